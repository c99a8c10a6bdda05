"""Token ids to text, piece by piece, never half a character.

A character may span tokens: an emoji is four bytes, and a byte-level vocabulary cuts them anywhere. So a
decoder per sequence keeps the bytes of a character under way until it is whole. All pieces joined are exactly
the text of all the ids decoded at once. (One exception: with a byte-fallback vocabulary a byte that belongs
to no character spoils whole characters before it as well; those that are out by then stay.)
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"  # what bytes that are no character decode to


class TextTokenizer(Protocol):
    """What is needed of a tokenizer here.

    `token_bytes` gives the bytes a token stands for (b"" for an id beyond the vocabulary), or None where a
    token's text depends on its neighbours, as with SentencePiece's leading spaces.
    """

    @property
    def special_token_ids(self) -> Collection[int]: ...

    def token_bytes(self, token_id: int, /) -> bytes | None: ...

    def decode(self, token_ids: Sequence[int], /, skip_special_tokens: bool = True) -> str: ...


class Detokenizer(Protocol):
    """The text of one sequence as its tokens arrive."""

    def feed(self, *token_ids: int) -> str:
        """Text that these tokens complete; "" while a character is under way."""

    def flush(self) -> str:
        """Text of what is still held, once no more tokens come: a cut character gives U+FFFD."""


def make_detokenizer(tokenizer: TextTokenizer, skip_special_tokens: bool = True) -> Detokenizer:
    """The one that suits the vocabulary."""
    skipped = frozenset(tokenizer.special_token_ids if skip_special_tokens else ())
    by_bytes = tokenizer.token_bytes(0) is not None
    return ByteDetokenizer(tokenizer, skipped) if by_bytes else WindowDetokenizer(tokenizer, skipped)


class ByteDetokenizer:
    """Byte-level vocabularies: join the bytes, decode UTF-8 as far as characters are whole.

    Bytes that can belong to no character give U+FFFD at once; a real U+FFFD is three bytes like any other.
    """

    __slots__ = ("_held", "_skipped", "_tokenizer")

    def __init__(self, tokenizer: TextTokenizer, skipped: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._held = b""  # of a character under way

    def feed(self, *token_ids: int) -> str:
        pieces = [self._held]
        for token_id in token_ids:
            if token_id not in self._skipped:
                pieces.append(self._tokenizer.token_bytes(token_id) or b"")
        data = b"".join(pieces)
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._held = data[used:]
        return text

    def flush(self) -> str:
        held, self._held = self._held, b""
        return held.decode(errors="replace")


class WindowDetokenizer:
    """Other vocabularies: decode a window of recent tokens again and emit what is new.

    The window starts one piece before the new tokens, so that they are decoded in their context. Text that
    ends in U+FFFD may be a character under way and is held back. A character has at most three bytes before
    its last: beyond three tokens only three U+FFFD are held, so that invalid bytes do not block the text.
    """

    HELD = 3

    def __init__(self, tokenizer: TextTokenizer, skipped: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._window: list[int] = []
        self._context = 0  # tokens of the window whose text is out
        self._shown = 0  # characters of the window's text that are out

    def feed(self, *token_ids: int) -> str:
        self._window += [token_id for token_id in token_ids if token_id not in self._skipped]
        text = self._text(self._window)
        end = len(text)
        if text.endswith(REPLACEMENT):
            pending = len(self._window) - self._context
            end = self._shown if pending <= self.HELD else max(self._shown, len(text) - self.HELD)
        piece = text[self._shown : end]
        self._shown = end
        if piece and end == len(text):
            del self._window[: self._context]
            self._context = len(self._window)
            self._shown = len(self._text(self._window))
        return piece

    def flush(self) -> str:
        text = self._text(self._window)
        piece = text[self._shown :]
        self._shown = len(text)
        return piece

    def _text(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)
