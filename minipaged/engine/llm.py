"""LLM: a model, a cache and an engine behind the few calls a script needs. Names and meanings are vLLM's."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Literal

import torch

from minipaged.attention.backend import get_backend
from minipaged.config import CacheConfig, EngineConfig
from minipaged.core.request import EngineStats
from minipaged.cpu.accelerate import prepare_for_cpu
from minipaged.engine.beam import BeamSearchOutput, beam_search
from minipaged.engine.dispatcher import Dispatcher
from minipaged.engine.engine import Engine
from minipaged.engine.input_processor import Message, Prompt, as_conversations, as_prompts, one_for_each
from minipaged.engine.output_processor import RequestOutput, StepRecord
from minipaged.engine.sizing import (
    default_kv_memory,
    default_num_seqs,
    default_step_tokens,
    host_blocks,
    resolve_cache_dtype,
    resolve_device,
    resolve_dtype,
    resolve_max_model_len,
    resolve_num_blocks,
)
from minipaged.memory import KVSpec
from minipaged.model.loading import LoadedModel, load_model
from minipaged.model.tokenizer import Tokenizer
from minipaged.sampling_params import BeamSearchParams, SamplingParams


class LLM:
    """Loads a model, reserves the KV cache and serves prompts from it.

    llm = LLM("smollm2-135m", kv_memory="64MiB")
    for output in llm.generate(["The sky is"], SamplingParams(temperature=0)):
        print(output.outputs[0].text)
    """

    def __init__(
        self,
        model: str | Path | LoadedModel = "smollm2-135m",
        *,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        block_size: int = 16,
        kv_memory: int | str | None = None,
        num_blocks: int | None = None,
        gpu_memory_utilization: float = 0.9,
        kv_cache_dtype: str | torch.dtype = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        enable_chunked_prefill: bool = True,
        enable_prefix_caching: bool = True,
        preemption: Literal["recompute", "swap"] = "recompute",
        swap_space: float | str = 1,
        watermark: float = 0.01,
        attention_backend: str = "auto",
        seed: int | None = 0,
    ) -> None:
        """Load and allocate.

        model: "smollm2-135m", a .gguf file, a Hugging Face folder, a hub id, or a model that is loaded.
        kv_memory: bytes of the KV cache, as a number or as text ("64MiB"); or give num_blocks instead.
            Neither: on a GPU what `gpu_memory_utilization` leaves, on a CPU a modest share of the free
            memory.
        block_size: tokens per block. With `block_size=max_model_len` every request reserves one strip for its
            longest length: the contiguous baseline.
        max_num_seqs: sequences that run at once; 256 by default, fewer if max_num_batched_tokens is.
        max_num_batched_tokens: tokens computed in one step; by default 2048, on a CPU 512, or max_num_seqs or
            without chunked prefill max_model_len if that is more.
        preemption: "recompute" or "swap" (to host memory).
        swap_space: host memory for swapped blocks, a number of GiB or text ("512MiB").
        watermark: share of the blocks that admission leaves free.
        seed: what requests without a seed derive theirs from; None takes fresh randomness.

        Raises ValueError, with the value and the limit, for settings that cannot be met.
        """
        self.device = resolve_device(device)
        if not isinstance(model, LoadedModel):
            model = load_model(model, dtype=resolve_dtype(dtype, self.device), device=self.device)
            prepare_for_cpu(model.model)  # one that is handed in stays as it is: its weights may be wanted
        self.name, self.tokenizer, self.model_config = model.name, model.tokenizer, model.config
        max_model_len = resolve_max_model_len(max_model_len, model.config)
        if max_num_batched_tokens is None:
            max_num_batched_tokens = default_step_tokens(
                self.device, max_model_len, max_num_seqs, enable_chunked_prefill=enable_chunked_prefill
            )
        if max_num_seqs is None:
            max_num_seqs = default_num_seqs(max_num_batched_tokens)
        config = EngineConfig(
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_chunked_prefill=enable_chunked_prefill,
            preemption=preemption,
            watermark=watermark,
        )
        spec = KVSpec.from_model(model.config, resolve_cache_dtype(kv_cache_dtype, model.model.dtype))
        if kv_memory is None and num_blocks is None:
            kv_memory = default_kv_memory(self.device, gpu_memory_utilization, spec, config)
        cache_config = CacheConfig(
            block_size=block_size,
            num_blocks=resolve_num_blocks(num_blocks, kv_memory, spec, block_size, self.device),
            dtype=spec.dtype,
            enable_prefix_caching=enable_prefix_caching,
            num_host_blocks=0 if preemption == "recompute" else host_blocks(swap_space, spec, block_size),
        )
        self.engine = Engine(
            model.model,
            cache_config,
            config,
            tokenizer=self.tokenizer,
            backend=get_backend(attention_backend, self.device),
            device=self.device,
            seed=seed,
        )
        self._dispatcher = Dispatcher(self.engine)
        self._ids = count()

    # Generation

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Serve all prompts and return their outputs in the order given.

        prompts: text, token ids, {"prompt": …} or {"prompt_token_ids": …}, or a list of these.
        sampling_params: one for all, or one for each.

        If one prompt is not right, it raises ValueError or TypeError before anything is queued. Interrupted,
        it aborts what it has queued.
        """
        return self._serve(as_prompts(prompts), sampling_params, use_tqdm, add_special_tokens=True)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
    ) -> list[RequestOutput]:
        """`generate` for one conversation, or a list of them, put into the model's chat template.

        messages: [{"role": "user", "content": "…"}, …].
        """
        tokenizer = self.get_tokenizer()
        texts = [
            tokenizer.apply_chat_template(conversation, add_generation_prompt=add_generation_prompt)
            for conversation in as_conversations(messages)
        ]
        return self._serve(
            texts, sampling_params, use_tqdm, add_special_tokens=False
        )  # the template has them

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Serve one prompt and yield its output after every step that gave it a token.

        Each item holds everything so far, or with `output_kind=RequestOutputKind.DELTA` what is new. The
        request is checked now and queued when the first item is asked for. When the iterator is closed or
        left behind, the request is aborted and its blocks are free.
        """
        params = sampling_params or SamplingParams()
        request = self.engine.make_request(self._next_id(), prompt, params)
        request.output_kind = params.output_kind
        return self._dispatcher.stream(request)

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams
    ) -> list[BeamSearchOutput]:
        """The `beam_width` best continuations of each prompt, one prompt after the other.

        Raises ValueError, before anything runs, for a prompt that is not right or whose hypotheses might not
        fit in the pool; RuntimeError while other requests are unfinished, for they hold blocks.
        """
        with self._dispatcher.alone("beam search"):
            return [
                beam_search(
                    self.engine.runner.model,
                    self.engine.pool,
                    self.engine.storage,
                    self.engine.runner.backend,
                    token_ids,
                    params,
                    eos_token_ids=self.model_config.eos_token_ids,
                    max_model_len=self.max_model_len,
                    tokenizer=self.tokenizer,
                )
                for token_ids in self.engine.inputs.beam_prompts(as_prompts(prompts), params)
            ]

    def _serve(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        *,
        add_special_tokens: bool,
    ) -> list[RequestOutput]:
        each = one_for_each(sampling_params, len(prompts))
        requests = [
            self.engine.make_request(self._next_id(), prompt, params, add_special_tokens=add_special_tokens)
            for prompt, params in zip(prompts, each, strict=True)
        ]
        return self._dispatcher.run(requests, use_tqdm)

    def _next_id(self) -> str:
        return f"llm-{next(self._ids)}"

    # What it is made of

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises ValueError for a model without one."""
        if self.tokenizer is None:
            raise ValueError(f"the model {self.name} has no tokenizer: give token ids instead of text")
        return self.tokenizer

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt and its output together."""
        return self.engine.config.max_model_len

    @property
    def stats(self) -> EngineStats:
        """Totals over all requests."""
        return self.engine.stats

    @property
    def trace(self) -> deque[StepRecord]:
        """One record per step: what ran, what waited, how much KV memory was reserved and used."""
        return self.engine.trace

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes. False while requests are unfinished."""
        return self._dispatcher.reset_prefix_cache()
