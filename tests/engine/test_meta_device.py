"""Whole steps on torch's `meta` device, which has shapes and no numbers: what a step launches on a GPU, that
no tensor is left on the processor, and that the host waits once. Seen without a card."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minipaged.attention.batch import AttentionBatch
from minipaged.cache import BlockCopy, KVStorage, LayerKV
from minipaged.config import CacheConfig, EngineConfig
from minipaged.engine.engine import Engine
from minipaged.model.tiny import TINY, random_llama
from minipaged.sampling_params import SamplingParams

WAITS = ("tolist", "item", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__")
TRANSFERS = ("_to_copy", "copy_", "lift_fresh", "detach")


class RecordedBackend:
    """Notes the kernels that would be launched."""

    name = "recorded"

    def __init__(self) -> None:
        self.launches: Counter[str] = Counter()

    def write_kv(self, layer: LayerKV, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        self._note("write_kv", layer.key, layer.value, key, value, slot_mapping)

    def paged_attention(
        self, query: Tensor, layer: LayerKV, batch: AttentionBatch, *, scale: float
    ) -> Tensor:
        tensors = [t for t in vars(batch).values() if isinstance(t, Tensor)]
        assert len(tensors) == 5
        self._note("paged_attention", query, layer.key, layer.value, *tensors)
        return torch.empty_like(query)

    def copy_blocks(self, storage: KVStorage, copies: Sequence[BlockCopy]) -> None:
        self._note("copy_blocks", *storage.tensors)

    def _note(self, kernel: str, *tensors: Tensor) -> None:
        assert {tensor.device.type for tensor in tensors} == {"meta"}, kernel
        self.launches[kernel] += 1


class Launches(TorchDispatchMode):
    """Counts torch's operations that compute something, and objects to one on the processor."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        tensors = [t for t in tree_leaves((args, kwargs, found)) if isinstance(t, Tensor)]
        if name not in TRANSFERS:
            assert all(t.device.type == "meta" for t in tensors), f"{name} runs on the processor"
        returns = func._schema.returns
        is_view = bool(returns) and returns[0].alias_info is not None and not returns[0].alias_info.is_write
        if not is_view and name not in ("empty", "empty_like", *TRANSFERS[2:]):
            self.counts[name] += 1
        return found


class Waits(TorchFunctionMode):
    """Counts where the host waits for the device. The numbers it asks for are all 7."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in WAITS and args and isinstance(args[0], Tensor) and args[0].device.type == "meta":
            self.count += 1
            assert name == "tolist" and args[0].ndim == 1, f"the host waits in {name}"
            return [7] * len(args[0])
        return func(*args, **(kwargs or {}))


@contextmanager
def watched() -> Iterator[tuple[Launches, Waits]]:
    with Launches() as launches, Waits() as waits:
        yield launches, waits


def meta_engine(**limits: Any) -> tuple[Engine, RecordedBackend]:
    backend = RecordedBackend()
    cache = CacheConfig(num_blocks=32, dtype=torch.bfloat16, block_size=4)
    config = EngineConfig(**{"max_model_len": 64, "max_num_seqs": 8, "max_num_batched_tokens": 16} | limits)
    model = random_llama(dtype=torch.bfloat16, device="meta")
    return Engine(model, cache, config, backend=backend, device="meta"), backend


KINDS = {
    "greedy": SamplingParams(temperature=0, max_tokens=6, ignore_eos=True),
    "drawn": SamplingParams(temperature=0.8, seed=1, max_tokens=6, ignore_eos=True),
    "penalised": SamplingParams(temperature=0.8, seed=1, presence_penalty=1, min_tokens=5, max_tokens=6),
    "three samples": SamplingParams(n=3, seed=1, max_tokens=6, ignore_eos=True),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_leaves_nothing_on_the_processor_and_waits_once(kind: str) -> None:
    """A prompt in chunks, decodes beside chunks, decodes alone, copies of shared blocks; all on `meta`."""
    engine, backend = meta_engine()
    engine.add_request("short", [1, 2, 3, 4, 5, 6], KINDS[kind])
    engine.add_request("long", list(range(1, 31)), KINDS[kind])
    seen: list[tuple[str, int]] = []
    plans: list[Any] = []
    engine.on_step = plans.append
    while engine.has_unfinished_requests():
        backend.launches.clear()
        with watched() as (launches, waits):
            engine.step()
        plan = plans[-1]
        assert waits.count == (1 if plan.sampled else 0)
        assert backend.launches["write_kv"] == backend.launches["paged_attention"] == TINY.num_layers
        assert backend.launches["copy_blocks"] == (1 if plan.copies else 0)
        lens = plan.query_lens
        what = "decodes" if max(lens) == 1 else "decodes and chunks" if min(lens) == 1 else "chunks"
        number = backend.launches.total() + launches.counts.total()
        seen.append((what + (", copies" if plan.copies else ""), number))
    print(f"\n{kind}, {TINY.num_layers} layers, launches of each step:")
    for what, number in seen:
        print(f"  {number:4} {what}")
    assert {"chunks", "decodes"} <= {what for what, _ in seen}
    assert any("decodes and chunks" in what for what, _ in seen)
    assert any("copies" in what for what, _ in seen) == (kind == "three samples")
    decodes = {number for what, number in seen if what == "decodes"}
    assert len(decodes) <= 2 and max(decodes) < 60 * TINY.num_layers  # not one for each request
