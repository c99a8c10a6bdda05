"""For the last exercise: a learner's earlier answers, and a model that computes what their engine plans.

mine = load_answers("..")                       # from the notebooks beside this one, each checked again
runner = Runner(load_model("smollm2-135m"), num_blocks=24, block_size=16)
steps = serve(engine, runner, my_batch)         # until nobody is left
"""

import linecache
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from coursekit.given import parts
from coursekit.grading import cell
from coursekit.grading.grade import grade_answer
from coursekit.grading.learner import COURSE
from coursekit.grading.notebook import Unreadable, answers, read_notebook, tasks_of
from coursekit.grading.task import Task
from coursekit.grading.tasks import TASKS
from minipaged.attention.batch import AttentionBatch
from minipaged.attention.torch_backend import TorchBackend
from minipaged.cache import BlockCopy, KVStorage
from minipaged.cache.storage import LayerKV
from minipaged.checkpoints.loading import LoadedModel
from minipaged.memory import KVSpec

PARTS = ("block_table", "decode_kernel", "block_hash", "prefix_cache", "scheduler_step")
"""The tasks of exercises 04, 07, 10 and 11 whose answers meet in exercise 12."""

Entry = tuple[str, Sequence[int], int, Sequence[int]]
"""What a step computes of one request: its name, the new tokens, how many are stored already, its blocks."""
Rows = tuple[Sequence[int], Sequence[int], Sequence[int], Sequence[Sequence[int]], Sequence[int]]
"""Token ids, positions, slots, block tables and context lengths, one of each for every new token."""


def load_answers(folder: str | Path = "..", *, ours: Collection[str] = ()) -> SimpleNamespace:
    """What a learner wrote in exercises 04, 07, 10 and 11, under its names; says of each what became of it.

    folder: where the notebooks lie, as in NN_name/NN_name.ipynb. An answer that does not pass its own check
    is not loaded; whatever uses it says which exercise comes first.
    ours: exercises, such as ["07"], of which the course's own solution is taken instead.
    """
    chosen = {str(number).zfill(2) for number in ours}
    if unknown := chosen - {TASKS[name].exercise for name in PARTS}:
        raise ValueError(f"ours names {sorted(unknown)}; exercises 04, 07, 10 and 11 are loaded here")
    found = SimpleNamespace()
    for task in map(TASKS.__getitem__, PARTS):
        try:
            if task.exercise in chosen:
                space, whose = run_answer(task, course_answer(task, Path(folder))), "the course's own"
            else:
                space, whose = run_answer(task, passed_answer(task, Path(folder))), "yours, passed"
        except NotLoaded as error:
            advice = f"do exercise {task.exercise} first"
            other = f'load_answers("..", ours=["{task.exercise}"])'
            print(f"{task.exercise}  {task.title}: {error}; {advice}, or {other}")
            space, whose = {name: missing(advice) for name in task.defines}, ""
        if whose:
            print(f"{task.exercise}  {task.title}: {whose}")
        for name in task.defines:
            setattr(found, name, space[name])
    return found


class NotLoaded(Exception):
    """An answer is not there, or is not right yet; `str()` says which."""


def passed_answer(task: Task, folder: Path) -> str:
    """The text of the learner's answer, after it has passed the checks of its exercise. NotLoaded if not."""
    sources = answers_in(task, folder)
    result = grade_answer(task, sources)
    if not result.passed:
        why = result.verdict if result.verdict == "not done yet" else f"does not pass ({result.reason})"
        raise NotLoaded(why)
    return sources[task.name]


def course_answer(task: Task, folder: Path) -> str:
    """The text of the course's own solution, or of what its check uses where `solutions` was left out."""
    for root in (folder.resolve().parent, COURSE.parent):
        if (root / "solutions").is_dir():
            return answers_in(task, root / "solutions")[task.name]
    if task.name in parts.TASKS:
        return Path(parts.__file__).read_text(encoding="utf-8")
    raise NotLoaded("the folder solutions is not here")


def answers_in(task: Task, folder: Path) -> dict[str, str]:
    """The answers in the notebook of the task's exercise. NotLoaded when it or this answer is missing."""
    paths = [path / f"{path.name}.ipynb" for path in sorted(folder.glob(f"{task.exercise}_*"))]
    path = next((path for path in paths if path.exists()), None)
    if path is None:
        raise NotLoaded(f"no notebook {task.exercise}_… in {folder}")
    try:
        sources = answers(read_notebook(path), tasks_of(task.exercise))
    except Unreadable as error:
        raise NotLoaded(f"{path.name} {error}") from None
    if task.name not in sources:
        raise NotLoaded(f"no answer in {path.name}")
    return sources


def run_answer(task: Task, source: str) -> dict[str, Any]:
    """The names that an answer defines, after the imports of its own notebook."""
    name = f"answer {task.name}"
    module = ModuleType(name)
    try:
        exec(compile(task.preamble, "preamble", "exec"), vars(module))
    except ImportError as error:  # of exercise 07, where Triton does not exist
        raise NotLoaded(str(error)) from None
    vars(module).update(cell.names_of_a_notebook())
    code, text = cell.compile_cell(source, name)
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)  # Triton looks there
    exec(code, vars(module))
    return vars(module)


def missing(advice: str) -> Callable[..., Any]:
    """Stands for what was not loaded: says so when it is used."""

    def use(*args: Any, **more: Any) -> Any:
        raise NotImplementedError(advice)

    return use


class Runner:
    """A model with its KV memory, which computes a batch of rows. All of it is plain torch, but `attend`.

    Each row is one new token. In every layer the keys and values of all rows are stored in their slots; then
    each row attends to the `context_len` keys that its block table leads to. So a prompt is many rows with
    one table, and each sees one key more than the row before it: no mask is needed.

    attend: `(query, key_cache, value_cache, block_tables, context_lens, scale)` in place of torch. query
    [num_rows, num_query_heads, head_size], caches [num_blocks, block_size, num_kv_heads, head_size], int32
    tables [num_rows, max_blocks] and lengths [num_rows]; answers like the query.
    """

    def __init__(
        self,
        model: LoadedModel,
        num_blocks: int,
        block_size: int,
        attend: Callable[..., Tensor] | None = None,
    ) -> None:
        self.model, self.attend = model.model, attend
        self.vocab_size = model.config.vocab_size
        spec = KVSpec.from_model(model.config, torch.float32)
        self.storage = KVStorage(spec, num_blocks, block_size)
        for part in self.storage.tensors:
            part.fill_(torch.nan)  # what nobody has written is noticed when it is read
        self.torch = TorchBackend()
        self.num_calls = 0  # of `attend`
        self.name = "plugged"

    def hidden(self, rows: Rows) -> Tensor:
        """The model's last hidden states [num_rows, hidden_size]. ValueError for numbers that lead astray."""
        token_ids, positions, slots, tables, context_lens = map(numbers, rows)
        wrong = [token for token in token_ids if not 0 <= token < self.vocab_size]
        if wrong:
            raise ValueError(f"token {wrong[0]}: the model knows 0 to {self.vocab_size - 1}")
        if slots and min(slots) < 0:
            raise ValueError(f"slot {min(slots)}: the memory has 0 to {self.storage.num_slots - 1}")
        batch = AttentionBatch(
            query_start=torch.arange(len(token_ids) + 1, dtype=torch.int32),
            context_lens=torch.tensor(context_lens, dtype=torch.int32),
            block_tables=torch.tensor(tables, dtype=torch.int32),
            slot_mapping=torch.tensor(slots, dtype=torch.int64),
            positions=torch.tensor(positions, dtype=torch.int64),
            block_size=self.storage.block_size,
            max_query_len=1,
            max_context_len=max(context_lens),
        )
        named, there = (batch.num_blocks_named or 0) - 1, self.storage.num_blocks - 1
        if named > there:  # a kernel would read beyond the pool
            raise ValueError(f"block {named} is named, the memory has 0 to {there}")
        return self.model(torch.tensor(token_ids), batch, self.storage, self)

    def next_tokens(self, plan: Sequence[Entry], rows: Rows) -> dict[str, int]:
        """The most likely token after the last row of each request in the plan."""
        hidden = self.hidden(rows)
        ends = torch.tensor([len(new) for _, new, _, _ in plan]).cumsum(0)
        if int(ends[-1]) != len(hidden):
            raise ValueError(f"the plan has {int(ends[-1])} new tokens, the batch {len(hidden)} rows")
        chosen = self.model.compute_logits(hidden[ends - 1]).argmax(dim=-1).tolist()
        return {name: token for (name, *_), token in zip(plan, chosen, strict=True)}

    def write_kv(self, layer: LayerKV, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        self.torch.write_kv(layer, key, value, slot_mapping)

    def copy_blocks(self, storage: KVStorage, copies: Sequence[BlockCopy]) -> None:
        self.torch.copy_blocks(storage, copies)

    def paged_attention(
        self, query: Tensor, layer: LayerKV, batch: AttentionBatch, *, scale: float
    ) -> Tensor:
        if self.attend is None:
            return self.torch.paged_attention(query, layer, batch, scale=scale)
        self.num_calls += 1
        return self.attend(
            query.contiguous(), layer.key, layer.value, batch.block_tables, batch.context_lens, scale
        )


def numbers(values: Any) -> Any:
    """Lists of ints, also where a learner has arrays or tensors."""
    if hasattr(values, "tolist"):
        return values.tolist()
    return [numbers(value) if hasattr(value, "__len__") else int(value) for value in values]


def serve(
    engine: Any, runner: Runner, make_batch: Callable[[list[Entry], int], Rows]
) -> list[dict[str, list[int]]]:
    """Run a learner's engine until nobody runs or waits; for each step, the blocks of each request in it.

    RuntimeError when a step computes nothing while somebody waits: it would be so for ever.
    """
    steps = []
    while engine.scheduler.running or engine.scheduler.waiting:
        plan = engine.schedule()
        if not plan:
            raise RuntimeError(f"nothing is computed, and {list(engine.scheduler.waiting)} wait")
        steps.append({name: numbers(blocks) for name, _, _, blocks in plan})
        rows = make_batch(plan, runner.storage.block_size)
        engine.update(runner.next_tokens(plan, rows))
    return steps


def most_held(steps: Sequence[Mapping[str, Sequence[int]]]) -> int:
    """The most blocks in use in one step; one that several requests share counts once."""
    return max(len({block for blocks in step.values() for block in blocks}) for step in steps)
