"""Serve one list of requests under a memory policy and account for every byte of the budget at every step.

`minipaged demo` and the lesson on the whole engine call this twice, once per policy. The policies are one
engine with two block sizes: a block as long as the longest request is a contiguous strip.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from coursekit.waste import WasteReport
from coursekit.workloads import Request
from minipaged.checkpoints.loading import LoadedModel
from minipaged.checks import parse_bytes
from minipaged.core.request import StepPlan
from minipaged.engine.llm import LLM
from minipaged.engine.output_processor import RequestOutput, StepRecord
from minipaged.machine import busy_seconds
from minipaged.sampling_params import SamplingParams


@dataclass(frozen=True)
class Run:
    """What one policy did with the requests.

    samples: one record per step, times in seconds from the start. waste: the sum of one report per step.
    foreign_share: share of the processor that other programs used meanwhile, 0 … 1. A busy machine stalls
    every step that runs on several threads, so with more than a tenth or so the times say little.
    """

    policy: str
    num_blocks: int
    outputs: list[RequestOutput]
    seconds: float
    samples: list[StepRecord]
    waste: WasteReport
    foreign_share: float

    def figures(self) -> dict[str, Any]:
        """Every number of a comparison. Shares of the budget are means over the steps; times in seconds."""
        running = [sample.running for sample in self.samples]
        ttft = [output.metrics.ttft for output in self.outputs if output.metrics.ttft is not None]
        tokens = sum(len(output.outputs[0].token_ids) for output in self.outputs)
        return {
            "blocks": self.num_blocks,
            "steps": len(self.samples),
            "running_mean": sum(running) / len(running),
            "running_peak": max(running),
            "share_of_taken": self.waste.share_of_taken,
            "shares": self.waste.shares,
            "output_tokens": tokens,
            "tokens_per_second": tokens / self.seconds,
            "ttft_mean": sum(ttft) / len(ttft),
            "ttft_worst": max(ttft),
            "seconds": self.seconds,
            "foreign_share": self.foreign_share,
        }


class WasteCounter:
    """Adds up, step by step, where the bytes of the budget are. For `Engine.on_step`.

    Both policies are judged alike: an empty slot after a request's last token either gets one of its tokens
    later (`to_come`) or never does (`never`). It has to know how long each answer will be, so the requests
    must run to `max_tokens`, one sequence each, and share no blocks.
    """

    def __init__(self, budget: int, block_size: int, bytes_per_token: int) -> None:
        self.budget, self.block_size, self.bytes_per_token = budget, block_size, bytes_per_token
        self.total: WasteReport | None = None

    def __call__(self, plan: StepPlan) -> None:
        used = to_come = reserved = 0  # slots
        for request in plan.requests:
            room = len(request.table.blocks) * self.block_size
            stored = request.table.num_tokens
            final = request.parent.num_prompt_tokens + (request.parent.params.max_tokens or 1)
            used += stored
            to_come += min(final - 1, room) - stored  # the last token of an answer is never stored
            reserved += room
        block_bytes = self.block_size * self.bytes_per_token
        whole_blocks = self.budget // block_bytes * block_bytes
        report = WasteReport(
            budget=self.budget,
            used=used * self.bytes_per_token,
            to_come=to_come * self.bytes_per_token,
            never=(reserved - used - to_come) * self.bytes_per_token,
            internal=0,  # split into the two kinds above
            external=self.budget - whole_blocks,
            free=whole_blocks - reserved * self.bytes_per_token,
        )
        self.total = report if self.total is None else self.total + report


def serve(
    policy: str,
    model: LoadedModel,
    requests: Sequence[Request],
    *,
    block_size: int,
    kv_memory: int | str,
    max_model_len: int,
    use_tqdm: bool = True,
    **settings: Any,
) -> Run:
    """Serve all requests greedily, each to its exact output length, within `kv_memory` bytes.

    settings: further arguments of `LLM`. Raises ValueError when a request can never fit.
    """
    llm = LLM(
        model,
        block_size=block_size,
        kv_memory=kv_memory,
        max_model_len=max_model_len,
        enable_prefix_caching=False,  # count what requests hold, not what is kept for later ones
        **settings,
    )
    # The first step of a process pays for thread pools and kernel choices; no policy should.
    llm.generate({"prompt_token_ids": [0]}, SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
    llm.engine.reset_stats()
    counter = WasteCounter(
        parse_bytes(kv_memory, "kv_memory"), block_size, llm.engine.storage.spec.bytes_per_token
    )
    llm.engine.on_step = counter
    start, busy, own = time.perf_counter(), busy_seconds(), time.process_time()
    outputs = llm.generate(
        [{"prompt_token_ids": request.prompt_token_ids} for request in requests],
        [SamplingParams(temperature=0, max_tokens=r.max_tokens, ignore_eos=True) for r in requests],
        use_tqdm=use_tqdm,
    )
    seconds = time.perf_counter() - start
    foreign = busy_seconds() - busy - (time.process_time() - own)
    assert counter.total is not None, "at least one step ran"
    samples = [replace(record, time=record.time - start) for record in llm.trace]
    return Run(
        policy,
        llm.engine.pool.num_blocks,
        outputs,
        seconds,
        samples,
        counter.total,
        foreign_share=min(1.0, max(0.0, foreign / (seconds * (os.cpu_count() or 1)))),
    )


def equal_outputs(first: Run, second: Run) -> int:
    """How many requests got the same tokens in both runs. In float32 all of them do."""
    pairs = zip(first.outputs, second.outputs, strict=True)
    return sum(list(a.outputs[0].token_ids) == list(b.outputs[0].token_ids) for a, b in pairs)
