"""What the GPU benchmark predicts, how it times, and that its peers are given the same keys and values."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported
pytest.importorskip("triton")
from benchmarks.gpu import peers, predict, shapes, timing
from benchmarks.gpu.data import make_inputs
from benchmarks.gpu.problems import relative_error
from minipaged.attention.torch_backend import TorchBackend


def test_predictions_follow_from_bytes_and_operations() -> None:
    shape = shapes.main_decode_shape()
    assert shape.kv_bytes == 32 * 4096 * 4096  # 4096 bytes a token
    floor = predict.predict(shape, bandwidth=4e12, flops=1e15)
    assert floor.bound == "memory" and floor.seconds == shape.bytes_moved / 4e12
    prompt = shapes.AttentionShape("", (3,), query_len=3, num_kv_heads=1, group=1, head_size=1)
    assert prompt.operations == 4 * (1 + 2 + 3)
    chunk = shapes.AttentionShape("", (5,), query_len=2, num_kv_heads=1, group=1, head_size=1)
    assert chunk.operations == 4 * (4 + 5)
    ragged = next(s for s in shapes.decode_shapes() if "ragged" in s.name)
    assert sum(ragged.context_lens) == 32 * 2048 and len(ragged.context_lens) == 32
    assert "decode b1 c32768" in predict.table(4e12, 1e15)


def test_quartiles_surround_the_median() -> None:
    found = timing.summarise([4.0, 1.0, 2.0, 3.0, 100.0], "events")
    assert found.low <= found.median == 3.0 <= found.high and found.samples == 5
    assert timing.summarise([2.0], "events").median == 2.0


class FakeEvent:
    """As much of torch.cuda.Event as timing uses; every interval lasts one millisecond."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: "FakeEvent") -> float:
        return 1.0


def test_a_gpu_replays_graphs_and_times_the_rest_between_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls are sampled in turn; one that cannot be captured runs as often as it is timed."""
    order: list[str] = []
    capturing: list[Any] = []

    @contextmanager
    def capture(graph: Any) -> Iterator[None]:
        capturing.append(graph)
        yield
        capturing.pop()

    def refuses(index: int) -> None:
        if capturing:
            capturing.pop()
            raise RuntimeError("not in a graph")
        order.append("ran")

    graph = SimpleNamespace(replay=lambda: order.append("replayed"))
    for name, value in {"Event": FakeEvent, "graph": capture, "CUDAGraph": lambda: graph}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    device: Any = SimpleNamespace(type="cuda")
    found = timing.compare({"a": lambda index: None, "b": refuses}, 2, device, 0.0)
    assert (found["a"].how, found["b"].how) == ("graph", "events")
    assert found["a"].samples == found["b"].samples
    assert found["a"].median == 0.0005  # one millisecond for two sets
    assert order[2 * timing.WARM_UP :] == ["replayed", "ran", "ran"] * found["a"].samples


def small_inputs() -> Any:
    shape = shapes.AttentionShape("", (256, 256), num_kv_heads=2, group=2, head_size=16)
    return make_inputs(shape, torch.device("cpu"), torch.float32)


def attend(inputs: Any, index: int) -> torch.Tensor:
    return TorchBackend().paged_attention(inputs.query, inputs.layer(index), inputs.batch, scale=inputs.scale)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", ["SDPA dense", "FlexAttention paged"])
def test_peers_see_the_same_keys_and_values(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    inputs = small_inputs()
    call = peers.PEERS[name](inputs)
    for index in range(inputs.num_sets):
        assert relative_error(call(index), attend(inputs, index).double()) < 1e-5


def test_repaging_keeps_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = small_inputs()
    sets, table = peers.repaged(inputs, 64)
    for index, dense in enumerate(peers.dense_sets(inputs)):
        for paged, rows in zip(sets[index], dense, strict=True):
            assert torch.equal(paged[table.long()].flatten(1, 2), rows)
    assert table.flatten().tolist() != sorted(table.flatten().tolist())
