"""`minipaged doctor`: for each thing a machine may lack, what does not run and the way out."""

import argparse
import json
from dataclasses import replace

import pytest

from minipaged import machine
from minipaged.commands import doctor
from minipaged.cpu import calibrate, kernels
from minipaged.cpu.build import find_compiler
from minipaged.machine import SERVING_MEMORY, Gpu, Machine

WHOLE = Machine(
    system="Linux x86_64",
    python="3.11.2",
    torch="2.13.0",
    torch_error=None,
    triton="3.7.1",
    gpu=None,
    cpu_bfloat16=True,
    cores=2,
    cpu_quota=None,
    threads=2,
    waiting={"GOMP_SPINCOUNT": "1000"},
    busy_share=0.07,
    compiler="c++",
    total_memory=2 * SERVING_MEMORY,
    available_memory=SERVING_MEMORY,
    model_file="model.gguf",
    jupyterlab="4.6.6",
    ipywidgets="8.1.9",
    matplotlib="3.11.2",
    pytest="9.2.0",
    nbval="0.11.0",
    products=(
        "bfloat16: amx-t0 (ms: amx-t0 3.1, torch 4.0)",
        "float32: torch (ms: torch 3.0, vectors-t0 3.4)",
    ),
)
T4 = Gpu("Tesla T4", (7, 5), 16 * 2**30, bfloat16=False)


def what_does_not_run(machine: Machine) -> dict[str, doctor.Ability]:
    return {ability.name: ability for ability in doctor.abilities(machine) if not ability.runs}


def test_everything_runs_on_a_whole_machine():
    assert what_does_not_run(WHOLE) == {}


@pytest.mark.parametrize(
    ("lacks", "name", "says"),
    [
        ({"torch_error": "OSError: libgomp"}, "serve a model (demo, generate)", "libgomp"),
        ({"model_file": None}, "serve a model (demo, generate)", "model file is missing"),
        (
            {"available_memory": SERVING_MEMORY - 1},
            "serve a model (demo, generate)",
            "MiB of memory are free",
        ),
        ({"jupyterlab": None}, "open the lessons", "jupyterlab"),
        ({"matplotlib": None}, "open the lessons", "matplotlib"),
        ({"triton": None}, "run the Triton kernels", "Triton is missing"),
        ({"triton": None, "system": "Darwin arm64"}, "run the Triton kernels", "does not exist for macOS"),
        ({"triton": None}, "compile the kernels for GPUs", "needs Triton"),
        ({"compiler": None}, "build the C++ decode kernel", "no C++ compiler"),
        ({"nbval": None}, "run the tests", "nbval"),
    ],
)
def test_what_is_missing_is_named_with_a_way_out(lacks, name, says):
    ability = what_does_not_run(replace(WHOLE, **lacks))[name]
    assert says in ability.how
    assert ability.way_out


def test_gpu_is_used_and_an_old_one_is_said_to_lack_bfloat16():
    abilities = {ability.name: ability.how for ability in doctor.abilities(replace(WHOLE, gpu=T4))}
    assert abilities["serve a model (demo, generate)"] == "on Tesla T4"
    assert "7.5" in abilities["run the Triton kernels"]
    assert "float16 is used" in abilities["run the Triton kernels"]


@pytest.mark.parametrize(
    ("machine", "code"),
    [
        (WHOLE, 0),
        (replace(WHOLE, triton=None, compiler=None), 0),
        (replace(WHOLE, model_file=None), 1),
        (replace(WHOLE, torch=None, torch_error="ImportError: no torch", model_file=None), 1),
    ],
)
def test_exit_code_says_whether_the_demo_can_run(monkeypatch, capsys, machine, code):
    monkeypatch.setattr(doctor, "inspect", lambda: machine)
    assert doctor.run(argparse.Namespace(json=False)) == code
    printed = capsys.readouterr().out
    assert "What runs here" in printed
    assert "bfloat16: amx-t0 (ms: amx-t0 3.1, torch 4.0)\n" in printed
    assert ("->" in printed) == (machine != WHOLE)
    assert doctor.run(argparse.Namespace(json=True)) == code
    report = json.loads(capsys.readouterr().out)
    assert report["machine"]["python"] == "3.11.2"
    assert report["abilities"][0]["runs"] == (code == 0)


def test_threads_are_named_with_what_limits_them_and_how_they_wait():
    rows = dict(doctor.describe(replace(WHOLE, cores=16, cpu_quota=1.5, threads=1)))
    assert rows["threads"] == "1, the container may use the time of 1.5 processors, GOMP_SPINCOUNT=1000"
    assert rows["other programs"] == "use 7% of the processors just now"
    assert dict(doctor.describe(WHOLE))["threads"] == "2, GOMP_SPINCOUNT=1000"


def test_this_machine_can_be_inspected():
    found = doctor.inspect()
    assert found.torch is not None
    assert found.torch_error is None
    assert 0 < found.available_memory <= found.total_memory
    assert found.cores >= 1
    assert found.threads >= 1
    assert found.waiting
    assert 0 <= found.busy_share <= 1


@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler on this machine")
def test_what_serves_the_products_is_told_for_each_dtype(monkeypatch):
    assert [line.partition(":")[0] for line in machine.cpu_products()] == ["float32", "bfloat16"]
    kernels.load.cache_clear()
    try:
        monkeypatch.setenv(calibrate.VARIABLE, "vectors-none")
        assert machine.cpu_products()[0] == "float32: vectors-none (MINIPAGED_PRODUCTS says so)"
        kernels.load.cache_clear()
        monkeypatch.setenv(calibrate.VARIABLE, "magic")
        assert machine.cpu_products()[0].startswith("MINIPAGED_PRODUCTS is 'magic', the ways to multiply are")
    finally:
        kernels.load.cache_clear()
