"""A conversation keeps its cache between turns."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from minipaged.checkpoints.loading import LoadedModel
from minipaged.engine.chat import Chat
from minipaged.engine.llm import LLM
from minipaged.model.tiny import TINY, random_llama
from minipaged.sampling_params import RequestOutputKind, SamplingParams
from tests.engine.fake_chat import ChatTokenizer, make_llm
from tests.model.hf_reference import model_is_installed, smollm2

ANSWER = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)


def test_a_turn_computes_only_what_is_new():
    chat = Chat(make_llm(), system="be brief")
    known = 0
    for turn in range(4):
        output = chat.send(f"question {turn}", ANSWER)
        reusable = known // 4 * 4
        assert output.num_cached_tokens == reusable
        known = len(output.prompt_token_ids) + len(output.outputs[0].token_ids) - 1  # the last was never fed
    assert [message["role"] for message in chat.messages] == ["system"] + ["user", "assistant"] * 4


def test_the_answers_are_those_of_a_conversation_computed_from_nothing():
    chat, cold = Chat(make_llm()), make_llm(enable_prefix_caching=False)
    for turn in range(3):
        output = chat.send(f"say ab {turn}", ANSWER)
        (again,) = cold.generate({"prompt_token_ids": output.prompt_token_ids}, ANSWER)
        assert list(again.outputs[0].token_ids) == list(output.outputs[0].token_ids)
    assert output.num_cached_tokens > 0


def test_the_prompt_is_the_conversation_whatever_ids_it_came_as():
    chat = Chat(make_llm())
    chat.send("ab", ANSWER)
    chat.send("cd", ANSWER)
    output = chat.send("ef", ANSWER)
    rendered = chat.llm.get_tokenizer().apply_chat_template(chat.messages[:-1])
    text = chat.llm.get_tokenizer().decode(output.prompt_token_ids, skip_special_tokens=False)
    assert text == rendered.encode().decode(errors="replace")


class ScriptedLLM:
    """Answers with given token ids and text; keeps the prompts."""

    max_model_len = 100

    def __init__(self, *answers, tokenizer=None):
        self.answers, self.prompts = list(answers), []
        self.tokenizer = tokenizer or ChatTokenizer()

    def get_tokenizer(self):
        return self.tokenizer

    def generate(self, prompt, params, use_tqdm):
        self.prompts.append(prompt["prompt_token_ids"])
        token_ids, text = self.answers.pop(0)
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=token_ids, text=text)])]


@pytest.mark.parametrize(
    ("token_ids", "text", "known"),
    [
        ([97, 98], "ab", [97, 98]),  # two tokens that read back as one stay two
        ([97, 98, 256], "ab", [97, 98]),  # the token that ended it comes with the template, if at all
        ([120, 97, 98], "xa", [120, 97]),  # the last token stopped it
        ([97, 98, 99, 100], "ab", [257]),  # a stop string cut the text: read it back
        ([256, 97, 98, 120], "abx", [257, 120]),  # a special token that is not shown: read it back
        ([256], "", []),
    ],
)
def test_the_ids_of_an_answer_are_kept_when_they_are_its_text(token_ids, text, known):
    llm = ScriptedLLM((token_ids, text), ([], ""))
    chat = Chat(llm)
    chat.send("q")
    chat.send("r")
    first, second = llm.prompts
    assert second[: len(first)] == first
    assert second[len(first) :] == known + llm.tokenizer.encode("\nuser: r\nassistant: ")


def test_a_template_that_rewrites_earlier_turns_is_read_anew():
    llm = ScriptedLLM(([32, 97, 98, 32], " ab "), ([], ""), tokenizer=ChatTokenizer(trims=True))
    chat = Chat(llm)
    chat.send("  q  ")
    chat.send("r")
    assert llm.prompts[1] == llm.tokenizer.encode("user: q\nassistant: ab\nuser: r\nassistant: ")


def test_too_long_a_conversation_is_refused_before_anything_changes():
    chat = Chat(make_llm(max_model_len=64))
    chat.send("short", ANSWER)
    messages = list(chat.messages)
    with pytest.raises(ValueError, match=r"conversation has \d+ tokens, max_model_len is 64"):
        chat.send("x" * 40, ANSWER)
    assert chat.messages == messages
    assert chat.send("y", ANSWER).num_cached_tokens > 0  # and it can go on


def test_a_turn_that_fails_leaves_the_conversation_as_it_was(monkeypatch):
    chat = Chat(make_llm())
    chat.send("one", ANSWER)
    messages = list(chat.messages)
    with monkeypatch.context() as patch:
        patch.setattr(chat.llm, "generate", lambda *args, **options: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            chat.send("two", ANSWER)
    assert chat.messages == messages
    assert chat.send("two", ANSWER).num_cached_tokens > 0


def test_several_answers_are_refused():
    with pytest.raises(ValueError, match="n is 2"):
        Chat(make_llm()).send("x", SamplingParams(n=2))


@pytest.mark.parametrize(("text", "params"), [(5, None), (None, None), ("hi", {"temperature": 0})])
def test_what_is_no_message_is_refused_and_not_said(text, params):
    chat = Chat(make_llm())
    with pytest.raises(TypeError, match="a chat sends text with SamplingParams"):
        chat.send(text, params)
    assert chat.messages == []


def test_a_model_without_tokenizer_cannot_chat():
    llm = LLM(LoadedModel(random_llama(), None, TINY, "tiny"), num_blocks=8, max_model_len=64)
    with pytest.raises(ValueError, match="no tokenizer"):
        Chat(llm)


@pytest.mark.model
@pytest.mark.skipif(not model_is_installed(), reason="the SmolLM2 file is not installed")
def test_a_real_conversation_reuses_its_cache():
    chat = Chat(LLM(smollm2(), num_blocks=64, max_model_len=512), system="Answer in one word.")

    first = chat.send("What is the capital of France?", SamplingParams(temperature=0, max_tokens=8))
    assert "Paris" in first.outputs[0].text
    second = chat.send("And of Italy?", SamplingParams(temperature=0, max_tokens=8))
    known = len(first.prompt_token_ids) + len(first.outputs[0].token_ids) - 1
    assert second.num_cached_tokens == known // 16 * 16
    assert "<|im_start|>" not in second.outputs[0].text


def test_a_stream_grows_and_leaves_the_conversation_as_send_does():
    streamed, sent = Chat(make_llm()), Chat(make_llm())
    for text in ("one", "two"):
        lengths = [len(output.outputs[0].token_ids) for output in streamed.stream(text, ANSWER)]
        assert lengths == list(range(1, 10))
        sent.send(text, ANSWER)
    assert streamed.messages == sent.messages


@pytest.mark.parametrize("pieces", [1, 4])
def test_a_stream_that_is_closed_keeps_what_was_said(pieces):
    chat = Chat(make_llm())
    chat.send("hello", ANSWER)
    outputs = chat.stream("go on", ANSWER)
    for _ in range(pieces):
        output = next(outputs)
    outputs.close()
    assert chat.messages[-1] == {"role": "assistant", "content": output.outputs[0].text}
    assert not chat.llm.engine.has_unfinished_requests()
    assert chat.send("and then?", ANSWER).num_cached_tokens > 0


def test_a_stream_that_never_gave_a_token_changes_nothing(monkeypatch):
    chat = Chat(make_llm())

    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(chat.llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(chat.stream("hello", ANSWER))
    assert chat.messages == []


def test_a_stream_of_parts_is_refused_before_anything_is_said():
    chat = Chat(make_llm())
    with pytest.raises(ValueError, match="output_kind is DELTA"):
        chat.stream("hello", replace(ANSWER, output_kind=RequestOutputKind.DELTA))
    assert chat.messages == []
