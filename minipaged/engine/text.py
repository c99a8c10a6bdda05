"""The text of a sequence as its tokens arrive, and where it ends.

Token ids become text piece by piece, never half a character. A character may span tokens: an emoji is four
bytes, and a byte-level vocabulary cuts them anywhere. So a decoder per sequence keeps the bytes of an
incomplete character until it is whole. And the text of a token depends on what comes before it: SentencePiece
drops the space of the very first token, but not of the first after a prompt. So a decoder begins with the end
of the prompt, and the prompt's text and all pieces joined are exactly the text of all the ids decoded at
once; a character that the prompt leaves incomplete belongs to the pieces. (One exception: with a
byte-fallback vocabulary a byte that belongs to no character spoils whole characters before it as well; those
that have been given out by then stay.)

When it ends, as in vLLM: an end-of-sequence or stop token ends the output, stays in `token_ids` and is left
out of the text; a stop string ends it as soon as the text holds it, wherever tokens border; neither counts
before `min_tokens`; whatever stops at the last allowed token is a "stop", not a "length".
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from io import StringIO
from typing import Protocol

from minipaged.sampling_params import SamplingParams

CONTEXT = 8  # tokens of the prompt that a decoder begins with
REPLACEMENT = "\ufffd"  # bytes that are no character decode to it


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

    The window starts one piece before the new tokens (at first with the end of the prompt), so that they are
    decoded in their context. Text that ends in U+FFFD may be an incomplete character and is held back. A
    character has at most three bytes before its last: beyond three tokens only three U+FFFD are held, so that
    invalid bytes do not block the text.
    """

    HELD = 3

    def __init__(
        self, tokenizer: TextTokenizer, skipped: Collection[int], context: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        # Tokens of the window, how many of them have been given out, and the characters of those.
        self._window, self._context = list(context), len(context)
        text = self._text(self._window)
        while text.endswith(REPLACEMENT) and 0 < self._context > len(context) - self.HELD:
            self._context -= 1  # a character that the prompt leaves incomplete is still to come
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


class OutputState:
    """Token ids, text and ending of one sequence.

    Text is decoded when it is asked for, or at every token if there are stop strings to look for. The cost of
    a token does not depend on the length of the text.

    Attributes:
        token_ids: the output so far; the live list, to which its owner appends.
        finish_reason: None, "stop", "length", or what `finish` was given.
        stop_reason: the stop token id or the stop string; None for end-of-sequence and other endings.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer | None,
        params: SamplingParams,
        eos_token_ids: Sequence[int],
        max_tokens: int,
        prompt: Sequence[int] = (),
    ):
        """
        Args:
            tokenizer: None gives no text.
            prompt: the token ids before it, which its text is a continuation of.
            max_tokens: tokens this sequence may have, `params.max_tokens` and the context limit both heeded.
        """
        if params.stop_strings and tokenizer is None:
            raise ValueError(f"stop strings need a tokenizer, the model has none: stop={params.stop_strings}")
        self._detokenizer: Detokenizer | None = None  # made when the first text is asked for
        self._source: tuple[TextTokenizer, bool, Sequence[int]] | None = None
        self.namer: Detokenizer | None = None  # of the texts beside log-probabilities
        if tokenizer is not None and params.detokenize:
            self._source = tokenizer, params.skip_special_tokens, prompt
        self._stop_ids = frozenset(params.stop_token_ids or ())
        self._ends = self._stop_ids if params.ignore_eos else self._stop_ids.union(eos_token_ids)
        self._stop_strings = params.stop_strings
        self._longest_stop = max(map(len, self._stop_strings), default=0)
        self._keep_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._max_tokens = max_tokens
        self._num_fed = 0  # tokens the detokenizer has seen
        self._text = StringIO()  # grows, and is read in parts, without a copy of the whole
        self._length = 0  # characters in _text
        self._cut: int | None = None  # where a stop string ends the text
        self._num_given = 0  # characters that delta() gave
        self._num_searched = 0  # characters in which stop strings were looked for
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

    def check_end(self) -> bool:
        """Whether the newest of `token_ids` ends the sequence. Ask after each token; twice is harmless."""
        token_ids = self.token_ids
        token_id = token_ids[-1]
        if token_id in self._ends and len(token_ids) >= self._min_tokens:
            self.finish("stop", token_id if token_id in self._stop_ids else None)
        elif len(token_ids) >= self._max_tokens:
            self.finish("length")
        if self._stop_strings:
            self._look_for_stop_string()
        return self.finish_reason is not None

    def finish(self, reason: str, stop_reason: int | str | None = None) -> None:
        """End the sequence. A sequence that has ended keeps its first ending."""
        if self.finish_reason is None:
            self.finish_reason, self.stop_reason = reason, stop_reason

    @property
    def text(self) -> str:
        """Text that stays as it is: whole characters, and nothing that may become a stop string.

        After the end: all of it, a cut character as U+FFFD.
        """
        return self._read(0, self.settle())

    def delta(self) -> str:
        """What `text` has gained since the last call."""
        start, self._num_given = self._num_given, self.settle()
        return self._read(start, self._num_given)

    def settle(self) -> int:
        """Decode what came; the number of characters that stay as they are. Again, it changes nothing."""
        self._decode()
        if self.finish_reason is None:
            return self._length - self._num_held()
        return self._length if self._cut is None else self._cut

    def _read(self, start: int, stop: int) -> str:
        self._text.seek(start)
        return self._text.read(stop - start)

    def _decode(self) -> None:
        """Feed the detokenizer the tokens it has not seen and store their text.

        A token that ended the output is fed only if the caller wants to see it. Each part of the text is
        stored before the next is asked for: if the tokenizer raises then, no text is lost or given twice.
        """
        if self._source is None or self._num_fed > len(self.token_ids):
            return
        if self._detokenizer is None:
            self._detokenizer = make_detokenizer(*self._source)
        last_is_end = self.finish_reason == "stop" and self._cut is None
        stop = len(self.token_ids) - (last_is_end and not self._keep_stop)
        if self._num_fed < stop:
            piece = self._detokenizer.feed(*self.token_ids[self._num_fed : stop])
            self._num_fed = stop
            self._text.seek(self._length)
            self._text.write(piece)
            self._length += len(piece)
        if self.finish_reason is not None:
            rest = self._detokenizer.flush()
            self._num_fed = len(self.token_ids) + 1  # nothing can come after a flush
            self._text.seek(self._length)
            self._text.write(rest)
            self._length += len(rest)

    def _look_for_stop_string(self) -> None:
        """Find the stop string that ends first in the text; of several that end there the longest.

        That is what reading character by character would meet, so it does not matter how tokens cut the text.
        """
        self._decode()
        seen, found = self._num_searched, []
        if len(self.token_ids) > self._min_tokens:
            start = max(0, seen - self._longest_stop + 1)
            text = self._read(start, self._length)
            found = [
                (start + place + len(string), start + place, string)
                for string in self._stop_strings
                if (place := text.find(string, max(0, seen - start - len(string) + 1))) >= 0
            ]
        if found:
            end, begin, string = min(found)
            self._cut = end if self._keep_stop else begin
            self.finish_reason, self.stop_reason = "stop", string
        self._num_searched = self._length

    def _num_held(self) -> int:
        """Characters at the end of the text that may be the start of a stop string."""
        if self._keep_stop or not self._stop_strings:
            return 0
        text = self._read(max(0, self._length - self._longest_stop + 1), self._length)
        for start in range(len(text)):
            if any(string.startswith(text[start:]) for string in self._stop_strings):
                return len(text) - start
        return 0
