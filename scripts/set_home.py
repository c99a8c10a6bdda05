"""Write another repository address into every file that names it: what `make home REPO=owner/name` runs.

    python scripts/set_home.py owner/name

The address stands in pyproject.toml; links and citations repeat it. Notebooks get the badge that opens them
in Colab; it is text, so nothing has to be executed again. Prints the files that changed.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

from coursekit.publish.home import declared_repository, with_badge

NOTEBOOKS = ("notebooks/", "exercises/", "solutions/")
ROOT = Path(__file__).resolve().parent.parent
# What stands before "owner/name" wherever this repository is meant; a mere folder "owner/name" is left alone.
HOSTS = r"github\.com/|colab\.research\.google\.com/github/|codespaces\.new/"


def renamed(text: str, old: str, new: str) -> str:
    """`text` with the address of repository `old` replaced by that of `new`."""
    return re.sub(rf"({HOSTS}){re.escape(old)}(?![\w-]|\.\w)", rf"\g<1>{new}", text)


def with_home(text: str, name: str, repo: str) -> str:
    """The text of the notebook `name`, with the badge that leads to `repo` under its title."""
    notebook = json.loads(text)
    first = notebook["cells"][0]
    if first["cell_type"] == "markdown":
        first["source"] = with_badge("".join(first["source"]), name, repo).splitlines(keepends=True)
    return json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"  # as nbformat writes it


def main(arguments: list[str]) -> int:
    if len(arguments) != 1 or not re.fullmatch(r"[\w-]+/[\w.-]+", arguments[0]):
        print("home: say where the repository is, as in `make home REPO=owner/name`", file=sys.stderr)
        return 2
    old, new = declared_repository(), arguments[0]
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        try:
            text = (ROOT / name).read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue  # a picture, an archive, or a file that is deleted here
        changed = renamed(text, old, new)
        if name.startswith(NOTEBOOKS) and name.endswith(".ipynb"):
            changed = with_home(changed, name, new)
        if changed != text:
            (ROOT / name).write_text(changed, encoding="utf-8")
            print(name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
