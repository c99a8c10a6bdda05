"""`minipaged bench memory`: what it measures holds, and it prints for people and for programs."""

import json
from dataclasses import replace

import pytest

from coursekit.commands.bench_memory import BLOCK_SIZES, PAPER_SHARE, RULES, WORKLOADS, load, measure
from minipaged.cli import main


@pytest.fixture(scope="module")
def results():
    """The two real traces cut to their first tenth: the command itself runs them whole."""
    measured = {}
    for name in WORKLOADS:
        workload = load(name)
        if name.startswith("azure"):
            workload = replace(workload, lengths=workload.lengths[: len(workload.lengths) // 10])
        measured[name] = measure(workload)["policies"]
    return measured


def test_paging_reaches_the_goals_at_block_size_16(results):
    goals = {"azure-conv": 0.99, "azure-code": 0.99, "sharegpt": 0.96, "alpaca": 0.90}
    for name, goal in goals.items():
        assert results[name]["paged 16"]["share_of_taken"] >= goal


def test_paging_holds_more_requests_than_any_reservation(results):
    for name, policies in results.items():
        best = max(policies[rule]["running"] for rule in RULES)
        assert policies["paged 16"]["running"] > best, name


def test_a_request_never_wastes_a_whole_block(results):
    for policies in results.values():
        for block_size in BLOCK_SIZES:
            assert policies[f"paged {block_size}"]["unused_tokens_per_request"] <= block_size - 1


def test_smaller_blocks_waste_less(results):
    for policies in results.values():
        shares = [policies[f"paged {block_size}"]["share_of_taken"] for block_size in BLOCK_SIZES]
        assert shares == sorted(shares, reverse=True)
        assert shares[0] == 1.0


def test_knowing_more_reserves_less(results):
    for policies in results.values():
        held = [policies[name]["share_of_taken"] for name in ("maximum x4", "maximum x2", *RULES)]
        assert held == sorted(held)


def test_the_shares_of_every_policy_add_up_to_the_budget(results):
    for policies in results.values():
        for figures in policies.values():
            assert sum(figures["shares_of_budget"].values()) == pytest.approx(1)


def test_the_order_of_the_papers_figures_is_ours(results):
    ours = [results["sharegpt"][name]["share_of_taken"] for name in PAPER_SHARE]
    assert ours == sorted(ours)


def test_json_carries_every_figure(capsys):
    assert main(["bench", "memory", "--json", "--workload", "chat48"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report["workloads"]) == {"chat48"}
    assert report["workloads"]["chat48"]["requests"] == 48
    assert set(report["workloads"]["chat48"]["policies"]) == {
        *RULES, "maximum x2", "maximum x4", *(f"paged {block_size}" for block_size in BLOCK_SIZES),
    }  # fmt: skip
    assert report["paper"]["share"]["paged 16"] == 0.963


def test_the_table_has_a_line_for_every_policy(capsys):
    assert main(["bench", "memory", "--workload", "chat48"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("chat48: 48 requests, 52 + 89 tokens on average")
    assert [line.split("  ")[0] for line in lines[2:7]] == [*RULES.values(), "maximum x2", "maximum x4"]
    assert max(map(len, lines)) <= 120
