"""The KV memory in a terminal: of two policies that serve the same requests, and of a server.

`race` is what `minipaged demo --live` shows. Each engine takes a step in turn, so both pictures move from the
first second on. The times of such a race mean nothing; `minipaged demo` without --live measures them.
`pool_lines` is what `minipaged top` shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from coursekit.recording import Lane
from coursekit.workloads import Request
from minipaged.checkpoints.loading import LoadedModel
from minipaged.engine.engine import Engine
from minipaged.engine.llm import LLM
from minipaged.sampling_params import SamplingParams

CELL_TOKENS = 16
GROUP, GROUPS_PER_ROW = 32, 2  # cells: a strip of 512 tokens is one group
USED, RESERVED, FREE = "█", "░", "·"
PART, SHARED, CACHED = "▄", "◆", "▒"
STYLES = {
    USED: "blue",
    PART: "blue",
    SHARED: "magenta",
    CACHED: "bright_black",
    RESERVED: "bright_black",
    FREE: "bright_black",
}
LEGEND = f"one cell: {CELL_TOKENS} tokens.  {USED} holds tokens  {RESERVED} reserved, empty  {FREE} free"


def draw_cells(num_blocks: int, block_size: int, tables: Iterable[tuple[Sequence[int], int]]) -> str:
    """A character for each CELL_TOKENS slots of the pool, in the order of its blocks.

    A block that is no multiple of CELL_TOKENS ends in a smaller cell.
    tables: (blocks, number of tokens) of each sequence.
    """
    per_block = -(-block_size // CELL_TOKENS)
    cells = [FREE] * (num_blocks * per_block)
    for blocks, num_tokens in tables:
        for index in range(len(blocks) * per_block):  # of the sequence's cells
            block, within = divmod(index, per_block)
            holds = index * CELL_TOKENS < num_tokens
            cells[blocks[block] * per_block + within] = USED if holds else RESERVED
    return "".join(cells)


def in_rows(cells: str) -> list[str]:
    """The cells as lines of GROUPS_PER_ROW groups."""
    groups = [cells[i : i + GROUP] for i in range(0, len(cells), GROUP)]
    return ["  " + " ".join(groups[i : i + GROUPS_PER_ROW]) for i in range(0, len(groups), GROUPS_PER_ROW)]


@dataclass
class View:
    """One policy's engine, and its memory as lines of text: now, and when most requests ran at once."""

    policy: str
    engine: Engine
    steps: int = 0
    peak: int = 0
    now: list[str] = field(default_factory=list)
    fullest: list[str] = field(default_factory=list)

    def step(self) -> None:
        """Move every request on by a step and look at the memory; nothing when all have finished."""
        if not self.engine.has_unfinished_requests():
            return
        self.engine.step()
        self.steps += 1
        scheduler = self.engine.scheduler
        running = len(scheduler.running)
        self.now = [
            f"{self.policy}: {running} requests at once, {len(scheduler.waiting)} wait (step {self.steps})",
            *in_rows(
                draw_cells(
                    self.engine.pool.num_blocks,
                    self.engine.storage.block_size,
                    [(request.table.blocks, request.table.num_tokens) for request in scheduler.running],
                )
            ),
        ]
        if running > self.peak:
            self.peak, self.fullest = running, self.now

    def lines(self) -> list[str]:
        """What to show: the memory now, and after the last step how it was at its fullest."""
        if self.engine.has_unfinished_requests():
            return self.now
        return [
            f"{self.policy}: up to {self.peak} requests at once, done after {self.steps} steps",
            *self.fullest[1:],
        ]


def race(
    model: LoadedModel,
    requests: Sequence[Request],
    policies: Mapping[str, int],
    *,
    kv_memory: int | str,
    max_model_len: int,
    console: Console | None = None,
) -> list[View]:
    """Serve the requests once under each policy, and show the memory of all while they do.

    policies: name -> block size. Where the console is no terminal, only the last picture is printed.
    """
    views = []
    for policy, block_size in policies.items():
        llm = LLM(
            model,
            block_size=block_size,
            kv_memory=kv_memory,
            max_model_len=max_model_len,
            enable_prefix_caching=False,  # show what requests hold, not what is kept for later ones
        )
        for index, request in enumerate(requests):
            params = SamplingParams(temperature=0, max_tokens=request.max_tokens, ignore_eos=True)
            llm.engine.add_request(str(index), {"prompt_token_ids": request.prompt_token_ids}, params)
        views.append(View(policy, llm.engine))
    console = console or Console()
    if not console.is_terminal:
        while any(view.engine.has_unfinished_requests() for view in views):
            for view in views:
                view.step()
        console.print(picture(views))
        return views
    with Live(console=console, auto_refresh=False) as live:
        while any(view.engine.has_unfinished_requests() for view in views):
            for view in views:
                view.step()
                live.update(picture(views), refresh=True)
    return views


def picture(views: Sequence[View]) -> Group:
    """All views, one below the other, in colour."""
    texts = [in_colour([*view.lines(), ""]) for view in views]
    return Group(*texts, Text(LEGEND))


def in_colour(lines: Sequence[str]) -> Text:
    """Lines with each symbol in its colour."""
    text = Text("\n".join(lines), no_wrap=True, overflow="crop")
    for symbol, style in STYLES.items():
        text.highlight_words([symbol], style)
    return text


def pool_lines(lane: Lane, rate: float, width: int, height: int) -> list[str]:
    """A server's pool as lines that fit a terminal of `width` x `height` characters, one cell a block.

    Of a pool that is too large the first blocks are shown, and the last line says how many are not.
    rate: output tokens a second, for the first line.
    """
    num_blocks, block_size = lane.header["num_blocks"], lane.header["block_size"]
    running = [one for one in lane.sequences.values() if one.status == "running"]
    held = lane.frame.get("blocks_held", 0)
    cells = [FREE] * num_blocks
    for block in lane.published:
        cells[block] = CACHED
    for one in running:
        for entry, block in enumerate(one.blocks):
            cells[block] = USED if (entry + 1) * block_size <= one.stored else PART
    for block, refs in lane.refs.items():
        if refs > 1:
            cells[block] = SHARED
    columns, rows = max(1, width - 4), max(1, height - 5)
    shown = ["".join(cells[i : i + columns]) for i in range(0, num_blocks, columns)][:rows]
    hidden = max(0, num_blocks - columns * rows)
    speed = f"{rate:.{0 if rate >= 1 else 1}f}"
    return [
        f"{lane.header['model']}: {len(running)} run, {len(lane.sequences) - len(running)} wait, "
        f"{held} of {num_blocks} blocks held ({held / num_blocks:.0%}), {speed} tokens/s",
        *[f"  {row}" for row in shown],
        f"one cell: a block of {block_size} tokens" + (f"; {hidden} more are not shown" if hidden else ""),
        f"{USED} full  {PART} part-filled  {SHARED} shared  {CACHED} cached, can be found  {FREE} free",
    ]
