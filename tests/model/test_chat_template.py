# ruff: noqa: E501
"""Chat templates render as in transformers, in a sandbox, with errors that name the template."""

import gc
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from minipaged.model.chat_template import ChatTemplate

HI = [{"role": "user", "content": "hi"}]


def render(source: str, messages: Any = HI, add_generation_prompt: bool = True, **tokens: str) -> str:
    return ChatTemplate(source, tokens).render(messages, add_generation_prompt=add_generation_prompt)


def test_template_sees_messages_special_tokens_and_the_generation_flag() -> None:
    source = (
        "{{ bos_token }}"
        "{% for message in messages %}[{{ message.role }}] {{ message['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    assert render(source, bos_token="<s>") == "<s>[user] hi[assistant]"
    assert render(source, bos_token="<s>", add_generation_prompt=False) == "<s>[user] hi"


def test_blocks_leave_no_blank_lines() -> None:
    source = "{% for message in messages %}\n  {% if 1 %}\n{{ message.content }}\n  {% endif %}\n{% endfor %}"
    assert render(source) == "hi\n"


def test_helpers_of_transformers_are_there() -> None:
    assert render("{{ messages[0] | tojson }}") == '{"role": "user", "content": "hi"}'
    assert render("{{ messages | tojson }}", [{"role": "user", "content": "<é'>"}]).endswith('"<é\'>"}]')
    assert render("{{ strftime_now('%Y') }}") in {str(datetime.now().year), str(datetime.now().year - 1)}
    assert render("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "012"
    assert render("{{ tools is none }}") == "True"


def test_template_may_refuse_messages_in_its_own_words() -> None:
    with pytest.raises(ValueError, match="chat template failed: roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize("source", ["{% for %}", "{{ messages", "{% endif %}", "{{ x | no_such_filter }}"])
def test_invalid_template_is_refused_when_it_is_used(source: str) -> None:
    template = ChatTemplate(source, {})
    for _ in range(2):
        with pytest.raises(ValueError, match="chat template is not valid Jinja"):
            template.render(HI, add_generation_prompt=True)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('touch escaped') }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ (messages | attr('__class__')).mro() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{% include 'secrets' %}",
        "{{ range(10 ** 9) | list }}",
        "{{ messages[0].content.nothing.more }}",
        "{{ 1 / 0 }}",
    ],
)
def test_template_that_reaches_out_of_its_sandbox_is_stopped(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(ValueError, match="chat template failed"):
        render(source, messages)
    assert messages == HI
    assert not (tmp_path / "escaped").exists()


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__code__ }}",
        "{{ messages | attr('__class__') | attr('__base__') }}",
    ],
)
def test_python_internals_do_not_exist_for_a_template(source: str) -> None:
    assert render(source) == ""


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one message"),
        ("hi", "a list of at least one message"),
        ({"role": "user", "content": "hi"}, "a list of at least one message"),
        (["hi"], "message 0 is 'hi'"),
        ([*HI, {"role": "user"}], "message 1 has content None"),
        ([{"content": "hi"}], "message 0 has role None"),
        ([{"role": "user", "content": [{"type": "text"}]}], "message 0 has content"),
    ],
)
def test_malformed_messages_are_refused_with_their_place(messages: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        render("{{ messages }}", messages)


def test_generation_tags_change_nothing() -> None:
    source = (
        "{%- for m in messages -%}{% set end = '!' %}"
        "{% generation %}{% set end = '?' %}{{ m.content }}{{ end }}{% endgeneration %}{{ end }}{%- endfor -%}"
    )
    assert render(source) == "hi?!"


@pytest.mark.parametrize(
    "source",
    [
        "{{ 2 ** (10 ** 9) }}",
        "{{ 7 ** (7 ** 9) }}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
        "{{ 'a' * (10 ** 9) * 3 }}",
        "{{ messages | tojson(indent=500000000) }}",
        "{{ messages[0].content.ljust(10 ** 10) }}",
        "{{ 'a' * 20000000 }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ " + "(" * 5000 + ")" * 5000 + " }}",
    ],
)
def test_template_without_measure_is_an_error_and_no_more(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minipaged.model.chat_template.SECONDS", 1.0)
    template = ChatTemplate(source, {})
    with pytest.raises(ValueError, match="chat template"):
        template.render(HI, add_generation_prompt=True)


def test_template_that_fails_on_one_conversation_serves_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minipaged.model.chat_template.SECONDS", 1.0)
    template = ChatTemplate("{% if messages | length > 1 %}{{ 2 ** messages[0].n }}{% endif %}ok", {})
    with pytest.raises(ValueError, match="took more than 1 s"):
        template.render([{**HI[0], "n": 10**9}, *HI], add_generation_prompt=True)
    assert template.render(HI, add_generation_prompt=True) == "ok"


def test_template_ends_with_its_owner() -> None:
    template = ChatTemplate("ok", {})
    template.render(HI, add_generation_prompt=True)
    process = template._process
    assert process is not None
    del template
    gc.collect()
    assert process.poll() is not None


def test_messages_that_are_not_plain_data_are_refused() -> None:
    with pytest.raises(ValueError, match="not plain data"):
        render("ok", [{**HI[0], "when": datetime.now()}])
