"""`minipaged serve`: its options are the fields of `ServeSettings` and of the engine."""

import argparse
from dataclasses import fields

import pytest

from minipaged.commands import serve
from minipaged.serve import ServeSettings


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return parser.parse_args(words)


def test_without_options_the_settings_are_the_defaults(monkeypatch):
    monkeypatch.delenv("MINIPAGED_API_KEY", raising=False)
    args = vars(parse())
    for field in fields(ServeSettings):
        if field.name in args:
            assert args[field.name] == field.default, field.name
    assert args["host"] == "127.0.0.1", "other machines cannot reach it unless it is asked for"


def test_every_limit_that_is_documented_can_be_set():
    args = parse("--max-requests", "5", "--drain-seconds", "0.5", "--allowed-hosts", "a", "b", "--port", "1")
    assert (args.max_requests, args.drain_seconds, args.port) == (5, 0.5, 1)
    assert args.allowed_hosts == ["a", "b"]
    with pytest.raises(SystemExit):
        parse("--max-requests", "many")


def test_the_key_may_come_from_the_environment_and_no_help_shows_it(monkeypatch, capsys):
    monkeypatch.setenv("MINIPAGED_API_KEY", "secret")
    assert serve.settings_from(parse()).api_key == "secret"
    assert serve.settings_from(parse("--api-key", "other")).api_key == "other"
    with pytest.raises(SystemExit):
        parse("--help")
    assert "secret" not in capsys.readouterr().out
