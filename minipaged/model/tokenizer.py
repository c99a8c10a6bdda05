"""Text to token ids and back, and chat messages to text."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import tokenizers
from tokenizers.decoders import ByteLevel

from minipaged.model.chat_template import ChatTemplate
from minipaged.model.errors import is_panic

T = TypeVar("T")
# Expressions in a tokenizer.json come from strangers, and `(a+)+$` takes exponential time.
SECONDS, SLOWEST = 10.0, 200_000  # for a text: so long, and a second more for so many characters
# Texts come one at a time, and one that hangs must not hold a thread of the library's pool.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _bytes_of_symbols() -> dict[str, int]:
    """GPT-2's alphabet: the character that stands for each byte in a byte-level vocabulary, and its byte.

    Printable bytes stand for themselves; the others, in order, are written as the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    symbols = {chr(byte): byte for byte in printable}
    return symbols | {chr(0x100 + index): byte for index, byte in enumerate(hidden)}


BYTES_OF_SYMBOLS = _bytes_of_symbols()


def _in_time(seconds: float, work: Callable[[], T]) -> T:
    """The result of `work`; ValueError when it takes longer, or when the library gives up.

    What takes longer is left to itself, in a thread that does not keep the process alive.
    """
    done: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            done.put((work(), None))
        except BaseException as error:
            done.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    try:
        value, error = done.get(timeout=seconds)
    except queue.Empty:
        raise ValueError(f"the tokenizer could not cut this text within {seconds:.0f} s") from None
    with _as_value_error():
        if error is not None:
            raise error
    return cast("T", value)


@contextmanager
def _as_value_error() -> Iterator[None]:
    """A regular expression that explodes ends in a panic of the library, which is no `Exception`."""
    try:
        yield
    except BaseException as error:
        if is_panic(error):
            raise ValueError(f"the tokenizer gave up on this text: {error}") from None
        raise


class Tokenizer:
    """A tokenizer of the `tokenizers` library with what serving needs around it.

    Special tokens written in a text are read as special tokens, as in transformers and vLLM: a rendered chat
    template is a text, and its markers must come out as such. The other side of it is that a user who writes
    `<|im_end|>` in a message ends that message. Whoever serves strangers takes `special_tokens` out of their
    text first.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_token_ids: Sequence[int] = (),
        template_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
        texts: Mapping[int, str] | None = None,
    ) -> None:
        """Wrap `backend`.

        template_tokens: names for the template (`bos_token`, ...) and their text.
        texts: of a byte-level vocabulary the tokens that stand for a text as it is, and not for the bytes of
            its letters: "café" added to a vocabulary is five bytes, not four.
        """
        backend.no_truncation()  # a tokenizer file may carry its trainer's settings
        backend.no_padding()
        self._backend = backend
        self.eos_token_ids = tuple(eos_token_ids)
        self._template = None if chat_template is None else ChatTemplate(chat_template, template_tokens or {})
        self._is_byte_level = isinstance(backend.decoder, ByteLevel)
        self._bytes = {id: text.encode() for id, text in (texts or {}).items()}
        added = backend.get_added_tokens_decoder()
        self.special_tokens = {token.content: id for id, token in added.items() if token.special}
        self.special_token_ids = frozenset(self.special_tokens.values())

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Token ids of `text`; `add_special_tokens` puts those before and after it that the model expects.

        Leave it off for a rendered chat template, which has them already. Raises ValueError for a str that is
        not text (a lone surrogate) and for one that the vocabulary's own expressions cannot cut in time,
        TypeError for anything else than a str.
        """
        if not isinstance(text, str):
            raise TypeError(f"text is of type {type(text).__name__}, a string is needed")
        text.encode()  # the library's own error would not say which character is at fault
        seconds = SECONDS + len(text) / SLOWEST
        # A batch of one: only then does the library let other threads run meanwhile.
        found = _in_time(
            seconds, lambda: self._backend.encode_batch([text], add_special_tokens=add_special_tokens)
        )
        return found[0].ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; bytes that form no character give U+FFFD, unknown ids nothing."""
        if not self._is_byte_level:
            with _as_value_error():
                return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        skipped = self.special_token_ids if skip_special_tokens else ()
        pieces = [self.token_bytes(id) or b"" for id in token_ids if id not in skipped]
        return b"".join(pieces).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes | None:
        """The bytes a token stands for: b"" beyond the vocabulary, None if that is not byte-level."""
        if not self._is_byte_level:
            return None
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._find_bytes(token_id)
        return found

    def _find_bytes(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id) or ""
        if all(symbol in BYTES_OF_SYMBOLS for symbol in token):
            return bytes(BYTES_OF_SYMBOLS[symbol] for symbol in token)
        return token.encode()  # an added token, written in plain text

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> str:
        """The prompt for `messages` ({"role": ..., "content": ...} each), ready for `encode`.

        Raises ValueError if the model has no template, or if the template refuses the messages.
        """
        if self._template is None:
            raise ValueError("this model has no chat template: pass plain text or token ids instead")
        return self._template.render(messages, add_generation_prompt=add_generation_prompt)
