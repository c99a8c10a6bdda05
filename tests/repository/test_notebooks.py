"""What holds for every lesson and study, read from its stored notebook. nbval runs them again."""

import ast
import re

import nbformat
import pytest
from checkout import ROOT

from coursekit.publish import build, home, notebooks, translate

FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
STUDIES = sorted((FOLDER / build.EXTRA).glob("*.ipynb"))
SHAPE = [
    "The question",
    "Your prediction",
    "Measure",
    "The picture",
    "Why",
    "The code as it stands",
    "What must hold",
    "Find the bug",
    "Check yourself",
    "Summary",
]
# The last lesson takes a quarter of an hour: it compares vLLM with what was built before, and builds nothing.
LAST = "14"
LEFT_OUT_LAST = ("The picture", "The code as it stands", "What must hold", "Find the bug")
MOST_LINES = 25
MOST_COLUMNS = 100


def read(path):
    return nbformat.read(path, as_version=4)


def code_cells(path):
    return [cell for cell in read(path).cells if cell.cell_type == "code"]


def prose(path):
    return "\n\n".join(cell.source for cell in read(path).cells if cell.cell_type == "markdown")


lessons = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
studies = pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
lessons_and_studies = pytest.mark.parametrize("path", NOTEBOOKS + STUDIES, ids=lambda path: path.stem)


def test_there_are_lessons():
    assert [path.name[:2] for path in NOTEBOOKS][:1] == ["00"]


def test_notebooks_and_sources_agree():
    for below in ("", build.EXTRA):
        sources = notebooks.find_sources(FOLDER, below=below)
        assert [text for source in sources if (text := build.difference(source))] == []
        assert build.orphans(FOLDER, below) == []


def test_translations_are_those_of_the_stored_lessons():
    """The same code but for words, the same numbers in every output. Else run `make build`."""
    for path in [*FOLDER.glob("src/*/[0-9]*.md"), *FOLDER.glob("src/*/extra/[0-9]*.md")]:
        assert translate.difference(translate.translate(path)) is None


@lessons_and_studies
def test_every_code_cell_was_executed_in_order(path):
    """nbval passes a notebook whose outputs were stripped; this does not."""
    cells = code_cells(path)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))


@lessons_and_studies
def test_cells_that_print_have_stored_what_they_print(path):
    speaking = re.compile(r"^\s*(print|show|say|table|compare|show_source)\(", re.MULTILINE)
    silent = [
        cell.source
        for cell in code_cells(path)
        if speaking.search(top_level(cell.source)) and not cell.outputs
    ]
    assert silent == []


def top_level(source):
    """The statements of a cell that run when it runs: definitions left out."""
    lines = source.splitlines()
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            for number in range(node.lineno - 1, node.end_lineno):
                lines[number] = ""
    return "\n".join(lines)


@lessons_and_studies
def test_no_cell_failed_and_none_warned(path):
    bad = [
        output
        for cell in code_cells(path)
        for output in cell.outputs
        if output.output_type == "error" or output.get("name") == "stderr"
    ]
    assert bad == []


@lessons_and_studies
def test_no_widget_state_is_stored_and_widgets_have_a_picture(path):
    assert "widgets" not in read(path).metadata
    for cell in code_cells(path):
        assert not any(notebooks.WIDGET_VIEW in output.get("data", {}) for output in cell.outputs)
        if re.search(r"^(Explorable|Stepper)\(", cell.source, re.MULTILINE):
            assert any("image/png" in output.get("data", {}) for output in cell.outputs)


@lessons_and_studies
def test_nothing_of_the_machine_is_stored(path):
    text = path.read_text()
    assert not re.search(r"/(home|root|tmp|work|Users)/\w", text)
    assert "version" not in read(path).metadata.language_info


@lessons_and_studies
def test_code_cells_fit_a_screen(path):
    for cell in code_cells(path):
        lines = cell.source.splitlines()
        assert len(lines) <= MOST_LINES, cell.source
        assert max(map(len, lines), default=0) <= MOST_COLUMNS, cell.source


@lessons
def test_a_lesson_has_the_shape_of_a_lesson(path):
    headings = re.findall(r"^## (.+)$", prose(path), re.MULTILINE)
    shape = [heading for heading in SHAPE if path.name[:2] != LAST or heading not in LEFT_OUT_LAST]
    assert [heading for heading in headings if heading in SHAPE] == shape
    assert re.match(rf"# {path.name[:2]} · \w", prose(path)), "the title has the number of the lesson"
    assert prose(path).count("<details>") == prose(path).count("</details>") >= 4, (
        "questions have folded answers"
    )
    assert "### Sources" in prose(path)


FEWEST_WORDS = 12


@lessons_and_studies
def test_a_picture_says_in_words_what_it_shows(path):
    """In its metadata for browsers and slides, and as plain text for viewers that show no pictures."""
    pictures = [
        output
        for cell in code_cells(path)
        for output in cell.outputs
        if "image/png" in output.get("data", {})
    ]
    assert all(picture.data["text/plain"].startswith("[") for picture in pictures)
    texts = [picture.metadata["image/png"]["alt"] for picture in pictures]
    short = [text for text in texts if len(text.split()) < FEWEST_WORDS]
    assert short == []


@lessons
def test_a_lesson_has_a_figure_in_words_too(path):
    outputs = [output for cell in code_cells(path) for output in cell.outputs]
    figures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert figures or path.name[:2] == LAST
    assert all(figure.data["text/plain"].startswith("[") for figure in figures)


@lessons
def test_a_lesson_is_neither_a_page_nor_a_book(path):
    least = 15 if path.name[:2] in ("00", LAST) else 30
    cells = [cell for cell in read(path).cells if not cell.id.endswith("-home")]
    assert least <= len(cells) <= 65


@lessons
def test_predictions_are_left_to_the_reader(path):
    """A guess is None as handed out, and is compared with the answer further down."""
    guesses = [
        name for cell in code_cells(path) for name in re.findall(r"^(my_\w+) = None", cell.source, re.M)
    ]
    assert guesses
    code = "\n".join(cell.source for cell in code_cells(path))
    assert [name for name in guesses if f"compare({name}," not in code] == []


@lessons_and_studies
def test_it_asserts_what_it_says(path):
    least = 2 if path in STUDIES else 5
    assert sum(cell.source.count("assert ") for cell in code_cells(path)) >= least


@lessons_and_studies
def test_it_installs_only_what_it_was_opened_from(path):
    """Code fetched from a fixed address would be whatever is found there; the first cell has none."""
    first, *others = [cell.source for cell in code_cells(path)]
    assert first == home.FIRST_CELL.read_text().rstrip()
    assert home.declared_repository() not in first
    assert not re.search(r"pip\b|git\+", "\n".join(others))


@lessons_and_studies
def test_the_cell_that_installs_is_folded_and_says_nothing_here(path):
    first = code_cells(path)[0]
    assert first.metadata.jupyter.source_hidden and first.metadata.cellView == "form"
    assert first.outputs == []


@lessons_and_studies
def test_a_badge_under_the_title_opens_the_lesson_in_colab_once_there_is_an_address(path):
    stored, place = read(path).cells[0].source, path.relative_to(ROOT).as_posix()
    assert stored == home.with_badge(stored, place, home.declared_repository())


def package_names():
    """Every public function and class that a module of the packages defines at its top; graders aside."""
    names = set()
    for path in (*(ROOT / "minipaged").rglob("*.py"), *(ROOT / "coursekit").rglob("*.py")):
        if "grading" in path.parts:
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                names.add(node.name)
    return names - {"main", "run", "add_arguments"}


@lessons_and_studies
def test_it_imports_what_the_package_has(path):
    """Code that belongs to the engine is shown from its file; a copy in a lesson would drift."""
    defined = {
        node.name
        for cell in code_cells(path)
        for node in ast.walk(ast.parse(cell.source))
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    assert defined & package_names() == set()


@lessons_and_studies
def test_links_to_files_and_glossary_lead_somewhere(path):
    glossary = (ROOT / "docs" / "glossary.md").read_text()
    anchors = {anchor_of(title) for title in re.findall(r"^#+ (.+)$", glossary, re.MULTILINE)}
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        assert (path.parent / name).exists(), target
        if name.endswith("glossary.md"):
            assert anchor in anchors, target


def anchor_of(title):
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


@lessons_and_studies
def test_terms_are_linked_to_the_glossary(path):
    assert "../docs/glossary.md#" in prose(path)


@studies
def test_a_study_and_its_lesson_link_to_each_other(path):
    (lesson,) = FOLDER.glob(f"{path.name[:2]}_*.ipynb")
    assert f"](../{lesson.name})" in prose(path)
    assert f"]({build.EXTRA}/{path.name})" in prose(lesson)
