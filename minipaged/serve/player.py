"""A recorded run as one page that needs no server: the live page's player with the recording in it.

    python -m minipaged.serve.player run.jsonl run.html

Without a recording the page asks for a file. Nothing but the standard library is used.
"""

from __future__ import annotations

import re
import sys
from importlib.resources import files
from pathlib import Path


def player_page(recording: str = "") -> str:
    """The page, whole: style and scripts are laid into it, and the lines of the recording."""
    page = files("minipaged.serve") / "page"

    def read(name: str) -> str:
        return (page / name).read_text(encoding="utf-8")

    html = read("index.html").replace('<section id="replay" hidden>', '<section id="replay">')
    html = html.replace('<script src="page/live.js"></script>\n', "")
    html = re.sub(
        r'<link rel="stylesheet" href="page/(\S+)">', lambda m: f"<style>\n{read(m[1])}</style>", html
    )
    data = recording.replace("<", "\\u003c")  # no text of the run can end the script
    laid_in = f'<script type="application/jsonl" id="recording">{data}</script>\n' if recording else ""
    html = html.replace('<script src="page/words.js">', f'{laid_in}<script src="page/words.js">')
    return re.sub(r'<script src="page/(\S+)"></script>', lambda m: f"<script>\n{read(m[1])}</script>", html)


def main() -> int:
    if len(sys.argv) not in (2, 3):
        print("usage: python -m minipaged.serve.player [RECORDING.jsonl] PAGE.html", file=sys.stderr)
        return 2
    recording = Path(sys.argv[1]).read_text(encoding="utf-8") if len(sys.argv) == 3 else ""
    Path(sys.argv[-1]).write_text(player_page(recording), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
