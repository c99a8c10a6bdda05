"""`minipaged chat` with a tiny model, for a terminal: python -m tests.commands.tiny_chat.

A message with LONG in it is answered until somebody stops it, the others in nine tokens.
"""

import time
from contextlib import closing
from dataclasses import replace

from minipaged import SamplingParams
from minipaged.commands import chat
from minipaged.engine.chat import Chat
from tests.engine.fake_chat import make_llm

ANSWER = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)


class Talk(Chat):
    def stream(self, text, sampling_params=None):
        params = replace(ANSWER, max_tokens=450) if "LONG" in text else ANSWER
        with closing(super().stream(text, params)) as outputs:
            for output in outputs:
                time.sleep(0.02)  # a model that somebody can interrupt
                yield output


llm = make_llm(max_model_len=512)
# Only letters on the screen, whatever a random model says: the tests look for the prompt's ">".
llm.tokenizer.pieces = [piece if piece.isalpha() else b"~" for piece in llm.tokenizer.pieces]
chat.talk(Talk(llm), ANSWER)
