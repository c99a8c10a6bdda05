"""A conversation that computes only what is new in each turn.

Each turn's prompt begins with everything said before, so its blocks are found in the prefix cache. For that
the token ids must be the same as last time, and text does not guarantee it: what the model generated as two
tokens may be read back as one. So a chat keeps the ids it has sent and received and encodes only the text
after them.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import NamedTuple

from minipaged.engine.llm import LLM
from minipaged.engine.output_processor import CompletionOutput, RequestOutput
from minipaged.engine.text import text_after
from minipaged.sampling_params import RequestOutputKind, SamplingParams

DEFAULT_PARAMS = SamplingParams(temperature=0, max_tokens=256)


class Turn(NamedTuple):
    """A message of the user before it is answered: the conversation with it, as messages, text and ids."""

    messages: list[dict[str, str]]
    rendered: str
    token_ids: list[int]
    params: SamplingParams


class ConversationFull(ValueError):
    """With the next message the conversation would be longer than `max_model_len`."""


class Chat:
    """One conversation with a model that has a chat template.

    chat = Chat(llm, system="You answer in one word.")
    print(chat.send("What is the capital of Norway?").outputs[0].text)

    Attributes:
        messages: the conversation so far, [{"role": "user", "content": "…"}, …].
        system: the instructions that it begins with, if any.
    """

    def __init__(self, llm: LLM, system: str | None = None) -> None:
        self.llm = llm
        self._tokenizer = llm.get_tokenizer()
        self.start_anew(system)

    def start_anew(self, system: str | None = None) -> None:
        """Forget what was said. What of it is still in the prefix cache stays there."""
        self.system = system
        self.messages = [] if system is None else [{"role": "system", "content": system}]
        self._text, self._token_ids = "", list[int]()  # sent and received so far; they belong together

    def num_unread_tokens(self, text: str) -> int:
        """Tokens that `text` would add to those sent and received so far. Raises as `send` does."""
        return len(self._next_turn(text, None).token_ids) - len(self._token_ids)

    def send(self, text: str, sampling_params: SamplingParams | None = None) -> RequestOutput:
        """Say `text`, wait for the answer and add both to the conversation.

        The output's `num_cached_tokens` says how many tokens of its prompt were not computed again. Without
        sampling_params: greedy, up to 256 tokens.

        Raises ConversationFull when the conversation has grown beyond `max_model_len`, ValueError when this
        message alone does, TypeError for what is no text; nothing has changed then.
        """
        turn = self._next_turn(text, sampling_params)
        (output,) = self.llm.generate({"prompt_token_ids": turn.token_ids}, turn.params, use_tqdm=False)
        self._keep(turn, output.outputs[0])
        return output

    def stream(
        self, text: str, sampling_params: SamplingParams | None = None
    ) -> Generator[RequestOutput, None, None]:
        """`send`, and yield the output as it grows.

        Closed before its end, or interrupted, it keeps what was said so far as the answer; without a single
        token of one, the conversation stays as it was.
        """
        turn = self._next_turn(text, sampling_params)
        if turn.params.output_kind is RequestOutputKind.DELTA:
            raise ValueError("a chat's stream holds everything so far, output_kind is DELTA")
        return self._stream(turn)

    def _stream(self, turn: Turn) -> Generator[RequestOutput, None, None]:
        reply = None
        try:
            for output in self.llm.stream({"prompt_token_ids": turn.token_ids}, turn.params):
                reply = output.outputs[0]
                yield output
        finally:
            if reply is not None:
                self._keep(turn, reply)

    def _next_turn(self, text: str, sampling_params: SamplingParams | None) -> Turn:
        """What the model will read when the user says `text`; raises as `send` does."""
        params = sampling_params or DEFAULT_PARAMS
        if not isinstance(text, str) or not isinstance(params, SamplingParams):
            raise TypeError(f"a chat sends text with SamplingParams, got {text!r} with {params!r}")
        if params.n != 1:
            raise ValueError(f"a chat goes on from one answer, n is {params.n}")
        messages = [*self.messages, {"role": "user", "content": text}]
        rendered = self._tokenizer.apply_chat_template(messages)
        token_ids = self._encode(rendered)
        if len(token_ids) >= self.llm.max_model_len:
            way_out = "start a new one" if self._token_ids else "shorten it"
            error = ConversationFull if self._token_ids else ValueError
            raise error(
                f"with this message the conversation has {len(token_ids)} tokens, "
                f"max_model_len is {self.llm.max_model_len}: {way_out}"
            )
        return Turn(messages, rendered, token_ids, params)

    def _keep(self, turn: Turn, reply: CompletionOutput) -> None:
        """The answer belongs to the conversation from now on, and its ids to what was sent and received."""
        self.messages = [*turn.messages, {"role": "assistant", "content": reply.text}]
        kept = self._ids_of_text(turn.token_ids, reply)
        self._token_ids = turn.token_ids + kept
        self._text = turn.rendered + (reply.text if kept else "")

    def _encode(self, rendered: str) -> list[int]:
        """Token ids of the rendered conversation, the known ones as they were.

        Only a byte-level vocabulary reads a part of a text as it reads the whole: others add a space.
        """
        if rendered.startswith(self._text) and self._tokenizer.token_bytes(0) is not None:
            return self._token_ids + self._tokenizer.encode(rendered[len(self._text) :])
        return self._tokenizer.encode(rendered)  # a template that rewrites earlier turns

    def _ids_of_text(self, prompt: list[int], reply: CompletionOutput) -> list[int]:
        """The reply's token ids, less an ending token, if after `prompt` they add just its text; or none."""
        for token_ids in (list(reply.token_ids), list(reply.token_ids[:-1])):
            if text_after(self._tokenizer, prompt, token_ids) == reply.text:
                return token_ids
        return []
