"""The outcome of a check in one screen."""

from typing import Any

from benchmarks.gpu.results import Found, goal_rows


def print_summary(found: Found, *, dry_run: bool) -> None:
    """Checks, rates, figures beside predictions, peers, goals; of a dry run only what means something."""
    sections = [checks(found), rates(found), figures(found), peers(found), goals(found), notes(found)]
    if dry_run:
        timed = [figure["name"] for figure in found.get("figures", [])]
        ran = f"{len(timed)} cases were timed, in an interpreter: the times are not shown"
        sections = [checks(found), [ran, ""], goals({}), notes(found)]
    for line in (line for section in sections for line in section):
        print(line)


def checks(found: Found) -> list[str]:
    """One line for each kernel and data type: how many problems, the worst error."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for check in found.get("checks", []):
        groups.setdefault((check["kernel"], f"{check.get('query', '')} / {check.get('kv', '')}"), []).append(
            check
        )
    lines = [f"{'kernel':<20} {'query / KV data type':<26} {'right':>7} {'worst error':>12} {'limit':>8}"]
    for (kernel, kinds), group in groups.items():
        errors = [check["error"] for check in group if isinstance(check.get("error"), float)]
        passed = sum(check["passed"] for check in group)
        worst = f"{max(errors):.1e}" if errors else "exact"
        limit = f"{group[0]['limit']:.0e}" if "limit" in group[0] else ""
        lines.append(f"{kernel:<20} {kinds:<26} {passed:>3} / {len(group):<2} {worst:>11} {limit:>8}")
        lines += [f"    {check['error']}"[:200] for check in group if isinstance(check.get("error"), str)]
    return [*lines, ""]


def rates(found: Found) -> list[str]:
    """What the card itself reaches."""
    first: dict[str, float] = {}
    for rate in found.get("rates", []):
        first.setdefault(rate["name"], rate["per_second"] if "per_second" in rate else rate["seconds"])
    lines = []
    if "copy" in first:
        lines.append(f"device copy {first['copy'] / 1e12:.2f} TB/s, read and written bytes counted")
    if "matmul" in first:
        lines.append(f"matrix product {first['matmul'] / 1e12:.0f} TFLOP/s")
    if "host per call" in first:
        lines.append(f"one call costs the host {first['host per call'] * 1e6:.0f} us, left out below")
    return [*lines, ""]


def figures(found: Found) -> list[str]:
    """Each timing beside what bytes and operations predict."""
    lines = [f"{'case':<34} {'median':>10} {'quartiles':>19} {'predicted':>10} {'share of copy':>13}"]
    for figure in found.get("figures", []):
        spread = f"{figure['low'] * 1e6:.1f} - {figure['high'] * 1e6:.1f} us"
        lines.append(
            f"{figure['name']:<34} {figure['median'] * 1e6:>7.1f} us {spread:>19} "
            f"{figure['predicted'] * 1e6:>7.1f} us {figure['share_of_copy']:>13.2f}"
        )
    return [*lines, ""]


def peers(found: Found) -> list[str]:
    lines = [f"{'beside':<22} {'ours':>10} {'theirs':>10} {'our speed / theirs':>19}"]
    for peer in found.get("peers", []):
        if "speed" in peer:
            ours, theirs = (peer[side]["median"] * 1e6 for side in ("ours", "theirs"))
            lines.append(f"{peer['name']:<22} {ours:>7.1f} us {theirs:>7.1f} us {peer['speed']:>19.2f}")
        else:
            lines.append(f"{peer['name']:<22} left out: {peer['skipped']}"[:120])
    return [*lines, ""]


def goals(found: Found) -> list[str]:
    lines = [f"{'goal':<52} {'limit':>6} {'aim':>6} {'measured':>9}"]
    for row in goal_rows(found):
        if row["measured"] is None:
            verdict = "not measured"
        else:
            verdict = f"{row['measured']:>9.2f}  {'met' if row['met'] else 'NOT met'}"
        lines.append(f"{row['text']:<52} {row['at_least']:>6.2f} {row['aim']:>6.2f} {verdict}")
    return [*lines, ""]


def notes(found: Found) -> list[str]:
    return [note["text"] for note in found.get("notes", [])]
