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

RIGHT["engine_memory"] = [
    pool + "\n\n" + table for pool, table in zip(RIGHT["allocator"], RIGHT["block_table"], strict=True)
]
RIGHT["engine_kernel"] = RIGHT["decode_kernel"]
