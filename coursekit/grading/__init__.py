"""Graders of the exercises: what a learner wrote runs in a guarded process and is judged from outside.

    task.py      what a task is and how its checks are written
    learner.py   the grader's end of the learner's process: remote objects, limits
    worker.py    the other end; guard.py is what it may not do, wire.py how values travel
    grade.py     one answer in, one result out
    tasks/       the checks, one file an exercise

The verdict is computed in the grader's process, which never runs a line of the learner's code. It asks the
other process to call the learner's functions and compares the plain values that come back. So nothing that an
answer prints, patches or exits with can become a mark.
"""
