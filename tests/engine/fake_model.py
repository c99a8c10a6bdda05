"""A model whose next token is a hash of every key and value it reads through the block tables.

A wrong block, a missing token, a stale value or a wrong position changes what it says, and an unwritten slot
(the cache starts as NaN) is an error. It works on exact integers: outputs can be compared token for token.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minipaged.attention.backend import AttentionBackend
from minipaged.attention.batch import AttentionBatch
from minipaged.cache import KVStorage
from minipaged.config import CacheConfig, EngineConfig, ModelConfig
from minipaged.engine.engine import Engine
from minipaged.engine.output_processor import RequestOutput
from minipaged.sampling_params import SamplingParams

PRIME = 65521  # below 2**16: every stored number and every product below 2**24 is exact in float32
EOS = 0


class HashModel:
    """Keys and values of a token are hashes of the token, its position and everything before it."""

    def __init__(self, vocab_size: int = 40) -> None:
        self.config = ModelConfig(
            vocab_size=vocab_size,
            hidden_size=2,
            intermediate_size=1,
            num_layers=1,
            num_query_heads=1,
            num_kv_heads=1,
            head_size=2,
            max_position_embeddings=4096,
            eos_token_ids=(EOS,),
        )
        self.steps: list[list[tuple[int, int]]] = []
        """For each forward pass the (first position, number of tokens) of each sequence."""

    def __call__(
        self, token_ids: Tensor, batch: AttentionBatch, storage: KVStorage, backend: AttentionBackend
    ) -> Tensor:
        key, value = (t[0].view(-1, 2).numpy() for t in (storage.key, storage.value))  # [num_slots, 2]
        starts, contexts = batch.query_start.tolist(), batch.context_lens.tolist()
        hidden = torch.empty(batch.num_tokens, 2)
        written = batch.slot_mapping.tolist()
        assert len(set(written)) == len(written), "two tokens are written to one slot"
        self.steps.append([])
        for i, context in enumerate(contexts):
            first, stop = starts[i], starts[i + 1]
            position = context - (stop - first)
            self.steps[-1].append((position, stop - first))
            assert batch.positions[first:stop].tolist() == list(range(position, context))
            blocks = batch.block_tables[i].numpy().astype(np.int64)
            where = np.arange(context)
            slots = blocks[where // batch.block_size] * batch.block_size + where % batch.block_size
            assert written[first:stop] == slots[position:].tolist()
            state = self._read(key[slots[:position], 0], value[slots[:position], 1])
            for row in range(first, stop):
                token, slot = int(token_ids[row]), written[row]
                mixed = (state * 31 + token * 1009 + position * 9176 + 13) % PRIME
                key[slot], value[slot] = (mixed, 0), (0, (mixed * 17 + token) % PRIME)
                state += int(key[slot, 0]) * (2 * position + 3) + int(value[slot, 1]) * (5 * position + 7)
                hidden[row] = torch.tensor([state % PRIME, 0])
                position += 1
        return hidden

    @staticmethod
    def _read(keys: np.ndarray, values: np.ndarray) -> int:
        assert not np.isnan(keys).any() and not np.isnan(values).any(), (
            "a slot is read that was never written"
        )
        where = np.arange(len(keys))
        return int(keys.astype(np.int64) @ (2 * where + 3) + values.astype(np.int64) @ (5 * where + 7))

    def compute_logits(self, hidden: Tensor) -> Tensor:
        vocab = torch.arange(self.config.vocab_size)
        scattered = (hidden[:, :1].long() * 40503 + (vocab + 1) * 9973 + hidden[:, :1].long() ** 2) % PRIME
        return scattered.float() / PRIME * 8


class Clock:
    """A clock that ticks once each time it is read: times in tests are numbers of readings."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def make_engine(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    model: Any = None,
    tokenizer: Any = None,
    max_model_len: int = 256,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    enable_prefix_caching: bool = False,
    num_host_blocks: int | None = None,
    watermark: float = 0.0,
    **config: Any,
) -> Engine:
    """An engine of small numbers; its cache is NaN wherever nothing was stored."""
    model = model or HashModel()
    swaps = config.get("preemption", "recompute") != "recompute"
    cache = CacheConfig(
        num_blocks=num_blocks,
        block_size=block_size,
        dtype=torch.float32,
        enable_prefix_caching=enable_prefix_caching,
        num_host_blocks=(2 * num_blocks if swaps else 0) if num_host_blocks is None else num_host_blocks,
    )
    limits = EngineConfig(
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        watermark=watermark,
        **config,
    )
    engine = Engine(model, cache, limits, tokenizer=tokenizer, clock=Clock())
    poison(engine)
    return engine


def poison(engine: Engine) -> None:
    """Overwrite with NaN whatever is free and holds nothing that could be hit."""
    pool = engine.pool
    blank = [b for b in range(pool.num_blocks) if not pool.ref_count(b) and not pool.is_published(b)]
    for tensor in engine.storage.tensors:
        if tensor.is_floating_point():
            tensor[:, blank] = torch.nan


def greedy(max_tokens: int = 16, **settings: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **settings)


def step(engine: Engine) -> list[RequestOutput]:
    """One step, then proof that nothing is lost, and poison in what is free."""
    outputs = engine.step()
    engine.check_invariants()
    poison(engine)
    return outputs


def run(engine: Engine, max_steps: int = 1000) -> dict[str, RequestOutput]:
    """Step until nothing is unfinished; the finished outputs by request id. Every block must come home."""
    finished = {}
    for _ in range(max_steps):
        if not engine.has_unfinished_requests():
            break
        finished.update((output.request_id, output) for output in step(engine) if output.finished)
    assert not engine.has_unfinished_requests(), f"requests are unfinished after {max_steps} steps"
    assert_idle(engine)
    return finished


def assert_idle(engine: Engine) -> None:
    assert engine.pool.num_free == engine.pool.num_blocks
    assert engine.manager.num_free_rows == engine.config.max_num_seqs
    if engine.manager.swap is not None:
        assert engine.manager.swap.host_pool.num_free == engine.manager.swap.host_pool.num_blocks


def tokens_of(output: RequestOutput) -> list[list[int]]:
    return [list(completion.token_ids) for completion in output.outputs]


def serve(engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[list[int]]:
    """Serve prompts all at once; the tokens of each one's first sequence."""
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), list(prompt), params)
    outputs = run(engine)
    return [tokens_of(outputs[str(i)])[0] for i in range(len(prompts))]


def alone(prompt: Sequence[int], params: SamplingParams, **settings: Any) -> list[list[int]]:
    """Tokens of one request in an engine of its own, with room for everything."""
    engine = make_engine(num_blocks=256, max_num_batched_tokens=256, **settings)
    engine.add_request("alone", list(prompt), params)
    return tokens_of(run(engine)["alone"])
