"""Building a tokenizer from a GGUF file's vocabulary and merges (byte-level BPE: Radford et al. 2019)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as BackendTokenizer

from minipaged.checkpoints.gguf_file import GGUFFile
from minipaged.model.tokenizer import Tokenizer

# Values of tokenizer.ggml.token_type
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
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


# Qwen 2's pattern is Llama 3's but for numbers, which it cuts into single digits.
QWEN2_PIECES = LLAMA3_PIECES.replace(r"\p{N}{1,3}", r"\p{N}")


@dataclass(frozen=True)
class PreTokenizer:
    """What a name in tokenizer.ggml.pre stands for, as llama.cpp has it (src/llama-vocab.cpp).

    Attributes:
        names: that mean the same.
        cuts: how text is cut into pieces before merging; merges never cross a cut.
        adds_bos: prompts begin with the beginning-of-sequence token, unless the file says otherwise.
        whole_pieces_first: a piece that is a token is taken as it is, even where no merges lead to it.
    """

    names: tuple[str, ...]
    cuts: pre_tokenizers.PreTokenizer
    adds_bos: bool = False
    whole_pieces_first: bool = False


def _by_pattern(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


GPT2_PIECES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
PRE_TOKENIZERS = (
    PreTokenizer(("gpt-2", "gpt2", "phi-2"), GPT2_PIECES),
    PreTokenizer(  # every digit alone, then as GPT-2
        ("smollm",),
        pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2_PIECES]),
    ),
    PreTokenizer(
        ("llama-bpe", "llama3", "llama-v3"),
        _by_pattern(LLAMA3_PIECES),
        adds_bos=True,
        whole_pieces_first=True,
    ),
    PreTokenizer(("qwen2", "deepseek-r1-qwen", "megrez"), _by_pattern(QWEN2_PIECES)),
)


def read_tokenizer(file: GGUFFile) -> Tokenizer | None:
    """The tokenizer in `file`, None if it holds none; ValueError for a kind we cannot rebuild."""
    kind = file.value("tokenizer.ggml.model")
    if kind in (None, "none", "no_vocab"):
        return None
    if kind != "gpt2":
        raise ValueError(
            f"tokenizer.ggml.model is {kind!r}, supported is 'gpt2' (byte-level BPE); "
            "a Hugging Face folder of this model brings its tokenizer.json"
        )
    if not file.tokens:
        raise ValueError("tokenizer.ggml.tokens is missing or empty")
    rows = file.tensors.get("token_embd.weight")
    if rows is not None and len(file.tokens) > rows.shape[0]:
        raise ValueError(f"the vocabulary has {len(file.tokens)} tokens, the embedding {rows.shape[0]} rows")
    pre_tokenizer = _find_pre_tokenizer(file.value("tokenizer.ggml.pre"))
    backend = BackendTokenizer(_bpe(file, whole_pieces_first=pre_tokenizer.whole_pieces_first))
    backend.pre_tokenizer = pre_tokenizer.cuts
    backend.decoder = decoders.ByteLevel()
    kinds = _token_kinds(file)
    _mark_special_tokens(backend, file.tokens, kinds)
    named = {name: _named_token(file, name) for name in ("bos", "eos", "unknown", "padding")}
    backend.post_processor = _around_a_prompt(file, named, adds_bos=pre_tokenizer.adds_bos)
    short = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    return Tokenizer(
        backend,
        eos_token_ids=file.eos_token_ids(),
        template_tokens={short[name]: token for name, token in named.items() if token is not None},
        chat_template=file.value("tokenizer.chat_template"),
        texts={id: _own_text(file.tokens[id], kind) for id, kind in enumerate(kinds) if kind != NORMAL},
    )


def _own_text(token: str, kind: int) -> str:
    """What a token that is not part of ordinary text stands for: itself, or nothing where it is unused."""
    return token if kind in (UNKNOWN, CONTROL, USER_DEFINED) else ""


def _token_kinds(file: GGUFFile) -> list[int]:
    """The kind of each token. Without a list all are ordinary; but what ends an answer is a control token,
    and so is what the file names as one, whatever the list says."""
    kinds = file.value("tokenizer.ggml.token_type", [NORMAL] * len(file.tokens))
    if not isinstance(kinds, list) or len(kinds) < len(file.tokens):
        found = len(kinds) if isinstance(kinds, list) else repr(kinds)
        raise ValueError(f"tokenizer.ggml has {len(file.tokens)} tokens but {found} token types")
    kinds = kinds[: len(file.tokens)]
    for id in (*file.eos_token_ids(), file.value("tokenizer.ggml.bos_token_id")):
        if isinstance(id, int) and 0 <= id < len(kinds) and kinds[id] == NORMAL:
            kinds[id] = CONTROL
    return kinds


def _around_a_prompt(
    file: GGUFFile, named: Mapping[str, str | None], *, adds_bos: bool
) -> processors.TemplateProcessing | None:
    """What puts tokens before and after a prompt: as the file says, else as its kind of vocabulary does."""
    adds = {"bos": adds_bos, "eos": False}
    for name, usual in adds.items():
        adds[name] = file.value(f"tokenizer.ggml.add_{name}_token", usual)
        if not isinstance(adds[name], bool):
            raise ValueError(f"tokenizer.ggml.add_{name}_token is {adds[name]!r}, true or false is needed")
        if adds[name] and named[name] is None:
            raise ValueError(
                f"prompts of this vocabulary get the {name} token, "
                f"but tokenizer.ggml.{name}_token_id is missing"
            )
    used = {name: named[name] for name, is_added in adds.items() if is_added}
    if not used:
        return None
    return processors.TemplateProcessing(
        single=[*filter(None, (used.get("bos"), "$A", used.get("eos")))],
        special_tokens=[(text, file.value(f"tokenizer.ggml.{name}_token_id")) for name, text in used.items()],
    )


def _list(file: GGUFFile, name: str) -> list:
    values = file.value(f"tokenizer.ggml.{name}")
    if not isinstance(values, list):
        raise ValueError(f"tokenizer.ggml.{name} is missing or not a list")
    return values


def _bpe(file: GGUFFile, *, whole_pieces_first: bool) -> models.BPE:
    tokens = file.tokens
    vocab = {token: id for id, token in enumerate(tokens)}
    if len(vocab) < len(tokens):
        raise ValueError(f"tokenizer.ggml.tokens has {len(tokens) - len(vocab)} tokens more than once")
    merges: list[Any] = [tuple(str(merge).split(" ")) for merge in _list(file, "merges")]
    if any(len(merge) != 2 for merge in merges):
        raise ValueError("tokenizer.ggml.merges holds an entry that is not two tokens with a space between")
    return models.BPE(vocab, merges, ignore_merges=whole_pieces_first)


def _find_pre_tokenizer(name: str | None) -> PreTokenizer:
    for found in PRE_TOKENIZERS:
        if name in found.names:
            return found
    known = ", ".join(repr(name) for found in PRE_TOKENIZERS for name in found.names)
    raise ValueError(f"tokenizer.ggml.pre is {name!r}, supported are {known}")


def _mark_special_tokens(backend: BackendTokenizer, tokens: list[str], kinds: list[int]) -> None:
    pairs = list(zip(tokens, kinds, strict=True))
    special = [AddedToken(token, normalized=False) for token, kind in pairs if kind in (UNKNOWN, CONTROL)]
    backend.add_special_tokens(special)  # each list at once: one by one takes the square of their number
    backend.add_tokens([AddedToken(token, normalized=False) for token, kind in pairs if kind == USER_DEFINED])


def _named_token(file: GGUFFile, name: str) -> str | None:
    id, tokens = file.value(f"tokenizer.ggml.{name}_token_id"), file.tokens
    if id is None:
        return None
    if isinstance(id, bool) or not isinstance(id, int) or not 0 <= id < len(tokens):
        raise ValueError(f"tokenizer.ggml.{name}_token_id is {id}, the vocabulary has {len(tokens)} tokens")
    return tokens[id]
