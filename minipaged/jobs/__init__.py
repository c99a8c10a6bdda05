"""Offline jobs: a file of prompts in, a file of answers out, on one process or on many, restartable.

The contract of both files is in `docs/scaling.md`; `lines.py` reads the one, `results.py` keeps the other.
"""
