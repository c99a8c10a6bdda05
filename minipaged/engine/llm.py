"""LLM: a model, a cache and an engine behind the few calls a script needs. Names and meanings are vLLM's."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

from minipaged.attention import get_backend
from minipaged.checkpoints.loading import LoadedModel, load_model
from minipaged.core.request import EngineStats
from minipaged.cpu.accelerate import accelerate
from minipaged.engine.args import EngineArgs, takes_arguments_of
from minipaged.engine.beam import BeamSearchOutput, beam_search
from minipaged.engine.dispatcher import Dispatcher
from minipaged.engine.engine import Engine
from minipaged.engine.input_processor import Message, Prompt, as_conversations, as_prompts, one_for_each
from minipaged.engine.output_processor import RequestOutput, StepRecord
from minipaged.model.tokenizer import Tokenizer
from minipaged.sampling_params import BeamSearchParams, SamplingParams


class LLM:
    """Loads a model, reserves the KV cache and serves prompts from it.

    llm = LLM("smollm2-135m", kv_memory="64MiB")
    for output in llm.generate(["The sky is"], SamplingParams(temperature=0)):
        print(output.outputs[0].text)
    """

    @takes_arguments_of(EngineArgs)
    def __init__(self, *args: Any, **settings: Any) -> None:
        """Load and allocate. The arguments are those of `EngineArgs`, which explains them.

        Raises ValueError, with the value and the limit, for settings that cannot be met: before the model is
        loaded, unless the limit is the model's own or what memory is free beside it.
        """
        asked = EngineArgs(*args, **settings)
        self.device = asked.find_device()
        backend = get_backend(asked.attention_backend, self.device)
        model = asked.model
        handed_in = isinstance(model, LoadedModel)
        if not isinstance(model, LoadedModel):
            model = load_model(model, dtype=asked.find_dtype(self.device), device=self.device)
        if asked.attention_backend == "auto":
            # A model that is handed in stays as it is: its weights may be wanted.
            model, backend = accelerate(model, backend, keep_weights=handed_in)
        self.name, self.tokenizer, self.model_config = model.name, model.tokenizer, model.config
        cache_config, config = asked.resolve(model.config, model.model.dtype, self.device)
        self.engine = Engine(
            model.model,
            cache_config,
            config,
            tokenizer=self.tokenizer,
            backend=backend,
            device=self.device,
            seed=asked.seed,
        )
        self._dispatcher = Dispatcher(self.engine)
        self._ids = count()

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> LLM:
        """The same from settings that are already put together."""
        return cls(**vars(args))

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
