"""A tiny model that can be talked to."""

from minipaged.checkpoints.loading import LoadedModel
from minipaged.engine.llm import LLM
from minipaged.model.tiny import TINY, random_llama
from tests.engine.fake_tokenizers import ByteTokenizer


class ChatTokenizer(ByteTokenizer):
    """One token per byte, but "ab" reads back as one token: text does not keep the ids that a model chose."""

    def __init__(self, *, trims: bool = False):
        super().__init__(["ab"])
        self.trims = trims

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        parts = [list(part.encode()) for part in text.split("ab")]
        return parts[0] + [token for part in parts[1:] for token in (257, *part)]

    def apply_chat_template(self, messages, add_generation_prompt=True) -> str:
        lines = [f"{m['role']}: {m['content'].strip() if self.trims else m['content']}\n" for m in messages]
        return "".join(lines) + ("assistant: " if add_generation_prompt else "")


def make_llm(**settings) -> LLM:
    settings = {"block_size": 4, "num_blocks": 200, "max_model_len": 256} | settings
    return LLM(LoadedModel(random_llama(seed=3), ChatTokenizer(), TINY, "tiny"), **settings)
