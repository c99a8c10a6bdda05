"""Clients that leave, dawdle, flood or lie, steps that fail, signals: no block is lost, each is told."""

import asyncio
import contextlib
import json
import random
import signal
import socket
import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest

pytest.importorskip("uvicorn", reason="no serve extra: `make setup` installs it")
openai = pytest.importorskip("openai", reason="no serve extra: `make setup` installs it")

import httpx
from tiny import make, running, tiny_llm

from minipaged.serve.app import Answer
from minipaged.serve.engine_thread import Call
from minipaged.serve.protocol import CompletionRequest, Form

pytestmark = pytest.mark.serve
LONG = {"model": "tiny", "prompt": "abc", "max_tokens": 400, "ignore_eos": True, "stream": True}


def request_bytes(body, *, path="/v1/completions", extra=b""):
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return head.encode() + extra + f"Content-Length: {len(data)}\r\n\r\n".encode() + data


def connect(server):
    return socket.create_connection(("127.0.0.1", server.port), timeout=60)


def read_all(connection):
    found = b""
    while part := connection.recv(65536):
        found += part
    return found


async def ask_many(server, bodies, limit=1000):
    """The answers to these bodies, sent at once."""
    limits = httpx.Limits(max_connections=limit)
    async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
        return await asyncio.gather(*[client.post("/v1/completions", json=body) for body in bodies])


def test_two_hundred_concurrent_streams_all_come_to_their_end():
    with running() as server:
        bodies = [LONG | {"max_tokens": 8, "prompt": f"prompt {i}"} for i in range(200)]
        answers = asyncio.run(ask_many(server, bodies))
        assert all(answer.status_code == 200 for answer in answers)
        for answer in answers:
            events = [line for line in answer.text.split("\n\n") if line]
            assert events[-1] == "data: [DONE]"
            assert json.loads(events[-2][6:])["choices"][0]["finish_reason"] == "length"
        server.wait_until_idle()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_frees_its_blocks_within_a_step(stream):
    with running() as server:
        thread, told = server.thread, []
        close = thread.close

        def num_steps():
            return server.llm.stats.num_steps

        def note(call):  # in the event loop, as soon as it knows that the client has left
            told.append(num_steps())
            close(call)

        thread.close = note
        thread.control(delay=0.05)  # so that its 400 tokens would take 20 s
        with connect(server) as connection:
            connection.sendall(request_bytes(LONG | {"stream": stream}))
            server.wait_until(lambda: num_steps() > 3)
        server.wait_until_idle()
        assert server.llm.stats.num_aborted == 1
        assert told and num_steps() <= told[0] + 1, "the step under way, and no other"


def test_a_client_that_leaves_while_it_waits_leaves_the_queue():
    with running(tiny_llm(max_num_seqs=1)) as server, connect(server) as first:
        first.sendall(request_bytes(LONG))
        server.wait_until(lambda: server.llm.engine.scheduler.running)
        with connect(server) as second:
            second.sendall(request_bytes(LONG))
            server.wait_until(lambda: len(server.llm.engine.requests) == 2)
        server.wait_until(lambda: server.llm.stats.num_aborted == 1)
    assert server.is_idle


def test_a_slow_reader_holds_nobody_up():
    with running() as server, connect(server) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        slow.sendall(request_bytes(LONG))
        (answer,) = asyncio.run(ask_many(server, [LONG | {"max_tokens": 20}]))
        assert answer.text.endswith("data: [DONE]\n\n")
        server.wait_until_idle()  # the engine does not wait for the reader
        slow.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert b"data: [DONE]" in read_all(slow)


@pytest.mark.parametrize("sends", [False, True])
def test_a_reader_that_takes_nothing_is_cut_off_even_if_it_sends(sends):
    with running(request_seconds=1.0, body_seconds=100) as server, connect(server) as stalled:
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        server.wait_until(lambda: server.connections)
        (connection,) = server.connections
        own = connection.transport.get_extra_info("socket")
        own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2048)  # little fits between server and client
        stalled.sendall(request_bytes(LONG | {"n": 30, "logprobs": 20}))
        server.wait_until(lambda: connection.flow.write_paused)
        if sends:
            stalled.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Patience: ")

        def cut_off():
            if sends:
                with contextlib.suppress(OSError):
                    stalled.sendall(b"x")  # a second request that never ends
            return not server.connections

        server.wait_until(cut_off)
        server.wait_until_idle()


def test_a_stream_that_takes_too_long_frees_its_blocks_before_its_reader_is_told():
    """The last event may wait for a reader that takes nothing; the blocks must not wait with it."""
    happened = []

    class Thread:
        def close(self, call):
            happened.append("closed")

    async def send(message):
        if message["type"] == "http.response.body":
            happened.append("told")

    async def receive():
        await asyncio.Event().wait()

    ask = CompletionRequest(prompt="a", stream=True)
    call = Call([types.SimpleNamespace(request_id="cmpl-0")])
    answer = Answer(Thread(), call, Form("cmpl-0", "tiny", ask, 1), seconds=0.05)
    asyncio.run(answer({"type": "http"}, receive, send))
    assert happened == ["closed", "told"]


def test_half_sent_requests_are_given_up():
    with running(body_seconds=0.3) as server:
        with connect(server) as headers_only:
            headers_only.sendall(b"POST /v1/completions HT")
            assert read_all(headers_only) == b""
        with connect(server) as half_body:
            half_body.sendall(request_bytes(LONG)[:-10])
            assert b"408 Request Timeout" in half_body.recv(1000)
        server.wait_until_idle()


def test_headers_without_end_are_given_up():
    with running() as server, connect(server) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\n")
        with contextlib.suppress(ConnectionError):
            for _ in range(200):
                connection.sendall(b"X-Header: " + b"x" * 1000 + b"\r\n")
            assert connection.recv(1000) == b""
        assert httpx.get(f"{server.url}/health").status_code == 200


def test_a_client_that_sends_far_too_much_is_told_why():
    with running(max_body=1000) as server:
        answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a" * 3_000_000})
        assert answer.status_code == 413


def test_the_trace_does_not_grow_with_the_steps(monkeypatch):
    monkeypatch.setattr("minipaged.serve.engine_thread.TRACE_KEPT", 20)
    with running() as server:
        (answer,) = asyncio.run(ask_many(server, [LONG | {"max_tokens": 100}]))
        server.wait_until_idle()
        assert server.llm.stats.num_steps >= 100
        server.wait_until(lambda: len(server.llm.trace) == 20)  # the last step is told before it is trimmed


def test_bodies_that_are_too_long_or_no_json_are_refused():
    with running(max_body=1000) as server, httpx.Client(base_url=server.url) as client:
        long = client.post("/v1/completions", json={"prompt": "a" * 1000})
        assert long.status_code == 413
        assert "more than the 1000 bytes" in long.json()["error"]["message"]
        chunks = client.post(
            "/v1/completions", content=iter([b"a" * 600] * 2), headers={"content-type": "application/json"}
        )
        assert chunks.status_code == 413
        kind = {"content-type": "application/json"}
        for content in (b"{", b"[" * 900, b"\xff", b"[]"):
            assert client.post("/v1/completions", content=content, headers=kind).status_code == 400
        assert client.post("/v1/completions", content=b"{}").status_code == 415


def test_a_flood_beyond_the_queue_is_refused_with_a_reason():
    with running(tiny_llm(max_num_seqs=2), max_requests=5) as server:
        answers = asyncio.run(ask_many(server, [LONG | {"max_tokens": 30}] * 40))
        refused = [answer for answer in answers if answer.status_code == 429]
        assert len(refused) >= 1 and all(answer.status_code in (200, 429) for answer in answers)
        assert "the limit is 5: try again later" in refused[0].json()["error"]["message"]
        assert refused[0].headers["retry-after"] == "1"
        assert sum(answer.status_code == 200 for answer in answers) >= 5
        server.wait_until_idle()


def test_connections_beyond_the_limit_are_refused():
    ask = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with running(max_connections=3) as server, contextlib.ExitStack() as held:
        for status in (b" 200 ", b" 200 ", b" 200 ", b" 503 "):
            connection = held.enter_context(connect(server))
            connection.sendall(ask)
            assert status in connection.recv(1000)


def test_a_request_that_takes_too_long_is_ended():
    with running(request_seconds=0.3) as server:
        server.thread.control(paused=True)
        whole, stream = asyncio.run(ask_many(server, [LONG | {"stream": False}, LONG]))
        assert whole.status_code == 504
        assert "more than the 0.3 s it may take" in whole.json()["error"]["message"]
        assert "more than the 0.3 s it may take" in stream.text
        server.wait_until_idle()


def test_a_step_that_fails_is_told_and_the_next_request_is_served():
    llm = tiny_llm()
    forward, fail = llm.engine.runner.forward, [True]

    def broken(plan):
        if fail[0]:
            raise RuntimeError("a wire is loose")
        return forward(plan)

    llm.engine.runner.forward = broken
    with running(llm) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        whole = client.post("/v1/completions", json=LONG | {"stream": False})
        assert whole.status_code == 500
        assert whole.json()["error"]["message"] == "the engine failed: RuntimeError: a wire is loose"
        assert "a wire is loose" in client.post("/v1/completions", json=LONG).text
        assert client.get("/health").status_code == 503
        server.wait_until_idle()
        fail[0] = False
        assert client.post("/v1/completions", json=LONG | {"max_tokens": 3}).status_code == 200
        assert client.get("/health").status_code == 200
        server.wait_until_idle()


def test_the_key_is_asked_for():
    with running(api_key="secret") as server:
        for key, status in (("wrong", 401), ("secret", 200), ("s\u00e9cret".encode().decode("latin-1"), 401)):
            headers = {"authorization": f"Bearer {key}".encode("latin-1")}
            assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == status
        assert httpx.get(f"{server.url}/v1/models").status_code == 401
        assert httpx.get(f"{server.url}/page/frames").status_code == 401
        assert httpx.get(f"{server.url}/metrics").status_code == 401
        assert httpx.get(f"{server.url}/health").status_code == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.example"}, 403),
        ({"host": "[::"}, 403),
        ({"host": "localhost:1"}, 200),
        ({"host": "pager.example:80"}, 200),
        ({"host": "localhost", "origin": "http://evil.example"}, 403),
        ({"host": "localhost", "origin": "null"}, 403),
        ({"host": "localhost", "origin": "http://localhost"}, 200),
        ({"host": "localhost", "sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}, 403),
        ({"host": "localhost", "sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, 200),
        ({"host": "localhost", "sec-fetch-site": "same-origin", "sec-fetch-mode": "cors"}, 200),
    ],
)
def test_pages_of_other_sites_are_kept_out(headers, status):
    with running(allowed_hosts=("pager.example",)) as server:
        assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == status


def test_it_listens_on_this_machine_only_unless_told():
    """127.0.0.2 is this machine too, and not the address that was asked for."""
    from minipaged.serve import ServeSettings

    settings = ServeSettings(port=0)
    server, _ = make(tiny_llm(), settings)
    listener = server.config.bind_socket()
    try:
        address, port = listener.getsockname()
        assert address == "127.0.0.1"
        listener.listen()
        socket.create_connection((address, port), timeout=5).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), timeout=5).close()
    finally:
        listener.close()


def start_process(drain_seconds):
    script = Path(__file__).parent / "tiny.py"
    return subprocess.Popen(
        [sys.executable, str(script), str(drain_seconds)], stdout=subprocess.PIPE, text=True
    )


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM to send")
@pytest.mark.parametrize(("drain", "told"), [(60, 0), (0, 3)])
def test_sigterm_lets_requests_finish_or_says_so_and_loses_no_block(drain, told):
    process = start_process(drain)
    assert process.stdout is not None
    url = f"http://127.0.0.1:{int(process.stdout.readline())}"
    texts, begun = [], threading.Barrier(4)

    def ask():
        with httpx.stream("POST", f"{url}/v1/completions", json=LONG, timeout=60) as answer:
            parts = answer.iter_text()
            text = next(parts)
            begun.wait(60)
            texts.append(text + "".join(parts))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    begun.wait(60)
    process.send_signal(signal.SIGTERM)
    for thread in threads:
        thread.join(60)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert output.strip() == f"free 128 of 128, told {told}"
    assert all(text.endswith("data: [DONE]\n\n") for text in texts)
    assert sum("the server is shutting down" in text for text in texts) == told


def test_random_clients_leave_every_block_free():
    """A slice of the soak in benchmarks/serve_soak.py: answers read whole, in part, or not at all."""
    chance = random.Random(1)

    async def one(client):
        body = LONG | {"max_tokens": chance.randint(1, 30), "prompt": "p" * chance.randint(1, 100)}
        body |= {"n": chance.choice([1, 1, 3]), "stream": chance.random() < 0.7}
        patience = chance.choice([None, None, chance.random() * 0.1])
        try:
            async with asyncio.timeout(patience):
                answer = await client.post("/v1/completions", json=body)
                assert answer.status_code == 200
        except TimeoutError:
            pass

    async def soak(url):
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            for _ in range(6):
                await asyncio.gather(*[one(client) for _ in range(25)])

    with running(tiny_llm(num_blocks=100)) as server:
        asyncio.run(soak(server.url))
        server.wait_until_idle()
        assert server.llm.stats.num_finished + server.llm.stats.num_aborted <= 150
        assert server.llm.stats.num_aborted > 0
