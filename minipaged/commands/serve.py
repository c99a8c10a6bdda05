"""Answer HTTP requests in OpenAI's form, with a page that shows the memory at work.

    minipaged serve
    minipaged serve --kv-memory 64MiB --port 8000        # then open http://127.0.0.1:8000
    minipaged serve --host 0.0.0.0 --api-key SECRET      # reachable from other machines
    minipaged serve --record run.jsonl                   # every step, for the player

Clients of OpenAI's API talk to http://127.0.0.1:8000/v1; docs/serving.md says what is supported. Ctrl-C or
SIGTERM lets what is under way finish for --drain-seconds, and a second one ends at once.
"""

import argparse
import os
import sys
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path

from minipaged.commands import CommandError, in_words
from minipaged.commands.serving import (
    add_engine_arguments,
    add_options,
    engine_settings,
    refusals,
    require_model_memory,
)
from minipaged.engine.args import EngineArgs
from minipaged.extras import how_to_install
from minipaged.serve import ServeSettings

NAMES = {"host": None, "port": "N", "api_key": "KEY", "served_model_name": "NAME", "allowed_hosts": "NAME"}
LIMITS = {
    "max_requests": "N",
    "max_connections": "N",
    "max_samples": "N",
    "max_body": "BYTES",
    "body_seconds": "S",
    "request_seconds": "S",
    "drain_seconds": "S",
}
SCHEDULING = {"max_num_seqs": "N", "preemption": None}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser.add_argument_group("addresses"), ServeSettings, NAMES)
    add_options(parser.add_argument_group("limits"), ServeSettings, LIMITS)
    add_engine_arguments(parser)
    add_options(parser.add_argument_group("scheduling"), EngineArgs, SCHEDULING)
    parser.add_argument("--record", type=Path, metavar="FILE", help="write every step to this file")


def settings_from(args: argparse.Namespace) -> ServeSettings:
    """The settings asked for; a key may come from the environment, where no list of processes shows it."""
    given = {field.name for field in fields(ServeSettings)} & vars(args).keys()
    asked = {name: getattr(args, name) for name in given}
    return ServeSettings(**asked | {"api_key": args.api_key or os.environ.get("MINIPAGED_API_KEY")})


def run(args: argparse.Namespace) -> int:
    require_model_memory(args)
    try:
        from minipaged.live.pages import LivePage
        from minipaged.serve.app import Api, make_app
        from minipaged.serve.guards import make_server
    except ImportError as error:
        raise CommandError(f"serving needs more packages: {how_to_install('serve')} ({error})") from error
    from minipaged.engine.llm import LLM
    from minipaged.recording import recording

    settings = settings_from(args)
    if settings.host not in ("127.0.0.1", "localhost", "::1") and settings.api_key is None:
        print("who reaches this machine may use the server: --api-key asks for a key", file=sys.stderr)
    with refusals():
        scheduling = {name: getattr(args, name) for name in SCHEDULING}
        llm = LLM(**engine_settings(args), **scheduling)
    api = Api(llm, settings)
    page = LivePage(llm, api.thread, settings)
    server = make_server(make_app(api, page.routes()), api.thread, settings)
    address, pool = f"http://{args.host}:{args.port}", llm.engine.pool
    print(
        f"{llm.name}: {pool.num_blocks} blocks of {llm.engine.cache_config.block_size} tokens, "
        f"requests of up to {llm.max_model_len}.\n"
        f"{address}/ shows the memory, {address}/v1 is OpenAI's API. Ctrl-C ends.",
        file=sys.stderr,
    )
    try:
        with recording(llm, args.record) if args.record else nullcontext():
            server.run()
    except OSError as error:
        raise CommandError(f"--record {in_words(error, args.record)}") from error
    print(f"stopped, {api.thread.num_told} unfinished requests were told", file=sys.stderr)
    return 0
