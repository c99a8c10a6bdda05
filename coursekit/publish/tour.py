"""The pages of the tour: text in docs/tour, numbers and moments from the recorded runs.

A page names a run, a moment and a sequence:

    ```{player} 09
    moment: first copy
    pick: sea/1
    ```

and its text has names in braces, `{copy}` or `{strips.most_running}`, for what the recording says up to
that moment; `Facts` lists them. So no number of the tour is typed. A moment is `first` and the kind of an
`Event`, `step` and a number, `most running` or `end`.
"""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlencode

from coursekit.lesson import number
from coursekit.recording import Lane, Recording, moments

DIRECTIVE = re.compile(r"```\{player\} (\w+)\n(.*?)```\n", re.DOTALL)
NAME = re.compile(r"\{([a-z_]+(?:\.[a-z_]+)?)\}")
PICTURE = re.compile(r'<section id="the-picture">.*?</h2>', re.DOTALL)
WORDS = "A run of the engine, recorded for this page: play it, drag it, pick a request, point at a block."
Values = dict[str, int | float | str]

# lesson that shows its recorded run on the site -> the step it begins at, the sequence whose table is drawn
LESSONS: dict[str, tuple[int, str | None]] = {
    "04": (60, "r1/0"),
    "09": (1, "sea/1"),
    "10": (4, "reader-1/0"),
    "11": (9, "A/0"),
    "12": (1, None),
}


@dataclass(frozen=True)
class Facts:
    """What a recording says at one moment; `values` by name, those of a second lane as `strips.name`.

    Of the engine: num_blocks, block_size, bytes_per_block, bytes_per_token, budget (bytes).
    Of the moment: step, running, waiting, blocks_held, free, prefill_tokens, decode_tokens, stored (tokens),
    room (slots of the held blocks), empty (slots of them without a token), entries (of all tables), saved
    (entries that cost no block), shared (blocks in several tables), sharers (most tables of one block).
    Up to the moment: most_running, computed (tokens), all_again (tokens, had each step computed every one),
    generated, fork, copy, hit, preempted (how many there were). Of the whole run: steps, in_all (tokens).
    Of the sequence picked: name, prompt, tokens, blocks, last_block, last_offset, last_slot, hit_tokens.
    """

    step: int
    pick: str | None
    values: Values


def facts(recording: Recording, moment: str, pick: str | None = None) -> Facts:
    """Follow the recording to the moment. Raises ValueError for a moment that never comes."""
    reached = find_moment(recording, moment)
    values: Values = {}
    so_far: dict[str, Counter[str]] = {}
    for step, lanes in enumerate(moments(recording)):
        for name, lane in lanes.items():
            prefix = "" if lane is next(iter(lanes.values())) else f"{name}."
            total = so_far.setdefault(prefix, Counter())
            _count(lane, total)
            if step == reached:
                values |= {prefix + key: value for key, value in _of_moment(lane, total).items()}
                if pick is not None and pick in lane.sequences and not prefix:
                    values |= _of_sequence(pick, lane)
            values |= {f"{prefix}in_all": total["computed"], f"{prefix}steps": step}
    if pick is not None and "name" not in values:
        raise ValueError(f"{pick!r} does not exist at {moment!r}, which is step {reached}")
    return Facts(reached, pick, values)


def find_moment(recording: Recording, moment: str) -> int:
    """The step, as the player counts, at which it comes."""
    what, _, which = moment.partition(" ")
    best, most, step = -1, 0, -1
    for step, lanes in enumerate(moments(recording)):
        lane = next(iter(lanes.values()))
        if what == "first" and best < 0 and any(event.kind == which for event in lane.events):
            best = step
        if what == "most" and lane.frame.get("running", 0) > most:
            best, most = step, lane.frame["running"]
        if what == "step" and step == int(which):
            best = step
    if what == "end":
        best = step
    if best < 0:
        raise ValueError(f"the recording has no moment {moment!r}; it has {step + 1} steps")
    return best


def _count(lane: Lane, total: Counter[str]) -> None:
    frame = lane.frame
    if total["seen"] != frame.get("index", -1) + 1:  # the last frame shows the end of the last step again
        total["seen"] = frame.get("index", -1) + 1
        total["computed"] += frame["prefill_tokens"] + frame["decode_tokens"]
        total["all_again"] += sum(one.stored for one in lane.sequences.values())
    total["most_running"] = max(total["most_running"], frame.get("running", 0))
    for event in lane.events:
        total[event.kind] += 1
        if event.kind == "hit":
            total[f"hit of {event.sequence}"] = len(event.blocks) * lane.header["block_size"]


def _of_moment(lane: Lane, total: Counter[str]) -> Values:
    header, refs = lane.header, lane.refs
    size = header["block_size"]
    stored_in: dict[int, int] = {}
    for one in lane.sequences.values():
        for place, block in enumerate(one.blocks):
            stored_in[block] = max(stored_in.get(block, 0), min(size, max(0, one.stored - place * size)))
    stored, entries = sum(stored_in.values()), sum(refs.values())
    values: Values = {key: header[key] for key in ("num_blocks", "block_size", "bytes_per_block")}
    keys = ("running", "waiting", "blocks_held", "prefill_tokens", "decode_tokens", "generated")
    values |= {key: lane.frame.get(key, 0) for key in keys}
    values |= {key: total[key] for key in ("most_running", "computed", "all_again")}
    values |= {key: total[key] for key in ("fork", "copy", "hit", "preempted")}
    return values | {
        "step": lane.frame.get("index", 0),
        "bytes_per_token": header["bytes_per_block"] // size,
        "budget": header["bytes_per_block"] * header["num_blocks"],
        "free": header["num_blocks"] - len(refs),
        "stored": stored,
        "stored_bytes": stored * header["bytes_per_block"] // size,
        "room": len(refs) * size,
        "empty": len(refs) * size - stored,
        "entries": entries,
        "saved": entries - len(refs),
        "shared": sum(count > 1 for count in refs.values()),
        "sharers": max(refs.values(), default=0),
        "hit_tokens": max((count for key, count in total.items() if key.startswith("hit of ")), default=0),
    }


def _of_sequence(name: str, lane: Lane) -> Values:
    one, size = lane.sequences[name], lane.header["block_size"]
    place, offset = divmod(max(0, one.stored - 1), size)
    block = one.blocks[place] if one.blocks else 0
    return {
        "name": name.removesuffix("/0"),
        "prompt": one.prompt,
        "tokens": one.stored,
        "blocks": len(one.blocks),
        "last_position": max(0, one.stored - 1),
        "last_place": place,
        "last_block": block,
        "last_offset": offset,
        "last_slot": block * size + offset,
    }


def player_frame(run: str, path: str, step: int = 0, pick: str | None = None) -> str:
    """An `iframe` with the player of a run, for a page from which `path` leads to the site's first folder."""
    start = {"step": step} | ({"pick": pick} if pick else {})
    return (
        f'<iframe class="player" title="A recorded run of the engine, to play and step through" '
        f'src="{path}_static/player/{run}.html#{html.escape(urlencode(start))}"></iframe>'
    )


def with_player(body: str, frame: str) -> str:
    """A lesson's page with the player below its heading "The picture". Raises ValueError without one."""
    found = PICTURE.search(body)
    if found is None:
        raise ValueError('no section "The picture" for the player to stand in')
    return f"{body[: found.end()]}\n<p>{WORDS}</p>\n{frame}\n{body[found.end() :]}"


def render(text: str, runs: Mapping[str, Recording]) -> str:
    """A page of the tour with its player and its numbers. Raises ValueError for an unknown name."""
    found = DIRECTIVE.search(text)
    if found is None:
        return text
    options = dict(line.split(": ", 1) for line in found[2].splitlines())
    here = facts(runs[found[1]], options["moment"], options.get("pick"))

    def value(name: re.Match[str]) -> str:
        if name[1] not in here.values:
            raise ValueError(f"no number {name[0]}; there are {sorted(here.values)}")
        known = here.values[name[1]]
        return known if isinstance(known, str) else number(known)

    before, after = text[: found.start()], text[found.end() :]
    frame = player_frame(found[1], "../../", here.step, here.pick)
    return NAME.sub(value, before) + frame + "\n" + NAME.sub(value, after)
