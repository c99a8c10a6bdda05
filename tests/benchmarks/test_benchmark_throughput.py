"""The comparison without its engines: which samples count, what is computed from them, what is printed."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks import figures, processes, quiet, readme, records, throughput
from benchmarks.engines import common
from benchmarks.floor import Floor
from benchmarks.goals import GOALS, goal_cells, goal_rows
from benchmarks.mixes import mix_of

SETTINGS = processes.Settings(threads=1, dtype="float32", preloads=(), foreign_limit=0.1)


def summary(rate: float, ttft: float = 1.0, peak: float = 1000.0) -> dict:
    spread = [0.9 * rate, 1.1 * rate]
    found = {"tokens_per_second": rate, "spread": spread, "ttft_mean": ttft, "peak_mib": peak}
    return found | {"tpot_mean": 0.01, "samples": []}


FOUND = {
    "chat48": {
        "minipaged": summary(560, 0.5, 800),
        "vllm": summary(320, 0.6, 3200),
        "transformers": summary(90),
    },
    "instruct64": {"minipaged": summary(500), "vllm": summary(550)},
    "alone": {"minipaged": summary(60)},
}
FLOORS = {mix: Floor(floor=800.0, overlapped=1000.0) for mix in FOUND}


def rows_by_goal() -> dict[tuple[str, str], dict]:
    return {(row["text"], row["mix"]): row for row in goal_rows(FOUND, FLOORS)}


def test_goals_are_judged_against_their_limits_and_their_aims():
    rows = rows_by_goal()
    vllm = rows["tokens/s against vLLM at its best", "chat48"]
    assert (vllm["measured"], vllm["met"], vllm["aim_met"]) == (1.75, True, False)
    assert not rows["tokens/s against vLLM at its best", "instruct64"]["met"]
    memory = rows["peak memory against vLLM", "chat48"]  # smaller is better
    assert (memory["measured"], memory["met"], memory["aim_met"]) == (0.25, True, True)
    assert rows["share of this machine's floor", "chat48"]["measured"] == 0.7
    assert not rows["share of this machine's floor", "chat48"]["met"]


def test_a_lead_is_held_against_the_one_recorded_on_such_a_machine():
    recorded = {"chat48": {"minipaged": summary(1000), "vllm": summary(500)}}
    rows = {row["mix"]: row for row in goal_rows(FOUND, FLOORS, recorded) if "record" in row["text"]}
    assert (rows["chat48"]["measured"], rows["chat48"]["met"]) == (0.875, False)
    assert rows["instruct64"]["met"] is None  # not recorded


def test_kernels_that_are_slower_than_plain_torch_miss_a_goal():
    found = {"chat48": FOUND["chat48"] | {"minipaged-torch": summary(570)}}
    goals = {(row["text"], row["mix"]): row for row in goal_rows(found, FLOORS)}
    row = goals["tokens/s against plain torch", "chat48"]
    assert (row["at_least"], row["met"]) == (1.0, False)
    assert row["measured"] == pytest.approx(560 / 570)


def test_what_was_not_measured_is_said_and_not_judged():
    row = rows_by_goal()["one request alone, against vLLM", "alone"]
    assert row["measured"] is row["met"] is row["aim_met"] is None
    assert goal_cells(row)[-2:] == ["-", "not measured"]
    assert len(goal_rows({}, {})) == sum(len(goal.mixes) for goal in GOALS)


def test_verdict_names_the_higher_limit_that_is_met():
    rows = rows_by_goal()
    assert goal_cells(rows["peak memory against vLLM", "chat48"])[2:] == [
        "≤ 0.50",
        "≤ 0.35",
        "0.25",
        "aim met",
    ]
    assert goal_cells(rows["tokens/s against vLLM at its best", "chat48"])[-1] == "met"
    assert goal_cells(rows["tokens/s against vLLM at its best", "instruct64"])[-1] == "not met"


def test_summary_is_the_median_of_the_samples():
    samples = [
        {"seconds": seconds, "output_tokens": 100, "ttft_mean": ttft, "tpot_mean": None, "peak_mib": 5}
        for seconds, ttft in ((1.0, 0.3), (2.0, 0.1), (4.0, 0.2))
    ]
    found = throughput.summarise(samples)
    assert found["tokens_per_second"] == 50 and found["spread"] == [25, 100]
    assert found["ttft_mean"] == 0.2 and found["tpot_mean"] is None


def test_table_says_how_many_times_faster_the_first_engine_is():
    rows = throughput.mix_rows("chat48", FOUND["chat48"])
    assert rows[2] == ["vllm", "320", "288 – 352", "0.60", "10.0", "3200", "1.75 ×"]
    assert throughput.mix_rows("chat48", {"vllm": summary(320)})[1][-1] == "-"
    assert records.markdown(rows).splitlines()[1].count("---") == len(rows[0])


def test_others_share_is_what_the_machine_did_beyond_the_measured_process():
    first = quiet.Reading(at=10.0, busy=100.0, own=5.0)
    last = quiet.Reading(at=14.0, busy=106.0, own=9.0)  # 2 of 8 processor seconds were not its own
    assert quiet.foreign_share(first, last, cores=2) == 0.25
    rounded = quiet.Reading(at=14.0, busy=103.9, own=9.0)  # clocks tick in hundredths
    assert quiet.foreign_share(first, rounded, cores=2) == 0.0
    with pytest.raises(ValueError, match="the readings are 0"):
        quiet.foreign_share(first, first, cores=2)


def test_a_measurement_is_taken_again_until_the_machine_is_quiet(monkeypatch: pytest.MonkeyPatch):
    shares = iter([0.5, 0.11, 0.1, 0.9])
    monkeypatch.setattr(quiet, "foreign_share", lambda *_: next(shares))
    results = iter("abc")
    assert quiet.when_quiet(lambda: next(results)) == ("c", 0.1)


def test_a_machine_that_is_never_quiet_is_an_error_with_the_shares(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(quiet, "foreign_share", lambda *_: 0.3)
    with pytest.raises(quiet.NotQuietError, match=r"30%.*at most 10%"):
        quiet.when_quiet(lambda: None)


def test_an_answer_of_another_length_is_refused():
    served = [common.Served(3, 0.5, 0.2), common.Served(1, 1.5, 0.0)]
    result = common.result_of(mix_of([2, 2], [3, 1]), served, seconds=2.0)
    assert result == {"seconds": 2.0, "output_tokens": 4, "ttft_mean": 1.0, "tpot_mean": 0.1}
    with pytest.raises(SystemExit, match="request 1 got 1 tokens, 2 were asked for"):
        common.result_of(mix_of([2, 2], [3, 2]), served, seconds=2.0)


class Disturbed:
    """An engine beside which others work in every sample but one in three."""

    engine = processes.ENGINES["minipaged"]

    def __init__(self) -> None:
        self.calls = 0

    def sample(self, name: str, mix: list[dict]) -> dict:
        self.calls += 1
        if self.calls % 3:
            raise quiet.NotQuietError([0.5], 0.1)
        return {"seconds": 1.0, "output_tokens": 3, "ttft_mean": 0.1, "tpot_mean": 0.1, "peak_mib": 5}


class Crashing(Disturbed):
    def sample(self, name: str, mix: list[dict]) -> dict:
        self.calls += 1
        raise RuntimeError("out of memory")


def test_a_disturbed_engine_gets_another_round_and_a_crashed_one_does_not():
    engines = {"disturbed": Disturbed(), "crashing": Crashing()}
    found = throughput.take_samples(engines, {"one": [], "two": []}, repeat=3)
    assert engines["disturbed"].calls == 6 and engines["crashing"].calls == 1
    assert [list(found[mix]) for mix in ("one", "two")] == [["disturbed"], ["disturbed"]]
    assert len(found["one"]["disturbed"]["samples"]) == 1


def stand_in(tmp_path: Path, body: str) -> processes.Engine:
    """An engine that is a few lines of Python beside the real `common`."""
    script = tmp_path / "engine.py"
    folder = str(Path(common.__file__).parent)
    script.write_text(
        f"import sys\nsys.path.insert(0, {folder!r})\nfrom common import *\narguments()\n{body}\n"
    )
    return processes.Engine("stand-in", str(script), Path(sys.executable))


def test_an_engine_serves_mix_after_mix_and_is_stopped_in_between(tmp_path: Path):
    serve = "run(lambda requests: [Served(r['max_tokens'], 0.5, 0.1) for r in requests])"
    handler = signal.getsignal(signal.SIGTERM)
    with processes.started([stand_in(tmp_path, serve)], SETTINGS) as running:
        engine = running["stand-in"]
        results = [engine.serve(mix_of([4] * n, [3] * n)) for n in (2, 5)]
        assert psutil.Process(engine._child.pid).status() == psutil.STATUS_STOPPED
        assert signal.getsignal(signal.SIGTERM) is not handler
    assert signal.getsignal(signal.SIGTERM) is handler
    assert [result["output_tokens"] for result in results] == [6, 15]
    assert all(result["peak_mib"] > 0 and result["cpu_seconds"] >= 0 for result in results)
    assert engine._child.returncode is not None


class Obeying:
    """A process that runs on for a while after it was told to stop."""

    pid = 1

    def __init__(self, *states: str) -> None:
        self.states, self.told = list(states), False

    def suspend(self) -> None:
        self.told = True

    def status(self) -> str:
        assert self.told
        return self.states.pop(0) if len(self.states) > 1 else self.states[0]


def test_an_engine_counts_as_stopped_only_when_it_is(monkeypatch: pytest.MonkeyPatch):
    slow = Obeying(psutil.STATUS_RUNNING, psutil.STATUS_SLEEPING, psutil.STATUS_STOPPED)
    processes.stop(slow)
    assert slow.states == [psutil.STATUS_STOPPED]
    monkeypatch.setattr(processes, "STOP_SECONDS", 0)
    with pytest.raises(TimeoutError, match="process 1 is running, 0 s after"):
        processes.stop(Obeying(psutil.STATUS_RUNNING))


def test_an_engine_that_fails_is_left_out_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    broken = stand_in(tmp_path, "sys.exit('no such model')")
    with processes.started([broken], SETTINGS) as running:
        assert running == {}
    assert "stand-in ended with 1: no such model" in capsys.readouterr().err


def test_a_missing_peer_is_skipped_by_name_and_an_unknown_one_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    absent = processes.Engine("vllm", "vllm_engine.py", Path("no/such/python"))
    monkeypatch.setitem(processes.ENGINES, "vllm", absent)
    assert [engine.name for engine in processes.installed(["minipaged", "vllm"])] == ["minipaged"]
    assert "vllm is skipped" in capsys.readouterr().err
    with pytest.raises(ValueError, match="'lmdeploy'"):
        processes.installed(["lmdeploy"])


def test_figures_from_a_busy_machine_are_not_recorded():
    with pytest.raises(ValueError, match=r"a limit of 1\.0 is not recorded"):
        records.write("throughput", {"foreign_limit": 1.0}, {}, record=True)


def test_what_is_written_says_where_it_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(records, "UNRECORDED", tmp_path)
    result = {"foreign_limit": 0.1, "mixes": FOUND, "floors": {mix: {"floor": 800.0} for mix in FOUND}}
    path = records.write("throughput", result, {"rates": figures.throughput(result)}, record=False)
    written = json.loads(path.read_text())
    assert written["mixes"] == FOUND and written["machine"]["versions"]["torch"]
    assert {file.name for file in tmp_path.iterdir()} == {"throughput.json", "rates.svg", "rates.png"}
    assert records.read("throughput", tmp_path) == written
    assert records.read("nothing", tmp_path) is None


EPYC = "cpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\nflags\t\t: fpu avx512_bf16 sse\n"
XEON = (
    "cpu family\t: 6\nmodel\t\t: 207\nmodel name\t: INTEL(R) XEON(R) PLATINUM 8581C CPU @ 2.10GHz\n"
    "flags\t\t: avx512_bf16 amx_bf16\n"
)
GRAVITON = "Features\t: fp asimd bf16 sve\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n"


def test_processor_is_named_with_its_bfloat16_instructions(tmp_path: Path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(EPYC)
    assert records.processor(cpuinfo) == "AMD EPYC, avx512_bf16"


@pytest.mark.parametrize(
    ("facts", "cores", "folder"),
    [
        (EPYC, 2, "amd-epyc-25-17-avx512-bf16-2-cores"),
        (EPYC, 8, "amd-epyc-25-17-avx512-bf16-8-cores"),
        (EPYC.replace("17", "1"), 2, "amd-epyc-25-1-avx512-bf16-2-cores"),  # the same name, an older one
        (XEON, 4, "intel-xeon-platinum-8581c-6-207-avx512-bf16-amx-bf16-4-cores"),
        (GRAVITON, 2, "aarch64-0x41-0xd40-bf16-2-cores"),
    ],
)
def test_each_kind_of_machine_has_a_folder_of_its_own(
    facts: str, cores: int, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("platform.processor", lambda: "")
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(facts)
    assert records.machine_folder(cpuinfo, cores) == records.RECORDED / folder


def test_a_record_of_another_machine_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(records, "RECORDED", tmp_path)
    monkeypatch.setattr(records.subprocess, "run", lambda *_, **__: None)  # writes the pages
    for machine in ("first", "second"):
        monkeypatch.setattr(records, "machine_folder", lambda name=machine: tmp_path / name)
        records.write("throughput", {"foreign_limit": 0.1, "of": machine}, {}, record=True)
    assert records.recorded_folders() == [tmp_path / "first", tmp_path / "second"]
    for folder in records.recorded_folders():
        assert records.read("throughput", folder)["of"] == folder.name
    assert {path.name for path in tmp_path.iterdir()} == {"first", "second"}


def test_every_machine_is_a_row_and_what_was_not_measured_a_dash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    floors = {mix: {"floor": 800.0} for mix in FOUND}
    about = {"threads": 2, "floors": floors}
    machines = {"one": ("Some CPU", FOUND), "other": ("Another CPU", {"chat48": {"vllm": summary(320)}})}
    for name, (processor, mixes) in machines.items():
        (tmp_path / name).mkdir()
        record = about | {"machine": {"processor": processor}, "mixes": mixes}
        (tmp_path / name / "throughput.json").write_text(json.dumps(record))
    rows = readme.render_machines(sorted(tmp_path.iterdir())).splitlines()[2:]
    assert rows[0].split(" | ") == [
        "| [Some CPU](results/cpu/one/README.md)", "2", "560", "1.75", "500", "0.91", "60", "-",
        "0.70 and 0.62", "0.83 and 1.00 |",
    ]  # fmt: skip
    assert rows[1].startswith("| [Another CPU]") and rows[1].count(" | - | -") >= 3
    assert readme.render_machines([]) == readme.NOT_RECORDED


def test_picture_has_a_bar_for_each_engine_and_a_floor_for_each_mix():
    result = {"mixes": FOUND, "floors": {mix: {"floor": 800.0} for mix in FOUND}}
    figure = figures.throughput(result)
    gids = {artist.get_gid() for artist in figure.findobj() if artist.get_gid()}
    wanted = {f"rate:{mix}:{engine}" for mix, engines in FOUND.items() for engine in engines}
    assert wanted | {f"floor:{mix}" for mix in FOUND} <= gids


def test_help_runs_from_any_folder(tmp_path: Path):
    command = [sys.executable, str(Path(throughput.__file__)), "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "--engines" in done.stdout
