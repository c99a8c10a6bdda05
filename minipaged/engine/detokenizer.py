"""Token ids to text, piece by piece, never half a character.

A character may span tokens: an emoji is four bytes, and a byte-level vocabulary cuts them anywhere. So a
decoder per sequence keeps the bytes of a character under way until it is whole. And a token's text depends on
what came before it: SentencePiece drops a space at the very beginning, but not after a prompt. So a decoder
begins with the end of the prompt. The prompt's text and all pieces joined are exactly the text of all the ids
decoded at once; a character that the prompt leaves cut belongs to the pieces. (One exception: with a
byte-fallback vocabulary a byte that belongs to no character spoils whole characters before it as well; those
that are out by then stay.)
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from typing import Protocol

CONTEXT = 8  # tokens of the prompt that a decoder begins with
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

    def preview(self, token_id: int, /) -> str:
        """What `feed` would give for this token, which is not fed."""


def make_detokenizer(
    tokenizer: TextTokenizer, skip_special_tokens: bool = True, prompt: Sequence[int] = ()
) -> Detokenizer:
    """The one that suits the vocabulary, for the tokens that follow `prompt`."""
    skipped = frozenset(tokenizer.special_token_ids if skip_special_tokens else ())
    by_bytes = tokenizer.token_bytes(0) is not None
    kind = ByteDetokenizer if by_bytes else WindowDetokenizer
    return kind(tokenizer, skipped, last_of(prompt, skipped))


def last_of(token_ids: Sequence[int], skipped: Collection[int]) -> list[int]:
    """The last few of `token_ids` that have a text: enough to hold a cut character and what is before it."""
    found: list[int] = []
    for token_id in reversed(token_ids):
        if len(found) == CONTEXT:
            break
        if token_id not in skipped:
            found.append(token_id)
    return found[::-1]


def text_after(tokenizer: TextTokenizer, prompt: Sequence[int], token_ids: Sequence[int]) -> str:
    """What `token_ids` add to the text of `prompt`, special tokens shown."""
    detokenizer = make_detokenizer(tokenizer, False, prompt)
    return detokenizer.feed(*token_ids) + detokenizer.flush()


class ByteDetokenizer:
    """Byte-level vocabularies: join the bytes, decode UTF-8 as far as characters are whole.

    Bytes that can belong to no character give U+FFFD at once; a real U+FFFD is three bytes like any other.
    """

    __slots__ = ("_held", "_skipped", "_tokenizer")

    def __init__(
        self, tokenizer: TextTokenizer, skipped: Collection[int], context: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._held = b""  # of a character under way
        self.feed(*context)

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

    def preview(self, token_id: int) -> str:
        held = self._held
        try:
            return self.feed(token_id)
        finally:
            self._held = held


class WindowDetokenizer:
    """Other vocabularies: decode a window of recent tokens again and emit what is new.

    The window starts one piece before the new tokens, or with the end of the prompt, so that they are decoded
    in their context. Text that ends in U+FFFD may be a character under way and is held back.
    A character has at most three bytes before
    its last: beyond three tokens only three U+FFFD are held, so that invalid bytes do not block the text.
    """

    HELD = 3

    def __init__(
        self, tokenizer: TextTokenizer, skipped: Collection[int], context: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        # Tokens of the window whose text is out, and the length of that: without a cut character at the end.
        self._window, self._context = list(context), len(context)
        text = self._text(self._window)
        while text.endswith(REPLACEMENT) and 0 < self._context > len(context) - self.HELD:
            self._context -= 1
            text = self._text(self._window[: self._context])
        self._shown = len(text)

    def feed(self, *token_ids: int) -> str:
        window = self._window + [token_id for token_id in token_ids if token_id not in self._skipped]
        text = self._text(window)  # may raise: nothing has changed then
        end = len(text)
        if text.endswith(REPLACEMENT):
            pending = len(window) - self._context
            end = self._shown if pending <= self.HELD else max(self._shown, len(text) - self.HELD)
        piece, shown, context = text[self._shown : end], end, self._context
        if piece and end == len(text):
            window = window[context:]
            context, shown = len(window), len(self._text(window))
        self._window, self._shown, self._context = window, shown, context
        return piece

    def flush(self) -> str:
        text = self._text(self._window)
        piece = text[self._shown :]
        self._shown = len(text)
        return piece

    def preview(self, token_id: int) -> str:
        before = self._window, self._shown, self._context
        try:
            return self.feed(token_id)
        finally:
            self._window, self._shown, self._context = before

    def _text(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)
