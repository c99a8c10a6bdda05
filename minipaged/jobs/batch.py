"""One offline job: reads a file of prompts, skips what is answered, and appends the results of the rest."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minipaged.jobs.lines import BadLine, Task, failed, keyed_lines, read_tasks, require_text
from minipaged.jobs.results import ResultFile


class JobError(Exception):
    """The job could not be finished; what has finished is written, and it can be run again."""


Result = Mapping[str, Any]
Serve = Callable[[Iterator[Task]], Iterable[Result]]
"""Tasks to results, one for each, in any order: a `Worker.run`, or many of them on a cluster."""


@dataclass(frozen=True)
class Summary:
    """What a job came to. Counts are lines of the input that are not blank.

    Attributes:
        lines: all of them. before: had a result when the job began. answered: got an answer now.
        failed: results that are an error, in the whole file.
        prompt_tokens, output_tokens: of what was answered now.
    """

    lines: int
    before: int
    answered: int
    failed: int
    prompt_tokens: int
    output_tokens: int


def run_job(
    source: Path,
    target: Path,
    serve: Serve,
    settings: Mapping[str, Any],
    *,
    chunk: int = 32,
    on_progress: Callable[[int, int, int], None] = lambda done, total, tokens: None,
) -> Summary:
    """Serve every line of `source` that has no result in `target` yet.

    settings: what the answers depend on besides the lines, as plain data; with `sampling` and `seed`. A
        job goes on only under the same settings. A line that got an error and was corrected since is served.
    chunk: results that are written at once. A job that is killed loses at most the last chunk.
    on_progress: called after each chunk with the lines done, all lines, and the output tokens so far.

    Raises ValueError, before anything is served, for files that do not belong together; JobError when
    `serve` failed or ended without a result for some line. What has finished is written in any case.
    """
    if not source.is_file():
        raise ValueError(f"no such file: {source}")
    require_text(source)
    if target.exists() and target.samefile(source):
        raise ValueError(f"{source} cannot be read and written at once: name another file for the results")
    with ResultFile(target) as results:
        total = _require_same_job(source, results, settings)
        _forget_mended(source, results, settings)
        before = len(results.done)
        on_progress(before, total, 0)
        todo = (item for item in read_tasks(source, settings) if item.line not in results.done)
        counts = [0, 0, 0]
        with closing(_serve_good(todo, serve)) as found:
            for written in _in_chunks(found, chunk, results):
                _count(written, counts)
                on_progress(len(results.done), total, counts[2])
        if len(results.done) < total:
            raise JobError(f"{total - len(results.done)} lines got no result: run the job again")
        return Summary(total, before, counts[0], results.num_errors, counts[1], counts[2])


def _require_same_job(source: Path, results: ResultFile, settings: Mapping[str, Any]) -> int:
    """The number of lines; ValueError unless every answer belongs to a line as it stands now.

    Where the result is an error, the line may have been mended."""
    total, unseen = 0, set(results.done)
    for number, key, _ in keyed_lines(source, settings):
        total += 1
        unseen.discard(number)
        if number not in results.errors and results.done.get(number, key) != key:
            raise ValueError(
                f"{results.path} has a result for line {number} of {source}, but for other text or under "
                "other settings: give the old ones, or another file for the results"
            )
    if unseen:
        raise ValueError(f"{results.path} has a result for line {min(unseen)}, which {source} does not have")
    return total


def _forget_mended(source: Path, results: ResultFile, settings: Mapping[str, Any]) -> None:
    """Have lines served again whose result is an error, and that were changed or whose id is free now."""
    if results.errors:
        for item in read_tasks(source, settings):
            if item.line in results.errors and results.done[item.line] != item.key:
                results.forget(item.line)


def _serve_good(items: Iterator[Task | BadLine], serve: Serve) -> Generator[Result]:
    """The results of all lines: tasks go through `serve`, what is no task passes by."""
    bad: deque[Result] = deque()

    def tasks() -> Iterator[Task]:
        for item in items:
            if isinstance(item, Task):
                yield item
            else:
                bad.append(failed(item, item.error))

    for result in serve(tasks()):
        while bad:
            yield bad.popleft()
        yield result
    yield from bad


def _in_chunks(found: Iterator[Result], chunk: int, results: ResultFile) -> Iterator[list[Result]]:
    """Write results as they come, `chunk` at once, and the rest also when an error or Ctrl-C ends it."""
    held: list[Result] = []
    try:
        for result in found:
            held.append(result)
            if len(held) >= chunk:
                written, held = held, []  # before the write: one that was cut short is not tried again
                results.append(written)
                yield written
    finally:
        if held:
            results.append(held)
    if held:
        yield held


def _count(written: Iterable[Result], counts: list[int]) -> None:
    for result in written:
        outputs = result.get("outputs")
        if outputs is not None:
            counts[0] += 1
            counts[1] += result["prompt_tokens"]
            counts[2] += sum(len(output["token_ids"]) for output in outputs)
