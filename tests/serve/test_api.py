"""The server as clients of OpenAI's API see it: the `openai` package, and plain HTTP where it has no word."""

import asyncio

import pytest

openai = pytest.importorskip("openai", reason="no serve extra: `make setup` installs it")
pytest.importorskip("uvicorn", reason="no serve extra: `make setup` installs it")

import httpx
from tiny import running, tiny_llm

from minipaged.sampling_params import SamplingParams

pytestmark = pytest.mark.serve
PROMPTS = ["The sky is", "A library keeps its books", "x"]
CHAT = [{"role": "system", "content": "Short."}, {"role": "user", "content": "Why?"}]


@pytest.fixture(scope="module")
def server():
    with running() as started:
        yield started


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made
    server.wait_until_idle()


@pytest.fixture
def post(server):
    with httpx.Client(base_url=server.url, timeout=60) as made:
        yield lambda path, body: made.post(path, json=body)


def greedy_ids(prompts, max_tokens=12):
    """What `LLM.generate` says, on an engine of its own."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    outputs = tiny_llm().generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs], [o.outputs[0].text for o in outputs]


def test_completions_are_those_of_llm_generate(client):
    ids, texts = greedy_ids(PROMPTS)
    answer = client.completions.create(
        model="tiny", prompt=PROMPTS, max_tokens=12, temperature=0, extra_body={"return_token_ids": True}
    )
    assert [choice.text for choice in answer.choices] == texts
    assert [choice.model_extra["token_ids"] for choice in answer.choices] == ids
    assert answer.usage.completion_tokens == sum(map(len, ids))
    assert answer.usage.prompt_tokens == sum(map(len, PROMPTS))


def test_a_stream_says_the_same_as_the_whole_answer(client):
    ids, texts = greedy_ids(PROMPTS[:1])
    events = list(
        client.completions.create(
            model="tiny", prompt=PROMPTS[0], max_tokens=12, temperature=0, stream=True,
            stream_options={"include_usage": True}, extra_body={"return_token_ids": True},
        )
    )  # fmt: skip
    parts = [event.choices[0] for event in events if event.choices]
    assert "".join(part.text for part in parts) == texts[0]
    assert [token for part in parts for token in part.model_extra["token_ids"]] == ids[0]
    assert len([part for part in parts if part.finish_reason]) == 1
    assert events[-1].usage.completion_tokens == len(ids[0])


def test_async_clients_are_served_side_by_side(server):
    ids, texts = greedy_ids(PROMPTS)

    async def ask_all():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:

            async def ask(prompt):
                stream = await client.completions.create(
                    model="tiny", prompt=prompt, max_tokens=12, temperature=0, stream=True
                )
                return "".join([event.choices[0].text async for event in stream])

            return await asyncio.gather(*map(ask, PROMPTS))

    assert asyncio.run(ask_all()) == texts
    server.wait_until_idle()


def test_prompts_may_be_token_ids(client):
    ids, texts = greedy_ids([[10, 20, 30]])
    one = client.completions.create(model="tiny", prompt=[10, 20, 30], max_tokens=12, temperature=0)
    several = client.completions.create(model="tiny", prompt=[[10, 20, 30]] * 2, max_tokens=12, temperature=0)
    named = client.completions.create(
        model="tiny", prompt=None, max_tokens=12, temperature=0, extra_body={"prompt_token_ids": [10, 20, 30]}
    )
    answers = [choice.text for answer in (one, several, named) for choice in answer.choices]
    assert answers == texts * 4


def test_chat_uses_the_template(client):
    llm = tiny_llm()
    (output,) = llm.chat(CHAT, SamplingParams(temperature=0, max_tokens=10), use_tqdm=False)
    answer = client.chat.completions.create(
        model="tiny", messages=CHAT, max_completion_tokens=10, temperature=0
    )
    assert answer.choices[0].message.content == output.outputs[0].text
    assert answer.usage.prompt_tokens == len(output.prompt_token_ids)


def test_a_chat_stream_names_the_role_once_and_has_every_sample(client):
    settings = {"model": "tiny", "messages": CHAT, "max_tokens": 10, "n": 3, "seed": 5}
    whole = client.chat.completions.create(**settings)
    texts, roles = ["", "", ""], []
    for event in client.chat.completions.create(**settings, stream=True):
        for choice in event.choices:
            texts[choice.index] += choice.delta.content or ""
            roles += [(choice.index, choice.delta.role)] if choice.delta.role else []
    assert texts == [choice.message.content for choice in whole.choices]
    assert sorted(roles) == [(0, "assistant"), (1, "assistant"), (2, "assistant")]


def test_logprobs_have_both_forms(client):
    chat = client.chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=4, temperature=0, logprobs=True, top_logprobs=3
    )
    content = chat.choices[0].logprobs.content
    assert len(content) == 4
    assert all(len(token.top_logprobs) == 3 for token in content)
    assert all(token.top_logprobs[0].logprob == token.logprob for token in content)  # greedy
    old = client.completions.create(model="tiny", prompt="abc", max_tokens=4, temperature=0, logprobs=2)
    found = old.choices[0].logprobs
    assert len(found.tokens) == len(found.token_logprobs) == len(found.text_offset) == 4
    assert [max(top.values()) for top in found.top_logprobs] == pytest.approx(found.token_logprobs)


def test_a_stop_string_ends_the_answer_and_is_not_in_it(client):
    (ids,), (text,) = greedy_ids(["abc"], max_tokens=20)
    stop = text[5:7]
    answer = client.completions.create(model="tiny", prompt="abc", max_tokens=20, temperature=0, stop=[stop])
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason) == (text[: text.index(stop)], "stop")
    assert choice.model_extra["stop_reason"] == stop


def test_a_seed_repeats_an_answer_and_extra_fields_are_heeded(client):
    def ask(**extra):
        body = {"min_tokens": 6, "ignore_eos": True} | extra
        answer = client.completions.create(model="tiny", prompt="abc", max_tokens=6, seed=3, extra_body=body)
        return answer.choices[0].text

    assert ask() == ask()
    (ids,), (greedy,) = greedy_ids(["abc"], max_tokens=6)
    assert ask(top_k=1) == greedy


def test_usage_counts_what_the_prefix_cache_had(client):
    prompt = "a beginning that is longer than one block of eight"
    for expected in (0, len(prompt) // 8 * 8):
        answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=2)
        assert answer.usage.prompt_tokens_details.cached_tokens == expected
    salted = client.completions.create(
        model="tiny", prompt=prompt, max_tokens=2, extra_body={"cache_salt": "mine"}
    )
    assert salted.usage.prompt_tokens_details.cached_tokens == 0


REFUSED = [
    ({"temperature": 3}, "temperature must be in [0, 2], got 3"),
    ({"temperature": "hot"}, "temperature must be a number, got 'hot'"),
    ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
    ({"max_tokens": 600}, "the prompt has 3 tokens and max_tokens is 600: together more than the 512"),
    ({"prompt": "a" * 600}, "prompt has 600 tokens, max_model_len is 512"),
    ({"prompt": [999]}, "token id 999 is outside the vocabulary, 0 to 262"),
    ({"prompt": ""}, "prompt has 0 tokens, at least 1 is needed"),
    ({"prompt": []}, "prompt has 0 tokens, at least 1 is needed"),
    ({"prompt": None}, "give one of prompt and prompt_token_ids"),
    ({"n": 65}, "1 prompts with n 65 ask for 65 answers, the limit is 64"),
    ({"n": 2, "temperature": 0}, "n must be 1 with temperature 0"),
    ({"logprobs": 21}, "logprobs must be in [0, 20], got 21"),
    ({"echo": True}, "echo is not supported by this server, got True"),
    ({"best_of": 4}, "best_of is not supported by this server, got 4"),
    ({"logit_bias": {"1": 2}}, "logit_bias is not supported by this server"),
    ({"stream_options": {"include_usage": True}}, "stream_options need stream"),
    ({"chat_template": "{{ x }}"}, "chat_template is not supported by this server"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[next(iter(c)) for c, _ in REFUSED])
def test_what_cannot_be_is_refused_with_the_value_and_the_limit(server, post, change, message):
    answer = post("/v1/completions", {"model": "tiny", "prompt": "abc"} | change)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
    assert answer.json()["error"]["type"] == "invalid_request_error"
    server.wait_until_idle()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tools": [{"type": "function"}]}, "tools is not supported by this server"),
        ({"response_format": {"type": "json_object"}}, "response_format is not supported by this server"),
        ({"top_logprobs": 2}, "top_logprobs is 2, it needs logprobs"),
        ({"messages": []}, "messages: List should have at least 1 item"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "image_url is not supported by this server, got {'url': 'x'}",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio", "text": "x"}]}]},
            "type: Input should be 'text', got input_audio",
        ),
        ({"messages": [{"role": "user", "content": "a<|end|>"}]}, "has the special token '<|end|>'"),
    ],
)
def test_what_a_chat_cannot_be_is_refused_by_name(post, change, message):
    answer = post("/v1/chat/completions", {"model": "tiny", "messages": CHAT} | change)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


def test_fields_that_ask_for_nothing_are_accepted(post):
    body = {"model": "tiny", "messages": CHAT, "max_tokens": 2, "user": "me", "tools": None, "logit_bias": {},
            "response_format": {"type": "text"}, "parallel_tool_calls": True, "store": False}  # fmt: skip
    assert post("/v1/chat/completions", body).status_code == 200


def test_errors_reach_the_client_as_its_own_exceptions(client):
    with pytest.raises(openai.NotFoundError, match="no model 'other' here, this server has 'tiny'"):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.BadRequestError, match="top_p must be in"):
        client.completions.create(model="tiny", prompt="a", top_p=7)
    with pytest.raises(openai.NotFoundError, match="GET /v1/files: Not Found"):
        client.files.list()
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").model_extra["max_model_len"] == 512


def test_text_becomes_tokens_and_text_again(post):
    found = post("/tokenize", {"prompt": "abc", "return_token_strs": True}).json()
    assert (found["count"], found["max_model_len"], found["token_strs"]) == (3, 512, ["a", "b", "c"])
    chat = post("/tokenize", {"messages": CHAT}).json()
    assert chat["count"] == len("Short.Why?") + 5
    assert post("/tokenize", {}).status_code == 400


def test_health_and_metrics(client, post):
    before = post("/v1/completions", {"prompt": "abc", "max_tokens": 3, "ignore_eos": True}).json()
    assert before["usage"]["completion_tokens"] == 3
    with httpx.Client(base_url=str(client.base_url).removesuffix("/v1/")) as plain:
        assert plain.get("/health").status_code == 200
        text = plain.get("/metrics").text
    names = "num_requests_running num_requests_waiting kv_cache_usage_perc generation_tokens_total "
    names += "prefix_cache_hits_total time_to_first_token_seconds_count"
    for name in names.split():
        assert f'vllm:{name}{{model_name="tiny"}}' in text
    assert 'vllm:request_success_total{finished_reason="length",model_name="tiny"}' in text
