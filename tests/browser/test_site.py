"""The built site: every page is whole, sends nothing anywhere, can be searched, and reads well on a phone."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from checkout import ROOT

from coursekit.publish import home

pytestmark = pytest.mark.browser

SITE = ROOT / "site"
PHONE = {"width": 390, "height": 844}
DOCUMENTS = sorted(
    page.relative_to(SITE).as_posix()
    for pattern in ("*.html", "docs/**/*.html", "notebooks/**/*.html", "exercises/**/*.html", "api/*.cache.*")
    for page in SITE.glob(pattern)
)
SMALLEST_TEXT, SMALLEST_CODE = 16, 12  # CSS pixels
FORMULAS = """() => ({written: document.querySelectorAll('.math').length,
                       set: document.querySelectorAll('.math mjx-container').length,
                       wrong: document.querySelectorAll('mjx-merror, [data-mjx-error]').length})"""
FONT_SIZES = """selector => [...document.querySelectorAll('article ' + selector)]
    .map(element => parseFloat(getComputedStyle(element).fontSize))"""


class Page(HTMLParser):
    """The anchors of a page, and the addresses it names."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.addresses: list[str] = []
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name == "id" and value:
                self.anchors.add(value)
            elif value and (name == "src" or (name == "href" and tag in {"a", "link"})):
                self.addresses.append(value)


@pytest.fixture(scope="module")
def pages(site) -> dict[Path, Page]:
    return {file.resolve(): Page(file) for file in SITE.rglob("*.html") if "_static" not in file.parts}


@pytest.fixture
def quiet(page, site) -> list[str]:
    """What a page complained about, or asked another machine for; such requests are not let out."""
    found: list[str] = []
    page.on("console", lambda message: message.type == "error" and found.append(message.text))
    page.on("pageerror", lambda error: found.append(str(error)))

    def watch(route) -> None:
        if route.request.url.startswith(site):
            route.continue_()
        else:
            found.append(f"asks for {route.request.url}")
            route.abort()

    page.route(re.compile(r"^https?:"), watch)
    return found


@pytest.mark.parametrize("document", DOCUMENTS or ["index.html"])  # skipped by name where none is built
def test_page_is_quiet_sets_its_formulas_and_fits_a_phone(page, site, quiet, document):
    page.set_viewport_size(PHONE)
    page.goto(f"{site}/{document}", wait_until="networkidle")
    formulas = page.evaluate(FORMULAS)
    if (SITE / "_static/es5").exists():
        page.wait_for_function("() => !document.querySelector('.math:not(:has(mjx-container))')")
        formulas = page.evaluate(FORMULAS)
        assert formulas["set"] == formulas["written"] and formulas["wrong"] == 0, formulas
    width = page.evaluate("() => document.documentElement.scrollWidth")
    assert width <= PHONE["width"], f"the page is {width} wide and scrolls sideways"
    assert min(page.evaluate(FONT_SIZES, "p"), default=SMALLEST_TEXT) >= SMALLEST_TEXT
    assert min(page.evaluate(FONT_SIZES, "pre"), default=SMALLEST_CODE) >= SMALLEST_CODE
    assert quiet == []


def test_site_has_every_lesson_exercise_and_module(site):
    documents = [
        *ROOT.glob("notebooks/[0-9]*.ipynb"),
        *ROOT.glob("notebooks/extra/[0-9]*.ipynb"),
        *ROOT.glob("exercises/*/*.ipynb"),
        *ROOT.glob("docs/*.md"),
    ]
    modules = [path.relative_to(ROOT).with_suffix("") for path in ROOT.glob("minipaged/**/[a-z]*.py")]
    wanted = [path.relative_to(ROOT).with_suffix(".html") for path in documents]
    wanted += [Path("api", ".".join(module.parts) + ".html") for module in modules]
    assert [str(path) for path in wanted if not (SITE / path).exists()] == []


def test_every_link_within_the_site_leads_somewhere(pages):
    broken = []
    for file, page in pages.items():
        for address in page.addresses:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            anchor = unquote(parts.fragment)
            if not target.is_file():
                broken.append(f"{file.relative_to(SITE)}: {address}")
            elif anchor and target in pages and anchor not in pages[target].anchors:
                broken.append(f"{file.relative_to(SITE)}: no such place {address}")
    assert broken == []


def test_formulas_of_the_lessons_are_marked_as_such(pages):
    lesson = next(SITE.glob("notebooks/02_*.html")).read_text(encoding="utf-8")
    assert 'class="math' in lesson and "$$" not in lesson


def test_search_finds_a_term_and_leads_to_it(page, site, quiet):
    page.goto(f"{site}/search.html?q=watermark")
    result = page.locator("#search-results a").first
    result.wait_for()
    result.click()
    page.wait_for_load_state()
    assert "watermark" in page.locator("article").inner_text().lower()
    assert quiet == []


def test_dark_mode_switches_and_is_remembered(page, site):
    def background() -> int:
        color = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
        return sum(map(int, re.findall(r"\d+", color)[:3]))

    page.emulate_media(color_scheme="light")
    page.goto(f"{site}/index.html")
    assert background() == 3 * 255
    page.locator("button.theme-switch-button:visible").first.click()
    page.locator(".theme-change-button[data-mode='dark']:visible").click()
    assert background() < 3 * 60
    page.goto(f"{site}/docs/glossary.html")
    assert background() < 3 * 60


@pytest.mark.parametrize("lesson", sorted(path.stem for path in ROOT.glob("notebooks/[0-9]*.ipynb")))
def test_lesson_can_be_downloaded_and_opened_in_colab(page, site, lesson):
    page.goto(f"{site}/notebooks/{lesson}.html")
    links = page.locator(f'a[href="{home.colab_url(f"notebooks/{lesson}.ipynb")}"]').count()
    assert (links >= 1) == (home.repository() != home.UNSET), "no button may lead nowhere"
    address = page.locator(".dropdown-download-buttons a").first.get_attribute("href")
    downloaded = json.loads(page.request.get(f"{site}/notebooks/{address}").body())
    for cell in downloaded["cells"]:
        cell["metadata"].pop("mystnb", None)  # the texts of its pictures, where the site looks for them
    is_same = downloaded == json.loads((ROOT / f"notebooks/{lesson}.ipynb").read_text())
    assert is_same  # the difference of two notebooks would take minutes to print


def test_a_widget_shows_its_first_picture(page, site):
    page.goto(f"{site}/notebooks/05_paged_attention.html")
    widget = page.get_by_alt_text("Upper row: a pool of eight blocks")
    widget.scroll_into_view_if_needed()
    assert widget.evaluate("async picture => { await picture.decode(); return picture.naturalWidth }") > 300
