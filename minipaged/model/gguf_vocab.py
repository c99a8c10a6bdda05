"""Building a tokenizer from a GGUF file's vocabulary and merges (byte-level BPE: Radford et al. 2019)."""

from __future__ import annotations

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers.pre_tokenizers import PreTokenizer

from minipaged.model.gguf_file import GGUFFile
from minipaged.model.tokenizer import Tokenizer

# Values of tokenizer.ggml.token_type
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
# How Llama 3 cuts text before merging; the alternatives are tried in this order.
LLAMA3_PIECES = "|".join(
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",  # English contractions
        r"[^\r\n\p{L}\p{N}]?\p{L}+",  # a word with the sign or space before it
        r"\p{N}{1,3}",  # digits by threes
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",  # punctuation
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


def read_tokenizer(file: GGUFFile) -> Tokenizer | None:
    """The tokenizer in `file`, None if it holds none; ValueError for a kind we cannot rebuild."""
    kind = file.value("tokenizer.ggml.model")
    if kind is None:
        return None
    if kind != "gpt2":
        raise ValueError(
            f"tokenizer.ggml.model is {kind!r}, supported is 'gpt2' (byte-level BPE); "
            "a Hugging Face folder of this model brings its tokenizer.json"
        )
    tokens = _list(file, "tokens")
    backend = BackendTokenizer(_bpe(file, tokens))
    backend.pre_tokenizer = _pre_tokenizer(file.value("tokenizer.ggml.pre"))
    backend.decoder = decoders.ByteLevel()
    _mark_special_tokens(backend, tokens, _list(file, "token_type"))
    named = {name: _named_token(file, tokens, name) for name in ("bos", "eos", "unknown", "padding")}
    if file.value("tokenizer.ggml.add_bos_token", False):
        if named["bos"] is None:
            raise ValueError("tokenizer.ggml.add_bos_token is set, but bos_token_id is missing")
        backend.post_processor = processors.TemplateProcessing(
            single=[named["bos"], "$A"],
            special_tokens=[(named["bos"], file.value("tokenizer.ggml.bos_token_id"))],
        )
    short = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    return Tokenizer(
        backend,
        eos_token_ids=file.eos_token_ids(),
        template_tokens={short[name]: token for name, token in named.items() if token is not None},
        chat_template=file.value("tokenizer.chat_template"),
    )


def _list(file: GGUFFile, name: str) -> list:
    values = file.value(f"tokenizer.ggml.{name}")
    if not isinstance(values, list):
        raise ValueError(f"tokenizer.ggml.{name} is missing or not a list")
    return values


def _bpe(file: GGUFFile, tokens: list[str]) -> models.BPE:
    vocab = {token: id for id, token in enumerate(tokens)}
    if len(vocab) < len(tokens):
        raise ValueError(f"tokenizer.ggml.tokens has {len(tokens) - len(vocab)} tokens more than once")
    merges = [tuple(merge.split(" ")) for merge in _list(file, "merges")]
    if any(len(merge) != 2 for merge in merges):
        raise ValueError("tokenizer.ggml.merges holds an entry that is not two tokens with a space between")
    # Llama 3 takes a piece that is a token as it is, even where the merges would not lead to it.
    whole_pieces_first = file.value("tokenizer.ggml.pre") == "llama-bpe"
    return models.BPE(vocab, merges, ignore_merges=whole_pieces_first)


def _pre_tokenizer(name: str | None) -> PreTokenizer:
    """How text is cut into pieces before merging; merges never cross a cut."""
    if name in ("gpt-2", "gpt2"):
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name == "smollm":  # every digit alone, then as GPT-2
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    if name == "llama-bpe":
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(LLAMA3_PIECES), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    raise ValueError(f"tokenizer.ggml.pre is {name!r}, supported are 'gpt-2', 'smollm' and 'llama-bpe'")


def _mark_special_tokens(backend: BackendTokenizer, tokens: list[str], types: list[int]) -> None:
    if len(types) != len(tokens):
        raise ValueError(f"tokenizer.ggml has {len(tokens)} tokens but {len(types)} token types")
    for token, kind in zip(tokens, types, strict=True):
        if kind in (UNKNOWN, CONTROL):
            backend.add_special_tokens([AddedToken(token, normalized=False)])
        elif kind == USER_DEFINED:
            backend.add_tokens([AddedToken(token, normalized=False)])


def _named_token(file: GGUFFile, tokens: list[str], name: str) -> str | None:
    id = file.value(f"tokenizer.ggml.{name}_token_id")
    if id is None:
        return None
    if not 0 <= id < len(tokens):
        raise ValueError(f"tokenizer.ggml.{name}_token_id is {id}, the vocabulary has {len(tokens)} tokens")
    return tokens[id]
