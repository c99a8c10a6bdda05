"""The learner's process: runs the answer, then does what the grader asks until its input ends.

Only the standard library is imported here, so that an exercise without tensors starts in milliseconds. The
first two messages are {"preamble": source, "forbidden": folders} and [(file name, source), …]; then requests:
    {"op": "name", "name": N}                      a global of the answer
    {"op": "get", "of": value, "name": N}          an attribute        {"op": "set", …, "value": value}
    {"op": "item", "of": value, "key": value}
    {"op": "call", "of": value, "args": value, "kwargs": value}
    {"op": "keep", "value": value}                 hold a copied value here, answer with a reference
    {"op": "fetch", "value": value}                the elements or the text of an object, as a plain value
Replies: {"value": …}, {"raised": {"type", "message", "line", "function"}} or, before it ends itself,
{"refused": what}.
"""

import json
import linecache
import os
import sys
import traceback
from types import ModuleType
from typing import Any, BinaryIO

from coursekit.grading import cell, guard, wire

ANSWER = "answer"


class Worker:
    """The objects that the grader knows by number, and what it may do with them."""

    def __init__(self, module: ModuleType, given: dict[str, Any]) -> None:
        self.names = {**vars(module), **given}  # what was given is not replaced by an answer
        self.objects: list[Any] = []

    def reference(self, value: Any) -> int:
        self.objects.append(value)
        return len(self.objects) - 1

    def decode(self, value: Any) -> Any:
        return wire.decode(value, lambda number, _: self.objects[number])

    def answer(self, request: dict[str, Any]) -> Any:
        """Do one request and return its encoded value; whatever the learner's code raises, this raises."""
        op = request["op"]
        if op == "keep":
            value = self.decode(request["value"])
            return {"reference": [self.reference(value), type(value).__name__]}
        if op == "name":
            return wire.encode(self.names[request["name"]], self.reference)
        if op == "fetch":
            value = self.decode(request["value"])
            if hasattr(value, "__iter__") and not hasattr(value, "dtype"):
                value = list(value)
            return wire.encode(value, self.reference)
        target = self.decode(request["of"])
        if op == "get":
            value = getattr(target, request["name"])
        elif op == "set":
            setattr(target, request["name"], self.decode(request["value"]))
            value = None
        elif op == "item":
            value = target[self.decode(request["key"])]
        else:
            value = target(*self.decode(request["args"]), **self.decode(request["kwargs"]))
        return wire.encode(value, self.reference)


def describe(error: BaseException) -> dict[str, Any]:
    """What the grader is told of an exception: its type, its text, the line and function of the answer."""
    # Not extract_tb: it would read the source of every frame, which the guard refuses.
    walk = traceback.walk_tb(error.__traceback__)
    frames = [(frame.f_code, line) for frame, line in walk if frame.f_code.co_filename.startswith(ANSWER)]
    lines = [(code.co_filename, line) for code, line in frames]
    function = frames[-1][0].co_qualname if frames else ""
    if isinstance(error, SyntaxError) and (error.filename or "").startswith(ANSWER):
        where = f"line {error.lineno}: {(error.text or '').strip()}"
    else:
        where = f"line {lines[-1][1]}: {linecache.getline(*lines[-1]).strip()}" if lines else ""
    names = [cls.__name__ for cls in type(error).__mro__]
    return {"type": names, "message": str(error)[:500], "line": where[:200], "function": function[:100]}


def run_source(name: str, source: str, module: ModuleType) -> None:
    """Run an answer, registered under `name`: Triton and inspect look sources up by file name."""
    code, source = cell.compile_cell(source, name)
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(code, vars(module))


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """Run the preamble and close the door, run the answers, then do one request after the other.

    There is a reply after each of these, so that the grader can time them apart.
    """

    def refuse(what: str) -> None:
        wire.send(replies, {"refused": what})
        os._exit(1)

    try:
        setup = wire.receive(requests)
        module = sys.modules["answer"] = ModuleType("answer")
        exec(compile(setup["preamble"], "preamble.py", "exec"), vars(module))
        given = dict(vars(module))
        vars(module).update(cell.what_a_notebook_has())
        guard.close_the_door(refuse, setup["forbidden"], os.getcwd())
        wire.send(replies, {"value": None})
        for name, source in wire.receive(requests):
            run_source(name, source, module)
        wire.send(replies, {"value": None})
        worker = Worker(module, given)
        while True:
            request = wire.receive(requests)
            try:
                reply = {"value": worker.answer(request)}
            except EOFError:
                raise
            except BaseException as error:
                reply = {"raised": describe(error)}
            wire.send(replies, reply)
    except EOFError:  # the grader is done
        return
    except BaseException as error:
        wire.send(replies, {"raised": describe(error)})


def main() -> None:
    """Keep the two pipes to the grader for this module; what the answer prints goes nowhere."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    serve(requests, replies)
    os._exit(0)  # threads that the answer started do not keep the process


if __name__ == "__main__":
    json.dumps(None)  # the encoder is loaded before anybody can replace it
    main()
