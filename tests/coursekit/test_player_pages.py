"""The player's page and cell output: whole, asking for nothing, and small enough to be stored."""

import base64
import gzip
import html
import json
import random
import re

import pytest

from coursekit.player import MAX_OUTPUT_BYTES, Player, player_page
from coursekit.recording import Recording
from minipaged.recording import FORMAT, VERSION

HEADER = {"format": FORMAT, "version": VERSION, "lane": "blocks", "model": "m", "num_blocks": 4,
          "block_size": 4, "bytes_per_block": 64}  # fmt: skip


def run(*texts):
    frames = [
        {"lane": "blocks", "index": i, "sequences": {"a/0": {"tokens": [text]}}}
        for i, text in enumerate(texts)
    ]
    return Recording([json.dumps(value) for value in (HEADER, *frames)])


def test_page_holds_the_recording_and_asks_for_nothing():
    page = player_page(run("</script><b>").text, step=3, pick='a"/0')
    assert "</script><b>" not in page and "\\u003c/script>" in page
    assert 'data-step="3" data-pick="a&quot;/0"' in page
    assert "src=" not in page and 'rel="stylesheet"' not in page
    assert "page/frames" not in page, "it has the player, not the feed"


def test_cell_output_unpacks_to_the_page():
    player = Player(run("one", "two"), step=1)
    bundle = player._repr_mimebundle_()
    assert bundle["text/plain"] == "[a player of 2 recorded steps; 4 blocks of 4 tokens]"
    document = html.unescape(re.search(r'srcdoc="([^"]*)"', bundle["text/html"])[1])
    packed = re.search(r'data-page="([^"]*)"', document)[1]
    assert gzip.decompress(base64.b64decode(packed)).decode() == player_page(run("one", "two").text, step=1)
    assert Player(run("one", "two"), step=1).html == player.html


def test_output_of_a_short_run_adds_little_to_a_notebook():
    assert len(Player(run("one")).html) < 30_000


def test_a_run_too_long_for_a_notebook_is_refused_with_both_sizes():
    noise = random.Random(0).randbytes(MAX_OUTPUT_BYTES).hex()
    with pytest.raises(ValueError, match=rf"takes \d+ bytes in the notebook, the most is {MAX_OUTPUT_BYTES}"):
        Player(run(noise))
