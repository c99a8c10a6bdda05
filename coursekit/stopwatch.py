"""Where the time of a step goes: clocks around methods of a running engine, taken off again afterwards."""

import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any, Self


class Stopwatch:
    """Time spent in named parts, each without the parts that it calls.

    with Stopwatch() as watch:
        watch.around(engine.scheduler, "schedule", "scheduler")
        engine.step()
        print(watch.take())       # {"scheduler": seconds}

    wait: called before the clock is read; on a GPU it has to wait for what was launched.
    """

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, wait: Callable[[], object] | None = None
    ) -> None:
        self._clock, self._wait = clock, wait
        self._seconds: dict[str, float] = defaultdict(float)
        self._open: list[str] = []
        self._since = 0.0
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Take all clocks off."""
        self._undo.close()

    def around(self, owner: Any, name: str, part: str) -> None:
        """Count every call of `owner.name` to `part`. owner: an object or a module."""
        method = getattr(owner, name)

        @wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._turn()
            self._open.append(part)
            try:
                return method(*args, **kwargs)
            finally:
                self._turn()
                self._open.pop()

        if name in vars(owner):
            self._undo.callback(setattr, owner, name, method)
        else:  # a method of its class, which shows again
            self._undo.callback(delattr, owner, name)
        setattr(owner, name, timed)

    def take(self) -> dict[str, float]:
        """Seconds of each part since the last call."""
        taken, self._seconds = dict(self._seconds), defaultdict(float)
        return taken

    def _turn(self) -> None:
        """Up to now the time was the innermost open part's."""
        if self._wait is not None:
            self._wait()
        now = self._clock()
        if self._open:
            self._seconds[self._open[-1]] += now - self._since
        self._since = now
