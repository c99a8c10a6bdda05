"""Which planted mistakes the graders find: `python -m tests.exercises.kill_rate` prints it for every task."""

import sys
from importlib import import_module
from pathlib import Path

from tests.exercises.proof import Proof


def proofs() -> list[Proof]:
    """The proofs of every tests/exercises/test_NN_name.py."""
    modules = sorted(Path(__file__).parent.glob("test_[0-9][0-9]_*.py"))
    return [proof for path in modules for proof in import_module(f"tests.exercises.{path.stem}").PROOFS]


def main() -> int:
    caught, planted, right = 0, 0, 0
    print(f"{'task':<18}{'caught':>8}   mistake, and what must find it")
    for proof in proofs():
        found = [proof.is_caught(wrong) for wrong in proof.all_wrong()]
        print(f"{proof.task:<18}{sum(found):>4}/{len(found)}")
        for wrong, killed in zip(proof.all_wrong(), found, strict=True):
            print(f"{'':<29}{'' if killed else 'MISSED  '}{wrong.name}: {wrong.fails}")
        right += len(proof.right())
        caught, planted = caught + sum(found), planted + len(found)
    print(f"{right} right answers in other styles planted")
    print(f"{caught} of {planted} planted mistakes found: kill rate {100 * caught / planted:.0f} %")
    return 0 if caught == planted else 1


if __name__ == "__main__":
    sys.exit(main())
