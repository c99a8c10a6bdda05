"""Choosing a backend, what it refuses, and the Triton backend through its public face."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from minipaged.attention import get_backend
from minipaged.attention.batch import AttentionBatch
from minipaged.attention.kernels.arguments import keys_per_part
from minipaged.attention.targets import TARGETS
from minipaged.attention.triton_backend import decode_launches, require_supported
from minipaged.cache.storage import KVStorage
from minipaged.memory import KVSpec
from minipaged.model.tiny import random_llama
from tests.attention.paged import dense_attention, make_problem, relative_error


@pytest.mark.parametrize(
    ("name", "backend"),
    [("auto", "torch"), ("torch", "torch"), ("reference", "reference"), ("triton", "triton")],
)
def test_names_give_backends(name, backend):
    assert get_backend(name, "cpu").name == backend


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match="'flash' is none of auto, torch, triton, reference"):
        get_backend("flash")


def test_auto_takes_triton_on_a_gpu_and_torch_without_triton(monkeypatch):
    seen = []
    monkeypatch.setattr("minipaged.attention.triton_backend.TritonBackend", seen.append)
    get_backend("auto", "cuda")
    assert seen == [torch.device("cuda")]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.warns(UserWarning, match="triton is not installed"):
        assert get_backend("auto", "cuda").name == "torch"
    with pytest.raises(ImportError, match="needs the triton package"):
        get_backend("triton", "cuda")


def in_a_fresh_process(code: str) -> str:
    """Standard error of Python code run without the interpreter's variable."""
    environment = {"PATH": "", "PYTHONPATH": ":".join(sys.path)}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    return run.stdout + run.stderr


def test_triton_on_a_cpu_says_how_to_interpret():
    code = "from minipaged.attention import get_backend; get_backend('triton', 'cpu')"
    assert "TRITON_INTERPRET=1, set before Python starts" in in_a_fresh_process(code)


def test_the_torch_path_does_not_import_triton():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "from minipaged.attention import AttentionBatch, get_backend\n"
        "print(get_backend('auto', 'cpu').name)"
    )
    assert in_a_fresh_process(code).strip() == "torch"


@pytest.mark.parametrize(
    ("query", "kv", "target", "message"),
    [
        (torch.bfloat16, torch.bfloat16, "sm_75", "bfloat16 needs sm_80 or newer, T4 is sm_75"),
        (torch.float16, torch.bfloat16, "sm_75", "bfloat16 needs sm_80"),
        (torch.float16, torch.float8_e4m3fn, "sm_80", "float8_e4m3fn needs sm_89 or newer, A100 is sm_80"),
        (torch.bfloat16, torch.float8_e4m3fn, "gfx942", "float8_e4m3fn needs sm_89 or newer, MI300X"),
        (torch.float64, torch.float64, "sm_90", "not in torch.float64"),
    ],
)
def test_what_a_card_cannot_do_is_refused_by_name(query, kv, target, message):
    with pytest.raises(ValueError, match=message):
        require_supported(query, kv, TARGETS[target])


@pytest.mark.parametrize(
    ("query", "kv", "target"),
    [
        (torch.float16, torch.int8, "sm_75"),
        (torch.bfloat16, torch.float8_e4m3fn, "sm_90"),
        (torch.bfloat16, torch.bfloat16, "gfx942"),
        (torch.float32, torch.float16, "sm_80"),
    ],
)
def test_what_a_card_can_do_is_not_refused(query, kv, target):
    require_supported(query, kv, TARGETS[target])


def test_parts_grow_with_the_work_until_one_program_may_take_2048_keys():
    sizes = [keys_per_part(batch, 8, 32768, 132) for batch in (1, 4, 16, 64, 256)]
    assert sizes == [512, 2048, 2048, 2048, 2048]
    assert [keys_per_part(batch, 8, 4096, 132) for batch in (1, 8, 16, 32, 128)] == [
        256,
        512,
        1024,
        1536,
        2048,
    ]
    assert keys_per_part(1, 8, 300, 132) == 256
    assert keys_per_part(0, 8, 0, 132) == 256


def test_few_long_sequences_fill_the_card():
    """Four programs for each of 132 multiprocessors, as near as parts of whole tiles allow."""
    part_len = keys_per_part(1, 8, 32768, 132)
    assert 2 * 132 <= 8 * -(-32768 // part_len) <= 4 * 132


def test_short_contexts_are_decoded_in_one_launch_and_long_ones_in_two():
    for lengths, kernels in (([200] * 3, ["decode_grouped"]), ([600, 2], ["decode_split", "decode_combine"])):
        problem = make_problem(lengths, block_size=16)
        launches = decode_launches(
            problem.query, problem.query, problem.layer, problem.batch, 1.0, get_backend("triton").target
        )
        assert [launch.kernel.fn.__name__.removesuffix("_kernel") for launch in launches] == kernels


@pytest.mark.parametrize(
    ("context_lens", "query_lens"), [([600, 2, 0], [1, 1, 0]), ([90, 5], [1, 1]), ([140, 20, 3], [70, 20, 1])]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_triton_backend_at_its_own_tile_sizes(context_lens, query_lens, dtype):
    problem = make_problem(context_lens, query_lens, num_kv_heads=1, group=3, block_size=16, dtype=dtype)
    output = get_backend("triton").paged_attention(
        problem.query, problem.layer, problem.batch, scale=problem.scale
    )
    assert relative_error(output, dense_attention(problem)) <= (1e-5 if dtype == torch.float32 else 2e-3)


@pytest.mark.parametrize("backend", ["torch", "triton", "reference"])
def test_mixed_up_shapes_are_refused(backend):
    problem = make_problem([5])
    for wrong, message in (
        (replace(problem, query=torch.randn(1, 4, 32)), "head size is 32, the cache's 16"),
        (replace(problem, query=torch.randn(1, 4, 8)), "head size is 8, the cache's 16"),
        (replace(problem, batch=replace(problem.batch, block_size=8)), "block size is 8, the cache's 4"),
    ):
        with pytest.raises(ValueError, match=message):
            get_backend(backend).paged_attention(wrong.query, wrong.layer, wrong.batch, scale=1.0)


def test_a_query_that_is_not_dense_is_refused_by_the_kernels():
    problem = make_problem([5])
    query = torch.randn(1, 16, 4).transpose(1, 2)
    with pytest.raises(ValueError, match="query has stride 4, must be 1"):
        get_backend("triton").paged_attention(query, problem.layer, problem.batch, scale=1.0)


def test_a_model_computes_the_same_with_torch_and_with_triton():
    """Prefill of two prompts, then a decode step, through every layer."""
    model = random_llama(seed=1, dtype=torch.float32)
    storages = [KVStorage(KVSpec.from_model(model.config, torch.float32), 8, 4) for _ in range(2)]
    steps = (([5, 9], [5, 9]), ([1, 1], [6, 10]))
    for query_lens, context_lens in steps:
        batch = AttentionBatch.build([[3, 1], [0, 7, 5]], query_lens, context_lens, 4)
        tokens = torch.randint(0, model.config.vocab_size, (batch.num_tokens,))
        hidden = [
            model.forward(tokens, batch, storage, get_backend(name))
            for storage, name in zip(storages, ("torch", "triton"), strict=True)
        ]
        assert relative_error(hidden[1], hidden[0]) <= 1e-5
