"""Worker: one engine that serves tasks, on whichever machine it was started."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from minipaged.core.sampler import BadLogitsError
from minipaged.engine.args import EngineArgs
from minipaged.engine.llm import LLM
from minipaged.engine.output_processor import RequestOutput
from minipaged.jobs.lines import Task, failed
from minipaged.sampling_params import RequestOutputKind, SamplingParams


class Worker:
    """Keeps an engine busy with tasks and yields their results as they finish.

    An answer depends on its task alone: seeds come with the task, and in float32 the tokens do not depend on
    what runs beside them.
    """

    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    @classmethod
    def load(cls, engine_args: EngineArgs) -> Worker:
        return cls(LLM.from_engine_args(engine_args))

    def run(self, tasks: Iterable[Task]) -> Iterator[dict[str, Any]]:
        """Serve all tasks: a result for each, in the order in which they finish.

        Tasks are taken when there is room for them, twice what can run at once, so `tasks` may be endless.
        What is wrong with one task is its result, and no other's. Closing the iterator aborts the rest.
        """
        engine = self.llm.engine
        source, waiting = iter(tasks), dict[str, Task]()
        next_task = next(source, None)
        try:
            while next_task is not None or waiting:
                while next_task is not None and len(waiting) < 2 * engine.config.max_num_seqs:
                    problem = self._add(next_task)
                    if problem is None:
                        waiting[str(next_task.line)] = next_task
                    else:
                        yield problem
                    next_task = next(source, None)
                yield from self._step(waiting)
        finally:
            for request_id in waiting:
                engine.abort_request(request_id)

    def _add(self, task: Task) -> dict[str, Any] | None:
        """Queue the task; the result, if it can never be served."""
        params = SamplingParams(**task.sampling, output_kind=RequestOutputKind.FINAL_ONLY)
        try:
            self.llm.engine.add_request(str(task.line), self._prompt(task), params)
        except (ValueError, TypeError) as error:
            return failed(task, str(error))
        return None

    def _prompt(self, task: Task) -> dict[str, Any]:
        prompt = dict(task.prompt)
        if "messages" in prompt:
            tokenizer = self.llm.get_tokenizer()
            text = tokenizer.apply_chat_template(prompt.pop("messages"), add_generation_prompt=True)
            prompt["prompt_token_ids"] = tokenizer.encode(text)  # the template has the special tokens
        return prompt

    def _step(self, waiting: dict[str, Task]) -> Iterator[dict[str, Any]]:
        try:
            outputs = self.llm.engine.step() if waiting else []
        except BadLogitsError as error:  # the others are computed again, and do not notice
            self.llm.engine.abort_request(error.request_id)
            yield failed(waiting.pop(error.request_id), str(error))
            return
        for output in outputs:
            yield answered(waiting.pop(output.request_id), output)


def serve_here(tasks: Iterator[Task], engine_args: EngineArgs) -> Iterator[dict[str, Any]]:
    """Results of the tasks from one engine in this process; it is loaded when there is a task."""
    for first in tasks:
        yield from Worker.load(engine_args).run(chain([first], tasks))


def answered(task: Task, output: RequestOutput) -> dict[str, Any]:
    """The result of a task that was served. It holds nothing that differs from run to run."""
    return {
        "line": task.line,
        "id": task.id,
        "key": task.key,
        "prompt_tokens": len(output.prompt_token_ids),
        "outputs": [
            {
                "text": completion.text,
                "token_ids": list(completion.token_ids),
                "finish_reason": completion.finish_reason,
            }
            for completion in output.outputs
        ],
    }
