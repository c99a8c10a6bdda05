"""What GitHub and editors read: workflows, forms, the dev container, the citation. None can be run here."""

import json
import re
import shlex
import tomllib

import pytest
import yaml
from checkout import ROOT

import minipaged
from coursekit.publish.home import declared_repository

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted(set((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")))
TARGETS = re.findall(r"^([a-z]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Keys of the Citation File Format 1.2.0 that are used here; `authors` to `title` are required.
CITATION_KEYS = {"authors", "cff-version", "message", "title"}
CITATION_KEYS |= {"keywords", "license", "references", "repository-code", "type", "version"}

workflows = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
forms = pytest.mark.parametrize("path", [p for p in FORMS if p.stem != "config"], ids=lambda path: path.stem)


def jobs(path):
    return yaml.safe_load(path.read_text())["jobs"].values()


def steps(path, key):
    """The values of `key` ("run" or "uses") of all steps."""
    return [step[key] for job in jobs(path) for step in job["steps"] if key in step]


def test_there_are_workflows_for_every_push_and_for_the_newest_torch():
    assert {"ci", "weekly"} <= {path.stem for path in WORKFLOWS}
    assert steps(ROOT / ".github/workflows/ci.yml", "run") == [".ci/run"]
    installs = [row for row in steps(ROOT / ".github/workflows/weekly.yml", "run") if "--upgrade" in row]
    assert [row.partition(" # ")[0].split()[-1] for row in installs] == ["torch", "torch"]
    assert "--index-url" in installs[0] and "triton" in installs[1].split()


@workflows
def test_workflows_use_githubs_own_actions_pinned_by_commit(path):
    """A tag can be moved to other code; a commit cannot. The comment says which version it is."""
    lines = [line for line in path.read_text().splitlines() if "uses:" in line]
    assert lines
    for line in lines:
        assert re.search(r"uses: actions/[\w-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+$", line), line


@workflows
def test_workflows_run_only_commands_of_this_repository(path):
    for command in steps(path, "run"):
        words = shlex.split(command, comments=True)
        is_target = words[0] == "make" and words[1] in TARGETS
        assert is_target or words[0] in {".ci/run", ".venv/bin/python"}, command
        assert not words[0].startswith(".ci") or (ROOT / words[0]).exists()


@workflows
def test_workflows_may_read_and_no_more_unless_they_publish(path):
    workflow = yaml.safe_load(path.read_text())
    allowed = {"contents": "read"}
    if path.stem == "pages":
        allowed |= {"pages": "write", "id-token": "write"}
    for permissions in (workflow["permissions"], *(job.get("permissions", {}) for job in jobs(path))):
        assert permissions.items() <= allowed.items()
    assert all(job["timeout-minutes"] <= 60 for job in jobs(path))


@workflows
def test_workflows_use_the_tested_python_and_start_when_they_should(path):
    workflow = yaml.safe_load(path.read_text())
    for job in jobs(path):
        for step in job["steps"]:
            if step.get("uses", "").startswith("actions/setup-python"):
                assert step["with"]["python-version"] == "3.11"
    events = workflow[True]  # YAML reads the key `on` as true
    assert set(events) <= {"push", "pull_request", "schedule", "workflow_dispatch"}


@forms
def test_issue_forms_are_what_github_accepts(path):
    form = yaml.safe_load(path.read_text())
    assert {"name", "description", "body"} <= set(form) <= {"name", "description", "body", "labels"}
    ids = [item["id"] for item in form["body"] if item["type"] != "markdown"]
    assert ids and len(ids) == len(set(ids))
    for item in form["body"]:
        assert item["type"] in {"markdown", "input", "textarea"}
        assert item["attributes"].get("value" if item["type"] == "markdown" else "label")
    assert any(item.get("validations", {}).get("required") for item in form["body"])


def test_forms_exist_for_bugs_lessons_and_questions():
    assert {path.stem for path in FORMS} == {"bug", "lesson", "question", "config"}


def test_the_dev_container_sets_up_as_everybody_else():
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    assert container["image"].endswith(":3.11")
    assert container["postCreateCommand"].split() == ["make", "setup"] and "setup" in TARGETS
    assert list(container["portsAttributes"]) == [str(port) for port in container["forwardPorts"]]
    editor = container["customizations"]["vscode"]
    assert editor["settings"]["python.defaultInterpreterPath"].endswith("/.venv/bin/python")
    assert {"ms-python.python", "ms-toolsai.jupyter"} <= set(editor["extensions"])


def test_the_citation_is_complete_and_agrees_with_the_project():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"authors", "cff-version", "message", "title"} <= set(citation) <= CITATION_KEYS
    assert citation["version"] == PROJECT["version"] == minipaged.__version__
    assert citation["license"] == PROJECT["license"]
    assert citation["repository-code"] == f"https://github.com/{declared_repository()}"
    assert citation["authors"] == [{"name": "minipaged contributors"}], "a person is named only by themselves"


def test_the_changelog_has_a_part_for_what_comes_and_dates_for_what_was():
    headings = re.findall(r"^## \[(.+?)\](?: - (.+))?$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    (first, no_date), *released = headings
    assert (first, no_date) == ("Unreleased", "")
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d", date) for _, date in released)
    assert [version for version, _ in released] in ([], [PROJECT["version"]])


@pytest.mark.parametrize("name", ["CODE_OF_CONDUCT.md", "CHANGELOG.md", "SECURITY.md", "CITATION.cff"])
def test_community_files_are_found_from_the_contribution_guide(name):
    assert f"({name})" in (ROOT / "CONTRIBUTING.md").read_text()
