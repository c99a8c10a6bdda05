"""`minipaged generate`: what it prints, where, and what it refuses."""

import io
import json
import re

import pytest
import torch

from minipaged import LLM, SamplingParams, cli
from minipaged.commands import CommandError, chat, generate, serving
from minipaged.memory import KVSpec, blocks_for

QUESTION = ["generate", "What is the capital of France?", "--max-tokens", "7"]


def test_prompt_comes_from_the_argument_or_from_stdin(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe\n"))
    assert generate.read_prompt("given") == "given"
    assert generate.read_prompt("-") == "from a pipe"


def test_input_that_is_no_text_is_refused(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xe9t\xe9"), encoding="utf-8"))
    with pytest.raises(CommandError, match="the input is not utf-8"):
        generate.read_prompt("-")


@pytest.mark.parametrize("prompt", ["", "-"])
def test_empty_prompt_is_refused(monkeypatch, prompt):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    with pytest.raises(CommandError, match="prompt is empty"):
        generate.read_prompt(prompt)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--top-p", "3"], "top_p must be in (0, 1], got 3"),
        (["--raw", "--system", "Be brief."], "--system needs the chat template"),
        (["--model", "no-such-model"], "no model 'no-such-model'"),
        (["--model", "no-such-model", "--max-tokens", "0"], "max_tokens"),
    ],
)
def test_wrong_value_is_one_sentence_and_exit_code_1(capsys, arguments, says):
    assert cli.main(["generate", "hello", *arguments]) == 1
    captured = capsys.readouterr()
    assert says in captured.err
    assert captured.err.startswith("minipaged generate: ")
    assert captured.out == ""


def test_too_little_memory_is_one_sentence_and_exit_code_1(monkeypatch, capsys):
    monkeypatch.setattr("minipaged.machine.available_memory", lambda: 300 * 2**20)
    assert cli.main(QUESTION) == 1
    said = capsys.readouterr().err
    assert said.startswith(
        "minipaged generate: serving the model needs about 2048 MiB of free memory, 300 MiB"
    )


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(num_blocks=16)


@pytest.mark.model
def test_text_streams_to_stdout_and_costs_go_to_stderr(capsys):
    assert cli.main(QUESTION) == 0
    streamed = capsys.readouterr()
    assert "Paris" in streamed.out
    assert "KV cache; first token after" in streamed.err
    assert cli.main([*QUESTION, "--json"]) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert captured.err == ""
    assert report["text"] + "\n" == streamed.out
    assert report["output_tokens"] <= 7


@pytest.mark.model
@pytest.mark.parametrize("max_tokens", [1, 12, 13, 14, 30])
def test_costs_are_the_blocks_that_the_engine_held(llm, max_tokens):
    prompt = {"prompt_token_ids": [1, *range(100, 119)]}
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    llm.trace.clear()
    output = generate.show_stream(llm.stream(prompt, params), show=False)
    cost = serving.costs(llm, output)
    assert (cost["prompt_tokens"], cost["output_tokens"]) == (20, max_tokens)
    assert cost["blocks"] == max(record.blocks_held for record in llm.trace)
    assert cost["kv_bytes"] == cost["blocks"] * llm.engine.storage.nbytes // llm.engine.storage.num_blocks


@pytest.mark.model
def test_prompt_is_put_into_the_chat_template_unless_raw(llm):
    chat = generate.make_prompt(llm, "Hello", raw=False, system="Be brief.")
    text = llm.get_tokenizer().decode(chat["prompt_token_ids"], skip_special_tokens=False)
    assert "Be brief." in text
    assert "Hello" in text
    assert text.rstrip().endswith("assistant")
    assert generate.make_prompt(llm, "Hello", raw=True, system=None) == "Hello"


@pytest.mark.parametrize("command", [generate, chat])
def test_the_example_in_the_help_is_one_that_could_come(command):
    """Of the default model, in bfloat16."""
    example = (
        r"\[(\d+) (?:\((\d+) from the prefix cache\) )?\+ (\d+) tokens in (\d+) blocks of 16: ([\d.]+) MiB"
    )
    prompt, cached, output, blocks, size = re.search(example, command.__doc__).groups()
    spec = KVSpec(num_layers=30, num_kv_heads=3, head_size=64, dtype=torch.bfloat16)
    assert int(cached or 0) % 16 == 0 and int(cached or 0) < int(prompt)
    assert int(blocks) == blocks_for(int(prompt) + int(output) - 1, 16)
    assert size == f"{int(blocks) * spec.bytes_per_block(16) / 2**20:.2f}"


@pytest.mark.parametrize("tpot", [None, 0.02])
def test_costs_are_described_with_one_token_and_with_many(tpot):
    cost = {"prompt_tokens": 3, "output_tokens": 1, "blocks": 1, "block_size": 16, "kv_bytes": 2**20}
    cost["cached_tokens"] = 0
    line = serving.describe({**cost, "ttft": 0.5, "tpot": tpot})
    assert line.startswith("[3 + 1 tokens in 1 blocks of 16: 1.00 MiB of KV cache; first token after 0.50 s")
    assert ("then 50 tokens/s" in line) == (tpot is not None)
    assert "then 0.1 tokens/s" in serving.describe({**cost, "ttft": 7.0, "tpot": 10.0})  # slow, not stopped
