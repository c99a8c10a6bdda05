"""When a sequence ends, and the text it has until then.

Rules, as in vLLM: an end-of-sequence or stop token ends the output, stays in `token_ids` and is left out of
the text; a stop string ends it as soon as the text holds it, wherever tokens border; neither counts before
`min_tokens`; whatever stops at the last allowed token is a "stop", not a "length".
"""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO

from minipaged.engine.detokenizer import Detokenizer, TextTokenizer, make_detokenizer
from minipaged.engine.sampling_params import SamplingParams


class OutputState:
    """Token ids, text and ending of one sequence.

    Text is decoded when somebody asks for it, or at every token where stop strings must be looked for. What a
    token costs does not depend on the length of the text.

    Attributes:
        token_ids: the output so far; the live list, to which its owner appends.
        finish_reason: None, "stop", "length", or what `finish` was given.
        stop_reason: the stop token id or the stop string; None for end-of-sequence and other endings.
    """

    __slots__ = (  # one object instead of two for each sequence: caches are cold after the model
        *("_cut", "_detokenizer", "_ends", "_keep_stop", "_length", "_longest_stop", "_max_tokens"),
        *(
            "_min_tokens",
            "_num_fed",
            "_num_given",
            "_num_searched",
            "_source",
            "_stop_ids",
            "_stop_strings",
            "_text",
        ),
        *("finish_reason", "stop_reason", "token_ids"),
    )

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
        self._length = 0  # characters of it
        self._cut: int | None = None  # where a stop string ends the text
        self._num_given = 0  # characters that delta() gave
        self._num_searched = 0  # characters in which stop strings were looked for
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

    def check_end(self) -> bool:
        """Whether the newest of `token_ids` ends the sequence. To be asked of each token, once or again."""
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
        return self._read(0, self._settle())

    def delta(self) -> str:
        """What `text` has gained since the last call."""
        start = self._num_given
        if start == self._length and self.finish_reason is None and not self._stop_strings:
            piece = self._decode()  # the usual case: all that was there is given, and nothing is held
            self._num_given = self._length
            return piece
        self._num_given = self._settle()
        return self._read(start, self._num_given)

    def _settle(self) -> int:
        """Decode what came; the number of characters that stay as they are."""
        self._decode()
        if self.finish_reason is None:
            return self._length - self._num_held()
        return self._length if self._cut is None else self._cut

    def _read(self, start: int, stop: int) -> str:
        self._text.seek(start)
        return self._text.read(stop - start)

    def _decode(self) -> str:
        """Feed the detokenizer what it has not seen; a token that ended the output only if it shall show.

        Returns the text that came with it. Each part is written before more is asked for: when a tokenizer
        raises then, nothing of it is lost, or comes twice.
        """
        if self._source is None or self._num_fed > len(self.token_ids):
            return ""
        if self._detokenizer is None:
            self._detokenizer = make_detokenizer(*self._source)
        last_is_end = self.finish_reason == "stop" and self._cut is None
        stop = len(self.token_ids) - (last_is_end and not self._keep_stop)
        piece = ""
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
            piece += rest
        return piece

    def _look_for_stop_string(self) -> None:
        """Of the stop strings in the text the one that ends first, and of those the longest: what reading
        character by character would meet, so that it does not matter how tokens cut the text."""
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
        """Length of the longest end of the text that some stop string begins with."""
        if self._keep_stop or not self._stop_strings:
            return 0
        text = self._read(max(0, self._length - self._longest_stop + 1), self._length)
        for start in range(len(text)):
            if any(string.startswith(text[start:]) for string in self._stop_strings):
                return len(text) - start
        return 0
