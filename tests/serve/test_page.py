"""The live page in a real Chromium: send users, see blocks fill, pick, fork, hang up, pause."""

import shutil

import pytest

pytest.importorskip("uvicorn", reason="no serve extra: `make setup` installs it")
playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: `make served` installs it")

import httpx
from page_checks import FAINT, UNNAMED
from tiny import running, tiny_llm

pytestmark = pytest.mark.serve
PHONE = {"width": 390, "height": 844}
BLUE, GREY = "#1f5fbf", "#b8b8b8"
PIXELS = """([name, colour]) => {
    const canvas = views.get(name).canvas, data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    const [r, g, b] = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
    let found = 0;
    for (let i = 0; i < data.length; i += 4) found += data[i] === r && data[i + 1] === g && data[i + 2] === b;
    return found;
}"""  # noqa: E501


@pytest.fixture(scope="module")
def chromium():
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        pytest.skip("no Chromium on PATH: `apt-get install chromium`")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture
def page(chromium):
    """A tab that notes complaints and requests to other machines, and lets none of these out."""
    context = chromium.new_context(viewport={"width": 1200, "height": 900}, bypass_csp=True)
    context.set_default_timeout(120_000)
    page, complaints = context.new_page(), []
    page.on("console", lambda m: m.type == "error" and complaints.append(m.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on(
        "request", lambda r: r.url.startswith(("http://127.", "data:", "file:")) or complaints.append(r.url)
    )
    yield page
    context.close()
    assert complaints == []


@pytest.fixture
def server():
    with running(tiny_llm(num_blocks=200)) as started:
        yield started


def open_page(page, server):
    page.goto(server.url)
    page.wait_for_function("lanes.has('blocks') && views.has('blocks')")


def test_users_fill_blocks_and_leave_them_cached(page, server):
    open_page(page, server)
    assert page.evaluate(PIXELS, ["blocks", BLUE]) == 0
    page.select_option("#rate", "1000")
    page.click("#send")
    page.wait_for_function("lanes.get('blocks').most > 5")
    page.wait_for_function("lanes.get('blocks').most > 5 && !lanes.get('blocks').sequences.size && !dirty")
    assert page.evaluate(PIXELS, ["blocks", BLUE]) == 0
    assert page.evaluate(PIXELS, ["blocks", GREY]) > 0
    server.wait_until_idle()


def test_a_picked_request_is_joined_to_its_blocks_while_the_engine_is_paused(page, server):
    open_page(page, server)
    page.click("#pause")
    page.wait_for_selector("#pause[aria-pressed=true]")
    page.click("#send")
    server.wait_until(lambda: len(server.llm.engine.requests) >= 3)
    steps = server.llm.stats.num_steps
    page.click("#one")
    page.wait_for_selector("#running button")
    assert server.llm.stats.num_steps == steps + 1
    page.locator("#running button").first.click()
    page.wait_for_function("document.querySelectorAll('.lane path').length > 0")
    name = page.evaluate("picked")
    blocks = server.llm.engine.requests[name.split("/")[0]].samples[0].table.blocks
    assert page.locator(".table li").all_inner_texts() == [f"{i} → {block}" for i, block in enumerate(blocks)]
    assert page.locator(".lane path").count() == len(blocks)
    assert page.evaluate(PIXELS, ["blocks", BLUE]) > 0
    page.locator(".lane canvas").focus()
    page.evaluate(f"point('blocks', {blocks[0] - 1 if blocks[0] else 1})")
    page.keyboard.press("ArrowRight" if blocks[0] else "ArrowLeft")
    page.wait_for_function(f"document.getElementById('block').innerText.includes('Block {blocks[0]}:')")
    assert f"in the block tables of {name.removesuffix('/0')}" in page.locator("#block").inner_text()
    page.click("#pause")
    server.wait_until(lambda: not server.thread.paused)


def test_a_chat_forks_its_prompt_copies_on_write_and_frees_all_when_it_hangs_up(page, server):
    open_page(page, server)
    page.select_option("#delay", "0.2")
    server.wait_until(lambda: server.thread.delay == 0.2)
    page.select_option("#n", "4")
    page.fill("#message", "a prompt that fills more than one block")
    page.click("#chat button[type=submit]")
    page.wait_for_function(
        "[...lanes.get('blocks').owners().values()].some((at) => at.length === 4)"
        " && [...lanes.get('blocks').owners().values()].filter((at) => at.length === 1).length >= 4"
    )
    kinds = "lanes.get('blocks').events.map((event) => event[1])"
    page.wait_for_function(f"['fork', 'copy'].every((kind) => {kinds}.includes(kind))")
    assert page.evaluate(f"{kinds}.filter((kind) => kind === 'fork').length") == 3
    page.click("#stop")
    page.wait_for_function("!lanes.get('blocks').sequences.size && !dirty")
    assert page.evaluate(PIXELS, ["blocks", BLUE]) == 0
    server.wait_until_idle()
    assert "its blocks are free" in page.locator("#said").inner_text()


def test_strips_stand_beside_blocks_and_hold_fewer(page, server):
    open_page(page, server)
    page.click("#strips")
    page.wait_for_function("views.size === 2")
    page.select_option("#rate", "1000")
    page.click("#send")
    page.wait_for_function("lanes.get('blocks').most > 10 && lanes.get('strips').most > 0")
    assert page.evaluate("lanes.get('strips').most") <= server.thread.lanes["strips"].pool.num_blocks
    page.click("#strips")
    page.wait_for_function("views.size === 1")


def test_words_change_and_a_phone_needs_no_sideways_scrolling(page, server):
    page.set_viewport_size(PHONE)
    open_page(page, server)
    for language in ("zh-CN", "en"):
        page.click("#language")
        page.wait_for_selector(f"html[lang={language}]")
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    missing = "Object.keys(WORDS.en).filter((key) => !(key in WORDS.zh)).length"
    assert page.evaluate(missing) == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everything_is_named_and_dark_enough_to_read(page, server, scheme):
    page.emulate_media(color_scheme=scheme)
    open_page(page, server)
    page.click("#send")
    page.wait_for_selector("#running button")
    page.wait_for_function("document.getElementById('status').textContent.includes('running')")
    assert page.evaluate(UNNAMED) == []
    assert page.evaluate(FAINT) == []


def test_an_open_page_that_is_closed_leaves_nothing_behind(page, server):
    open_page(page, server)
    page.click("#pause")
    server.wait_until(lambda: server.thread.paused)
    page.goto("about:blank")
    server.wait_until(lambda: not server.thread.paused)
    assert server.llm.engine.on_step is None
    body = {"prompt": "abc", "max_tokens": 2}
    assert httpx.post(f"{server.url}/v1/completions", json=body).status_code == 200
