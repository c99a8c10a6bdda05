"""A conversation that computes only what is new in each turn.

Each turn's prompt begins with everything said before, so its blocks are found in the prefix cache. For that
the token ids must be the same as last time, and text does not guarantee it: what the model generated as two
tokens may be read back as one. So a chat keeps the ids it has sent and received and encodes only the text
behind them.
"""

from __future__ import annotations

from minipaged.engine.llm import LLM
from minipaged.engine.outputs import CompletionOutput, RequestOutput
from minipaged.engine.sampling_params import SamplingParams

DEFAULT_PARAMS = SamplingParams(temperature=0, max_tokens=256)


class Chat:
    """One conversation with a model that has a chat template.

    chat = Chat(llm, system="You answer in one word.")
    print(chat.send("What is the capital of Norway?").outputs[0].text)

    Attributes:
        messages: the conversation so far, [{"role": "user", "content": "…"}, …].
    """

    def __init__(self, llm: LLM, system: str | None = None) -> None:
        self.llm = llm
        self.messages = [] if system is None else [{"role": "system", "content": system}]
        self._tokenizer = llm.get_tokenizer()
        self._text, self._token_ids = "", list[int]()  # sent and received so far; they belong together

    def send(self, text: str, sampling_params: SamplingParams | None = None) -> RequestOutput:
        """Say `text`, wait for the answer and add both to the conversation.

        The output's `num_cached_tokens` says how many tokens of its prompt were not computed again. Without
        sampling_params: greedy, up to 256 tokens.

        Raises ValueError when the conversation has grown beyond `max_model_len`, TypeError for what is no
        text; nothing has changed then.
        """
        params = sampling_params or DEFAULT_PARAMS
        if not isinstance(text, str) or not isinstance(params, SamplingParams):
            raise TypeError(f"a chat sends text with SamplingParams, got {text!r} with {params!r}")
        if params.n != 1:
            raise ValueError(f"a chat goes on from one answer, n is {params.n}")
        messages = [*self.messages, {"role": "user", "content": text}]
        rendered = self._tokenizer.apply_chat_template(messages)
        token_ids = self._encode(rendered)
        if len(token_ids) >= self.llm.max_model_len:
            raise ValueError(
                f"with this message the conversation has {len(token_ids)} tokens, "
                f"max_model_len is {self.llm.max_model_len}: start a new one"
            )
        (output,) = self.llm.generate({"prompt_token_ids": token_ids}, params, use_tqdm=False)
        reply = output.outputs[0]
        self.messages = [*messages, {"role": "assistant", "content": reply.text}]
        kept = self._ids_of_text(reply)
        self._token_ids = token_ids + kept
        self._text = rendered + (reply.text if kept else "")
        return output

    def _encode(self, rendered: str) -> list[int]:
        """Token ids of the rendered conversation, the known ones as they were."""
        if rendered.startswith(self._text):
            return self._token_ids + self._tokenizer.encode(rendered[len(self._text) :])
        return self._tokenizer.encode(rendered)  # a template that rewrites earlier turns

    def _ids_of_text(self, reply: CompletionOutput) -> list[int]:
        """The reply's token ids, less an ending token, if they stand for just its text; or none."""
        for token_ids in (list(reply.token_ids), list(reply.token_ids[:-1])):
            if self._tokenizer.decode(token_ids, skip_special_tokens=False) == reply.text:
                return token_ids
        return []
