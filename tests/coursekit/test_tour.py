"""The tour: one idea a page, every number from a recording, a way to its lesson and to the next page."""

import re
from urllib.parse import parse_qs

import pytest
from checkout import ROOT

from coursekit.publish.recorded_runs import RUNS, recorded_runs
from coursekit.publish.tour import DIRECTIVE, LESSONS, NAME, facts, find_moment, render, with_player
from coursekit.recording import record
from minipaged.checkpoints.loading import LoadedModel
from minipaged.engine.llm import LLM
from minipaged.model.tiny import TINY, random_llama
from minipaged.sampling_params import SamplingParams

PAGES = sorted(ROOT.glob("docs/tour/[0-9]*.md"))[1:]
LINK = re.compile(r"\]\(([^)]*)\)")


@pytest.fixture(scope="module")
def samples():
    """Three samples of a prompt of six tokens, in blocks of four."""
    llm = LLM(LoadedModel(random_llama(), None, TINY, "tiny"), device="cpu", num_blocks=16, block_size=4)
    params = SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=5, ignore_eos=True)
    with record(llm) as run:
        llm.generate({"prompt_token_ids": [1, 2, 3, 4, 5, 6]}, params, use_tqdm=False)
    return run


def test_there_are_ten_pages_in_the_order_of_the_course():
    lessons = [re.search(r"notebooks/(\d\d)_", page.read_text())[1] for page in PAGES]
    assert len(PAGES) == 10 and lessons == sorted(lessons)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_has_its_parts_and_no_typed_number(page):
    text = page.read_text()
    run, options = DIRECTIVE.search(text).groups()
    assert run in RUNS and "moment: " in options
    assert re.search(r"^\*\*.*\?\*\*$", text, re.MULTILINE), "its question"
    assert re.search(r"<details><summary>.*\?</summary>\n\n.+\n\n</details>", text), (
        "a question and its answer"
    )
    prose = re.sub(r"lesson \d\d", "", LINK.sub("]", DIRECTIVE.sub("", text)))
    assert not re.search(r"\d", prose), "numbers are computed from the recording"
    here = PAGES.index(page)
    leads_to = PAGES[here + 1].name if here < 9 else "../../notebooks/00_start_here.ipynb"
    links = LINK.findall(text)
    assert leads_to in links
    assert all((page.parent / link.partition("#")[0]).exists() for link in links)


def test_first_page_lists_all_of_them():
    listed = LINK.findall((ROOT / "docs/tour/00_tour.md").read_text())
    assert listed == [page.name for page in PAGES]


def test_facts_are_those_of_the_moment(samples):
    at_fork, at_copy = (facts(samples, f"first {kind}", "llm-0/1").values for kind in ("fork", "copy"))
    assert (at_fork["sharers"], at_fork["blocks_held"], at_fork["saved"], at_fork["copy"]) == (3, 2, 4, 0)
    assert (at_copy["blocks_held"], at_copy["entries"], at_copy["saved"], at_copy["copy"]) == (4, 6, 2, 2)
    assert (at_copy["prompt"], at_copy["tokens"], at_copy["blocks"]) == (6, 7, 2)
    assert at_copy["stored"] == 4 + 3 * 3 and at_copy["empty"] == 3
    assert at_copy["last_slot"] == at_copy["last_block"] * 4 + 2
    assert at_copy["computed"] == 6 + 3 and at_copy["in_all"] == 6 + 3 * 4


def test_moments_are_found_or_refused(samples):
    steps = [find_moment(samples, name) for name in ("first fork", "first copy", "step 3", "end")]
    assert steps == [0, 1, 3, 5]
    for moment in ("first preempted", "step 99"):
        with pytest.raises(ValueError, match=f"no moment '{moment}'; it has 6 steps"):
            find_moment(samples, moment)
    with pytest.raises(ValueError, match="'llm-9/0' does not exist"):
        facts(samples, "end", "llm-9/0")


def test_a_page_gets_its_player_and_its_numbers(samples):
    page = "# T\n\n```{player} 09\nmoment: first copy\npick: llm-0/1\n```\n\n{sharers} of {num_blocks}.\n"
    shown = render(page, {"09": samples})
    start = re.search(r'src="../../_static/player/09.html#([^"]*)"', shown)[1].replace("&amp;", "&")
    assert parse_qs(start) == {"step": ["1"], "pick": ["llm-0/1"]}
    assert shown.endswith("3 of 16.\n")
    with pytest.raises(ValueError, match=r"no number \{shares\}"):
        render(page + "{shares}", {"09": samples})


def test_lessons_get_their_player_below_the_picture():
    body = '<section id="the-picture">\n<h2>The picture<a href="#x">#</a></h2>\n<p>text</p></section>'
    assert re.search(r"</h2>\n<p>A run.*</p>\nFRAME\n\n<p>text", with_player(body, "FRAME"))
    with pytest.raises(ValueError, match="no section"):
        with_player("<p>text</p>", "FRAME")
    for lesson in LESSONS:
        (source,) = ROOT.glob(f"notebooks/src/{lesson}_*.py")
        assert "# ## The picture\n" in source.read_text() and lesson in RUNS


@pytest.mark.slow  # a minute of the real model: it makes every run that the site plays
def test_every_page_finds_its_moment_and_its_numbers(tmp_path):
    runs = recorded_runs(tmp_path)
    for page in PAGES:
        shown = render(page.read_text(), runs)
        assert "<iframe" in shown and not NAME.search(shown)
    for lesson, (step, pick) in LESSONS.items():
        assert facts(runs[lesson], f"step {step}", pick).values["running"] > 1
    values = facts(runs["12"], "most running").values
    assert values["most_running"] > 5 * values["strips.most_running"]
    stamps = [path.stat().st_mtime_ns for path in sorted(tmp_path.iterdir())]
    recorded_runs(tmp_path)
    assert [path.stat().st_mtime_ns for path in sorted(tmp_path.iterdir())] == stamps, "made once"
