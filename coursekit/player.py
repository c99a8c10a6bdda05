"""The player: a recorded run as a page, or as the output of a cell. It is the live page of `minipaged serve`.

    python -m coursekit.player run.jsonl run.html

Either needs no server, no kernel and no network. Without a recording the page asks for a file.
"""

from __future__ import annotations

import base64
import gzip
import html
import re
import sys
from importlib.resources import files
from pathlib import Path

from coursekit.recording import Recording, moments

MAX_OUTPUT_BYTES = 200_000
"""Most that a cell's output may add to its notebook. The page itself takes 17 kB of it, ten chats in 400
steps some 25: whoever needs more has recorded more steps than a reader will look at."""

INFLATE = (
    "Promise.resolve(Uint8Array.from(atob(document.currentScript.dataset.page),c=>c.charCodeAt(0)))"
    ".then(b=>new Response(new Blob([b]).stream().pipeThrough(new DecompressionStream('gzip'))).text())"
    ".then(t=>{document.open();document.write(t);document.close()})"
)


def player_page(recording: str = "", *, step: int = 0, pick: str | None = None) -> str:
    """The page, whole: style and scripts are laid into it, and the lines of the recording.

    It begins at `step`, with the block table of the sequence `pick` (as in "llm-0/1") joined to its blocks;
    `page.html#step=12&pick=llm-0/1` begins there whatever was given here.
    """
    page = files("minipaged.live") / "page"

    def read(name: str) -> str:
        return (page / name).read_text(encoding="utf-8")

    text = read("index.html").replace('<script src="page/live.js"></script>\n', "")
    text = re.sub(
        r'<link rel="stylesheet" href="page/(\S+)">', lambda m: f"<style>\n{read(m[1])}</style>", text
    )
    if recording:
        data = recording.replace("<", "\\u003c")  # no text of the run can end the script
        start = f'data-step="{step}"' + (f' data-pick="{html.escape(pick)}"' if pick else "")
        laid_in = f'<script type="application/jsonl" id="recording" {start}>{data}</script>\n'
        text = text.replace('<script src="page/words.js">', f'{laid_in}<script src="page/words.js">')
    return re.sub(r'<script src="page/(\S+)"></script>', lambda m: f"<script>\n{read(m[1])}</script>", text)


class Player:
    """A recording as the output of a cell: play, step, drag, pick a request, point at a block.

    with record(llm) as run:
        llm.generate(prompts, params)
    Player(run)

    The output is the page and the run in one, compressed, so it plays offline and wherever the notebook is
    shown with its scripts; elsewhere there is one sentence. It works without the kernel that made it.
    Raises ValueError for a run that would add more than `MAX_OUTPUT_BYTES` to the notebook.
    """

    def __init__(self, run: Recording, *, step: int = 0, pick: str | None = None, height: int = 720) -> None:
        page = player_page(run.text, step=step, pick=pick)
        packed = base64.b64encode(gzip.compress(page.encode(), mtime=0)).decode()
        if len(packed) > MAX_OUTPUT_BYTES:
            raise ValueError(
                f"the run takes {len(packed)} bytes in the notebook, the most is {MAX_OUTPUT_BYTES}: record "
                "fewer steps, or save it with `run.save`"
            )
        *_, last = moments(run)
        lane = next(iter(last.values()))
        self.text = (
            f"[a player of {len(run.lines) - len(last)} recorded steps; "
            f"{lane.header['num_blocks']} blocks of {lane.header['block_size']} tokens]"
        )
        document = html.escape(f'<script data-page="{packed}">{INFLATE}</script>')
        self.html = (
            f'<iframe title="{html.escape(self.text)}" style="width:100%;height:{height}px;border:0" '
            f'srcdoc="{document}"></iframe>'
        )

    def _repr_mimebundle_(self, **options: object) -> dict[str, str]:
        return {"text/html": self.html, "text/plain": self.text}


def main() -> int:
    if len(sys.argv) not in (2, 3):
        print("usage: python -m coursekit.player [RECORDING.jsonl] PAGE.html", file=sys.stderr)
        return 2
    recording = Recording.load(sys.argv[1]).text if len(sys.argv) == 3 else ""
    Path(sys.argv[-1]).write_text(player_page(recording), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
