"""Write `uv.lock`, the versions of constraints.txt with the hash of each file: what `make lock` runs.

uv reads no constraints.txt, but it keeps the versions that a lock already has. So the lock is made once with
the constraints as uv's own setting, in a scratch folder, and then again without them.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
READ = ("pyproject.toml", "README.md", "LICENSE")  # what uv reads of the project
INDEX = "https://pypi.org/simple"  # it is written into the lock


def pins() -> list[str]:
    """The requirements of constraints.txt."""
    lines = (line.partition("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines())
    return [line for line in lines if line]


def main() -> int:
    uv = shutil.which("uv")
    if uv is None:
        sys.exit("uv is not installed: `pip install uv`, or https://docs.astral.sh/uv")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("UV_")}
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        for name in READ:
            shutil.copy(ROOT / name, scratch)
        text = (ROOT / "pyproject.toml").read_text()
        rows = "".join(f"    {pin!r},\n" for pin in pins())
        command = [uv, "lock", "--default-index", INDEX]
        (scratch / "pyproject.toml").write_text(
            text.replace("[tool.uv]\n", f"[tool.uv]\nconstraint-dependencies = [\n{rows}]\n")
        )
        subprocess.run(command, cwd=scratch, env=environment, check=True)
        (scratch / "pyproject.toml").write_text(text)
        subprocess.run(command, cwd=scratch, env=environment, check=True)
        shutil.copy(scratch / "uv.lock", ROOT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
