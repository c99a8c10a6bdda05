"""Engine: requests go in, and every `step` moves them on by one plan.

A step plans, runs the model, samples and commits. If it is cut short, wherever that is, every request gives
its blocks up and will be computed again from the tokens it has. What could not be reported comes with the
next step.
"""

from __future__ import annotations

import threading
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
from minipaged.core.request import EngineStats, ParentRequest, Request, StepPlan
from minipaged.core.runner import BatchBuilder, Model, ModelRunner
from minipaged.core.sampler import SamplerOutput, sample
from minipaged.core.scheduler import Scheduler
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
        pool = BlockPool(num_blocks, enable_prefix_caching=cache_config.enable_prefix_caching)
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
        swap = SwapSpace.create(pool, self.storage, host_blocks) if host_blocks else None
        self.manager = KVCacheManager(pool, block_size, config.max_num_seqs, swap)
        self.scheduler = Scheduler(config, self.manager)
        self.inputs = InputProcessor(model.config, config, tokenizer, self.manager, seed=seed, clock=clock)
        row_length = min(blocks_for(config.max_model_len, block_size), num_blocks)
        builder = BatchBuilder(config.max_num_seqs, row_length, block_size, device)
        self.runner = ModelRunner(model, self.storage, backend or get_backend("auto", device), builder)
        self.requests: dict[str, ParentRequest] = {}
        """Unfinished requests by id."""
        self._recorder = Recorder(spec.bytes_per_token * block_size, block_size)
        self.on_step: Callable[[StepPlan], None] | None = None
        """Called with each plan after the model ran, before its tokens are added. It must change nothing."""
        self._num_streaming = 0
        self._outputs = OutputProcessor(tokenizer)
        self._lock = threading.RLock()  # a request may be added or aborted in another thread
        self._in_doubt = False  # whether something was cut short and is still to be put right

    @property
    def pool(self) -> BlockPool:
        return self.manager.pool

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
    ) -> ParentRequest:
        """Check a request and build it without queueing it; raises as `add_request` does."""
        request = self.inputs.make_request(request_id, prompt, params, add_special_tokens=add_special_tokens)
        self.manager.require_fits(request)
        return request

    def add(self, requests: list[ParentRequest]) -> None:
        """Queue requests that `make_request` built: all of them, or none and ValueError for an id in use."""
        with self._lock:
            ids = {request.request_id for request in requests}
            taken = sorted(filter(self.is_unfinished, ids))
            if taken or len(ids) < len(requests):
                raise ValueError(f"request ids {taken or sorted(ids)} are in use or given twice")
            self._in_doubt = True
            for request in requests:
                self.requests[request.request_id] = request
                self.scheduler.waiting.extend(request.samples)
                self._num_streaming += request.streams
            self._in_doubt = False

    def abort_request(self, request_id: str, index: int | None = None) -> bool:
        """End a request, or only sample `index` of it, in whatever state it is, and free what that holds.

        Nothing is reported once the last live sample is aborted. False for one that is unknown or finished.
        Another thread may call it: it waits for the end of a step.
        """
        with self._lock:
            request = self.requests.get(request_id)
            if request is None:
                return False
            unfinished = request.unfinished
            doomed = [sample for sample in unfinished if index in (None, sample.index)]
            if unfinished and not doomed:
                return False
            for sample in doomed:
                sample.output.finish("abort")
                self.scheduler.end(sample)
            if not request.unfinished:
                self._outputs.drop(request)
                self._forget(request)
                self.scheduler.stats.num_aborted += 1
            return True

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests) or self._outputs.has_outputs

    def is_unfinished(self, request_id: str) -> bool:
        """Whether something of this request is still to be reported."""
        return request_id in self.requests or self._outputs.holds(request_id)

    def _forget(self, request: ParentRequest) -> None:
        self._num_streaming -= request.streams
        del self.requests[request.request_id]

    # Steps

    def step(self) -> list[RequestOutput]:
        """Move every request on. Returns those that finished, and those that stream and got a token.

        What a step made before it raised is returned by the next one, at once.
        """
        with self._lock:
            if not self._outputs.has_outputs:
                self._advance()
            return self._outputs.take_outputs()

    def _advance(self) -> None:
        if self._in_doubt:  # the recovery itself was cut short
            self._recover()
        self._in_doubt = True
        try:
            start = self._clock()
            self._end(self._outputs.check_again(), start)
            plan = self.scheduler.schedule()
            output = self._compute(plan) if plan.requests else SamplerOutput([])
            now = self._clock()
            if plan.requests:
                self._recorder.record(plan, self.scheduler, start, now)
                if self.on_step is not None:
                    self.on_step(plan)
            self._commit(plan, output)
            self._end([*plan.ended, *self._outputs.find_ended(plan.sampled)], now)
        except BaseException:
            self._recover()
            raise
        self._in_doubt = False
        self._outputs.make_outputs(self._streaming(plan.sampled), self._finish)

    def _compute(self, plan: StepPlan) -> SamplerOutput:
        hidden = self.runner.forward(plan)
        self.runner.prompt_logprobs(plan, hidden)
        if not plan.sampled:
            return SamplerOutput([])
        states = [request.sampling for request in plan.sampled]
        is_plain = all(state.is_plain for state in states)
        if is_plain and (token_ids := self.runner.greedy_tokens(plan, hidden)) is not None:
            return SamplerOutput(token_ids)
        return sample(self.runner.sampled_logits(plan, hidden), states)

    def _recover(self) -> None:
        """Every request returns to the queue, in order, and is asked again whether it has ended."""
        self._in_doubt = True
        samples = [sample for request in self.requests.values() for sample in request.samples]
        self.scheduler.requeue_all(samples)
        for request in self.requests.values():
            if not request.unfinished:
                self._outputs.end(request, self._clock())
        self._outputs.unchecked = [sample for sample in samples if sample.output.token_ids]
        self._in_doubt = False

    def _finish(self, request: ParentRequest) -> None:
        self._forget(request)
        self.scheduler.stats.num_finished += 1

    def _commit(self, plan: StepPlan, output: SamplerOutput) -> None:
        """Take over what the step computed. No tokenizer is asked."""
        for request, query_len in zip(plan.requests, plan.query_lens, strict=True):
            request.num_computed += query_len
        if output.logprobs is not None:
            for request, entry in zip(plan.sampled, output.logprobs, strict=True):
                request.add_logprobs(entry)
        for request, token_id in zip(plan.sampled, output.token_ids, strict=True):
            request.tokens.append(token_id)
            request.output.token_ids.append(token_id)

    def _end(self, ended: list[Request], now: float) -> None:
        """Free what requests hold that have ended at `now`, and note what is to be reported."""
        for request in ended:
            self.scheduler.end(request)
            if not request.parent.unfinished:
                self._outputs.end(request.parent, now)

    def _streaming(self, sampled: list[Request]) -> list[ParentRequest]:
        """Requests that stream, got a token and go on."""
        if not self._num_streaming:
            return []
        parents = dict.fromkeys([request.parent for request in sampled])
        return [parent for parent in parents if parent.streams and parent.unfinished]

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
        with self._lock:
            if reset_running_requests:
                self._recover()
            return self.pool.reset_prefix_cache()

    def check_invariants(self) -> None:
        """Prove that every block, row and queue entry has exactly its owners. Slow; raises AssertionError."""
        self.manager.check_invariants(self.scheduler.running, self.scheduler.waiting)
        queued = [*self.scheduler.running, *self.scheduler.waiting]
        unfinished = [sample for request in self.requests.values() for sample in request.unfinished]
        assert queued == unfinished, "the queues are not the unfinished requests in order"
