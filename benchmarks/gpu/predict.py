"""What bytes, operations and a card's two rates predict for each case of the benchmark.

    python benchmarks/gpu/predict.py                        for an H200, by its data sheet
    python benchmarks/gpu/predict.py --card A100-80GB
    python benchmarks/gpu/predict.py --bandwidth 4.3e12 --flops 7.8e14

Decode must read every key and value once; prefill must do its products. The larger of the two times is the
floor: no kernel runs faster. A measurement is told beside its floor, and the gap is what is left to explain.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.gpu.shapes import GOALS, AttentionShape, decode_shapes, prefill_shapes

# Device memory in bytes per second and dense 16-bit matrix products in operations per second, by the vendors'
# data sheets. What a copy or a product really reaches is lower: the benchmark measures both on the card at
# hand.
CARDS = {
    "T4": (320e9, 65e12),
    "L4": (300e9, 121e12),
    "RTX-4090": (1008e9, 165e12),
    "A100-80GB": (2039e9, 312e12),
    "H100-SXM": (3350e9, 989e12),
    "H200": (4800e9, 989e12),
    "B200": (8000e9, 2250e12),
    "MI300X": (5300e9, 1307e12),
}


@dataclass(frozen=True)
class Prediction:
    """Least bytes moved, operations done, and the seconds they take; `bound` names the larger."""

    bytes_moved: int
    operations: int
    seconds: float
    bound: str  # "memory" or "arithmetic"


def predict(shape: AttentionShape, bandwidth: float, flops: float) -> Prediction:
    """The floor of one attention step: `bandwidth` in bytes per second, `flops` in operations per second."""
    memory, arithmetic = shape.bytes_moved / bandwidth, shape.operations / flops
    return Prediction(
        shape.bytes_moved,
        shape.operations,
        max(memory, arithmetic),
        "memory" if memory >= arithmetic else "arithmetic",
    )


def table(bandwidth: float, flops: float) -> str:
    """All cases with their floors, then the goals they are held to."""
    lines = [f"{'case':<26} {'KV read':>10} {'operations':>11} {'floor':>10}  bound by"]
    for shape in (*decode_shapes(), *prefill_shapes()):
        floor = predict(shape, bandwidth, flops)
        lines.append(
            f"{shape.name:<26} {shape.kv_bytes / 1e6:>7.0f} MB {floor.operations / 1e9:>6.1f} GFLOP "
            f"{floor.seconds * 1e6:>7.1f} us  {floor.bound}"
        )
    lines += ["", f"{'goal':<52} {'at least':>8} {'aim':>6}"]
    lines += [f"{goal.text:<52} {goal.limit(goal.at_least):>8} {goal.limit(goal.aim):>6}" for goal in GOALS]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--card", choices=CARDS, default="H200", help="rates by its data sheet")
    parser.add_argument("--bandwidth", type=float, help="bytes per second, instead of the data sheet's")
    parser.add_argument("--flops", type=float, help="operations per second, instead of the data sheet's")
    args = parser.parse_args()
    bandwidth, flops = CARDS[args.card]
    bandwidth, flops = args.bandwidth or bandwidth, args.flops or flops
    print(f"{args.card}: {bandwidth / 1e12:.2f} TB/s, {flops / 1e12:.0f} TFLOP/s in 16 bits")
    print("predicted, not measured\n")
    print(table(bandwidth, flops))


if __name__ == "__main__":
    main()
