"""Engine: requests go in, and every `step` moves them on by one plan.

A step plans, runs the model, samples and commits. If anything raises, wherever that is, every request gives
its blocks up and will be computed again from the tokens it has. What could not be reported comes with the
next step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import torch

from minipaged.attention import AttentionBackend, get_backend
from minipaged.cache import BlockPool, KVStorage, PrefixStats
from minipaged.cache.swap import SwapSpace
from minipaged.config import CacheConfig, EngineConfig
from minipaged.core.kv_cache_manager import KVCacheManager
from minipaged.core.request import Request, Sequence, Status, StepPlan
from minipaged.core.runner import BatchBuilder, Model, ModelRunner
from minipaged.core.sampler import SamplerOutput, sample
from minipaged.core.scheduler import EngineStats, Scheduler, swap_seconds_per_block
from minipaged.engine.input_processor import EngineTokenizer, InputProcessor, Prompt
from minipaged.engine.output_processor import OutputProcessor, Recorder, RequestOutput, StepRecord
from minipaged.memory import KVSpec, blocks_for
from minipaged.sampling_params import SamplingParams


class Engine:
    """Serves one model from one paged cache."""

    def __init__(
        self,
        model: Model,
        cache_config: CacheConfig,
        config: EngineConfig,
        *,
        tokenizer: EngineTokenizer | None = None,
        backend: AttentionBackend | None = None,
        device: torch.device | str = "cpu",
        seed: int | None = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Allocate the cache.

        seed: requests without a seed of their own derive one from it, in the order they are made; None takes
            fresh randomness. clock: seconds; every time in metrics and trace is read from it.
        """
        self.config, self.cache_config = config, cache_config
        self._clock = clock
        block_size, num_blocks = cache_config.block_size, cache_config.num_blocks
        device = torch.device(device)
        self.pool = BlockPool(num_blocks, enable_prefix_caching=cache_config.enable_prefix_caching)
        spec = KVSpec.from_model(model.config, cache_config.dtype)
        try:
            self.storage = KVStorage(spec, num_blocks, block_size, device=device)
        except (RuntimeError, MemoryError) as error:  # in an allocator's words
            size = num_blocks * spec.bytes_per_block(block_size) >> 20
            raise ValueError(
                f"{num_blocks} blocks of {block_size} tokens take {size} MiB, which {device} refused: "
                "give a smaller kv_memory or num_blocks"
            ) from error
        host_blocks = cache_config.num_host_blocks
        swap = SwapSpace.create(self.pool, self.storage, host_blocks) if host_blocks else None
        self.manager = KVCacheManager(self.pool, block_size, config.max_num_seqs, swap)
        self.scheduler = Scheduler(config, self.manager)
        if swap is not None and config.preemption == "auto":
            self.scheduler.cost.seconds_per_block = swap_seconds_per_block(swap, clock)
        self.inputs = InputProcessor(
            model.config, config, tokenizer, self.pool, block_size, seed=seed, clock=clock
        )
        row_length = min(blocks_for(config.max_model_len, block_size), num_blocks)
        builder = BatchBuilder(config.max_num_seqs, row_length, block_size, device)
        self.runner = ModelRunner(model, self.storage, backend or get_backend("auto", device), builder)
        self.requests: dict[str, Request] = {}
        """Unfinished requests by id."""
        self._recorder = Recorder(spec.bytes_per_token * block_size, block_size)
        self.on_step: Callable[[StepPlan], None] | None = None
        """Called with each plan after the model ran, before its tokens are added. It must change nothing."""
        self._num_streaming = 0
        self._outputs = OutputProcessor(tokenizer)

    # Requests

    def add_request(self, request_id: str, prompt: Prompt, params: SamplingParams | None = None) -> None:
        """Queue a request; `step` reports it as `params.output_kind` says.

        Raises ValueError, with the value and the limit, for what could never be served, and TypeError for
        what is no prompt. Nothing has changed then.
        """
        params = params or SamplingParams()
        request = self.make_request(request_id, prompt, params)
        request.output_kind = params.output_kind
        self.add([request])

    def make_request(
        self, request_id: str, prompt: Prompt, params: SamplingParams, *, add_special_tokens: bool = True
    ) -> Request:
        """Check a request and build it without queueing it; raises as `add_request` does."""
        request = self.inputs.make_request(request_id, prompt, params, add_special_tokens=add_special_tokens)
        self.manager.require_fits(request)
        return request

    def add(self, requests: list[Request]) -> None:
        """Queue requests that `make_request` built: all of them, or none and ValueError for an id in use."""
        ids = {request.request_id for request in requests}
        taken = sorted(filter(self.is_unfinished, ids))
        if taken or len(ids) < len(requests):
            raise ValueError(f"request ids {taken or sorted(ids)} are in use or given twice")
        for request in requests:
            self.requests[request.request_id] = request
            self.scheduler.add(request)
            self._num_streaming += request.streams

    def abort_request(self, request_id: str, index: int | None = None) -> bool:
        """End a request, or only sample `index` of it, in whatever state it is, and free what that holds.

        Nothing is reported once the last live sample is aborted. False for one that is unknown or finished.
        """
        request = self.requests.get(request_id)
        doomed = [s for s in request.live if index in (None, s.index)] if request else []
        if request is None or (request.live and not doomed):
            return False
        if len(doomed) == len(request.live):
            if request.live:  # else it ended in a step that was cut short, and is not reported yet
                self.scheduler.remove(request)
            self._outputs.drop(request)
            self._forget(request)
            self.scheduler.stats.num_aborted += 1
        for sequence in doomed:
            sequence.output.finish("abort")
            self.manager.retire(sequence)
        return True

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests) or self._outputs.has_outputs

    def is_unfinished(self, request_id: str) -> bool:
        """Whether something of this request is still to be reported."""
        return request_id in self.requests or self._outputs.holds(request_id)

    def _forget(self, request: Request) -> None:
        self._num_streaming -= request.streams
        del self.requests[request.request_id]

    # Steps

    def step(self) -> list[RequestOutput]:
        """Move every request on. Returns those that finished, and those that stream and got a token."""
        start = self._clock()
        try:
            plan = self.scheduler.schedule()
            output = self._compute(plan) if plan.sequences else SamplerOutput([])
            now = self._clock()
            if plan.sequences:
                self._recorder.record(plan, self.scheduler, start, now)
                if self.on_step is not None:
                    self.on_step(plan)
            self._outputs.end(self._commit(plan, output) if plan.sequences else plan.ended, now)
        except BaseException:
            self._recover()
            raise
        return self._outputs.report(self._streaming(plan.sampled), self._finish)

    def _compute(self, plan: StepPlan) -> SamplerOutput:
        hidden = self.runner.forward(plan)
        self.runner.prompt_logprobs(plan, hidden)
        if not plan.sampled:
            return SamplerOutput([])
        states = [s.sampling for s in plan.sampled]
        is_plain = all(state.is_plain for state in states)
        if is_plain and (token_ids := self.runner.greedy_tokens(plan, hidden)) is not None:
            return SamplerOutput(token_ids)
        return sample(self.runner.sampled_logits(plan, hidden), states)

    def _recover(self) -> None:
        """Every request returns to the queue, in order; those that have ended will be reported."""
        self._outputs.ended.clear()
        self._outputs.end(self.scheduler.requeue_all(self.requests.values()), self._clock())

    def _finish(self, request: Request) -> None:
        self._forget(request)
        self.scheduler.stats.num_finished += 1

    def _commit(self, plan: StepPlan, output: SamplerOutput) -> list[Request]:
        """Take over what the step computed; returns the requests that finished with it."""
        block_size, caching = self.cache_config.block_size, self.cache_config.enable_prefix_caching
        for sequence, query_len in zip(plan.sequences, plan.query_lens, strict=True):
            sequence.num_computed += query_len
            if caching and (query_len > 1 or not sequence.num_computed % block_size):
                self.manager.publish(sequence)
        for request in plan.forks:
            self.manager.fork(request)
        if output.logprobs is not None:
            for sequence, entry in zip(plan.sampled, output.logprobs, strict=True):
                sequence.add_logprobs(entry)
        for sequence, token_id in zip(plan.sampled, output.token_ids, strict=True):
            sequence.tokens.append(token_id)
            sequence.output.token_ids.append(token_id)
        # All have their token before anything is asked of a tokenizer, which may raise.
        ended = [sequence for sequence in plan.sampled if sequence.output.check_end()]
        for sequence in ended:
            self.manager.retire(sequence)
        finished = list(dict.fromkeys([s.request for s in ended if s.request.status is Status.FINISHED]))
        if finished:
            self.scheduler.running = [r for r in self.scheduler.running if r.status is not Status.FINISHED]
        return finished

    def _streaming(self, sampled: list[Sequence]) -> list[Request]:
        """Requests that stream, got a token and go on."""
        if not self._num_streaming:
            return []
        requests = dict.fromkeys([s.request for s in sampled])
        return [r for r in requests if r.streams and r.status is not Status.FINISHED]

    # Records

    @property
    def stats(self) -> EngineStats:
        """Totals since the engine was made or `reset_stats` was called; a copy."""
        return replace(self.scheduler.stats, prefix=replace(self.manager.prefix_stats))

    @property
    def trace(self) -> deque[StepRecord]:
        """One record per step, the newest `TRACE_LENGTH` of them."""
        return self._recorder.trace

    def reset_stats(self) -> None:
        """Start the totals and the trace again."""
        self.scheduler.stats = EngineStats()
        self.manager.prefix_stats = PrefixStats()
        self._recorder.trace.clear()

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        """Forget every published block. False, and nothing changed, while requests hold blocks.

        With `reset_running_requests` they give their blocks up first, and will be computed again.
        """
        if reset_running_requests:
            self._recover()
        return self.pool.reset_prefix_cache()

    def check_invariants(self) -> None:
        """Prove that every block, row and queue entry has exactly its owners. Slow; raises AssertionError."""
        self.manager.check_invariants(self.scheduler.running, self.scheduler.waiting)
        queued, known = [*self.scheduler.running, *self.scheduler.waiting], self.requests.values()
        assert queued == [r for r in known if r.live], "the queues are not the unfinished requests in order"
