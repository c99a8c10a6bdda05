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
from pathlib import Path

from minipaged.commands import CommandError
from minipaged.commands.serving import (
    add_engine_arguments,
    engine_settings,
    refusals,
    require_model_memory,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", default="127.0.0.1", help="where to listen (default: this machine only)")
    parser.add_argument("--port", type=int, default=8000, help="the port (default %(default)s)")
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        default=os.environ.get("MINIPAGED_API_KEY"),
        help="what clients must send (default: $MINIPAGED_API_KEY, else nothing)",
    )
    parser.add_argument("--served-model-name", metavar="NAME", help="the name clients use (default: --model)")
    parser.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a name that leads here, for browsers",
    )
    parser.add_argument("--record", type=Path, metavar="FILE", help="write every step to this file")
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--max-requests", type=int, default=1024, metavar="N", help="under way at once (default %(default)s)"
    )
    limits.add_argument(
        "--max-connections", type=int, default=2048, metavar="N", help="open at once (default %(default)s)"
    )
    limits.add_argument(
        "--max-samples", type=int, default=64, metavar="N", help="answers to a request (default %(default)s)"
    )
    limits.add_argument(
        "--max-body", type=int, default=2**20, metavar="BYTES", help="of a request (default %(default)s)"
    )
    limits.add_argument(
        "--request-seconds", type=float, default=600, metavar="S", help="for one answer (default %(default)s)"
    )
    limits.add_argument(
        "--drain-seconds", type=float, default=30, metavar="S", help="to finish in (default %(default)s)"
    )
    add_engine_arguments(parser, kv_memory=None)
    parser.add_argument("--max-num-seqs", type=int, metavar="N", help="sequences that run at once")
    parser.add_argument(
        "--preemption",
        default="recompute",
        choices=["recompute", "swap"],
        help="what happens to a request whose blocks are needed (default %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    require_model_memory(args)
    try:
        from minipaged.serve import ServeSettings
        from minipaged.serve.server import make_server
    except ImportError as error:
        raise CommandError(
            f"serving needs the serve extra: pip install 'minipaged[serve]' ({error})"
        ) from error
    from minipaged.engine.llm import LLM

    settings = ServeSettings(
        host=args.host,
        port=args.port,
        api_key=args.api_key,
        model_name=args.served_model_name,
        allowed_hosts=tuple(args.allowed_host),
        max_body=args.max_body,
        max_samples=args.max_samples,
        max_requests=args.max_requests,
        max_connections=args.max_connections,
        request_seconds=args.request_seconds,
        drain_seconds=args.drain_seconds,
    )
    with refusals():
        llm = LLM(**engine_settings(args), max_num_seqs=args.max_num_seqs, preemption=args.preemption)
    try:
        server, calls = make_server(llm, settings, args.record)
    except OSError as error:
        raise CommandError(f"--record: {error}") from error
    if args.host not in ("127.0.0.1", "localhost", "::1") and args.api_key is None:
        print("who reaches this machine may use the server: --api-key asks for a key", file=sys.stderr)
    pool, size = llm.engine.pool, llm.engine.cache_config.block_size
    address = f"http://{args.host}:{args.port}"
    print(
        f"{llm.name}: {pool.num_blocks} blocks of {size} tokens, requests of up to {llm.max_model_len}.\n"
        f"{address}/ shows the memory, {address}/v1 is OpenAI's API. Ctrl-C ends.",
        file=sys.stderr,
    )
    server.run()
    told = f", {calls.num_told} unfinished requests were told" if calls.num_told else ""
    print(f"stopped{told}", file=sys.stderr)
    return 0
