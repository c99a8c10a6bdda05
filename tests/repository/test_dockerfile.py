"""The classroom's image: no root, no solutions, and every command in it exists. Docker itself is not run."""

import re
import shlex

from checkout import ROOT

from coursekit.publish.handout import is_handed_out

TEXT = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text())
LINES = [line.split(maxsplit=1) for line in TEXT.splitlines() if line and not line.startswith("#")]
TARGETS = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_learners_are_not_root_and_their_work_outlives_the_container():
    kinds = [kind for kind, _ in LINES]
    (user,) = [rest for kind, rest in LINES if kind == "USER"]
    assert user != "root" and kinds.index("USER") < kinds.index("COPY")
    assert ["VOLUME", "/course/work"] in LINES


def test_its_commands_are_targets_of_the_makefile():
    command = next(rest for kind, rest in LINES if kind == "CMD")
    called = [re.findall(r'"([^"]+)"', command)]
    called += [shlex.split(rest) for kind, rest in LINES if kind == "RUN" and rest.startswith("make")]
    assert len(called) == 2 and all(words[0] == "make" and words[1] in TARGETS for words in called)


def test_what_needs_the_image_is_in_the_handout_and_solutions_are_not():
    assert is_handed_out("Dockerfile") and is_handed_out("constraints.txt") and is_handed_out("Makefile")
    assert not is_handed_out("solutions/README.md")
    assert "solutions" in (ROOT / ".dockerignore").read_text().split()
