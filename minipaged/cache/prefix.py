"""Block hashes: the key under which a full block's contents can be found again.

Keys and values of a token depend on every token before it, so a block's hash covers its own tokens and the
hash of the block before it (PagedAttention paper, section 4.4, "shared prefix"; the chain is vLLM's automatic
prefix caching). It is sha256: two different prefixes do not get the same hash, by chance or on purpose.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

ExtraKey = tuple[str, str]  # (kind, value), such as ("salt", "tenant-7")


def _field(tag: bytes, payload: bytes) -> bytes:
    """Tag and length first, so that no two different lists of fields give the same bytes."""
    return tag + len(payload).to_bytes(8, "little") + payload


def hash_block(parent: bytes | None, token_ids: Sequence[int], extra: Sequence[ExtraKey] = ()) -> bytes:
    """32-byte hash of a full block with these tokens, after the block with hash `parent` (None: no block).

    `extra` separates what must not be shared although the tokens are equal: pairs of a kind and a value.
    """
    digest = sha256(b"root" if parent is None else _field(b"P", parent))
    digest.update(_field(b"T", array("q", token_ids).tobytes()))
    for kind, value in extra:
        digest.update(_field(b"K", kind.encode()) + _field(b"V", value.encode()))
    return digest.digest()


def hash_blocks(
    token_ids: Sequence[int], block_size: int, *, salt: str | None = None, known: Sequence[bytes] = ()
) -> list[bytes]:
    """Hashes of all full blocks of `token_ids`, in order. A partly filled last block has none.

    `known` are the hashes of the leading blocks, from an earlier call. `salt` goes into the first block only;
    the chain carries it to the others.
    """
    hashes = list(known)
    for start in range(len(hashes) * block_size, len(token_ids) - block_size + 1, block_size):
        extra: tuple[ExtraKey, ...] = (("salt", salt),) if start == 0 and salt is not None else ()
        parent = hashes[-1] if hashes else None
        hashes.append(hash_block(parent, token_ids[start : start + block_size], extra))
    return hashes


def usable_hits(num_tokens: int, block_size: int) -> int:
    """Most blocks that a sequence of `num_tokens` tokens may take from the cache.

    At least one token is left to compute: its logits choose the next token.
    """
    return max(0, num_tokens - 1) // block_size


@dataclass
class PrefixStats:
    """Tokens asked for and tokens found, counted once for each admitted request."""

    queries: int = 0
    hits: int = 0

    def record(self, num_tokens: int, num_hit_tokens: int) -> None:
        if not 0 <= num_hit_tokens <= num_tokens:
            raise ValueError(f"{num_hit_tokens} tokens hit out of {num_tokens}")
        self.queries += num_tokens
        self.hits += num_hit_tokens

    @property
    def hit_rate(self) -> float:
        """Share of the tokens asked for that were found, 0 … 1."""
        return self.hits / self.queries if self.queries else 0.0
