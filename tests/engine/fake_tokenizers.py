"""Tokenizers small enough to know by heart."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby


class ByteTokenizer:
    """One token per byte, id = byte; 256 is end-of-sequence and special; `words` follow from 257 on.
    Ids beyond have no text, as in real tokenizers.

    `token_bytes` can be switched off, which makes it a tokenizer that can only decode whole lists.
    """

    eos_token_id = 256
    special_token_ids = frozenset({256})

    def __init__(self, words: Sequence[str] = (), *, has_bytes: bool = True):
        self.pieces = [bytes([value]) for value in range(256)] + [b"<eos>"] + [w.encode() for w in words]
        self.has_bytes = has_bytes
        self.vocab_size = len(self.pieces)

    def token_bytes(self, token_id: int) -> bytes | None:
        if not self.has_bytes:
            return None
        return self.pieces[token_id] if token_id < self.vocab_size else b""

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        skipped = self.special_token_ids if skip_special_tokens else ()
        known = [t for t in token_ids if t not in skipped and t < self.vocab_size]
        return b"".join(self.pieces[t] for t in known).decode(errors="replace")


class PieceTokenizer(ByteTokenizer):
    """40 tokens: letters in pieces of one and two, and the two halves of é."""

    special_token_ids = frozenset({0})

    def __init__(self) -> None:
        super().__init__()
        pieces = [b"ab", b"b", b"a", b"\xc3", b"\xa9", b"c", b"ba"]
        self.pieces = [pieces[i % len(pieces)] for i in range(40)]
        self.vocab_size = 40


class MetaspaceTokenizer:
    """Words with SentencePiece's leading mark: the first of a decoded list loses its space."""

    special_token_ids: frozenset[int] = frozenset({0})

    def __init__(self, pieces: Sequence[str]):
        self.pieces = ["<s>", *pieces]
        self.vocab_size = len(self.pieces)

    def token_bytes(self, token_id: int) -> None:
        return None

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        skipped = self.special_token_ids if skip_special_tokens else ()
        text = "".join(self.pieces[t] for t in token_ids if t not in skipped).replace("▁", " ")
        return text.removeprefix(" ")


class ByteFallbackTokenizer:
    """One token per byte; neighbouring bytes that are not valid UTF-8 as a whole give one U+FFFD each.

    So do the <0x..> tokens of SentencePiece vocabularies.
    """

    special_token_ids: frozenset[int] = frozenset()

    def token_bytes(self, token_id: int) -> None:
        return None

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        text = ""
        for is_ascii, run in groupby(token_ids, lambda token: token < 128):
            data = bytes(run)
            try:
                text += data.decode()
            except UnicodeDecodeError:
                text += data.decode() if is_ascii else "\ufffd" * len(data)
        return text
