"""Exercise 03: a first-fit arena of contiguous strips, and an account of what it wastes."""

import random
import re
from collections.abc import Sequence
from functools import partial
from itertools import permutations

from coursekit.grading.learner import Learner
from coursekit.grading.task import Expect, Task
from coursekit.grading.values import plain

SETUP = "from coursekit.given.strips import Strip, moments"

ARENA = Task(
    name="arena",
    exercise="03",
    title="A first-fit arena",
    points=4,
    defines=("MyArena",),
    preamble=SETUP,
)

WASTE = Task(
    name="waste",
    exercise="03",
    title="An account of waste",
    points=3,
    defines=("waste",),
    preamble=SETUP,
)

TASKS = [ARENA, WASTE]


@ARENA.check(
    "cuts strips from the beginning of the first hole that is long enough",
    hint="first fit takes the leftmost hole that is long enough, not the longest and not the closest fit; "
    "what is left of it begins `size` slots later",
)
def first_fit(learner: Learner, expect: Expect) -> None:
    arena = learner.MyArena(22)
    expect.equal(
        [arena.allocate(size) for size in (6, 2, 4, 2)], [0, 6, 8, 12], "strips of 6, 2, 4, 2 in 22 slots"
    )
    expect.equal(arena.holes, [(14, 8)], "holes after strips of 6, 2, 4, 2 in 22 slots")
    arena.free(0)
    arena.free(8)
    holes, why = arena.holes, "holes are listed from left to right, by their start"
    is_mixed = isinstance(holes, list) and sorted(plain(holes)) == [[0, 6], [8, 4], [14, 8]]
    hint = why if is_mixed else ""
    expect.equal(holes, [(0, 6), (8, 4), (14, 8)], "holes after free(0) and free(8)", hint=hint)
    expect.equal(arena.allocate(3), 0, "allocate(3) with holes (0, 6), (8, 4), (14, 8)")
    given = "holes (0, 6), (8, 4), (14, 8) after allocate(3)"
    expect.equal(arena.holes, [(3, 3), (8, 4), (14, 8)], given)
    expect.equal(arena.allocate(5), 14, "allocate(5) with holes (3, 3), (8, 4), (14, 8)")


@ARENA.check(
    "a hole that is used up is gone",
    hint="a strip as long as its hole leaves no rest, and a hole of size 0 is no hole",
)
def exact_fit(learner: Learner, expect: Expect) -> None:
    arena = learner.MyArena(8)
    expect.equal(arena.allocate(8), 0, "allocate(8) in 8 slots")
    expect.equal(arena.holes, [], "holes after allocate(8) in 8 slots")
    arena = learner.MyArena(9)
    for size in (3, 3, 3):
        arena.allocate(size)
    arena.free(3)
    expect.equal(arena.allocate(3), 3, "allocate(3) with the one hole (3, 3)")
    expect.equal(arena.holes, [], "the one hole (3, 3) after allocate(3)")


@ARENA.check(
    "a shortage answers None and changes nothing",
    hint="a strip lies in one hole: slots of two holes that do not touch cannot be one strip, "
    "however many are free together",
)
def shortage(learner: Learner, expect: Expect) -> None:
    arena = learner.MyArena(12)
    expect.equal(arena.allocate(13), None, "allocate(13) in 12 slots")
    for size in (4, 4, 4):
        arena.allocate(size)
    expect.equal(arena.allocate(1), None, "allocate(1) with no slot free")
    arena.free(0)
    arena.free(8)
    expect.equal(arena.allocate(5), None, "allocate(5) with holes (0, 4) and (8, 4)")
    expect.equal(arena.holes, [(0, 4), (8, 4)], "holes after it was refused")
    expect.equal(arena.allocate(4), 0, "allocate(4) with holes (0, 4) and (8, 4)")


@ARENA.check(
    "a freed strip joins the holes on both its sides",
    hint="a new hole may touch one to its left, one to its right, both or none; if touching holes stay two, "
    "the arena crumbles, and a request is refused although there is room for it",
)
def joins(learner: Learner, expect: Expect) -> None:
    starts = 0, 3, 6, 9
    for order in permutations(starts):
        arena = learner.MyArena(12)
        for _ in starts:
            arena.allocate(3)
        memory = "#" * 12
        for i, start in enumerate(order, start=1):
            arena.free(start)
            memory = memory[:start] + "..." + memory[start + 3 :]
            given = f"four strips of 3 in 12 slots, freed in the order {list(order[:i])}: holes"
            expect.equal(arena.holes, holes_of(memory), given)
        expect.equal(arena.allocate(12), 0, f"allocate(12) after all were freed in the order {list(order)}")


@ARENA.check(
    "free of what is no strip raises ValueError and changes nothing",
    hint="a strip freed twice is a hole that overlaps another: two requests then write into the same memory. "
    "Look whether a strip begins there before you touch the holes",
)
def wrong_free(learner: Learner, expect: Expect) -> None:
    arena = learner.MyArena(12)
    for size in (4, 4, 2):
        arena.allocate(size)
    arena.free(0)
    for start, what in [
        (0, "a second time"),
        (5, "the middle of a strip"),
        (10, "the beginning of a hole"),
        (12, "beyond the end"),
        (-2, "before the beginning"),
    ]:
        given = f"free({start}), {what}, with strips at 4 and 8"
        expect.raises("ValueError", partial(arena.free, start), given)
        expect.equal(arena.holes, [(0, 4), (10, 2)], f"holes after {given}")
    arena.free(4)
    expect.equal(arena.holes, [(0, 8), (10, 2)], "holes after free(4)")


def holes_of(memory: str) -> list[tuple[int, int]]:
    """(start, size) of each run of dots; a dot is a free slot."""
    return [(run.start(), len(run.group())) for run in re.finditer(r"\.+", memory)]


@ARENA.check(
    "every slot is in one strip or one hole, in any traffic",
    hint="strips of many lengths come and go; follow the first step at which the holes differ on paper",
)
def traffic(learner: Learner, expect: Expect) -> None:
    source, arena, memory = random.Random(3), learner.MyArena(64), "." * 64
    strips: dict[int, int] = {}
    for _ in range(120):
        if strips and (source.random() < 0.45 or memory.count(".") < 4):
            start = source.choice(sorted(strips))
            size = strips.pop(start)
            arena.free(start)
            memory, what = memory[:start] + "." * size + memory[start + size :], f"free({start})"
        else:
            size = source.randrange(1, 20)
            start, what = memory.find("." * size), f"allocate({size})"
            given = f"{what} with holes {holes_of(memory)}"
            expect.equal(arena.allocate(size), start if start >= 0 else None, given)
            if start >= 0:
                memory = memory[:start] + "#" * size + memory[start + size :]
                strips[start] = size
        expect.equal(arena.holes, holes_of(memory), f"64 slots, {memory} after {what}: holes")


KINDS = ("used", "to_come", "never", "external", "free")


def same_shares(
    learner: Learner,
    expect: Expect,
    arena: Sequence[tuple[int, int, int] | int],
    next_size: int | None,
) -> None:
    """`arena` from left to right: a strip as (reserved, tokens now, tokens at the end), a hole as its size.

    Every slot gets the name of its kind; the shares expected are counts of names.
    """
    names: list[str] = []
    strips, holes = [], []
    for part in arena:
        if isinstance(part, tuple):
            reserved, now, final = part
            strips.append(learner.Strip(*part))
            names += ["used"] * now + ["to_come"] * (final - now) + ["never"] * (reserved - final)
        else:
            holes.append((len(names), part))
            names += ["free" if next_size is None or part >= next_size else "external"] * part
    got = learner.waste(len(names), strips, holes, next_size)
    parts = [part for part in arena if isinstance(part, tuple)]
    given = f"{len(names)} slots, strips {parts} (reserved, now, at the end), holes {holes}"
    for kind in KINDS:
        wanted, hint = names.count(kind) / len(names), ""
        if kind == "external" and next_size in [size for _, size in holes]:
            hint = f"a hole of exactly {next_size} slots is long enough for a request of {next_size}"
        if isinstance(got[kind], int | float) and abs(got[kind] - wanted) < 0.005:
            hint = "nearly: is something rounded? A share stays the quotient that it is"
        expect.close(
            got[kind], wanted, f'{given}, next_size {next_size}: "{kind}"', tolerance=1e-9, hint=hint
        )


@WASTE.check(
    "a strip is tokens, room for tokens to come, and room never used",
    hint="what a request will still fill is not lost for ever: it ends at final_tokens, and only what is "
    "reserved beyond that is never used",
)
def in_strips(learner: Learner, expect: Expect) -> None:
    same_shares(learner, expect, [(10, 2, 7)], None)
    same_shares(learner, expect, [(10, 2, 7), (30, 15, 30), (10, 10, 10)], None)
    same_shares(learner, expect, [(16, 1, 1), (4, 3, 4)], 5)


@WASTE.check(
    "shares are of all slots, not of the reserved ones",
    hint="with one denominator the shares add up to 1 and two servers can be compared; "
    "a share of what is reserved hides the holes",
)
def one_denominator(learner: Learner, expect: Expect) -> None:
    same_shares(learner, expect, [(10, 2, 7), 10], 1)
    same_shares(learner, expect, [20, (10, 5, 10), 50, (20, 5, 10)], 4)
    same_shares(learner, expect, [40], 40)


@WASTE.check(
    "a hole is external waste when the next request does not fit into it",
    hint="each hole is judged by itself: too short is shorter than next_size; a long hole does not make "
    "short ones useful, and many short ones do not make a long one",
)
def short_holes(learner: Learner, expect: Expect) -> None:
    for next_size in (4, 5, 6, 7, 11):
        same_shares(learner, expect, [6, (10, 4, 8), 4], next_size)
    same_shares(learner, expect, [3, (4, 1, 2), 3, (5, 5, 5), 3], 8)
    same_shares(learner, expect, [30], 40)


@WASTE.check(
    "when nobody waits every hole is free",
    hint="waste is measured against a need: with next_size None there is none",
)
def nobody_waits(learner: Learner, expect: Expect) -> None:
    same_shares(learner, expect, [6, (10, 4, 8), 4], None)
    same_shares(learner, expect, [16], None)


@WASTE.check(
    "any arena: each slot is counted once",
    hint="count slots in all five kinds before you divide: they must add up to num_slots",
)
def any_arena(learner: Learner, expect: Expect) -> None:
    source = random.Random(30)
    for _ in range(15):
        arena: list[tuple[int, int, int] | int] = []
        for _ in range(source.randrange(1, 6)):
            now, more, rest = source.randrange(1, 40), source.randrange(0, 40), source.randrange(0, 40)
            arena.append((now + more + rest, now, now + more))
            if source.random() < 0.7:
                arena.append(source.randrange(1, 60))
        same_shares(learner, expect, arena, source.choice([None, *range(1, 60, 7)]))
