"""Measure how much of the KV memory holds tokens, for three ways to reserve it and for paging.

No model runs: request lengths are sent through each policy, in the same budget, one token a step. Lengths are
those of the chat48 mix, of two real Azure traces, and drawn like the PagedAttention paper's two workloads.
The averages are over the steps in which a request waits.
"""

import argparse
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from coursekit.traffic import Traffic

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
WORKLOADS = ("chat48", "azure-conv", "azure-code", "sharegpt", "alpaca")
SEED = 0
RULES = {
    "maximum": "reserve the maximum",
    "power_of_two": "reserve a power of two",
    "oracle": "reserve the true length",
}

# Kwon et al. 2023: share of KV memory that holds tokens (figure 2) and requests running at once (figure 13).
# Its paged system is vLLM with blocks of 16 tokens; figure 2 is one of its experiments, not one a workload.
PAPER_SHARE = {"maximum": 0.204, "power_of_two": 0.268, "oracle": 0.382, "paged 16": 0.963}
PAPER_RUNNING = {
    "sharegpt": {"maximum": 7.00, "power_of_two": 9.81, "oracle": 13.62, "paged 16": 30.42},
    "alpaca": {"maximum": 7.00, "power_of_two": 43.24, "oracle": 72.75, "paged 16": 132.44},
}


@dataclass(frozen=True)
class Workload:
    """Lengths, the longest request the server must accept, and the budget; all in tokens."""

    name: str
    lengths: "np.ndarray"
    max_len: int
    budget_tokens: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print every figure for a program to read")
    parser.add_argument(
        "--workload",
        choices=WORKLOADS,
        action="append",
        help="only this one; may be given again (default: all)",
    )


def run(args: argparse.Namespace) -> int:
    report = {name: measure(load(name)) for name in args.workload or WORKLOADS}
    if args.json:
        print(json.dumps({"workloads": report, "paper": {"share": PAPER_SHARE, "running": PAPER_RUNNING}}))
    else:
        print("\n\n".join("\n".join(table(name, result)) for name, result in report.items()))
        print("\n" + "\n".join(FOOTNOTES))
    return 0


def load(name: str) -> Workload:
    """A workload; in its budget, reserving the maximum runs 7 requests, as in the paper (chat48: 4)."""
    import numpy as np

    from coursekit.workloads import azure_lengths, load_mix, lognormal_lengths

    if name == "chat48":
        lengths = np.array([(len(r.prompt_token_ids), r.max_tokens) for r in load_mix("chat48")])
        return Workload(name, lengths, max_len=512, budget_tokens=4 * 512 + 128)
    if name == "azure-conv":
        return Workload(name, azure_lengths("conv"), max_len=16384, budget_tokens=7 * 16384 + 2048)
    if name == "azure-code":
        return Workload(name, azure_lengths("code"), max_len=8192, budget_tokens=7 * 8192 + 1024)
    # 12 GB at 800 KiB a token: OPT-13B on a card of 40 GB, the paper's first server
    if name == "sharegpt":
        return Workload(name, lognormal_lengths("sharegpt", 2000, SEED), max_len=2048, budget_tokens=14648)
    return Workload(name, lognormal_lengths("alpaca", 10000, SEED), max_len=2048, budget_tokens=14648)


def measure(workload: Workload) -> dict[str, Any]:
    """Every policy on one workload, as plain numbers."""
    policies = dict(policies_of(workload))
    return {
        "requests": len(workload.lengths),
        "mean_prompt_tokens": float(workload.lengths[:, 0].mean()),
        "mean_generated_tokens": float(workload.lengths[:, 1].mean()),
        "max_len": workload.max_len,
        "budget_tokens": workload.budget_tokens,
        "policies": {name: figures(traffic) for name, traffic in policies.items()},
    }


def policies_of(workload: Workload) -> Iterator[tuple[str, "Traffic"]]:
    """The three rules of reservation, the maximum again at longer maxima, and paging at every block size."""
    from coursekit.traffic import contiguous_traffic, paged_traffic

    lengths, max_len, budget = workload.lengths, workload.max_len, workload.budget_tokens
    for rule in ("maximum", "power_of_two", "oracle"):
        yield rule, contiguous_traffic(lengths, budget, max_len, rule)
    for factor in (2, 4):
        traffic = contiguous_traffic(lengths, budget, factor * max_len, "maximum")
        yield f"maximum x{factor}", traffic
    for block_size in BLOCK_SIZES:
        yield f"paged {block_size}", paged_traffic(lengths, budget, block_size)


def figures(traffic: "Traffic") -> dict[str, Any]:
    waste = traffic.waste
    return {
        "share_of_taken": waste.share_of_taken,
        "shares_of_budget": waste.shares,
        "running": traffic.running,
        "unused_tokens_per_request": traffic.unused_per_request,
        "preemptions": traffic.preemptions,
        "steps": traffic.steps,
    }


COLUMNS = {  # heading -> width
    "policy": -23, "holds": 6, "paper": 7, "|": 3, "used": 6, "to come": 9, "never": 7, "last": 6, "holes": 7,
    "free": 6, "| ": 4, "running": 8, "paper ": 7, "unused": 9, "preempted": 11,
}  # fmt: skip
FOOTNOTES = (
    "holds: % of the memory a policy took (the budget without `free`) that holds tokens. In % of the budget:",
    "to come / never: reserved for tokens that come later / never; last: after the last token of a block;",
    "holes: too small for the request that waits, or for a block; free: room for running requests to grow.",
    "running: requests in memory at once; unused: slots a request took that hold no token.",
    "maximum x2, x4: the server must accept requests 2 and 4 times as long; the requests stay the same.",
    "paper: Kwon et al. 2023, figures 2 (one experiment for all workloads) and 13; OPT-13B, blocks of 16.",
)


def line(cells: Iterable[str]) -> str:
    pairs = zip(cells, COLUMNS.values(), strict=True)
    return "".join(cell.ljust(-width) if width < 0 else cell.rjust(width) for cell, width in pairs)


def table(name: str, result: dict[str, Any]) -> Iterator[str]:
    yield (
        f"{name}: {result['requests']} requests, {result['mean_prompt_tokens']:.0f} + "
        f"{result['mean_generated_tokens']:.0f} tokens on average; longest accepted {result['max_len']}, "
        f"budget {result['budget_tokens']} tokens"
    )
    yield line(heading.strip() for heading in COLUMNS)
    running = PAPER_RUNNING.get(name, {})
    for policy, f in result["policies"].items():
        yield line(
            [
                RULES.get(policy, policy),
                f"{100 * f['share_of_taken']:.1f}",
                f"{100 * PAPER_SHARE[policy]:.1f}" if policy in PAPER_SHARE else "",
                "|",
                *(f"{100 * share:.1f}" for share in f["shares_of_budget"].values()),
                "|",
                f"{f['running']:.1f}",
                f"{running[policy]:.1f}" if policy in running else "",
                f"{f['unused_tokens_per_request']:.1f}",
                str(f["preemptions"]),
            ]
        )
