"""The graders of exercise 03 find what they are there to find."""

import pytest

from tests.exercises.proof import Proof, Wrong

ARENA = Proof(
    task="arena",
    second='''
class MyArena:
    """One flag for each slot; holes and strips are read off the flags when somebody asks."""

    def __init__(self, num_slots):
        self.owner = [None] * num_slots

    @property
    def holes(self):
        found, begin = [], None
        for slot, owner in enumerate([*self.owner, "end"]):
            if owner is None and begin is None:
                begin = slot
            elif owner is not None and begin is not None:
                found.append([begin, slot - begin])
                begin = None
        return found

    def allocate(self, size):
        for start in range(len(self.owner) - size + 1):
            if self.owner[start : start + size] == [None] * size:
                self.owner[start : start + size] = [start] * size
                return start

    def free(self, start):
        if start < 0 or start not in self.owner:
            raise ValueError(start)
        self.owner = [None if owner == start else owner for owner in self.owner]
''',
    wrong=[
        Wrong(
            "takes the longest hole",
            "cuts strips from the beginning of the first hole",
            replace=(
                "for i, (start, hole) in enumerate(self.holes):",
                "for i, (start, hole) in sorted(enumerate(self.holes), key=lambda h: -h[1][1]):",
            ),
        ),
        Wrong(
            "takes the shortest hole that is long enough",
            "cuts strips from the beginning of the first hole",
            replace=(
                "for i, (start, hole) in enumerate(self.holes):",
                "for i, (start, hole) in sorted(enumerate(self.holes), key=lambda h: h[1][1]):",
            ),
        ),
        Wrong(
            "looks at the first hole only",
            "cuts strips from the beginning of the first hole",
            replace=("enumerate(self.holes)", "enumerate(self.holes[:1])"),
        ),
        Wrong(
            "leaves holes of size 0",
            "a hole that is used up is gone",
            replace=("[rest] if hole > size else []", "[rest]"),
        ),
        Wrong(
            "refuses a hole of exactly the size",
            "a hole that is used up is gone",
            replace=("if hole >= size:", "if hole > size:"),
        ),
        Wrong(
            "counts the free slots of all holes together",
            "cuts strips from the beginning of the first hole that is long enough",
            replace=("if hole >= size:", "if sum(hole for _, hole in self.holes) >= size:"),
        ),
        Wrong(
            "takes the longest hole when none is long enough",
            "a shortage answers None",
            replace=(
                "        return None\n        ### END",
                "        start, _ = max(self.holes, key=lambda hole: hole[1], default=(0, 0))\n"
                "        return start\n        ### END",
            ),
        ),
        Wrong(
            "does not join holes",
            "a freed strip joins",
            replace=("if joined and sum(joined[-1]) == begin:", "if False:"),
        ),
        Wrong(
            "joins only the hole behind the strip",
            "a freed strip joins",
            replace=(
                "if joined and sum(joined[-1]) == begin:",
                "if joined and joined[-1][0] == start and sum(joined[-1]) == begin:",
            ),
        ),
        Wrong(
            "joins only the hole before the strip",
            "a freed strip joins",
            replace=(
                "if joined and sum(joined[-1]) == begin:",
                "if joined and begin == start and sum(joined[-1]) == begin:",
            ),
        ),
        Wrong(
            "frees a strip twice",
            "free of what is no strip",
            replace=("self.strips.pop(start)", "self.strips[start]"),
        ),
        Wrong(
            "says nothing when there is no strip",
            "free of what is no strip",
            replace=('raise ValueError(f"no strip begins at slot {start}")', "return"),
        ),
    ],
)

WASTE = Proof(
    task="waste",
    second='''
def waste(num_slots, strips, holes, next_size):
    """One pass with running sums of shares; external by a filter with the need as a number."""
    need = 0 if next_size is None else next_size
    shares = dict.fromkeys(["free", "external", "never", "to_come", "used"], 0.0)
    for strip in strips:
        ends = [0, strip.num_tokens, strip.final_tokens, strip.reserved]
        for kind, begin, end in zip(["used", "to_come", "never"], ends, ends[1:]):
            shares[kind] += (end - begin) / num_slots
    for _, size in holes:
        shares["external" if size < need else "free"] += size / num_slots
    return shares
''',
    wrong=[
        Wrong(
            "takes room for tokens to come for waste for ever",
            "a strip is tokens, room for tokens to come",
            replace=("strip.reserved - strip.final_tokens", "strip.reserved - strip.num_tokens"),
        ),
        Wrong(
            "counts the tokens of the end as tokens of now",
            "a strip is tokens, room for tokens to come",
            replace=('"used": sum(strip.num_tokens', '"used": sum(strip.final_tokens'),
        ),
        Wrong(
            "answers percent",
            "a strip is tokens, room for tokens to come",
            replace=("count / num_slots", "100 * count / num_slots"),
        ),
        Wrong(
            "divides by what is reserved",
            "shares are of all slots",
            replace=("count / num_slots", "count / max(1, sum(strip.reserved for strip in strips))"),
        ),
        Wrong(
            "calls every hole waste",
            "shares are of all slots",
            replace=("if next_size is not None and size < next_size", "if next_size is not None"),
        ),
        Wrong(
            "takes a hole of exactly the size for too short",
            "shares are of all slots",
            replace=("size < next_size", "size <= next_size"),
        ),
        Wrong(
            "judges all holes by the longest",
            "a hole is external waste when",
            replace=("size < next_size", "max(sizes) < next_size"),
        ),
        Wrong(
            "judges all holes by their sum",
            "a hole is external waste when",
            replace=("size < next_size", "sum(sizes) < next_size"),
        ),
        Wrong(
            "calls every hole waste when nobody waits",
            "when nobody waits every hole is free",
            replace=("next_size is not None and size < next_size", "next_size is None or size < next_size"),
        ),
    ],
)

PROOFS = [ARENA, WASTE]


@pytest.mark.parametrize("proof", PROOFS, ids=lambda proof: proof.task)
def test_the_grader_tells_right_from_wrong(proof):
    proof.check()
