"""ModelRunner: turns a plan into tensors, runs the model and hands back logits.

The block tables of all running requests live in one int32 matrix, a fixed row for each request. A step
writes only the entries that are new.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from minipaged.attention.backend import AttentionBackend
from minipaged.attention.batch import AttentionBatch, new_token_slots
from minipaged.cache import KVStorage
from minipaged.config import ModelConfig
from minipaged.core.request import Request, StepPlan
from minipaged.core.sampler import gather_logprobs
from minipaged.memory import blocks_for

LOGIT_ROWS = 256  # prompt rows that meet the head at once: the logits of a long prompt would take gigabytes


class Model(Protocol):
    """What the engine needs of a model; `LlamaModel` is one."""

    config: ModelConfig
    fuses_argmax: bool
    """Whether `argmax_tokens` does less than `compute_logits`; only then is it called, or needed."""

    def __call__(
        self, token_ids: Tensor, batch: AttentionBatch, storage: KVStorage, backend: AttentionBackend
    ) -> Tensor:
        """[T] token ids -> [T, hidden_size]; stores the tokens' keys and values.

        Each layer stores those of all tokens before it reads any: a request may list blocks that another
        request fills in this step.
        """

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden_size] -> float32 [R, vocab_size]."""

    def argmax_tokens(self, hidden: Tensor) -> Tensor:
        """[R, hidden_size] -> int64 [R]: where the logits are largest; -1 if one is not finite."""


class BatchBuilder:
    """Keeps the block-table matrix [max_num_seqs, max_blocks] and builds an `AttentionBatch` per step."""

    def __init__(self, max_num_seqs: int, max_blocks: int, block_size: int, device: torch.device) -> None:
        self.block_size = block_size
        self.device = device
        self._tables = np.zeros((max_num_seqs, max_blocks), dtype=np.int32)

    def build(self, plan: StepPlan) -> tuple[Tensor, AttentionBatch]:
        """Token ids [T] int64 and the batch that says where they belong."""
        for request in plan.requests:
            if request.row_blocks != len(request.table.blocks):
                self._write_row(request)
        context_lens = [r.num_computed + n for r, n in zip(plan.requests, plan.query_lens, strict=True)]
        longest = max(context_lens)
        # [count, max_blocks of this step], a copy: the matrix may change while a device still reads
        width = blocks_for(longest, self.block_size)
        tables = self._tables[:, :width].take([request.row for request in plan.requests], axis=0)
        query_lens = np.array(plan.query_lens)
        query_start = np.concatenate([[0], np.cumsum(query_lens)])
        positions, slots = new_token_slots(tables, query_lens, np.array(context_lens), self.block_size)
        batch = AttentionBatch(
            query_start=self._to_device(query_start, np.int32),
            context_lens=self._to_device(context_lens, np.int32),
            block_tables=self._to_device(tables, np.int32),
            slot_mapping=self._to_device(slots, np.int64),
            positions=self._to_device(positions, np.int64),
            block_size=self.block_size,
            max_query_len=max(plan.query_lens),
            max_context_len=longest,
            num_blocks_named=0,  # the tables are the manager's: nothing here leads out of the pool
        )
        return self._to_device(_new_tokens(plan), np.int64), batch

    def _write_row(self, request: Request) -> None:
        blocks, start = request.table.blocks, request.row_blocks
        self._tables[request.row, start : len(blocks)] = blocks[start:]
        request.row_blocks = len(blocks)

    def _to_device(self, numbers: np.ndarray | list[int], dtype: type[np.integer]) -> Tensor:
        return torch.from_numpy(np.asarray(numbers, dtype)).to(self.device)


def _new_tokens(plan: StepPlan) -> list[int]:
    """The tokens that this step computes [T], request by request."""
    tokens = []
    for request, query_len in zip(plan.requests, plan.query_lens, strict=True):
        start = request.num_computed
        tokens += request.tokens[start : start + query_len]
    return tokens


def _sampled_rows(plan: StepPlan, hidden: Tensor) -> Tensor:
    """The rows of `hidden` that a token is sampled from, in the order of `plan.sampled`."""
    if plan.sampled == plan.requests and len(plan.requests) == len(hidden):  # every row is, in order
        return hidden
    last_rows = np.cumsum(plan.query_lens) - 1
    return hidden[torch.from_numpy(last_rows[plan.sampled_from]).to(hidden.device)]


class ModelRunner:
    """Runs the model on a plan: copies, forward pass, and the head on the rows that are needed."""

    def __init__(
        self, model: Model, storage: KVStorage, backend: AttentionBackend, builder: BatchBuilder
    ) -> None:
        self.model = model
        self.storage = storage
        self.backend = backend
        self.builder = builder

    def forward(self, plan: StepPlan) -> Tensor:
        """Do the copies, store the keys and values of the step, return the hidden states [T, hidden_size]."""
        if plan.copies:
            self.backend.copy_blocks(self.storage, plan.copies)
        token_ids, batch = self.builder.build(plan)
        return self.model(token_ids, batch, self.storage, self.backend)

    def sampled_logits(self, plan: StepPlan, hidden: Tensor) -> Tensor:
        """Logits [len(plan.sampled), vocab_size] float32; the other rows never meet the head."""
        return self.model.compute_logits(_sampled_rows(plan, hidden))

    def greedy_tokens(self, plan: StepPlan, hidden: Tensor) -> list[int] | None:
        """The greedy token of each sampled row, from a model that finds it without writing logits down.

        None from any other model, and where some logit is not finite: the sampler says whose.
        """
        if not self.model.fuses_argmax:
            return None
        token_ids: list[int] = self.model.argmax_tokens(_sampled_rows(plan, hidden)).tolist()
        return None if min(token_ids) < 0 else token_ids

    def prompt_logprobs(self, plan: StepPlan, hidden: Tensor) -> None:
        """For requests that ask: log-probabilities of the prompt tokens that follow this step's rows."""
        if not plan.num_prefill_tokens:
            return
        end = 0
        for request, query_len in zip(plan.requests, plan.query_lens, strict=True):
            start, end = end, end + query_len
            parent = request.parent
            if parent.params.prompt_logprobs is None:
                continue
            found = parent.prompt_logprobs
            if found is None:
                found = parent.prompt_logprobs = [None]  # nothing comes before the first token
            # Row p scores token p + 1. What an earlier run of a preempted request has found is kept.
            for first in range(len(found) - 1, parent.num_prompt_tokens - 1, LOGIT_ROWS):
                rows = hidden[start:end][first - request.num_computed :][:LOGIT_ROWS]
                targets = parent.prompt_token_ids[first + 1 :][: len(rows)]
                rows = rows[: len(targets)]
                if len(rows):
                    logits = self.model.compute_logits(rows)
                    found += gather_logprobs(logits, targets, parent.params.prompt_logprobs)
