"""What may import what: no circles, nothing from a layer that is built on one's own."""

import ast
import importlib.util

import pytest
from checkout import ROOT

SPEC = importlib.util.spec_from_file_location("count_core", ROOT / "scripts" / "count_core.py")
count_core = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(count_core)
circles, upward_imports = count_core.circles, count_core.upward_imports


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    return count_core.import_graph()


def test_no_modules_import_each_other_in_a_circle(graph):
    assert circles(graph) == []


def test_nothing_is_imported_from_a_layer_above(graph):
    assert upward_imports(graph) == []


def test_the_core_knows_no_engine_and_no_model_file(graph):
    """No text, no prompt, no tokenizer, no caller: what it asks of them it declares as a protocol."""
    own = ("minipaged.core", "minipaged.cache", "minipaged.attention")
    allowed = {"minipaged.config", "minipaged.memory", "minipaged.sampling_params"}
    for module, imported in graph.items():
        if module.startswith("minipaged.core"):
            assert {other for other in imported if not other.startswith(own)} <= allowed, module


def test_only_the_engine_plugs_in_the_fast_path_for_cpus(graph):
    """`machine` asks it for the compiler. With `cpu/` deleted all else would still import."""
    importers = {
        module
        for module, imported in graph.items()
        if module.startswith("minipaged.") and any(other.startswith("minipaged.cpu") for other in imported)
    }
    own = ("minipaged.cpu", "minipaged.engine.", "minipaged.machine")
    assert {module for module in importers if not module.startswith(own)} == set()


def test_the_two_folders_of_the_engine_stay_few_files():
    """Once they were 27 files, and a request crossed between files at almost every second call."""
    files = count_core.count("core")[1] + count_core.count("engine")[1]
    assert 10 <= files <= 17


@pytest.mark.parametrize("where", ["at the top", "under TYPE_CHECKING", "in a function"])
def test_an_import_counts_wherever_it_stands(where):
    line = "from minipaged.engine import llm"
    source = {
        "at the top": line,
        "under TYPE_CHECKING": f"if TYPE_CHECKING:\n    {line}",
        "in a function": f"def f():\n    {line}",
    }[where]
    known = {"minipaged.engine", "minipaged.engine.llm"}
    assert count_core.imports_of(ast.parse(source), known) == {"minipaged.engine.llm"}


def test_circles_and_upward_imports_are_found():
    graph = {
        "minipaged.cache.a": {"minipaged.core.b", "minipaged"},
        "minipaged.core.b": {"minipaged.core.c"},
        "minipaged.core.c": {"minipaged.cache.a"},
        "minipaged.core.d": {"minipaged.core.b"},
        "minipaged": {"minipaged.core.d", "minipaged.cache.a"},
    }
    assert circles(graph) == [["minipaged.cache.a", "minipaged.core.b", "minipaged.core.c"]]
    assert upward_imports(graph) == ["minipaged.cache.a -> minipaged.core.b"]


def test_a_module_without_a_layer_is_named():
    with pytest.raises(ValueError, match=r"minipaged.novelty.x is in no layer"):
        count_core.layer_of("minipaged.novelty.x")


def test_the_counts_are_those_of_the_files():
    lines = sum(len(file.read_text().splitlines()) for file in (ROOT / "minipaged" / "core").glob("*.py"))
    assert count_core.count("core")[2] == lines
