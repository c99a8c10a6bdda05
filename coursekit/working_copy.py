"""The learner's copy of the course: the folder `work`, which version control ignores. What `make lab` opens.

    python -m coursekit.working_copy             copy what is not there yet
    python -m coursekit.working_copy --update    get the newest lessons, keep what the learner changed

Running or saving a lesson there changes no file of the course, so the next `git pull` goes through, and
`make test` tests the course. The folders that lessons link to are links in it. `work/.copied.json` remembers
what every notebook said when it was copied; that tells what the learner has changed since. What a cell has
printed is no change.
"""

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

NAME = "work"
RECORD = ".copied.json"
NOTEBOOKS = ("notebooks/*.ipynb", "notebooks/extra/*.ipynb", "notebooks/zh/*.ipynb", "exercises/*/*.ipynb")
LINKED = ("docs", "minipaged", "coursekit", "benchmarks")  # what lessons and exercises link to


@dataclass
class Changes:
    """What an update did, each notebook by its path below the course's folder."""

    added: list[str] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)  # the learner's: where the new one was put beside it
    waiting: list[str] = field(default_factory=list)  # newer in the course; only an update brings them


def notebooks_of(course: Path) -> list[str]:
    """Lessons and exercises of the course, without what somebody who worked in them left beside."""
    found = [path for pattern in NOTEBOOKS for path in sorted(course.glob(pattern))]
    return [path.relative_to(course).as_posix() for path in found if ".backup-" not in path.name]


def fingerprint(path: Path) -> str:
    """A hash of the cells' text; of the bytes where the file is no notebook any more."""
    data = path.read_bytes()
    try:
        cells = [[cell["cell_type"], "".join(cell["source"])] for cell in json.loads(data)["cells"]]
    except (ValueError, KeyError, TypeError):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha256(json.dumps(cells).encode()).hexdigest()


def bring_up_to_date(course: Path, *, update: bool) -> Changes:
    """Copy into `course`/work what is missing there and, with `update`, what is newer in the course.

    A notebook that the learner has changed is never written to: the new one is put beside it.
    """
    work = course / NAME
    work.mkdir(exist_ok=True)
    for name in LINKED:
        if (course / name).is_dir() and not (work / name).is_symlink():
            (work / name).symlink_to(Path("..") / name, target_is_directory=True)
    record = work / RECORD
    copied: dict[str, str] = json.loads(record.read_text()) if record.exists() else {}
    changes = Changes()
    for name in notebooks_of(course):
        source, mine = course / name, work / name
        newest = fingerprint(source)
        if not mine.exists():
            mine.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, mine)
            changes.added.append(name)
        elif newest == copied.get(name):
            continue
        elif fingerprint(mine) == newest:
            pass
        elif not update:
            changes.waiting.append(name)
            continue
        elif fingerprint(mine) == copied.get(name):
            shutil.copyfile(source, mine)
            changes.replaced.append(name)
        else:
            beside = free_name(mine)
            shutil.copyfile(source, beside)
            changes.kept[name] = beside.relative_to(work).as_posix()
        copied[name] = newest
    record.write_text(json.dumps(copied, indent=1) + "\n")
    return changes


def free_name(notebook: Path) -> Path:
    """04_x.new.ipynb beside 04_x.ipynb, or 04_x.new-2.ipynb where that is taken."""
    beside, number = notebook.with_suffix(".new.ipynb"), 1
    while beside.exists():
        number += 1
        beside = notebook.with_suffix(f".new-{number}.ipynb")
    return beside


def pull(course: Path) -> str | None:
    """Fetch the newest version of the course; returns why that was not possible, or None."""
    if not (course / ".git").exists():
        return "not a git checkout: unpack the newest handout over this folder; what is new in it is taken"
    git = ["git", "-C", str(course)]
    upstream = [*git, "rev-parse", "--abbrev-ref", "--symbolic-full-name", "@{upstream}"]
    if subprocess.run(upstream, capture_output=True).returncode != 0:
        return "this branch follows no other: nothing is fetched, what is new in this folder is taken"
    done = subprocess.run([*git, "pull", "--ff-only"], capture_output=True, text=True)
    return f"git pull did not go through: {done.stderr.strip()}" if done.returncode else None


def told(changes: Changes) -> list[str]:
    """What the learner should know, a line each."""
    lines = [f"new: {name}" for name in changes.added]
    lines += [f"newer version: {name}" for name in changes.replaced]
    lines += [
        f"kept, since you changed it: {name}; its new version is {beside}"
        for name, beside in changes.kept.items()
    ]
    if changes.waiting:
        lines.append(
            f"newer in the course: {', '.join(changes.waiting)}; `make update` gets them and keeps yours"
        )
    return lines


def main(arguments: list[str] | None = None, course: Path | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m coursekit.working_copy",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--update", action="store_true", help="get the newest lessons, keep mine")
    update = parser.parse_args(arguments).update
    course = course or Path.cwd()
    if not notebooks_of(course):
        print(f"no lessons in {course}: run this in the repository's folder", file=sys.stderr)
        return 1
    is_first = not (course / NAME / RECORD).exists()
    if update and (problem := pull(course)):
        print(problem, file=sys.stderr)
        if problem.startswith("git pull"):
            return 1
    changes = bring_up_to_date(course, update=update)
    if is_first:
        print(f"your copy of the course is {NAME}/: nothing that you do there changes the course itself")
    else:
        for line in told(changes) or (["you have the newest version"] if update else []):
            print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
