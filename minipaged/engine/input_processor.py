"""InputProcessor: from what a caller asks to a checked `Request`, before anything is queued."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from minipaged.cache import BlockPool, BlockTable
from minipaged.config import EngineConfig, ModelConfig
from minipaged.engine.outputs import RequestMetrics
from minipaged.engine.prompts import EngineTokenizer, Prompt, parse_prompt
from minipaged.engine.request import Request
from minipaged.engine.request import Sequence as RequestSequence
from minipaged.engine.sampler import SamplingState
from minipaged.engine.sampling_params import BeamSearchParams, SamplingParams
from minipaged.engine.stop import OutputState
from minipaged.memory import blocks_for


class InputProcessor:
    """Builds requests with empty block tables of `pool`; takes no block."""

    def __init__(
        self,
        model_config: ModelConfig,
        config: EngineConfig,
        tokenizer: EngineTokenizer | None,
        pool: BlockPool,
        block_size: int,
        *,
        seed: int | None,
        clock: Callable[[], float],
    ) -> None:
        self.model_config = model_config
        self.config = config
        self.tokenizer = tokenizer
        self._pool, self._block_size = pool, block_size
        self._seed, self._clock = seed, clock
        self._num_made = 0

    def make_request(
        self, request_id: str, prompt: Prompt, params: SamplingParams, *, add_special_tokens: bool = True
    ) -> Request:
        """Raises ValueError, with the value and the limit, for an empty prompt, a token id outside the
        vocabulary or a prompt that leaves no room for one output token; TypeError for what is no prompt or
        no SamplingParams."""
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params is SamplingParams, got {params!r}")
        text, token_ids, salt = self._parse(prompt, add_special_tokens=add_special_tokens)
        limit = self.config.max_model_len
        max_tokens = min(params.max_tokens or limit, limit - len(token_ids))
        request = Request(request_id, text, token_ids, params, RequestMetrics(self._clock()), salt)
        entropy = self._next_entropy()
        for index in range(params.n):
            output = OutputState(
                self.tokenizer, params, self.model_config.eos_token_ids, max_tokens, token_ids
            )
            sampling = SamplingState.make(
                request_id,
                params,
                index=index,
                prompt_token_ids=token_ids,
                output_token_ids=output.token_ids,
                eos_token_ids=self.model_config.eos_token_ids,
                entropy=entropy,
            )
            table = BlockTable(self._pool, self._block_size)
            request.sequences.append(
                RequestSequence(request, index, token_ids.copy(), output, sampling, table)
            )
        request.live = request.sequences.copy()
        request.start_over()
        return request

    def beam_prompts(self, prompts: Sequence[Prompt], params: BeamSearchParams) -> list[list[int]]:
        """Token ids of prompts for beam search; ValueError also for hypotheses that the pool might not
        hold."""
        if not isinstance(params, BeamSearchParams):
            raise TypeError(f"beam search takes BeamSearchParams, got {params!r}")
        found = []
        for prompt in prompts:
            _, token_ids, _ = self._parse(prompt, add_special_tokens=True)
            longest = min(len(token_ids) + params.max_tokens, self.config.max_model_len) - 1
            shared = len(token_ids) // self._block_size
            most = shared + params.beam_width * (blocks_for(longest, self._block_size) - shared)
            if most > self._pool.num_blocks:
                raise ValueError(
                    f"prompt has {len(token_ids)} tokens, beam_width is {params.beam_width}, max_tokens is "
                    f"{params.max_tokens}: that may need {most} blocks, the pool has {self._pool.num_blocks}"
                )
            found.append(token_ids)
        return found

    def _parse(self, prompt: Prompt, *, add_special_tokens: bool) -> tuple[str | None, list[int], str | None]:
        text, token_ids, salt = parse_prompt(
            prompt, self.tokenizer, self.model_config.vocab_size, add_special_tokens=add_special_tokens
        )
        limit = self.config.max_model_len
        if len(token_ids) >= limit:
            raise ValueError(
                f"prompt has {len(token_ids)} tokens, max_model_len is {limit} with at least one output token"
            )
        return text, token_ids, salt

    def _next_entropy(self) -> bytes | None:
        """Stands in for a missing seed: the same in every run that makes the same requests."""
        self._num_made += 1
        if self._seed is None:
            return None
        return hashlib.blake2b(f"{self._seed} {self._num_made}".encode(), digest_size=16).digest()
