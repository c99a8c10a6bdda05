"""Write the course without its solutions, as a folder and a zip for a class: what `make handout` runs.

    python -m coursekit.publish.handout [--out DIR]

It holds what is committed, not what stands in the working tree: a teacher's own answers in `exercises` stay
here. Left out are the solutions, the tests (they prove the checks with right and wrong answers), the guide
for teachers, and what only maintainers use. The checks stay, since a learner's own `check` needs them: they
say what must hold. So does the engine, which the course teaches.
"""

import argparse
import io
import posixpath
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

LEFT_OUT = ("solutions/", "tests/", ".ci/", ".github/", "docs/teaching.md", "nbgrader_config.py")
KEPT = ("tests/nbval_sanitize.cfg",)  # `make notebooks` compares with it
VERSION = "HANDOUT.txt"
LINK = re.compile(r"\[([^\]]+)\]\(([^)\s#]+)[^)]*\)")


def is_handed_out(name: str) -> bool:
    """Whether a file of the repository belongs to the handout."""
    return name in KEPT or not name.startswith(LEFT_OUT)


def without_dead_links(name: str, text: str) -> str:
    """The Markdown page `name` with plain words where a link leads to what is left out."""

    def kept(link: re.Match[str]) -> str:
        words, target = link.groups()
        place = posixpath.normpath(posixpath.join(posixpath.dirname(name), target))
        return link[0] if ":" in target or (is_handed_out(place) and is_handed_out(f"{place}/")) else words

    return LINK.sub(kept, text)


def write_handout(course: Path, folder: Path) -> str:
    """Replace `folder` by the handout of the commit that is checked out in `course`; returns its short name.

    RuntimeError where `course` is no git checkout.
    """
    git = ["git", "-C", str(course)]
    archive = subprocess.run([*git, "archive", "--format=tar", "HEAD"], capture_output=True)
    if archive.returncode:
        said = archive.stderr.decode().strip()
        raise RuntimeError(f"{course}: a handout is made from a commit; git says {said}")
    shutil.rmtree(folder, ignore_errors=True)
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        for member in tar:
            if (file := tar.extractfile(member)) and is_handed_out(member.name):
                target = folder / member.name
                target.parent.mkdir(parents=True, exist_ok=True)
                content = file.read()
                if target.suffix == ".md":
                    content = without_dead_links(member.name, content.decode()).encode()
                target.write_bytes(content)
                target.chmod(member.mode)
    commit = [*git, "log", "-1", "--format=%h of %cs"]
    version = subprocess.run(commit, capture_output=True, text=True, check=True).stdout.strip()
    (folder / VERSION).write_text(f"The course without its solutions, from commit {version}.\n")
    return version


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m coursekit.publish.handout",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("out") / "handout", help="default: out/handout")
    out = parser.parse_args(arguments).out
    try:
        version = write_handout(Path.cwd(), out)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    packed = shutil.make_archive(str(out), "zip", out.parent, out.name)
    print(f"{out} and {Path(packed).name} beside it: the course without its solutions, commit {version}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
