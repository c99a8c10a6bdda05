"""Kernels run in Triton's interpreter here. Triton reads the variable when it is first imported."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
