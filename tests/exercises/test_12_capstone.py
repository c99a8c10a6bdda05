"""The graders of the capstone find what they are there to find."""

import pytest

from tests.exercises.proof import Proof, Wrong

ENGINE_MEMORY = Proof(
    task="engine_memory",
    second='''
class MyBlockPool:
    """One bit a block; the lowest free one is found by searching."""

    def __init__(self, num_blocks):
        self.free_bits = (1 << num_blocks) - 1

    @property
    def num_free(self):
        return bin(self.free_bits).count("1")

    def allocate(self, n):
        bits, blocks = self.free_bits, []
        while len(blocks) < n and bits:
            lowest = bits & -bits
            blocks.append(lowest.bit_length() - 1)
            bits ^= lowest
        if len(blocks) < n:
            return None
        self.free_bits = bits
        return blocks

    def free(self, blocks):
        for block in blocks:
            self.free_bits |= 1 << block


class MyBlockTable:
    """Counts the room left in the last block instead of the tokens."""

    def __init__(self, pool, block_size):
        self.pool, self.block_size, self.blocks, self.room = pool, block_size, [], 0

    def append(self, n):
        more = 0
        while self.room + more * self.block_size < n:
            more += 1
        blocks = self.pool.allocate(more)
        if blocks is None:
            return False
        self.blocks = [*self.blocks, *blocks]
        self.room += more * self.block_size - n
        return True

    def free(self):
        self.pool.free(self.blocks)
        self.blocks, self.room = [], 0
''',
    wrong=[
        Wrong(
            "gives one block to two requests",
            "a pool and a table do what the engine asks",
            replace=("[self.unused.pop() for _ in range(n)]", "self.unused[:n]"),
        ),
        Wrong(
            "puts new blocks in front",
            "SmolLM2 says the same from your blocks",
            replace=("self.blocks.extend(blocks)", "self.blocks[:0] = blocks"),
        ),
        Wrong(
            "takes a block one token early",
            "a pool and a table do what the engine asks",
            replace=("-(-total // self.block_size)", "(total // self.block_size + 1)"),
        ),
        Wrong(
            "takes a spare block for long requests",
            "in every step exactly the blocks are held",
            replace=("-(-total // self.block_size)", "(-(-total // self.block_size) + (total > 20))"),
        ),
        Wrong(
            "takes what is there and keeps it",
            "a pool and a table do what the engine asks",
            replace=(
                "            return None\n",
                "            self.unused.clear()\n            return None\n",
            ),
        ),
        Wrong(
            "counts tokens that found no room",
            "a pool and a table do what the engine asks",
            replace=(
                "            return False\n",
                "            self.num_tokens = total\n            return False\n",
            ),
        ),
        Wrong(
            "forgets blocks without giving them back",
            "a pool and a table do what the engine asks",
            replace=("        self.pool.free(self.blocks)\n", ""),
        ),
    ],
)

ENGINE_KERNEL = Proof(
    task="engine_kernel",
    second='''
@triton.jit
def tile_of(cache_ptr, table_ptr, p, live, mask, kv_head, stride_block, stride_slot, stride_head, dims,
            BLOCK_SIZE: tl.constexpr):
    block = tl.load(table_ptr + p // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
    at = block * stride_block + p % BLOCK_SIZE * stride_slot + kv_head * stride_head
    return tl.load(cache_ptr + at[:, None] + dims[None, :], mask=live[:, None] & mask[None, :], other=0.0)

@triton.jit
def my_decode_kernel(
    output_ptr, query_ptr, key_cache_ptr, value_cache_ptr, block_tables_ptr, context_lens_ptr, scale,
    stride_block, stride_slot, stride_head, stride_table,
    BLOCK_SIZE: tl.constexpr, HEAD_SIZE: tl.constexpr, HEAD_PADDED: tl.constexpr, GROUP: tl.constexpr,
    TILE: tl.constexpr,
):
    """Two passes: the largest score first, then the sums."""
    seq = tl.program_id(1)
    row = (seq * tl.num_programs(0) + tl.program_id(0)) * HEAD_SIZE
    dims = tl.arange(0, HEAD_PADDED)
    mask = dims < HEAD_SIZE
    query = tl.load(query_ptr + row + dims, mask=mask, other=0.0)
    length = tl.load(context_lens_ptr + seq)
    table_ptr, kv_head = block_tables_ptr + seq * stride_table, tl.program_id(0) // GROUP
    largest = float("-inf")
    for start in range(0, length, TILE):
        p = start + tl.arange(0, TILE)
        key = tile_of(key_cache_ptr, table_ptr, p, p < length, mask, kv_head, stride_block, stride_slot,
                      stride_head, dims, BLOCK_SIZE)
        scores = tl.where(p < length, tl.sum(key * query[None, :], axis=1) * scale, float("-inf"))
        largest = tl.maximum(largest, tl.max(scores, axis=0))
    sum_of_weights, sum_of_values = 0.0, tl.zeros([HEAD_PADDED], tl.float32)
    for start in range(0, length, TILE):
        p = start + tl.arange(0, TILE)
        key = tile_of(key_cache_ptr, table_ptr, p, p < length, mask, kv_head, stride_block, stride_slot,
                      stride_head, dims, BLOCK_SIZE)
        value = tile_of(value_cache_ptr, table_ptr, p, p < length, mask, kv_head, stride_block, stride_slot,
                        stride_head, dims, BLOCK_SIZE)
        weights = tl.where(p < length, tl.exp(tl.sum(key * query[None, :], axis=1) * scale - largest), 0.0)
        sum_of_weights += tl.sum(weights, axis=0)
        sum_of_values += tl.sum(weights[:, None] * value, axis=0)
    tl.store(output_ptr + row + dims, sum_of_values / sum_of_weights, mask=mask)
''',
    wrong=[
        Wrong(
            "every query head reads its own KV head",
            "one layer's attention is right",
            replace=("head // GROUP * stride_head", "head % 3 * stride_head"),
        ),
        Wrong(
            "reads NaN of unused slots",
            "one layer's attention is right",
            replace=(
                "value = tl.load(value_cache_ptr + places, mask=real, other=0.0)",
                "value = tl.load(value_cache_ptr + places, mask=in_head[None, :] & (places >= 0), other=0.0)",
            ),
        ),
        Wrong(
            "does not rescale the earlier tiles",
            "one layer's attention is right",
            replace=("rescale = tl.exp(maximum - new_maximum)", "rescale = 1.0"),
        ),
        Wrong(
            "misses the last token",
            "one layer's attention is right",
            replace=("live = positions < context_len", "live = positions < context_len - 1"),
        ),
        Wrong(
            "ignores the table",
            "one layer's attention is right",
            replace=(
                "blocks = tl.load(table_ptr + positions // BLOCK_SIZE, mask=live, other=0).to(tl.int64)",
                "blocks = (positions // BLOCK_SIZE).to(tl.int64)",
            ),
        ),
        Wrong(
            "a way around the kernel",
            "one layer's attention is right",
            source="""
def my_decode_kernel():
    pass

def launch_decode(kernel, query, key_cache, value_cache, block_tables, context_lens, scale, *, tile):
    output = torch.empty_like(query)
    for seq, length in enumerate(context_lens.tolist()):
        blocks = block_tables[seq, : -(-length // key_cache.shape[1])].long()
        keys = key_cache[blocks].flatten(0, 1)[:length].repeat_interleave(3, 1)
        values = value_cache[blocks].flatten(0, 1)[:length].repeat_interleave(3, 1)
        weights = torch.softmax((query[seq] * keys).sum(-1) * scale, dim=0)
        output[seq] = (weights[..., None] * values).sum(0)
    return output
""",
        ),
        Wrong(
            "right only up to two blocks",
            "SmolLM2 says the same through your kernel",
            replace=("range(0, context_len, TILE)", "range(0, tl.minimum(context_len, 32), TILE)"),
        ),
    ],
)

PROOFS = [ENGINE_MEMORY, ENGINE_KERNEL]


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("proof", PROOFS, ids=lambda proof: proof.task)
def test_the_grader_tells_right_from_wrong(proof):
    """Slow: each answer serves SmolLM2, in float32."""
    proof.check()
