"""Mistakes that reviewers made on purpose, by task: (name, words of the check that fails, edit, or source).

As in proof.Wrong: an edit is a pair of texts, old and new, of the solution. Where the answer follows, None
stands in its place.
"""

from typing import Any

from tests.exercises.right_answers import RIGHT


def edited(task: str, which: int, *edits: tuple[str, str]) -> str:
    """A right answer of right_answers.py with every edit made; each must fit once."""
    text = RIGHT[task][which]
    for old, new in edits:
        assert text.count(old) == 1, f"{task}: {old!r} stands {text.count(old)} times"
        text = text.replace(old, new)
    return text


def of(name: str, fails: str, task: str, which: int, *edits: tuple[str, str]) -> tuple[Any, ...]:
    return name, fails, None, edited(task, which, *edits)


WRONG: dict[str, list[tuple[Any, ...]]] = {
    "multiplications": [
        of(
            "floats",
            "one step compares",
            "multiplications",
            0,
            ("return again, kept", "return float(again), kept"),
        ),
        of(
            "the other way round",
            "one step compares|a later step",
            "multiplications",
            0,
            ("return again, kept", "return kept, again"),
        ),
        of(
            "a square instead of a triangle",
            "one step compares",
            "multiplications",
            0,
            ("length * (length + 1) // 2", "length * length"),
        ),
        of(
            "a prompt without steps is read", "without a step", "multiplications", 1, (") if new else 0", ")")
        ),
    ],
    "cached_attention": [
        of(
            "counts positions from 1",
            "what is kept is one rotated key",
            "cached_attention",
            0,
            ("position = len(self.keys)", "position = len(self.keys) + 1"),
        ),
        of(
            "rotates values",
            "a step averages",
            "cached_attention",
            0,
            ("value[None]", "rotate(value, position)[None]"),
        ),
        of(
            "h modulo the number of KV heads",
            "query head h reads",
            "cached_attention",
            1,
            ("head * len(key) // len(query)", "head % len(key)"),
        ),
        of("no scaling", "weights are the softmax", "cached_attention", 1, (" * len(q) ** -0.5", "")),
    ],
    "bytes_per_token": [
        of("a float", "two vectors in each layer", "bytes_per_token", 0, ("bits // 8", "bits / 8")),
        of("keys only", "two vectors in each layer", "bytes_per_token", 1, ('("K", "V")', '("K",)')),
        of(
            "one scale a token",
            "each vector brings one scale",
            "bytes_per_token",
            0,
            ("vectors * scale_bytes", "scale_bytes"),
        ),
    ],
    "memory_plan": [
        of(
            "a float",
            "blocks are what is left",
            "memory_plan",
            1,
            ("num_blocks = (card", "num_blocks = 1.0 * (card"),
        ),
        of(
            "a float for the requests",
            "a request takes whole blocks",
            "memory_plan",
            0,
            ("blocks // math.ceil", "blocks / math.ceil"),
        ),
        of(
            "refuses a plan without blocks",
            "a model that does not fit",
            "memory_plan",
            0,
            ("free < 0", "free <= 0"),
        ),
        of("weights rounded down", "weights round up", "memory_plan", 1, (" + (eighths % 16 > 0)", "")),
    ],
    "arena": [
        of(
            "best fit",
            "cuts strips from the beginning",
            "arena",
            0,
            (
                "in self.holes:\n            if room",
                "in sorted(self.holes, key=lambda h: h[1]):\n            if room",
            ),
        ),
        of(
            "frees without looking",
            "free of what is no strip",
            "arena",
            1,
            ("if len(kept) == len(self.strips):", "if False:"),
        ),
        of(
            "a strip needs a larger hole",
            "cuts strips from the beginning|a hole that is used up",
            "arena",
            0,
            ("room >= size", "room > size"),
        ),
    ],
    "waste": [
        of(
            "a hole that just fits is waste",
            "a hole is external waste|shares are",
            "waste",
            0,
            ("size >= next_size", "size > next_size"),
        ),
        of(
            "shares of what is reserved",
            "shares are of all slots",
            "waste",
            0,
            ("slots / num_slots", "slots / max(1, sum(s.reserved for s in strips))"),
        ),
        of(
            "what is reserved less what is used was never used",
            "a strip is tokens",
            "waste",
            0,
            ("strip.reserved - strip.final_tokens", "strip.reserved - strip.num_tokens"),
        ),
    ],
    "allocator": [
        (
            "the last n of a list, for n = 0 all of it",
            "gives out different blocks",
            ("[self.unused.pop() for _ in range(n)]", "self.unused[-n:]; del self.unused[-n:]"),
        ),
        of("frees block -1", "a wrong free raises", "allocator", 0, ("(blocks < 0).any() or ", "")),
        (
            "eats the caller's list",
            "the list of blocks stays the caller's",
            (
                "self.unused += blocks",
                "\n        while blocks:\n            self.unused.append(blocks.pop())",
            ),
        ),
        (
            "sorts the caller's list",
            "the list of blocks stays the caller's",
            ("self.unused += blocks", "blocks.sort(); self.unused += blocks"),
        ),
        (
            "keeps the caller's list",
            "the list of blocks stays the caller's",
            ("self.unused += blocks", "self.unused = blocks if not self.unused else self.unused + blocks"),
        ),
        (
            "refuses the last block",
            "gives out different blocks",
            ("if n > self.num_free", "if n >= self.num_free"),
        ),
        ("num_free is a method", "gives out different blocks", ("    @property\n", "")),
    ],
    "block_table": [
        (
            "forgets before it frees",
            "free gives every block back",
            (
                "        self.pool.free(self.blocks)\n        self.blocks = []",
                "        self.blocks.clear()\n        self.pool.free(self.blocks)",
            ),
        ),
        (
            "counts slots from start",
            "token p is in slot",
            ("for p in range(start, stop)", "for p in range(stop - start)"),
        ),
        (
            "asks block by block",
            "a full pool answers False",
            None,
            """
class MyBlockTable:
    def __init__(self, pool, block_size):
        self.pool, self.block_size, self.blocks, self.num_tokens = pool, block_size, [], 0

    def append(self, n):
        for _ in range(n):
            if self.num_tokens == len(self.blocks) * self.block_size:
                new = self.pool.allocate(1)
                if new is None:
                    return False
                self.blocks += new
            self.num_tokens += 1
        return True

    def slots(self, start, stop):
        size = self.block_size
        return [self.blocks[p // size] * size + p % size for p in range(start, stop)]

    def free(self):
        self.pool.free(self.blocks)
        self.blocks, self.num_tokens = [], 0
""",
        ),
    ],
    "paged_attention": [
        of(
            "scales the query in place",
            "what lies in unused slots",
            "paged_attention",
            0,
            ("    out = torch", "    query *= scale\n    out = torch"),
            (" * scale, dim", ", dim"),
        ),
        of(
            "answers in float64",
            "averages the values",
            "paged_attention",
            0,
            ("return out", "return out.double()"),
        ),
        of(
            "softmax over heads",
            "averages the values|weights are the softmax",
            "paged_attention",
            1,
            (
                "F.scaled_dot_product_attention(q[:, None], k, v)[:, 0]",
                "((q[:, None] @ k.mT) / q.shape[-1] ** 0.5).softmax(0)[:, 0, :, None].mul(v).sum(1)",
            ),
        ),
        of(
            "h modulo the number of KV heads",
            "query head h reads",
            "paged_attention",
            0,
            ("h // (query.shape[1] // num_kv_heads)", "h % num_kv_heads"),
        ),
        of(
            "a block too many",
            "padding of a table|averages",
            "paged_attention",
            0,
            ("math.ceil(length / block_size)", "length // block_size + 1"),
        ),
    ],
    "write_kv": [
        (
            "the rows' head stride for the cache",
            "heads of rows and heads of caches",
            ("head * stride_cache_head", "head * stride_head"),
        ),
        (
            "HEAD_SIZE for both head strides",
            "heads of rows and heads of caches",
            (
                "source = token * stride_token + head * stride_head + dims",
                "stride_head = HEAD_SIZE; stride_cache_head = HEAD_SIZE\n"
                "    source = token * stride_token + head * stride_head + dims",
            ),
        ),
        (
            "the cache's head stride for the rows",
            "heads of rows and heads of caches",
            ("token * stride_token + head * stride_head", "token * stride_token + head * stride_cache_head"),
        ),
        ("slot 0 is taken for padding", "each token's keys and values", ("if slot < 0", "if slot <= 0")),
        (
            "only the first head",
            "each token's keys and values",
            ("(head < NUM_HEADS) & (dims", "(head < 1) & (dims"),
        ),
    ],
    "decode_kernel": [
        of(
            "a tile too few",
            "one tile of keys|many tiles|lengths at the edges",
            "decode_kernel",
            1,
            ("tl.cdiv(n, TILE)", "n // TILE"),
        ),
        of(
            "forgets to rescale",
            "one tile of keys|many tiles",
            "decode_kernel",
            1,
            ("acc = acc * tl.exp(largest - new)", "acc = acc"),
        ),
        of(
            "leaves 0 / 0 where nothing is read",
            "a sequence without keys",
            "decode_kernel",
            1,
            ("tl.maximum(total, 1e-30)", "total"),
        ),
        of(
            "reads every key twice",
            "each key and each value is read once",
            "decode_kernel",
            0,
            (
                "    for p in range(tl.load(context_lens_ptr + s)):",
                """    for p in range(tl.load(context_lens_ptr + s)):
        first = tl.load(block_tables_ptr + s * stride_table + p // BLOCK_SIZE).to(tl.int64)
        there = first * stride_block + (p % BLOCK_SIZE) * stride_slot + (h // GROUP) * stride_head
        m = tl.maximum(m, tl.sum(q * tl.load(key_cache_ptr + there + d, mask=ok, other=0.0)))
    for p in range(tl.load(context_lens_ptr + s)):""",
            ),
        ),
    ],
    "combine": [
        of(
            "the mean of the parts",
            "the parts together",
            "combine",
            0,
            (
                "torch.nan_to_num(torch.softmax(lse, dim=0), nan=0.0)",
                "(total > 0) / (total > 0).sum(0, keepdim=True).clamp(min=1)",
            ),
        ),
        of(
            "no guard for empty parts",
            "empty parts|a head without",
            "combine",
            0,
            (
                "torch.where(total[:, :, None] > 0, acc / total[:, :, None], torch.zeros_like(acc))",
                "acc / total[:, :, None]",
            ),
        ),
        of(
            "weights without totals",
            "the parts together",
            "combine",
            0,
            ("maximum + torch.log(total)", "maximum"),
        ),
    ],
    "chunk_mask": [
        of("without itself", "a whole prompt", "chunk_mask", 1, (">=", ">")),
        of(
            "queries at the beginning",
            "more keys than queries",
            "chunk_mask",
            0,
            (".tril(num_keys - num_queries)", ".tril()"),
        ),
        of(
            "true where nothing is seen",
            "a whole prompt",
            "chunk_mask",
            0,
            (".bool()", ".bool().logical_not()"),
        ),
    ],
    "chunked_prefill": [
        of(
            "positions from 0",
            "in pieces the same",
            "chunked_prefill",
            0,
            ("torch.arange(start, stop)", "torch.arange(n)"),
        ),
        of(
            "its own chunk only",
            "in pieces the same",
            "chunked_prefill",
            0,
            ("cache[layer][:, slots[:stop]]", "cache[layer][:, slots[start:stop]]"),
            ("my_chunk_mask(n, stop)", "my_chunk_mask(n, n)"),
        ),
        of(
            "all rows of logits",
            "a prompt in one piece",
            "chunked_prefill",
            0,
            ("model.logits(x[-1])", "model.logits(x)"),
        ),
        of(
            "sorted slots",
            "keys and values are in the slots",
            "chunked_prefill",
            0,
            ("    stop = 0", "    slots = slots.sort().values\n    stop = 0"),
        ),
    ],
    "ref_counts": [
        of("block -1", "a wrong share or free", "ref_counts", 1, ("b in known and ", "")),
        of(
            "never free again",
            "a block has one holder",
            "ref_counts",
            0,
            ("        self.holders = +self.holders\n", ""),
        ),
        of(
            "shares a free block",
            "a wrong share or free",
            "ref_counts",
            0,
            ("    def share(self, blocks):\n        self._check(blocks)\n", "    def share(self, blocks):\n"),
        ),
    ],
    "fork": [
        of(
            "one list for both",
            "who writes first|a fork takes no block",
            "fork",
            0,
            ("child.blocks = self.blocks[:]", "child.blocks = self.blocks"),
        ),
        of(
            "copies without giving up the old",
            "who writes first|of n tables",
            "fork",
            0,
            ("            self.pool.free([old])\n", ""),
        ),
        of(
            "copies a block that is full",
            "without a fork|a full last block|a fork",
            "fork",
            1,
            ("if room > 0 and self.pool", "if self._blocks and self.pool"),
        ),
        of("copies for append(0)", "a full last block", "fork", 0, ("n > 0 and ", "")),
    ],
    "block_hash": [
        of(
            "four bytes of a digest",
            "two blocks meet by accident",
            "block_hash",
            1,
            (".digest()", ".digest()[:4]"),
        ),
        (
            "md5",
            "two blocks meet by accident",
            None,
            """
import hashlib

def my_block_hashes(token_ids, block_size, salt=None):
    names, parent = [], repr(salt)
    for end in range(block_size, len(token_ids) + 1, block_size):
        parent = hashlib.md5((parent + repr(list(token_ids[end - block_size : end]))).encode()).hexdigest()
        names.append(parent)
    return names
""",
        ),
        of("None is an empty salt", "a salt keeps", "block_hash", 1, ("[salt, block", "[salt or '', block")),
        of(
            "no past",
            "the same tokens after another past|a salt",
            "block_hash",
            1,
            ("list(token_ids[:stop])", "list(token_ids[stop - block_size : stop])"),
        ),
    ],
    "prefix_cache": [
        (
            "takes cached blocks before blank ones",
            "blank blocks are taken before",
            ("sorted(self.unused, key=lambda block: block in self.key_of)[:n]", "list(self.unused)[:n]"),
        ),
        (
            "a lookup moves blocks to the end",
            "the block that was free for longest",
            (
                "            hits.append(self.block_of[key])\n",
                "            hits.append(self.block_of[key])\n            if hits[-1] in self.unused:\n"
                "                del self.unused[hits[-1]]\n                self.unused[hits[-1]] = None\n",
            ),
        ),
        (
            "a lookup shares",
            "a published block is found",
            ("        return hits\n", "        self.share(hits)\n        return hits\n"),
        ),
        of(
            "looks keys up in the wrong direction",
            "a lookup stops",
            "prefix_cache",
            1,
            ("takewhile(self.keys.__contains__, keys)", "filter(self.keys.__contains__, keys)"),
        ),
    ],
    "scheduler_step": [
        of(
            "the back of the queue",
            "when a block is missing",
            "scheduler_step",
            0,
            ("self.waiting.insert(0, last)", "self.waiting.append(last)"),
        ),
        of(
            "forgets its tokens",
            "when a block is missing|who gave way",
            "scheduler_step",
            1,
            ("                self.drop(victim)\n", "                self.drop(victim); victim.n = 1\n"),
        ),
        of(
            "does not give the blocks of a finished request back",
            "a request that can never run|a request holds",
            "scheduler_step",
            0,
            (
                "                self.own[name] = 0\n                self.running",
                "                self.running",
            ),
        ),
        of(
            "room for the tokens it has, not one more",
            "a request holds blocks",
            "scheduler_step",
            1,
            ("job.n // self.b + 1 - job.held", "-(-job.n // self.b) - job.held"),
        ),
    ],
    "engine_step": [
        of(
            "far negative blocks",
            "a request alone",
            "engine_step",
            0,
            ("first, self.blocks(name)]", "first, [block - 2**20 for block in self.blocks(name)]]"),
        ),
        of(
            "a dictionary for each entry",
            "a request alone",
            "engine_step",
            0,
            (
                "return [name, tokens[first:], first, self.blocks(name)]",
                "return {'name': name, 'new': tokens[first:], 'start': first, 'blocks': self.blocks(name)}",
            ),
        ),
        of(
            "who comes back starts from its prompt",
            "who gives way",
            "engine_step",
            1,
            (
                "self.table, self.prefix, self.computed = None, [], 0",
                "self.table, self.prefix, self.computed, self.ids = None, [], 0, self.ids[:3]",
            ),
        ),
        of(
            "forgets the table of who comes back, and counts on",
            "who gives way|who comes back",
            "engine_step",
            1,
            (
                "self.computed = len(self.prefix) * engine.bs",
                "self.computed = self.computed or len(self.prefix) * engine.bs",
            ),
            ("self.table, self.prefix, self.computed = None, [], 0", "self.table, self.prefix = None, []"),
        ),
    ],
}

# What a later reader tried; edits of the solution.
WRONG.setdefault("scheduler_step", []).extend(
    [
        (
            "never itself",
            "the youngest gives way also",
            (
                "                youngest = self.running.pop()\n",
                "                youngest = [n for n in self.running if n != name][-1]\n"
                "                self.running.remove(youngest)\n",
            ),
        ),
        (
            "head of the waiting only once a step",
            "requests start in the order",
            (
                "            self.running.append(self.waiting.pop(0))\n"
                "            self.take(self.running[-1])\n",
                "            self.running.append(self.waiting.pop(0))\n"
                "            self.take(self.running[-1])\n"
                "            break\n",
            ),
        ),
        (
            "one more than max_running",
            "requests start in the order",
            ("len(self.running) < self.max_running", "len(self.running) <= self.max_running"),
        ),
        (
            "returns running after removal",
            "a request that can never run",
            ("        return served\n", "        return list(self.running)\n"),
        ),
    ]
)
WRONG.setdefault("allocator", []).extend(
    [
        (
            "objects of its own",
            "gives out different blocks",
            None,
            """
class Block:
    def __init__(self, n): self.n = n
class MyBlockPool:
    def __init__(self, num_blocks): self.f = [Block(i) for i in range(num_blocks)]
    @property
    def num_free(self): return len(self.f)
    def allocate(self, n):
        if n > len(self.f): return None
        return [self.f.pop() for _ in range(n)]
    def free(self, blocks): self.f += blocks
""",
        ),
    ]
)
WRONG.setdefault("multiplications", []).extend(
    [
        (
            "the texts are one token longer",
            "one step compares",
            (
                "range(prompt_tokens, prompt_tokens + new_tokens)",
                "range(prompt_tokens + 1, prompt_tokens + new_tokens + 1)",
            ),
        ),
    ]
)
WRONG.setdefault("bytes_per_token", []).extend(
    [
        (
            "takes the bytes of a scale for bits",
            "each vector brings one scale",
            ("// 8 + scale_bytes", "// 8 + scale_bytes // 8"),
        ),
        (
            "one scale for all vectors",
            "each vector brings one scale",
            ("vectors * bytes_per_vector", "vectors * (bytes_per_vector - scale_bytes) + scale_bytes"),
        ),
    ]
)
WRONG.setdefault("memory_plan", []).extend(
    [
        ("reserve counted twice", "blocks are what is left", ("- reserve_bytes\n", "- 2 * reserve_bytes\n")),
    ]
)
WRONG.setdefault("arena", []).extend(
    [
        (
            "holes unsorted after free",
            "cuts strips from the beginning",
            (
                "sorted([*self.holes, (start, self.strips.pop(start))])",
                "[(start, self.strips.pop(start)), *self.holes]",
            ),
        ),
        (
            "the last hole that is long enough",
            "cuts strips from the beginning",
            (
                "        for i, (start, hole) in enumerate(self.holes):",
                "        for i, (start, hole) in reversed(list(enumerate(self.holes))):",
            ),
        ),
    ]
)
WRONG.setdefault("waste", []).extend(
    [
        (
            "rounded shares",
            "a hole is external waste",
            ("count / num_slots for", "round(count / num_slots, 2) for"),
        ),
        (
            "a hole of exactly the size is too short",
            "shares are of all slots",
            ("next_size is not None and size < next_size", "next_size and size <= next_size"),
        ),
    ]
)
WRONG.setdefault("block_table", []).extend(
    [
        ("append answers None", "takes a block only when", ("        return True\n", "        return\n")),
    ]
)
WRONG.setdefault("paged_attention", []).extend(
    [
        (
            "last token twice",
            "averages the values",
            (
                "p = torch.arange(length)",
                "p = torch.arange(length + (length > 0)).clamp(max=max(length - 1, 0))",
            ),
        ),
        (
            "one dimension lost",
            "averages the values",
            ("    return output\n", "    return output.squeeze(0)\n"),
        ),
    ]
)
WRONG.setdefault("write_kv", []).extend(
    [
        (
            "one mask for heads and numbers together",
            "head sizes and numbers of heads",
            (
                "real = (head < NUM_HEADS) & (dims < HEAD_SIZE)",
                "real = (head * HEAD_SIZE + dims) < NUM_HEADS * HEAD_SIZE",
            ),
        ),
    ]
)
WRONG.setdefault("decode_kernel", []).extend(
    [
        ("rescale acc but not total", "many tiles", ("total = total * rescale +", "total = total +")),
        (
            "offset in tile not in block",
            "one tile of keys",
            ("positions % BLOCK_SIZE * stride_slot", "tl.arange(0, TILE) * stride_slot"),
        ),
        (
            "every sequence reads the first table",
            "many tiles",
            ("tl.load(table_ptr + positions", "tl.load(block_tables_ptr + positions"),
        ),
    ]
)
WRONG.setdefault("combine", []).extend(
    [
        (
            "total of parts not rescaled",
            "the parts together",
            ("(factor * total).sum(dim=0)", "total.sum(dim=0)"),
        ),
    ]
)
WRONG.setdefault("chunk_mask", []).extend(
    [
        (
            "window of num_queries",
            "more keys than queries",
            ("return key <= query", "return (key <= query) & (key > query - num_queries)"),
        ),
    ]
)
WRONG.setdefault("chunked_prefill", []).extend(
    [
        ("logits as row", "a prompt in one piece", ("model.logits(hidden[-1])", "model.logits(hidden[-1:])")),
        (
            "clears the cache",
            "keys and values are in the slots",
            ("    start = 0\n", "    start = 0\n    cache.zero_()\n"),
        ),
    ]
)
WRONG.setdefault("ref_counts", []).extend(
    [
        (
            "free appends at every free",
            "a shared block is free only",
            (
                "            if self.holders[block] == 0:\n                self.unused.append(block)",
                "            self.unused.append(block)",
            ),
        ),
    ]
)
WRONG.setdefault("fork", []).extend(
    [
        (
            "frees the tail but keeps it",
            "who writes first",
            ("            self.blocks[-1] = own\n", "            self.blocks.append(own)\n"),
        ),
    ]
)
WRONG.setdefault("block_hash", []).extend(
    [
        (
            "order lost: sorted",
            "different tokens are different",
            ("repr(list(block))", "repr(sorted(block))"),
        ),
        (
            "salt in every block but no past",
            "the same tokens after another past",
            ("sha256(parent + repr", "sha256(repr(salt).encode() + repr"),
        ),
    ]
)
WRONG.setdefault("prefix_cache", []).extend(
    [
        (
            "free puts in front",
            "the block that was free for longest",
            (
                "            if self.holders[block] == 0:\n                self.unused[block] = None",
                "            if self.holders[block] == 0:\n"
                "                self.unused = {block: None, **self.unused}",
            ),
        ),
    ]
)
