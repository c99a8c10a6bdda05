"""Exercise 12, the capstone: the learner's memory and kernel inside the engine, which serves SmolLM2.

The engine runs in the grader's process. Its pool, its tables and its attention are stand-ins that call the
learner's in the other process.
"""

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from coursekit.grading.learner import Learner
from coursekit.grading.task import Expect, Task
from minipaged.memory import blocks_for

BLOCK_SIZE = 16
PROMPTS = [
    "A small computer kept the keys and values of every token that it had read. One day its memory was full. "
    "It looked at the requests that were waiting in front of the door, and said:",
    "Once upon a time there was a small computer that",
    "Blocks are",
]
NEW_TOKENS = 16


@cache
def model() -> Any:
    """SmolLM2 in float32, in which two right ways to compute agree token for token."""
    from minipaged.checkpoints.loading import load_model

    return load_model("smollm2-135m", dtype=torch.float32, device="cpu")


def engine(num_blocks: int) -> Any:
    from minipaged.engine.llm import LLM

    return LLM(
        model(),
        device="cpu",
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_model_len=512,
        enable_prefix_caching=False,
        attention_backend="torch",
    )


def serve(llm: Any, prompts: list[str], new_tokens: int) -> list[tuple[list[int], float]]:
    """Each prompt's most likely continuation: its tokens, and the logarithm of how likely they were."""
    from minipaged.sampling_params import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, logprobs=0)
    outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    return [(list(output.token_ids), float(output.cumulative_logprob)) for output in outputs]


@cache
def reference(new_tokens: int = NEW_TOKENS) -> list[tuple[list[int], float]]:
    """What the engine's own memory and attention give."""
    return serve(engine(64), PROMPTS, new_tokens)


def expect_same(expect: Expect, got: list[tuple[list[int], float]], given: str, *, new_tokens: int) -> None:
    wanted = reference(new_tokens)[: len(got)]
    expect.equal([tokens for tokens, _ in got], [tokens for tokens, _ in wanted], f"tokens of {given}")
    for (_, have), (_, want) in zip(got, wanted, strict=True):
        expect.close(have, want, f"log-probability of {given}", tolerance=1e-3)


SETUP = """
import importlib.util
import os
import torch
import triton
import triton.language as tl
from coursekit.given.launches import launch_decode
"""

ENGINE_MEMORY = Task(
    name="engine_memory",
    exercise="12",
    title="Your memory in the engine",
    points=6,
    defines=("MyBlockPool", "MyBlockTable"),
    preamble=SETUP,
    prepare=reference,
)

ENGINE_KERNEL = Task(
    name="engine_kernel",
    exercise="12",
    title="Your kernel in the engine",
    points=6,
    defines=("my_decode_kernel",),
    preamble=SETUP,
    needs=("engine_memory",),
    prepare=partial(reference, 3),
)

TASKS = [ENGINE_MEMORY, ENGINE_KERNEL]


def plugged(learner: Learner, num_blocks: int) -> tuple[Any, Any]:
    from coursekit.capstone import plug_in_memory

    llm = engine(num_blocks)
    return llm, plug_in_memory(llm, learner.MyBlockPool, learner.MyBlockTable)


@ENGINE_MEMORY.check(
    "a pool and a table do what the engine asks of them",
    hint="go back to the checks of exercise 04: they show more of what goes wrong",
    guards=True,
)
def parts(learner: Learner, expect: Expect) -> None:
    pool = learner.MyBlockPool(4)
    first, second = learner.MyBlockTable(pool, 4), learner.MyBlockTable(pool, 4)
    sizes = []
    for table, n in [(first, 4), (second, 3), (first, 1), (second, 1), (second, 5)]:
        done = table.append(n)
        sizes.append((done, len(table.blocks), pool.num_free))
    given = "4 blocks of 4; append 4 to one table, 3 to another, 1 to the first, 1 and 5 to the second"
    wanted = [(True, 1, 3), (True, 1, 2), (True, 2, 1), (True, 1, 1), (False, 1, 1)]
    expect.equal(sizes, wanted, f"{given}: answer, blocks of the table, num_free after each")
    expect.equal(len({*first.blocks, *second.blocks}), 3, f"{given}: different blocks in use")
    first.free()
    expect.equal((first.blocks, pool.num_free), ([], 3), f"{given}: after free() of the first")
    expect.equal(second.append(1), True, f"{given}: append(1) to the second after that")
    expect.equal((len(second.blocks), pool.num_free), (2, 2), f"{given}: its blocks, and num_free, then")


@ENGINE_MEMORY.check(
    "SmolLM2 says the same from your blocks",
    hint="each table's blocks, in the order of its tokens: the kernel reads through them. Two requests that "
    "hold one block read each other's tokens",
    seconds=120,
)
def same_tokens(learner: Learner, expect: Expect) -> None:
    llm, pool = plugged(learner, 24)
    got = serve(llm, PROMPTS, NEW_TOKENS)
    expect_same(
        expect, got, f"{len(PROMPTS)} prompts at once, 24 blocks of {BLOCK_SIZE}", new_tokens=NEW_TOKENS
    )
    expect.equal(pool.num_free, 24, "num_free of 24 after all requests are finished")


@ENGINE_MEMORY.check(
    "in every step exactly the blocks are held that the tokens need",
    hint="a block is taken when a token needs one, and given back when its request is over",
    seconds=120,
)
def held_blocks(learner: Learner, expect: Expect) -> None:
    llm, pool = plugged(learner, 24)
    seen: list[tuple[list[int], int]] = []

    def look(plan: Any) -> None:
        tables = [request.table for request in llm.engine.scheduler.running]
        seen.append(([table.num_tokens for table in tables], 24 - pool.num_free))

    llm.engine.on_step = look
    serve(llm, PROMPTS, NEW_TOKENS)
    for tokens, held in seen:
        wanted = sum(blocks_for(n, BLOCK_SIZE) for n in tokens)
        expect.equal(
            held, wanted, f"blocks held while the requests have {tokens} tokens, blocks of {BLOCK_SIZE}"
        )


@ENGINE_MEMORY.check(
    "a full pool makes somebody wait, and the tokens stay the same",
    hint="append must answer False and leave table and pool as they were: the engine then preempts the "
    "youngest, and asks again",
    seconds=120,
)
def full_pool(learner: Learner, expect: Expect) -> None:
    llm, pool = plugged(learner, 4)
    got = serve(llm, PROMPTS, NEW_TOKENS)
    expect_same(expect, got, f"{len(PROMPTS)} prompts, only 4 blocks of {BLOCK_SIZE}", new_tokens=NEW_TOKENS)
    expect.true(llm.stats.num_preemptions > 0, "the same: preemptions", "at least one", "none")
    expect.equal(pool.num_free, 4, "num_free of 4 after all requests are finished")


@ENGINE_MEMORY.check(
    "an abandoned request gives everything back",
    hint="free() of the table frees every block once and forgets them",
    seconds=120,
)
def abandoned(learner: Learner, expect: Expect) -> None:
    llm, pool = plugged(learner, 8)
    for number, prompt in enumerate(PROMPTS):
        llm.engine.add_request(f"r{number}", prompt)
    for _ in range(3):
        llm.engine.step()
    for number in range(len(PROMPTS)):
        llm.engine.abort_request(f"r{number}")
    expect.equal(pool.num_free, 8, "num_free of 8 after three requests ran three steps and were aborted")
    expect.equal(len(set(pool.mine.allocate(8))), 8, "different blocks of allocate(8) after that")


def attend_with(learner: Learner) -> Any:
    """The learner's kernel as the engine calls attention; a tile holds a block."""

    def attend(query: Tensor, *rest: Any) -> Tensor:
        answer = learner.launch_decode(learner.my_decode_kernel, query.contiguous(), *rest, tile=BLOCK_SIZE)
        return answer if isinstance(answer, Tensor) else torch.full_like(query, torch.nan)

    return attend


@ENGINE_KERNEL.check(
    "one layer's attention is right",
    hint="go back to the checks of exercise 07: they show more of what goes wrong",
    guards=True,
)
def one_layer(learner: Learner, expect: Expect) -> None:
    generator = torch.Generator().manual_seed(12)
    query = torch.randn(2, 9, 64, generator=generator)
    cache = torch.full((2, 5, BLOCK_SIZE, 3, 64), torch.nan)
    rows = torch.randn(2, 33, 3, 64, generator=generator)
    cache[:, [3, 1]] = rows[:, :32].unflatten(1, (2, BLOCK_SIZE))  # the first sequence has 32 tokens
    cache[:, 4, 0] = rows[:, 32]  # the second has one
    tables = torch.tensor([[3, 1], [4, 0]], dtype=torch.int32)
    got = attend_with(learner)(query, *cache, tables, torch.tensor([32, 1], dtype=torch.int32), 0.125)
    for seq, of in enumerate([rows[:, :32], rows[:, 32:]]):
        keys, values = of.repeat_interleave(3, dim=2)  # [n, 9, 64]
        weights = torch.softmax(0.125 * torch.einsum("hd,nhd->hn", query[seq], keys), dim=1)
        wanted = torch.einsum("hn,nhd->hd", weights, values)
        given = f"sequence {seq} of 32 and 1 tokens, 9 query heads on 3, everything else NaN"
        expect.close(got[seq], wanted, given, tolerance=1e-4)


@ENGINE_KERNEL.check(
    "SmolLM2 says the same through your kernel, from your blocks",
    hint="right for one layer but not here: think of scale, of which query heads share a KV head, of lengths "
    "that are no multiple of a tile",
    seconds=240,
)
def whole_model(learner: Learner, expect: Expect) -> None:
    from coursekit.capstone import plug_in_attention

    llm, pool = plugged(learner, 6)
    backend = plug_in_attention(llm, attend_with(learner))
    got = serve(llm, PROMPTS[:1], 3)
    expect_same(expect, got, "one prompt, your memory and your kernel", new_tokens=3)
    layers = llm.model_config.num_layers
    expect.equal(
        backend.num_calls, 2 * layers, f"calls of your kernel: {layers} layers, 2 tokens after the first"
    )
    expect.equal(pool.num_free, 6, "num_free of 6 after the request is finished")
