"""Right answers in other styles, by task: written from the contract alone, as learners write them.

Each must pass. With the one that stands beside a task's wrong answers they are at least three.
"""

RIGHT: dict[str, list[str]] = {
    "multiplications": [
        """
def multiplications(prompt, new, head_size):
    again = kept = 0
    length = prompt
    for step in range(new):
        triangle = length * (length + 1) // 2
        again += triangle * head_size
        kept += (triangle if step == 0 else length) * head_size
        length += 1
    return again, kept
""",
        """
import numpy as np

def multiplications(prompt, new, head_size):
    lengths = np.arange(prompt, prompt + new)
    again = int((lengths * (lengths + 1) // 2).sum()) * head_size
    kept = head_size * (int(lengths[1:].sum()) + prompt * (prompt + 1) // 2) if new else 0
    return [again, kept]
""",
    ],
    "cached_attention": [
        """
import math

class MyCachedAttention:
    def __init__(self, num_kv_heads, head_size):
        self.keys = torch.zeros(0, num_kv_heads, head_size)
        self.values = torch.zeros(0, num_kv_heads, head_size)

    def step(self, query, key, value):
        position = len(self.keys)
        self.keys = torch.cat([self.keys, rotate(key, position)[None]])
        self.values = torch.cat([self.values, value[None]])
        group = len(query) // self.keys.shape[1]
        q = rotate(query, position).reshape(-1, group, query.shape[-1])
        scores = torch.einsum("kgd,nkd->kgn", q, self.keys) / math.sqrt(query.shape[-1])
        return torch.einsum("kgn,nkd->kgd", scores.softmax(-1), self.values).reshape(query.shape)
""",
        """
class MyCachedAttention:
    def __init__(self, num_kv_heads, head_size):
        self._keys, self._values = [], []

    @property
    def keys(self):
        return torch.stack(self._keys)

    @property
    def values(self):
        return torch.stack(self._values)

    def step(self, query, key, value):
        now = len(self._keys)
        self._keys.append(rotate(key, now))
        self._values.append(value.clone())
        rows = []
        for head, q in enumerate(rotate(query, now)):
            mine = head * len(key) // len(query)
            scores = torch.stack([(q * k[mine]).sum() for k in self._keys]) * len(q) ** -0.5
            weights = torch.exp(scores - scores.max())
            weights = weights / weights.sum()
            rows.append(sum(w * v[mine] for w, v in zip(weights, self._values)))
        return torch.stack(rows)
""",
    ],
    "bytes_per_token": [
        """
import math

def bytes_per_token(model, bits, scale_bytes):
    vectors = math.prod([2, model.num_layers, model.num_kv_heads])
    return vectors * scale_bytes + vectors * model.head_size * bits // 8
""",
        """
def one_vector(numbers, bits, scale):
    return (numbers * bits + 7) // 8 + scale

def bytes_per_token(model, bits, scale_bytes=0):
    total = 0
    for _ in range(model.num_layers):
        for _ in ("K", "V"):
            total += model.num_kv_heads * one_vector(model.head_size, bits, scale_bytes)
    return total
""",
    ],
    "memory_plan": [
        """
from fractions import Fraction
import math

def memory_plan(card, parameters, bits_per_weight, reserve, bytes_per_token, block_size, max_tokens):
    weights = math.ceil(Fraction(bits_per_weight) * parameters / 8)
    free = card - reserve - weights
    if free < 0:
        raise ValueError(f"{-free} bytes are missing")
    blocks, _ = divmod(free, block_size * bytes_per_token)
    return blocks, blocks // math.ceil(max_tokens / block_size)
""",
        """
class DoesNotFit(ValueError):
    pass

def memory_plan(*sizes):
    card, parameters, bits, reserve, token, block, n = sizes
    eighths = int(bits * 2) * parameters
    weights = eighths // 16 + (eighths % 16 > 0)
    if weights + reserve > card:
        raise DoesNotFit
    num_blocks = (card - weights - reserve) // (token * block)
    per_request = (n + block - 1) // block
    return [num_blocks, int(num_blocks / per_request)]
""",
    ],
    "arena": [
        """
class MyArena:
    def __init__(self, num_slots):
        self.used = [False] * num_slots
        self.strips = {}

    @property
    def holes(self):
        found, start = [], None
        for slot, used in enumerate([*self.used, True]):
            if used and start is not None:
                found.append((start, slot - start))
                start = None
            elif not used and start is None:
                start = slot
        return found

    def allocate(self, size):
        for start, room in self.holes:
            if room >= size:
                self.used[start : start + size] = [True] * size
                self.strips[start] = size
                return start
        return None

    def free(self, start):
        if start not in self.strips:
            raise ValueError(start)
        size = self.strips.pop(start)
        self.used[start : start + size] = [False] * size
""",
        """
import numpy as np

class MyArena:
    def __init__(self, num_slots):
        self.num_slots = num_slots
        self.strips = []  # (start, end), sorted

    @property
    def holes(self):
        ends = [0] + [end for _, end in self.strips]
        starts = [start for start, _ in self.strips] + [self.num_slots]
        return [(np.int64(a), np.int64(b - a)) for a, b in zip(ends, starts) if b > a]

    def allocate(self, size):
        start = next((hole for hole, room in self.holes if room >= size), None)
        if start is not None:
            self.strips = sorted([*self.strips, (start, start + size)])
        return start

    def free(self, start):
        kept = [strip for strip in self.strips if strip[0] != start]
        if len(kept) == len(self.strips):
            raise ValueError(f"no strip begins at {start}")
        self.strips = kept
""",
    ],
    "waste": [
        """
def waste(num_slots, strips, holes, next_size):
    count = dict.fromkeys(("used", "to_come", "never", "external", "free"), 0)
    for strip in strips:
        count["used"] += strip.num_tokens
        count["to_come"] += strip.final_tokens - strip.num_tokens
        count["never"] += strip.reserved - strip.final_tokens
    for _, size in holes:
        count["free" if next_size is None or size >= next_size else "external"] += size
    return {kind: slots / num_slots for kind, slots in count.items()}
""",
        """
import numpy as np

def waste(num_slots, strips, holes, next_size):
    rows = np.array([(s.num_tokens, s.final_tokens, s.reserved) for s in strips]).reshape(-1, 3)
    used, final, reserved = rows.sum(axis=0)
    sizes = np.array([size for _, size in holes], dtype=int)
    short = sizes < (0 if next_size is None else next_size)
    parts = used, final - used, reserved - final, sizes[short].sum(), sizes[~short].sum()
    return dict(zip(["used", "to_come", "never", "external", "free"], np.array(parts) / num_slots))
""",
    ],
    "allocator": [
        """
import numpy as np

class MyBlockPool:
    def __init__(self, num_blocks):
        self.is_free = np.ones(num_blocks, dtype=bool)

    @property
    def num_free(self):
        return self.is_free.sum()

    def allocate(self, n):
        if n > self.num_free:
            return None
        blocks = np.flatnonzero(self.is_free)[:n]
        self.is_free[blocks] = False
        return blocks

    def free(self, blocks):
        blocks = np.array(blocks, dtype=int)
        if len(np.unique(blocks)) < len(blocks) or (blocks < 0).any() or (blocks >= len(self.is_free)).any():
            raise ValueError("no such block, or one twice")
        if self.is_free[blocks].any():
            raise ValueError("not held")
        self.is_free[blocks] = True
""",
        """%%time
%matplotlib inline
class 块池:
    def __init__(self, 数目):
        self.空闲 = set(range(数目))
        self.全部 = frozenset(self.空闲)
        self.num_free = 数目

    def allocate(self, n):
        if n > self.num_free:
            return
        己取 = []
        while len(己取) < n:
            己取.append(self.空闲.pop())
        self.num_free -= n
        return 己取

    def free(self, blocks):
        还 = list(blocks)
        if not set(还) <= self.全部 - self.空闲 or len(还) != len(set(还)):
            raise ValueError
        self.空闲 |= set(还)
        self.num_free = len(self.空闲)

MyBlockPool = 块池
display(MyBlockPool)
""",
    ],
    "block_table": [
        """
class MyBlockTable:
    def __init__(self, pool, block_size):
        self.pool, self.block_size = pool, block_size
        self.free_nothing()

    def free_nothing(self):
        self.blocks, self.num_tokens = [], 0

    def append(self, n):
        missing = 0
        while (len(self.blocks) + missing) * self.block_size < self.num_tokens + n:
            missing += 1
        if missing:
            got = self.pool.allocate(missing)
            if got is None:
                return False
            self.blocks.extend(got)
        self.num_tokens += n
        return True

    def slots(self, start, stop):
        everything = [b * self.block_size + o for b in self.blocks for o in range(self.block_size)]
        return everything[start:stop]

    def free(self):
        self.pool.free(list(self.blocks))
        self.free_nothing()
""",
        """
import numpy as np

class MyBlockTable:
    def __init__(self, pool, block_size):
        self.pool, self.block_size, self.num_tokens = pool, block_size, 0
        self.blocks = np.zeros(0, dtype=np.int64)

    def append(self, n):
        need = int(np.ceil((self.num_tokens + n) / self.block_size)) - self.blocks.size
        new = self.pool.allocate(need)
        if new is None:
            return np.False_
        self.blocks = np.append(self.blocks, np.array(new, dtype=np.int64))
        self.num_tokens += np.int64(n)
        return np.True_

    def slots(self, start, stop):
        p = np.arange(start, stop)
        return self.blocks[p // self.block_size] * self.block_size + p % self.block_size

    def free(self):
        self.pool.free(self.blocks.tolist())
        self.__init__(self.pool, self.block_size)
""",
    ],
    "paged_attention": [
        """
def paged_attention(query, key_cache, value_cache, block_tables, context_lens):
    block_size, num_kv_heads = key_cache.shape[1:3]
    scale = 1 / math.sqrt(query.shape[2])
    out = torch.zeros_like(query)
    for i, length in enumerate(context_lens.tolist()):
        if not length:
            continue
        blocks = block_tables[i, : math.ceil(length / block_size)].tolist()
        k = torch.cat([key_cache[b] for b in blocks])[:length]
        v = torch.cat([value_cache[b] for b in blocks])[:length]
        for h in range(query.shape[1]):
            kv = h // (query.shape[1] // num_kv_heads)
            out[i, h] = torch.softmax(k[:, kv] @ query[i, h] * scale, dim=0) @ v[:, kv]
    return out
""",
        """
import torch.nn.functional as F

def paged_attention(query, key_cache, value_cache, block_tables, context_lens):
    rows = []
    for q, table, n in zip(query, block_tables, context_lens):
        p = torch.arange(int(n))
        where = table[p // key_cache.shape[1]].long(), p % key_cache.shape[1]
        k, v = (cache[where].transpose(0, 1) for cache in (key_cache, value_cache))
        if n == 0:
            rows.append(torch.zeros_like(q))
            continue
        group = q.shape[0] // k.shape[0]
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        rows.append(F.scaled_dot_product_attention(q[:, None], k, v)[:, 0])
    return torch.stack(rows)
""",
    ],
    "write_kv": [
        """
@triton.jit
def my_write_kv(
    key_ptr, value_ptr, slots_ptr, key_cache_ptr, value_cache_ptr,
    stride_token, stride_head, stride_block, stride_slot, stride_cache_head,
    BLOCK_SIZE: tl.constexpr, NUM_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr,
    HEADS_PADDED: tl.constexpr, HEAD_PADDED: tl.constexpr,
):
    token = tl.program_id(0)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    heads = tl.arange(0, HEADS_PADDED)[:, None]
    dims = tl.arange(0, HEAD_PADDED)[None, :]
    real = (heads < NUM_HEADS) & (dims < HEAD_SIZE) & (slot >= 0)
    source = token * stride_token + heads * stride_head + dims
    target = slot // BLOCK_SIZE * stride_block + slot % BLOCK_SIZE * stride_slot
    target += heads * stride_cache_head + dims
    tl.store(key_cache_ptr + target, tl.load(key_ptr + source, mask=real), mask=real)
    tl.store(value_cache_ptr + target, tl.load(value_ptr + source, mask=real), mask=real)
""",
        """
@triton.jit
def my_write_kv(
    key_ptr, value_ptr, slots_ptr, key_cache_ptr, value_cache_ptr,
    stride_token, stride_head, stride_block, stride_slot, stride_cache_head,
    BLOCK_SIZE: tl.constexpr, NUM_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr,
    HEADS_PADDED: tl.constexpr, HEAD_PADDED: tl.constexpr,
):
    pid = tl.program_id(axis=0)
    lanes = tl.arange(0, HEADS_PADDED * HEAD_PADDED)
    h, d = lanes // HEAD_PADDED, lanes % HEAD_PADDED
    s = tl.load(slots_ptr + pid)
    if s > -1:
        block = (s // BLOCK_SIZE).to(tl.int64)
        offset = s - (s // BLOCK_SIZE) * BLOCK_SIZE
        ok = (h < NUM_HEADS) & (d < HEAD_SIZE)
        here = pid * stride_token + h * stride_head + d
        there = block * stride_block + offset * stride_slot + h * stride_cache_head + d
        k = tl.load(key_ptr + here, mask=ok, other=0)
        v = tl.load(value_ptr + here, mask=ok, other=0)
        tl.store(key_cache_ptr + there, k, mask=ok)
        tl.store(value_cache_ptr + there, v, mask=ok)
""",
    ],
    "combine": [
        """
def my_combine(maximum, total, acc):
    lse = maximum + torch.log(total)
    weights = torch.nan_to_num(torch.softmax(lse, dim=0), nan=0.0)
    average = torch.where(total[:, :, None] > 0, acc / total[:, :, None], torch.zeros_like(acc))
    return torch.einsum("ph,phd->hd", weights, average)
""",
        """
def my_combine(maximum, total, acc):
    heads, size = acc.shape[1:]
    answer = torch.zeros(heads, size)
    for h in range(heads):
        m, t, a = -math.inf, 0.0, torch.zeros(size)
        for part in range(len(maximum)):
            if total[part, h] == 0:
                continue
            new = max(m, float(maximum[part, h]))
            old, this = math.exp(m - new), math.exp(float(maximum[part, h]) - new)
            m, t = new, t * old + float(total[part, h]) * this
            a = a * old + acc[part, h] * this
        if t:
            answer[h] = a / t
    return answer
""",
    ],
    "chunk_mask": [
        """
def my_chunk_mask(num_queries, num_keys):
    return torch.ones(num_queries, num_keys).tril(num_keys - num_queries).bool()
""",
        """
import numpy as np

def my_chunk_mask(num_queries, num_keys):
    positions = np.arange(num_keys - num_queries, num_keys)
    return positions[:, None] >= np.arange(num_keys)[None, :]
""",
    ],
    "chunked_prefill": [
        """
def my_chunked_prefill(model, tokens, chunk_lens, cache, slots):
    stop = 0
    for n in chunk_lens:
        start, stop = stop, stop + n
        x = model.embed(tokens[start:stop])
        mask = my_chunk_mask(n, stop)
        for layer in range(model.num_layers):
            q, k, v = model.project(layer, x, torch.arange(start, stop))
            cache[layer, :, slots[start:stop]] = torch.stack([k, v])
            keys, values = cache[layer][:, slots[:stop]]
            x = model.finish(layer, x, model.attend(q, keys, values, mask))
    return model.logits(x[-1])
""",
        """
def my_chunked_prefill(model, tokens, chunk_lens, cache, slots):
    ends = torch.tensor(chunk_lens).cumsum(0).tolist()
    for start, stop in zip([0, *ends], ends):
        positions = torch.tensor(range(start, stop))
        hidden = model.embed(tokens[positions])
        for layer in range(model.num_layers):
            query, key, value = model.project(layer, hidden, positions)
            for i, p in enumerate(range(start, stop)):
                cache[layer, 0, int(slots[p])] = key[i]
                cache[layer, 1, int(slots[p])] = value[i]
            seen = slots[:stop]
            attended = model.attend(query, cache[layer, 0, seen], cache[layer, 1, seen],
                                    torch.as_tensor(my_chunk_mask(stop - start, stop)))
            hidden = model.finish(layer, hidden, attended)
    return model.logits(hidden)[-1]
""",
    ],
    "ref_counts": [
        """
from collections import Counter

class MySharedPool:
    def __init__(self, num_blocks):
        self.num_blocks = num_blocks
        self.holders = Counter()

    @property
    def num_free(self):
        return self.num_blocks - len(self.holders)

    def ref_count(self, block):
        return self.holders[block]

    def allocate(self, n):
        free = [b for b in range(self.num_blocks) if b not in self.holders]
        if len(free) < n:
            return None
        self.holders.update(free[:n])
        return free[:n]

    def _check(self, blocks):
        if len(set(blocks)) != len(blocks) or any(b not in self.holders for b in blocks):
            raise ValueError(blocks)

    def share(self, blocks):
        self._check(blocks)
        self.holders.update(blocks)

    def free(self, blocks):
        self._check(blocks)
        self.holders.subtract(blocks)
        self.holders = +self.holders
""",
        """
import numpy as np

class MySharedPool:
    def __init__(self, num_blocks):
        self.counts = np.zeros(num_blocks, dtype=np.int32)

    @property
    def num_free(self):
        return (self.counts == 0).sum()

    def ref_count(self, block):
        return self.counts[block]

    def allocate(self, n):
        (free,) = np.nonzero(self.counts == 0)
        if free.size < n:
            return None
        self.counts[free[:n]] = 1
        return free[:n].tolist()

    def share(self, blocks):
        self._add(blocks, 1)

    def free(self, blocks):
        self._add(blocks, -1)

    def _add(self, blocks, change):
        known = range(len(self.counts))
        if len(set(blocks)) < len(blocks) or not all(b in known and self.counts[b] > 0 for b in blocks):
            raise ValueError("not held")
        for b in blocks:
            self.counts[b] += change
""",
    ],
    "fork": [
        """
import copy, math

class MyForkingTable:
    def __init__(self, pool, block_size):
        self.pool, self.block_size = pool, block_size
        self.blocks, self.num_tokens = [], 0

    def fork(self):
        child = copy.copy(self)
        child.blocks = self.blocks[:]
        self.pool.share(self.blocks)
        return child

    def append(self, n):
        new = math.ceil((self.num_tokens + n) / self.block_size) - len(self.blocks)
        writes_into_tail = n > 0 and self.num_tokens % self.block_size != 0
        must_copy = writes_into_tail and self.pool.ref_count(self.blocks[-1]) > 1
        fresh = self.pool.allocate(new + must_copy)
        if fresh is None:
            return None
        copies = []
        if must_copy:
            old, self.blocks[-1] = self.blocks[-1], fresh.pop(0)
            self.pool.free([old])
            copies.append((old, self.blocks[-1]))
        self.blocks += fresh
        self.num_tokens += n
        return copies

    def free(self):
        self.pool.free(self.blocks)
        self.blocks, self.num_tokens = [], 0
""",
        """
class MyForkingTable:
    def __init__(self, pool, block_size, blocks=(), num_tokens=0):
        self.pool, self.block_size = pool, block_size
        self._blocks, self.num_tokens = tuple(blocks), num_tokens

    @property
    def blocks(self):
        return list(self._blocks)

    def fork(self):
        self.pool.share(self.blocks)
        return MyForkingTable(self.pool, self.block_size, self._blocks, self.num_tokens)

    def append(self, n):
        if n == 0:
            return []
        room = len(self._blocks) * self.block_size - self.num_tokens
        tail = self._blocks[-1] if room > 0 and self.pool.ref_count(self._blocks[-1]) > 1 else None
        need = -(-max(0, n - room) // self.block_size)
        got = self.pool.allocate(need + (tail is not None))
        if got is None:
            return None
        self.num_tokens += n
        if tail is None:
            self._blocks += tuple(got)
            return []
        self._blocks = (*self._blocks[:-1], *got)
        self.pool.free([tail])
        return [[tail, got[0]]]

    def free(self):
        self.pool.free(self.blocks)
        self._blocks, self.num_tokens = (), 0
""",
    ],
    "block_hash": [
        """
import hashlib

def my_block_hashes(token_ids, block_size, salt=None):
    state = hashlib.sha256(b"no salt" if salt is None else b"salt" + salt.encode())
    names = []
    for end in range(block_size, len(token_ids) + 1, block_size):
        for token in token_ids[end - block_size : end]:
            state.update(token.to_bytes(8, "little"))
        names.append(state.hexdigest())
    return names
""",
        """
from hashlib import blake2b
import json

def my_block_hashes(token_ids, block_size, salt=None):
    full = len(token_ids) // block_size * block_size
    return [
        blake2b(json.dumps([salt, block_size, list(token_ids[:stop])]).encode()).digest()
        for stop in range(block_size, full + 1, block_size)
    ]
""",
    ],
    "prefix_cache": [
        """
from collections import OrderedDict

class MyPrefixCache:
    def __init__(self, num_blocks):
        self.blank, self.cached = OrderedDict.fromkeys(range(num_blocks)), OrderedDict()
        self.holders, self.key_of = {}, {}

    @property
    def num_free(self):
        return len(self.blank) + len(self.cached)

    def allocate(self, n):
        if self.num_free < n:
            return None
        taken = []
        for _ in range(n):
            block, _ = (self.blank or self.cached).popitem(last=False)
            self.key_of.pop(block, None)
            self.holders[block] = 1
            taken.append(block)
        return taken

    def publish(self, block, key):
        if key not in self.key_of.values():
            self.key_of[block] = key

    def lookup(self, keys):
        where = {key: block for block, key in self.key_of.items()}
        hits = []
        for key in keys:
            if key not in where:
                return hits
            hits.append(where[key])
        return hits

    def share(self, blocks):
        for block in blocks:
            self.blank.pop(block, None)
            self.cached.pop(block, None)
            self.holders[block] = self.holders.get(block, 0) + 1

    def free(self, blocks):
        for block in blocks:
            self.holders[block] -= 1
            if not self.holders[block]:
                (self.cached if block in self.key_of else self.blank)[block] = None
""",
        """
from itertools import takewhile

class MyPrefixCache:
    def __init__(self, num_blocks):
        self.queue = list(range(num_blocks))
        self.count = [0] * num_blocks
        self.keys = [None] * num_blocks

    @property
    def num_free(self):
        return self.count.count(0)

    def allocate(self, n):
        order = [b for b in self.queue if self.keys[b] is None]
        order += [b for b in self.queue if self.keys[b] is not None]
        if n > len(order):
            return None
        for block in order[:n]:
            self.queue.remove(block)
            self.count[block], self.keys[block] = 1, None
        return order[:n]

    def publish(self, block, key):
        if key not in self.keys:
            self.keys[block] = key

    def lookup(self, keys):
        return [self.keys.index(key) for key in takewhile(self.keys.__contains__, keys)]

    def share(self, blocks):
        for block in blocks:
            if self.count[block] == 0:
                self.queue.remove(block)
            self.count[block] += 1

    def free(self, blocks):
        for block in blocks:
            self.count[block] -= 1
            if self.count[block] == 0:
                self.queue.append(block)
""",
    ],
}

SIGNATURE = """
    output_ptr, query_ptr, key_cache_ptr, value_cache_ptr, block_tables_ptr, context_lens_ptr, scale,
    stride_block, stride_slot, stride_head, stride_table,
    BLOCK_SIZE: tl.constexpr, HEAD_SIZE: tl.constexpr, HEAD_PADDED: tl.constexpr,
    GROUP: tl.constexpr, TILE: tl.constexpr,
"""

RIGHT["decode_kernel"] = [
    # one key at a time, in place of a tile
    f"""
@triton.jit
def my_decode_kernel({SIGNATURE}):
    h = tl.program_id(0)
    s = tl.program_id(1)
    d = tl.arange(0, HEAD_PADDED)
    ok = d < HEAD_SIZE
    at = (s * tl.num_programs(0) + h) * HEAD_SIZE + d
    q = tl.load(query_ptr + at, mask=ok, other=0.0) * scale
    m = -float("inf")
    l = 0.0
    acc = tl.zeros((HEAD_PADDED,), dtype=tl.float32)
    for p in range(tl.load(context_lens_ptr + s)):
        block = tl.load(block_tables_ptr + s * stride_table + p // BLOCK_SIZE).to(tl.int64)
        row = block * stride_block + (p % BLOCK_SIZE) * stride_slot + (h // GROUP) * stride_head
        k = tl.load(key_cache_ptr + row + d, mask=ok, other=0.0)
        v = tl.load(value_cache_ptr + row + d, mask=ok, other=0.0)
        score = tl.sum(q * k)
        new = tl.maximum(m, score)
        old = tl.exp(m - new)
        w = tl.exp(score - new)
        l = l * old + w
        acc = acc * old + w * v
        m = new
    if l == 0.0:
        l = 1.0
    tl.store(output_ptr + at, acc / l, mask=ok)
""",
    # an if in place of where, a whole mask for a tile, helper functions
    f"""
@triton.jit
def slots(table, positions, valid, stride_block, stride_slot, SIZE: tl.constexpr):
    block = tl.load(table + positions // SIZE, mask=valid, other=0)
    return tl.cast(block, tl.int64) * stride_block + (positions - positions // SIZE * SIZE) * stride_slot

@triton.jit
def my_decode_kernel({SIGNATURE}):
    head, seq = tl.program_id(0), tl.program_id(1)
    n = tl.load(context_lens_ptr + seq)
    d = tl.arange(0, HEAD_PADDED)[None, :]
    at = (seq * tl.num_programs(0) + head) * HEAD_SIZE + d
    q = tl.load(query_ptr + at, mask=d < HEAD_SIZE, other=0.0)
    largest = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    acc = tl.zeros((1, HEAD_PADDED), tl.float32)
    for i in range(0, tl.cdiv(n, TILE)):
        p = i * TILE + tl.arange(0, TILE)
        valid = p < n
        at_key = slots(block_tables_ptr + seq * stride_table, p, valid, stride_block, stride_slot, BLOCK_SIZE)
        at_key = at_key[:, None] + head // GROUP * stride_head + d
        mask = valid[:, None] & (d < HEAD_SIZE)
        k = tl.load(key_cache_ptr + at_key, mask, 0.0)
        score = tl.where(valid, tl.sum(q * k, 1) * scale, float("-inf"))
        new = tl.maximum(largest, tl.max(score, 0))
        weight = tl.exp(score - new)
        total = total * tl.exp(largest - new) + tl.sum(weight, 0)
        v = tl.load(value_cache_ptr + at_key, mask, 0.0)
        acc = acc * tl.exp(largest - new) + tl.sum(weight[:, None] * v, 0)[None, :]
        largest = new
    tl.store(output_ptr + at, acc / tl.maximum(total, 1e-30), mask=d < HEAD_SIZE)
""",
]

RIGHT["scheduler_step"] = [
    """
from math import ceil

class MyScheduler:
    def __init__(self, num_blocks, block_size, max_running):
        self.num_blocks, self.block_size, self.max_running = num_blocks, block_size, max_running
        self.running, self.waiting = [], []
        self.have, self.end, self.own = {}, {}, {}

    @property
    def num_free(self):
        return self.num_blocks - sum(self.own.values())

    def size(self, tokens):
        return ceil(tokens / self.block_size)

    def add(self, name, prompt, output):
        if self.size(prompt + output) > self.num_blocks:
            raise ValueError(f"{name} never fits")
        self.waiting.append(name)
        self.have[name], self.end[name], self.own[name] = prompt, prompt + output, 0

    def step(self):
        i = 0
        while i < len(self.running):
            name = self.running[i]
            need = self.size(self.have[name] + 1)
            while name in self.running and need - self.own[name] > self.num_free:
                last = self.running.pop()
                self.own[last] = 0
                self.waiting.insert(0, last)
            if name in self.running:
                self.own[name] = need
            i += 1
        while self.waiting and len(self.running) < self.max_running:
            need = self.size(self.have[self.waiting[0]] + 1)
            if need > self.num_free:
                break
            name = self.waiting.pop(0)
            self.running.append(name)
            self.own[name] = need
        served = list(self.running)
        for name in served:
            self.have[name] += 1
            if self.have[name] == self.end[name]:
                self.own[name] = 0
                self.running.remove(name)
        return served
""",
    """
from collections import deque
from types import SimpleNamespace as Job

class MyScheduler:
    def __init__(self, num_blocks, block_size, max_running):
        self.all, self.b, self.most = num_blocks, block_size, max_running
        self.num_free = num_blocks
        self.r, self.w = [], deque()

    running = property(lambda self: [job.name for job in self.r])
    waiting = property(lambda self: [job.name for job in self.w])

    def add(self, name, prompt, output):
        if prompt + output > self.all * self.b:
            raise ValueError(name)
        self.w.append(Job(name=name, n=prompt, end=prompt + output, held=0))

    def lack(self, job):
        return job.n // self.b + 1 - job.held

    def grab(self, job):
        extra = self.lack(job)
        job.held += extra
        self.num_free -= extra

    def drop(self, job):
        self.num_free += job.held
        job.held = 0

    def step(self):
        safe, rest = [], self.r
        while rest:
            job = rest.pop(0)
            while self.lack(job) > self.num_free:
                victim = rest.pop() if rest else job
                self.drop(victim)
                self.w.appendleft(victim)
                if victim is job:
                    break
            else:
                self.grab(job)
                safe.append(job)
        self.r = safe
        while self.w and len(self.r) < self.most and self.lack(self.w[0]) <= self.num_free:
            self.grab(self.w[0])
            self.r.append(self.w.popleft())
        names = self.running
        for job in self.r:
            job.n += 1
            if job.n == job.end:
                self.drop(job)
        self.r = [job for job in self.r if job.n < job.end]
        return tuple(names)
""",
]

# Later ones, each in yet another style.
RIGHT["multiplications"].append(
    '''
def multiplications(p, n, h):
    """Sums of squares in closed form."""
    if n == 0:
        return 0, 0
    q = p + n - 1
    tetra = lambda m: m * (m + 1) * (m + 2) // 6
    return h * (tetra(q) - tetra(p - 1)), h * (p * (p + 1) // 2 + (q * (q + 1) - p * (p + 1)) // 2)
'''
)
RIGHT["cached_attention"].append(
    """
import torch.nn.functional as F
class MyCachedAttention:
    def __init__(self, num_kv_heads, head_size):
        self.cache = torch.empty(2, 4, num_kv_heads, head_size)
        self.n = 0
    keys = property(lambda self: self.cache[0, : self.n])
    values = property(lambda self: self.cache[1, : self.n])
    def step(self, query, key, value):
        if self.n == self.cache.shape[1]:
            self.cache = torch.cat([self.cache, torch.empty_like(self.cache)], dim=1)
        self.cache[0, self.n], self.cache[1, self.n] = rotate(key, self.n), value
        query = rotate(query, self.n)
        self.n += 1
        q = query[None, :, None]                       # [1, heads, 1, size]
        k, v = (x.transpose(0, 1)[None] for x in (self.keys, self.values))
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)[0, :, 0]
"""
)
RIGHT["memory_plan"].append(
    """
def memory_plan(card, parameters, bits_per_weight, reserve, token_bytes, block_size, tokens_per_request):
    weights = -int(-(parameters * bits_per_weight) // 8)
    kv = card - weights - reserve
    if kv < 0: raise ValueError("too large")
    blocks, lost = divmod(kv, token_bytes * block_size)
    need = tokens_per_request // block_size + bool(tokens_per_request % block_size)
    return [blocks, blocks // need]
"""
)
RIGHT["arena"].append(
    r"""
import re
class MyArena:
    def __init__(self, num_slots):
        self.map = "." * num_slots
        self.size = {}
    @property
    def holes(self):
        return [(m.start(), len(m[0])) for m in re.finditer(r"\.+", self.map)]
    def allocate(self, size):
        at = self.map.find("." * size)
        if at < 0: return None
        self.map = self.map[:at] + "x" * size + self.map[at + size:]
        self.size[at] = size
        return at
    def free(self, start):
        try: size = self.size.pop(start)
        except KeyError: raise ValueError(start) from None
        self.map = self.map[:start] + "." * size + self.map[start + size:]
"""
)
RIGHT["waste"].append(
    """
from collections import Counter
def waste(num_slots, strips, holes, next_size):
    kinds = Counter(used=0, to_come=0, never=0, external=0, free=0)
    for s in strips:
        for i in range(s.reserved):
            kinds["used" if i < s.num_tokens else "to_come" if i < s.final_tokens else "never"] += 1
    for _, size in holes:
        kinds["external" if size < (next_size or 0) else "free"] += size
    return {k: n / num_slots for k, n in kinds.items()}
"""
)
RIGHT["allocator"].append(
    """
import numpy as np
class MyBlockPool:
    def __init__(self, num_blocks):
        self.free_mask = np.ones(num_blocks, bool)
    @property
    def num_free(self):
        return int(self.free_mask.sum())
    def allocate(self, n):
        found = np.flatnonzero(self.free_mask)[:n]
        if len(found) < n: return None
        self.free_mask[found] = False
        return found.tolist()
    def free(self, blocks):
        seen = set()
        for b in blocks:
            if b < 0 or b >= len(self.free_mask) or self.free_mask[b] or b in seen:
                raise ValueError(b)
            seen.add(b)
        self.free_mask[list(blocks)] = True
"""
)
RIGHT["block_table"].append(
    """
class MyBlockTable:
    def __init__(self, pool, block_size):
        self.pool, self.block_size, self.blocks = pool, block_size, []
        self.room = 0
    @property
    def num_tokens(self):
        return len(self.blocks) * self.block_size - self.room
    def append(self, n):
        short = n - self.room
        new = self.pool.allocate(max(0, -(-short // self.block_size)))
        if new is None: return False
        self.blocks.extend(new)
        self.room += len(new) * self.block_size - n
        return True
    def slots(self, start, stop):
        every = [b * self.block_size + i for b in self.blocks for i in range(self.block_size)]
        return every[start:stop]
    def free(self):
        mine, self.blocks, self.room = self.blocks, [], 0
        self.pool.free(mine)
"""
)
RIGHT["paged_attention"].append(
    """
def paged_attention(query, key_cache, value_cache, block_tables, context_lens):
    out = []
    for q, table, n in zip(query, block_tables, context_lens.tolist()):
        bs = key_cache.shape[1]
        k = [key_cache[table[t // bs], t % bs] for t in range(n)]
        v = [value_cache[table[t // bs], t % bs] for t in range(n)]
        if not n:
            out.append(torch.zeros_like(q)); continue
        k, v = torch.stack(k, 1)[None], torch.stack(v, 1)[None]
        attend = torch.nn.functional.scaled_dot_product_attention
        out.append(attend(q[None, :, None], k, v, enable_gqa=True)[0, :, 0])
    return torch.stack(out)
"""
)
RIGHT["write_kv"].append(
    """
@triton.jit
def my_write_kv(
    key_ptr,  # [num_tokens, NUM_HEADS, HEAD_SIZE]
    value_ptr,
    slots_ptr,  # [num_tokens] int32
    key_cache_ptr,  # [num_blocks, BLOCK_SIZE, NUM_HEADS, HEAD_SIZE]
    value_cache_ptr,
    stride_token,
    stride_head,
    stride_block,
    stride_slot,
    stride_cache_head,
    BLOCK_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
):
    token = tl.program_id(0)
    ### BEGIN SOLUTION
    slot = tl.load(slots_ptr + token).to(tl.int64)  # widened before it is multiplied
    if slot < 0:
        return
    dims = tl.arange(0, HEAD_PADDED)
    real = dims < HEAD_SIZE
    base = (slot // BLOCK_SIZE) * stride_block + (slot % BLOCK_SIZE) * stride_slot
    for head in tl.static_range(NUM_HEADS):
        row = token * stride_token + head * stride_head
        to = base + head * stride_cache_head + dims
        tl.store(key_cache_ptr + to, tl.load(key_ptr + row + dims, mask=real), mask=real)
        tl.store(value_cache_ptr + to, tl.load(value_ptr + row + dims, mask=real), mask=real)
    ### END SOLUTION
"""
)
RIGHT["decode_kernel"].append(
    """
@triton.jit
def my_decode_kernel(
    output_ptr,  # [num_seqs, num_query_heads, HEAD_SIZE] float32
    query_ptr,  # the same
    key_cache_ptr,  # [num_blocks, BLOCK_SIZE, num_kv_heads, HEAD_SIZE] float32
    value_cache_ptr,
    block_tables_ptr,  # [num_seqs, max_blocks] int32
    context_lens_ptr,  # [num_seqs] int32
    scale,
    stride_block,
    stride_slot,
    stride_head,
    stride_table,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per KV head
    TILE: tl.constexpr,
):
    head, seq = tl.program_id(0), tl.program_id(1)
    row = (seq * tl.num_programs(0) + head) * HEAD_SIZE  # where the query is, and the result goes
    dims = tl.arange(0, HEAD_PADDED)
    in_head = dims < HEAD_SIZE
    query = tl.load(query_ptr + row + dims, mask=in_head, other=0.0) * scale
    table_ptr = block_tables_ptr + seq * stride_table
    context_len = tl.load(context_lens_ptr + seq)
    ### BEGIN SOLUTION
    kv_head = head // GROUP
    maximum = float("-inf")
    total = 0.0
    acc = tl.zeros([HEAD_PADDED], tl.float32)
    for tile in range(tl.cdiv(context_len, TILE)):
        first = tile * TILE
        positions = first + tl.arange(0, TILE)
        live = positions < context_len
        blocks = tl.load(table_ptr + positions // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
        rows = blocks * stride_block + positions % BLOCK_SIZE * stride_slot + kv_head * stride_head
        real = live[:, None] & in_head[None, :]
        key = tl.load(key_cache_ptr + rows[:, None] + dims[None, :], mask=real, other=0.0)
        value = tl.load(value_cache_ptr + rows[:, None] + dims[None, :], mask=real, other=0.0)
        scores = tl.where(live, tl.sum(key * query[None, :], axis=1), float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=0))
        weights = tl.exp2((scores - new_maximum) * 1.4426950408889634)
        rescale = tl.exp(maximum - new_maximum)
        total = total * rescale + tl.sum(weights, axis=0)
        acc = acc * rescale + tl.sum(weights[:, None] * value, axis=0)
        maximum = new_maximum
    result = acc / tl.where(total > 0.0, total, 1.0)
    ### END SOLUTION
    tl.store(output_ptr + row + dims, result, mask=in_head)
"""
)
RIGHT["combine"].append(
    """
def my_combine(maximum, total, acc):
    m, s, a = maximum[0], total[0], acc[0]
    for i in range(1, len(maximum)):
        both = torch.maximum(m, maximum[i])
        zero = torch.zeros_like(m)
        old = torch.where(m == -torch.inf, zero, torch.exp(m - both))
        new = torch.where(maximum[i] == -torch.inf, zero, torch.exp(maximum[i] - both))
        m, s, a = both, s * old + total[i] * new, a * old[:, None] + acc[i] * new[:, None]
    return torch.nan_to_num(a / s[:, None])
"""
)
RIGHT["chunk_mask"].append(
    """
def my_chunk_mask(q, k):
    return [[int(j <= k - q + i) for j in range(k)] for i in range(q)]
"""
)
RIGHT["chunked_prefill"].append(
    """
def my_chunked_prefill(model, tokens, chunk_lens, cache, slots):
    done = 0
    for part, where in zip(tokens.split(chunk_lens), slots.split(chunk_lens)):
        at = done + torch.arange(len(part))
        x = model.embed(part)
        done += len(part)
        for l in range(model.num_layers):
            q, *kv = model.project(l, x, at)
            cache[l][:, where] = torch.stack(kv)
            k, v = cache[l].index_select(1, slots[:done])
            x = model.finish(l, x, model.attend(q, k, v, my_chunk_mask(len(part), done)))
    return model.logits(x)[-1]
"""
)
RIGHT["ref_counts"].append(
    """
from collections import Counter
class MySharedPool:
    def __init__(self, num_blocks):
        self.n, self.count = num_blocks, Counter()
    num_free = property(lambda self: self.n - len(+self.count))
    def ref_count(self, block): return self.count[block]
    def allocate(self, n):
        free = [b for b in range(self.n) if not self.count[b]]
        if len(free) < n: return None
        self.count.update(free[:n])
        return free[:n]
    def check(self, blocks):
        if any(c > 1 for c in Counter(blocks).values()) or not all(self.count[b] > 0 for b in blocks):
            raise ValueError(blocks)
    def share(self, blocks): self.check(blocks); self.count.update(blocks)
    def free(self, blocks): self.check(blocks); self.count.subtract(blocks)
"""
)
RIGHT["fork"].append(
    """
import copy
class MyForkingTable:
    def __init__(self, pool, block_size):
        self.pool, self.block_size, self.blocks, self.num_tokens = pool, block_size, [], 0
    def fork(self):
        self.pool.share(self.blocks)
        twin = copy.copy(self)
        twin.blocks = self.blocks[:]
        return twin
    def append(self, n):
        if n == 0: return []
        full = self.num_tokens % self.block_size == 0
        cow = not full and self.pool.ref_count(self.blocks[-1]) != 1
        room = 0 if full else self.block_size - self.num_tokens % self.block_size
        more = max(0, -(-(n - room) // self.block_size))
        got = self.pool.allocate(more + int(cow))
        if got is None: return None
        pairs = []
        if cow:
            new = got.pop()
            pairs.append([self.blocks.pop(), new])
            self.pool.free(pairs[0][:1])
            self.blocks.append(new)
        self.blocks += got
        self.num_tokens += n
        return pairs
    def free(self):
        while self.blocks: self.pool.free([self.blocks.pop()])
        self.num_tokens = 0
"""
)
RIGHT["block_hash"].append(
    """
import hashlib, struct
def my_block_hashes(token_ids, block_size, salt=None):
    h = hashlib.blake2b(b"none" if salt is None else b"salt" + salt.encode())
    out = []
    for i in range(len(token_ids) // block_size):
        h.update(struct.pack(f"<{block_size}q", *token_ids[i * block_size:(i + 1) * block_size]))
        out.append(h.hexdigest())
    return out
"""
)
RIGHT["prefix_cache"].append(
    """
from collections import OrderedDict, deque
class MyPrefixCache:
    def __init__(self, num_blocks):
        self.blank, self.cached = deque(range(num_blocks)), OrderedDict()
        self.refs, self.where, self.name = {}, {}, {}
    @property
    def num_free(self): return len(self.blank) + len(self.cached)
    def allocate(self, n):
        if self.num_free < n: return None
        out = []
        while len(out) < n:
            if self.blank: b = self.blank.popleft()
            else:
                b, _ = self.cached.popitem(last=False)
                self.where.pop(self.name.pop(b))
            self.refs[b] = 1
            out.append(b)
        return out
    def publish(self, block, key):
        if self.where.setdefault(key, block) == block: self.name[block] = key
    def lookup(self, keys):
        out = []
        for k in keys:
            b = self.where.get(k)
            if b is None: return out
            out.append(b)
        return out
    def share(self, blocks):
        for b in blocks:
            self.cached.pop(b, None)
            self.refs[b] = self.refs.get(b, 0) + 1
    def free(self, blocks):
        for b in blocks:
            self.refs[b] -= 1
            if not self.refs[b]:
                if b in self.name: self.cached[b] = None
                else: self.blank.append(b)
"""
)
RIGHT["scheduler_step"].append(
    """
class MyScheduler:
    def __init__(self, num_blocks, block_size, max_running):
        self.all, self.bs, self.most, self.line, self.n = num_blocks, block_size, max_running, [], 0
    running = property(lambda s: [r[0] for r in s.line[: s.n]])
    waiting = property(lambda s: [r[0] for r in s.line[s.n :]])
    num_free = property(lambda s: s.all - sum(-(-r[1] // s.bs) for r in s.line[: s.n]))
    def add(self, name, prompt, output):
        if -(-(prompt + output) // self.bs) > self.all:
            raise ValueError
        self.line.append([name, prompt, prompt + output])
    def step(self):
        def ok(k):
            needed = sum(r[1] // self.bs + 1 for r in self.line[:k])
            return k <= min(self.most, len(self.line)) and needed <= self.all
        while not ok(self.n): self.n -= 1
        while ok(self.n + 1): self.n += 1
        names = self.running
        for r in self.line[: self.n]: r[1] += 1
        left = [r for r in self.line if r[1] < r[2]]
        self.n -= len(self.line) - len(left)
        self.line = left
        return names
"""
)

RIGHT["engine_step"] = [
    """
class MyEngine:
    def __init__(self, num_blocks, block_size, max_running):
        self.block_size = block_size
        self.scheduler = MyScheduler(num_blocks, block_size, max_running)
        self.cache = MyPrefixCache(num_blocks)
        self.tokens, self.hits, self.tables, self.stored = {}, {}, {}, {}

    def add(self, name, prompt, output):
        self.scheduler.add(name, len(prompt), output)
        self.tokens[name] = list(prompt)

    def blocks(self, name):
        return [*self.hits[name], *self.tables[name].blocks]

    def drop(self, names):
        for name in names:
            self.tables[name].free()
            self.cache.free(self.hits[name])
            del self.tables[name], self.hits[name]

    def schedule(self):
        names = list(self.scheduler.step())
        self.drop([name for name in self.tables if name not in names])
        return [self.entry(name, self.tokens[name]) for name in names]

    def entry(self, name, tokens):
        first = len(tokens) - 1
        if name not in self.tables:
            keys = my_block_hashes(tokens, self.block_size)
            if len(tokens) % self.block_size == 0:
                keys = keys[:-1]
            self.hits[name] = self.cache.lookup(keys)
            self.cache.share(self.hits[name])
            self.tables[name] = MyBlockTable(self.cache, self.block_size)
            first = len(self.hits[name]) * self.block_size
        self.tables[name].append(len(tokens) - first)
        return [name, tokens[first:], first, self.blocks(name)]

    def update(self, sampled):
        for name in sampled:
            tokens, blocks = self.tokens[name], self.blocks(name)
            for number, key in enumerate(my_block_hashes(tokens, self.block_size)):
                self.cache.publish(blocks[number], key)
            self.tokens[name] = tokens + [sampled[name]]
        self.drop(sampled.keys() - set(self.scheduler.running))
""",
    """
import itertools

class MyEngine(object):
    def __init__(self, num_blocks, block_size, max_running):
        self.bs = block_size
        self.cache = MyPrefixCache(num_blocks)
        self.scheduler = MyScheduler(num_blocks, block_size, max_running)
        self.seq = {}

    def add(self, name, prompt, output):
        self.scheduler.add(name, len(prompt), output)
        self.seq[name] = Sequence(self, prompt)

    def schedule(self):
        names = self.scheduler.step()
        for name, seq in self.seq.items():
            if seq.table is not None and name not in names:
                seq.release()
        plan = []
        for name in names:
            new, start = self.seq[name].advance()
            plan.append((name, new, start, self.seq[name].block_ids()))
        return plan

    def update(self, sampled):
        for name, token in sampled.items():
            seq = self.seq[name]
            seq.publish()
            seq.ids += (token,)
            if name not in self.scheduler.running:
                seq.release()
                del self.seq[name]

class Sequence:
    def __init__(self, engine, prompt):
        self.engine, self.ids, self.table, self.prefix, self.computed = engine, tuple(prompt), None, [], 0

    def block_ids(self):
        return list(itertools.chain(self.prefix, self.table.blocks))

    def advance(self):
        engine = self.engine
        if self.table is None:
            self.table = MyBlockTable(engine.cache, engine.bs)
            most = (len(self.ids) - 1) // engine.bs
            found = engine.cache.lookup(my_block_hashes(list(self.ids), engine.bs))
            self.prefix = found[:most]
            engine.cache.share(self.prefix)
            self.computed = len(self.prefix) * engine.bs
        start, self.computed = self.computed, len(self.ids)
        if not self.table.append(self.computed - start):
            raise RuntimeError("out of blocks")
        return list(self.ids[start:]), start

    def publish(self):
        hashes = my_block_hashes(list(self.ids), self.engine.bs)
        for block, key in list(zip(self.block_ids(), hashes))[len(self.prefix):]:
            self.engine.cache.publish(block, key)

    def release(self):
        self.table.free()
        self.engine.cache.free(self.prefix)
        self.table, self.prefix, self.computed = None, [], 0
""",
    """
class MyEngine:
    def __init__(self, num_blocks, block_size, max_running):
        self.block_size = block_size
        self.scheduler = MyScheduler(num_blocks, block_size, max_running)
        self.cache = MyPrefixCache(num_blocks)
        self.tokens, self.hits, self.tables, self.stored = {}, {}, {}, {}

    def add(self, name, prompt, output):
        self.scheduler.add(name, len(prompt), output)
        self.tokens[name] = list(prompt)

    def blocks(self, name):
        return [*self.hits[name], *self.tables[name].blocks]

    def schedule(self):
        names = self.scheduler.step()
        while gone := next((n for n in self.tables if n not in names), None):
            self.cache.free(self.blocks(gone)[::-1])
            self.tables.pop(gone), self.hits.pop(gone), self.stored.pop(gone)
        for name in names:
            if name in self.tables:
                continue
            text = self.tokens[name][:]
            last = text.pop()
            self.hits[name] = hits = self.cache.lookup(my_block_hashes(text, self.block_size))
            self.cache.share(hits)
            table = self.tables[name] = MyBlockTable(self.cache, self.block_size)
            self.stored[name] = self.block_size * len(hits)
            table.append(len(text) + 1 - self.stored[name])
        plan = []
        for name in names:
            text, start = self.tokens[name], self.stored[name]
            if len(text) > len(self.hits[name]) * self.block_size + self.tables[name].num_tokens:
                self.tables[name].append(1)
            plan.append((name, text[start:], start, self.blocks(name)))
        return plan

    def update(self, sampled):
        for name, token in sampled.items():
            text = self.tokens[name]
            full = len(text) // self.block_size
            hashes = my_block_hashes(text, self.block_size)
            assert len(hashes) == full
            [self.cache.publish(b, h) for b, h in zip(self.blocks(name)[:full], hashes)]
            self.stored[name] = len(text)
            text += [token]
        for name in set(self.tables) - set(self.scheduler.running):
            self.cache.free(self.blocks(name))
            for kept in (self.tables, self.hits, self.stored):
                del kept[name]
""",
]
RIGHT["engine_batch"] = [
    """
def my_batch(plan, block_size):
    rows = []
    for name, new, start, blocks in plan:
        for i in range(len(new)):
            p = start + i
            block, offset = divmod(p, block_size)
            rows.append((new[i], p, blocks[block] * block_size + offset, blocks[:], p + 1))
    width = max(len(row[3]) for row in rows)
    for row in rows:
        while len(row[3]) < width:
            row[3].append(0)
    return [[row[i] for row in rows] for i in range(5)]
""",
    """
from itertools import zip_longest

def my_batch(plan, block_size):
    columns = list(zip_longest(*(blocks for *_, blocks in plan), fillvalue=0))
    tables = list(map(list, zip(*columns)))
    places = [(r, p) for r, (_, new, start, _) in enumerate(plan) for p in range(start, start + len(new))]
    ids = [token for _, new, _, _ in plan for token in new]
    slots = [tables[r][p // block_size] * block_size + p % block_size for r, p in places]
    return ids, [p for _, p in places], slots, [tables[r] for r, _ in places], [p + 1 for _, p in places]
""",
    """
import torch

def my_batch(plan, block_size):
    tables = torch.nn.utils.rnn.pad_sequence([torch.tensor(e[3]) for e in plan], batch_first=True)
    counts = torch.tensor([len(e[1]) for e in plan])
    owner = torch.repeat_interleave(torch.arange(len(plan)), counts)
    positions = torch.cat([torch.arange(e[2], e[2] + len(e[1])) for e in plan])
    tokens = torch.cat([torch.tensor(e[1]) for e in plan])
    slots = tables[owner, positions // block_size] * block_size + positions % block_size
    return tokens, positions, slots, tables[owner], positions + 1
""",
]

RIGHT["step_cost"] = [
    """
import statistics

def my_step_cost(measured):
    try:
        line = statistics.linear_regression(*zip(*measured, strict=True))
    except (TypeError, statistics.StatisticsError):
        raise ValueError("no line") from None
    return [line.intercept, line.slope]
""",
    """
def my_step_cost(measured):
    n = len(measured)
    x, y, xx, xy = (sum(f(a, b) for a, b in measured) for f in (
        lambda a, b: a, lambda a, b: b, lambda a, b: a * a, lambda a, b: a * b))
    d = n * xx - x * x
    if not d:
        raise ValueError(measured)
    k = (n * xy - x * y) / d
    return y / n - k * x / n, k
""",
]

RIGHT["first_token"] = [
    """
def my_ttft(prompts, decoding, budget, fixed, per_token):
    ms, i, done = 0.0, 0, 0
    while i < len(prompts):
        used = decoding
        if used >= budget:
            return float("inf")
        joined = 0
        while used < budget and i < len(prompts):
            used += 1
            done += 1
            if done == prompts[i]:
                i, done, joined = i + 1, 0, joined + 1
        ms += fixed
        ms += per_token * used
        decoding += joined
    return ms
""",
    """
from collections import deque

def my_ttft(prompts, decoding, budget, fixed, per_token):
    queue, steps = deque(prompts), []
    while queue:
        room = max(budget - decoding, 0)
        if not room:
            return math.inf
        before, ended = decoding, 0
        while queue and room >= queue[0]:
            room -= queue.popleft()
            ended += 1
        if queue:
            queue[0] -= room
            room = 0
        steps.append(budget - room)
        decoding = before + ended
    return sum(fixed + per_token * n for n in steps)
""",
]
