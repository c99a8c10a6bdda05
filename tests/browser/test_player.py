"""The player in Chromium: it plays, steps and drags a recorded run, and everybody can use it."""

import json
import re

import pytest
from checkout import ROOT
from page_checks import FAINT, UNNAMED

from coursekit.player import Player, player_page
from coursekit.recording import moments, record
from minipaged.checkpoints.loading import LoadedModel
from minipaged.engine.llm import LLM
from minipaged.model.tiny import TINY, random_llama
from minipaged.sampling_params import SamplingParams

pytestmark = pytest.mark.browser
PHONE = {"width": 390, "height": 844}
MODEL = LoadedModel(random_llama(), None, TINY, "tiny")
DRAWN = "views.has('blocks') && !dirty"


@pytest.fixture(scope="module")
def run():
    """Two requests of three samples each in a pool too small for all: forks, copies and a preemption."""
    llm = LLM(MODEL, device="cpu", num_blocks=16, block_size=4, watermark=0.0)
    random = {"n": 3, "temperature": 1.0, "max_tokens": 14, "ignore_eos": True}
    params = [SamplingParams(seed=seed, **random) for seed in (1, 2)]
    prompts = [{"prompt_token_ids": list(range(start, start + 6))} for start in (10, 40)]
    with record(llm) as recording:
        llm.generate(prompts, params, use_tqdm=False)
    assert llm.stats.num_preemptions > 0
    return recording


@pytest.fixture
def opened(page, run, tmp_path):
    """The page of the run, drawn. What it complains about, or asks a machine for, fails the test."""
    complaints = []
    page.on("console", lambda message: message.type == "error" and complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: re.match("https?:|ws", request.url) and complaints.append(request.url))
    file = tmp_path / "run.html"
    file.write_text(player_page(run.text), encoding="utf-8")
    page.goto(file.as_uri())
    page.wait_for_function(DRAWN)
    yield page
    assert complaints == []


def known(page):
    """What the player knows: sequence -> [status, stored, blocks]."""
    page.wait_for_function(DRAWN)
    return page.evaluate(
        "Object.fromEntries([...lanes.get('blocks').sequences]"
        ".map(([name, s]) => [name, [s.status, s.stored, s.blocks]]))"
    )


def recorded(run, step):
    for number, lanes in enumerate(moments(run)):
        if number == step:
            sequences = lanes["blocks"].sequences
            return {name: [one.status, one.stored, one.blocks] for name, one in sequences.items()}
    raise AssertionError(f"no step {step}")


def place(page):
    return page.evaluate("+document.getElementById('slider').value")


def drag_to(page, step):
    page.evaluate(
        "(to) => { const slider = document.getElementById('slider');"
        " slider.value = to; slider.dispatchEvent(new Event('input')); }",
        step,
    )


def test_steps_and_drags_show_what_was_recorded_then(opened, run):
    last = sum(1 for _ in moments(run)) - 1
    assert known(opened) == recorded(run, 0)
    opened.click("#forward")
    opened.click("#forward")
    opened.click("#back")
    assert place(opened) == 1 and known(opened) == recorded(run, 1)
    for step in (last, 5, last - 3):  # onwards, and back
        drag_to(opened, step)
        assert known(opened) == recorded(run, step)
    opened.locator("#slider").focus()
    opened.keyboard.press("ArrowLeft")
    opened.wait_for_function(f"+document.getElementById('slider').value === {last - 4}")
    assert known(opened) == recorded(run, last - 4)


def test_it_plays_to_the_end_stops_there_and_begins_again(opened, run):
    last = sum(1 for _ in moments(run)) - 1
    opened.select_option("#pace", "60")
    opened.click("#play")
    opened.wait_for_function(f"+document.getElementById('slider').value === {last}")
    opened.wait_for_function("document.getElementById('play').textContent === 'Play'")
    assert known(opened) == {}
    opened.click("#play")
    opened.wait_for_function(f"+document.getElementById('slider').value < {last}")
    opened.click("#play")
    opened.wait_for_function("document.getElementById('play').textContent === 'Play'")


def test_a_picked_request_is_joined_to_each_of_its_blocks(opened, run):
    drag_to(opened, 3)
    opened.locator("#running button").nth(1).click()
    opened.wait_for_function("document.querySelectorAll('.lane path').length > 0")
    name = opened.evaluate("picked")
    blocks = recorded(run, 3)[name][2]
    assert opened.locator(".table li").all_inner_texts() == [
        f"{i} → {block}" for i, block in enumerate(blocks)
    ]
    ends = opened.evaluate("""() => {
        const v = views.get("blocks"), box = v.root.getBoundingClientRect(), pool = v.canvas.getBoundingClientRect(), size = v.places.size;
        return [...document.querySelectorAll(".lane path")].map((path) => {
            const end = path.getPointAtLength(path.getTotalLength());
            return Math.floor((end.y + box.top - pool.top) / size) * v.places.columns + Math.floor((end.x + box.left - pool.left) / size);
        }); }""")  # noqa: E501
    assert ends == blocks


def test_a_block_tells_its_tokens_references_and_hash_to_mouse_and_keyboard(opened, run):
    drag_to(opened, 3)
    shared = next(block for block, count in lane_at(run, 3).refs.items() if count == 3)
    box = opened.locator(".lane canvas").bounding_box()
    x, y, size = opened.evaluate(
        f"[...views.get('blocks').places.at({shared}), views.get('blocks').places.size]"
    )
    opened.mouse.move(box["x"] + x + size / 2, box["y"] + y + size / 2)
    opened.wait_for_function(f"document.getElementById('block').innerText.includes('Block {shared}:')")
    told = opened.inner_text("#block")
    assert "4 of 4 tokens, reference count 3" in told
    assert f"prefix hash {lane_at(run, 3).published[shared]}" in told
    opened.locator(".lane canvas").focus()
    opened.keyboard.press("End")
    opened.wait_for_function("document.getElementById('block').innerText.includes('Block 15:')")
    opened.keyboard.press("Home")
    opened.wait_for_function("document.getElementById('block').innerText.includes('Block 0:')")
    opened.keyboard.press("Enter")
    opened.wait_for_function("picked !== null")


def lane_at(run, step):
    for number, lanes in enumerate(moments(run)):
        if number == step:
            return lanes["blocks"]
    raise AssertionError(f"no step {step}")


def test_it_names_the_forks_copies_and_preemptions_that_the_recording_has(opened, run):
    expected = {"fork": 0, "copy": 0, "gaveWay": 0}
    seen = dict(expected)
    for step, lanes in enumerate(moments(run)):
        for event in lanes["blocks"].events:
            kind = {"preempted": "gaveWay"}.get(event.kind, event.kind)
            expected[kind] = expected.get(kind, 0) + 1
        drag_to(opened, step)
        found = opened.evaluate(
            "lanes.get('blocks').events.filter((e) => e[0] === lanes.get('blocks').frame.index)"
        )
        for _, kind, *_ in found if len(found) < 8 else []:
            seen[kind] = seen.get(kind, 0) + 1
    assert expected["fork"] >= 2 and expected["copy"] >= 2 and expected["gaveWay"] >= 1
    assert {kind: seen[kind] for kind in expected} == expected
    assert opened.locator("#events li").count() > 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everything_is_named_and_dark_enough_to_read(opened, scheme):
    opened.emulate_media(color_scheme=scheme)
    drag_to(opened, 3)
    opened.locator("#running button").first.click()
    opened.wait_for_function(DRAWN)
    assert opened.evaluate(UNNAMED) == []
    assert opened.evaluate(FAINT) == []
    assert opened.evaluate("document.getElementById('status').getAttribute('role')") == "status"
    assert "running" in opened.inner_text("#status")
    assert opened.locator("#requests th[scope=col]").count() == 3


def test_a_phone_needs_no_sideways_scrolling_in_either_language(opened):
    opened.set_viewport_size(PHONE)
    for language in ("zh-CN", "en"):
        opened.click("#language")
        opened.wait_for_selector(f"html[lang={language}]")
        opened.wait_for_function(DRAWN)
        assert opened.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    keys = "JSON.stringify([Object.keys(WORDS.en), Object.keys(WORDS.zh)])"
    english, chinese = json.loads(opened.evaluate(keys))
    assert english == chinese


def test_in_a_notebook_it_inflates_takes_its_height_and_follows_the_page(page, run, tmp_path):
    file = tmp_path / "cell.html"
    player = Player(run, step=2, pick="llm-0/1")
    file.write_text(f"<!doctype html><html data-theme='dark'><body>{player.html}</body></html>")
    page.goto(file.as_uri())
    inside = "document.querySelector('iframe').contentWindow"
    page.wait_for_function(f"{inside}.document.querySelectorAll('.lane path').length > 0")
    assert page.evaluate(f"{inside}.document.getElementById('slider').value") == "2"
    assert page.evaluate(f"{inside}.document.documentElement.dataset.theme") == "dark"
    page.wait_for_function(
        "Math.abs(document.querySelector('iframe').clientHeight - 8"
        f" - {inside}.document.body.scrollHeight) <= 2"
    )


@pytest.mark.parametrize("lesson", ["04", "09", "10", "11", "12"])
def test_a_lesson_on_the_site_plays_its_recorded_run(page, site, lesson):
    (document,) = (ROOT / "site").glob(f"notebooks/{lesson}_*.html")
    plays_and_steps(page, f"{site}/notebooks/{document.name}")


@pytest.mark.parametrize("number", range(1, 11))
def test_a_page_of_the_tour_plays_its_recorded_run(page, site, number):
    (document,) = (ROOT / "site").glob(f"docs/tour/{number:02}_*.html")
    plays_and_steps(page, f"{site}/docs/tour/{document.name}")
    assert not re.search(r"\{[a-z_.]+\}", page.inner_text("article")), "every number is filled in"


def plays_and_steps(page, address):
    page.goto(address)
    frame = "document.querySelector('iframe.player')"
    page.evaluate(f"{frame}.scrollIntoView()")  # it is loaded when it is near
    inside = f"{frame}.contentWindow.document"
    page.wait_for_function(f"{inside}.querySelector('.lane canvas')?.width > 300")
    before = page.evaluate(f"+{inside}.getElementById('slider').value")
    page.evaluate(f"{inside}.getElementById('back').click()")
    page.wait_for_function(f"+{inside}.getElementById('slider').value === {before - 1}")
