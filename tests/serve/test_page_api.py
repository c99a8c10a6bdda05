"""What the live page asks of the server, without a browser: its files, frames, controls and users."""

import contextlib
import http.client
import json
import socket
import threading

import pytest

pytest.importorskip("uvicorn", reason="no serve extra: `make setup` installs it")

import httpx
from tiny import running, tiny_llm

pytestmark = pytest.mark.serve


class Page:
    """An open page: reads the feed in a thread, and keeps what it was told."""

    def __init__(self, server):
        self.server, self.lines, self.client = server, [], httpx.Client(base_url=server.url, timeout=60)
        self._feed = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        threading.Thread(target=self._read, daemon=True).start()
        server.wait_until(lambda: len(self.lines) >= 2)

    def _read(self):
        self._feed.request("GET", "/page/frames")
        for text in self._feed.getresponse():
            self.lines.append(json.loads(text))

    def post(self, path, **body):
        answer = self.client.post(f"/page/{path}", json=body)
        assert answer.status_code == 200, answer.text

    def close(self):
        with contextlib.suppress(OSError):  # it was closed
            self._feed.sock.shutdown(socket.SHUT_RDWR)
        self.client.close()

    def frames(self, lane="blocks"):
        return [value for value in list(self.lines) if value["lane"] == lane and "format" not in value]

    @property
    def engine(self):
        return self.server.llm.engine


@pytest.fixture
def page():
    with running(tiny_llm(num_blocks=200)) as server:
        opened = Page(server)
        yield opened
        opened.close()


def test_the_feed_is_a_header_and_then_what_changes(page):
    assert (page.lines[0]["format"], page.lines[0]["num_blocks"]) == ("minipaged-recording", 200)
    page.post("users", count=5, rate=1000, mix="instruct64")
    page.server.wait_until(lambda: page.engine.stats.num_finished == 5)
    page.server.wait_until(lambda: page.frames()[-1]["blocks_held"] == 0)
    started = {name for frame in page.frames() for name in frame["sequences"]}
    ended = {name for frame in page.frames() for name in frame["gone"]}
    assert started == ended, "whoever came has gone"
    assert started <= {f"user-{number}/0" for number in range(1, 6)}  # some live between two frames


def test_a_paused_engine_takes_the_steps_it_is_told_and_shows_each(page):
    page.post("control", paused=True)
    page.post("users", count=3, rate=1000)
    page.server.wait_until(lambda: len(page.engine.requests) == 3)
    before = page.engine.stats.num_steps
    page.post("control", step=2)
    page.server.wait_until(lambda: page.engine.stats.num_steps == before + 2)
    page.server.wait_until(lambda: page.frames()[-1].get("index") == before + 1)
    assert page.frames()[-1]["paused"] is True
    page.post("control", paused=False)
    page.server.wait_until_idle()


def test_slow_steps_stay_slow_while_commands_come(page):
    page.post("control", delay=10)
    page.post("users", count=1)
    page.server.wait_until(lambda: page.engine.stats.num_steps >= 1)
    for _ in range(5):
        page.post("control")
    assert page.engine.stats.num_steps == 1
    page.post("control", delay=0)


def test_strips_have_as_many_bytes_and_take_turns_with_the_blocks(page):
    page.post("control", strips=True)
    page.server.wait_until(lambda: "strips" in page.server.thread.lanes)
    strips = page.server.thread.lanes["strips"]
    assert strips.pool.num_blocks * strips.cache_config.block_size <= 200 * 8
    assert strips.pool.num_blocks == 200 * 8 // 512
    page.post("users", count=8, rate=1000, mix="instruct64")
    page.server.wait_until(lambda: strips.stats.num_finished == 8 and page.engine.stats.num_finished == 8)
    assert max(frame["running"] for frame in page.frames("strips") if "running" in frame) <= 3
    page.post("control", strips=False)
    page.server.wait_until(lambda: "strips" not in page.server.thread.lanes)


def test_a_page_that_is_closed_leaves_nothing_behind(page):
    page.post("control", paused=True, strips=True)
    page.server.wait_until(lambda: page.server.thread.paused and len(page.server.thread.lanes) == 2)
    page.close()
    page.server.wait_until(lambda: page.server.thread.on_turn is None)
    assert not page.server.thread.paused
    assert list(page.server.thread.lanes) == ["blocks"]


def test_files_of_the_page_and_no_others_are_given():
    with running() as server, httpx.Client(base_url=server.url) as client:
        index = client.get("/")
        assert "default-src 'none'" in index.headers["content-security-policy"]
        assert client.get("/page/live.js").headers["content-type"].startswith("text/javascript")
        for name in ("mixes.json", "nothing.js", "..%2Fapp.js", "..%2F__init__.py"):
            assert client.get(f"/page/{name}").status_code == 404, name
        refused = client.post("/page/users", json={"mix": "mine"})
        assert "mix is 'mine', there are ['chat48', 'instruct64'" in refused.json()["error"]["message"]
        refused = client.post("/page/control", json={"delay": 11})
        assert "delay: Input should be less than or equal to 10, got 11" in refused.json()["error"]["message"]
