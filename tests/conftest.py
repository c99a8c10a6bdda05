"""What every test shares: one thread per worker, quiet progress bars, no network, fixed seeds."""

import os

# Before torch is imported: with `-n 2` on two cores, the thread pools of two workers stall each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported: kernels run on the CPU
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "agg")

import random

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
# The same examples every time, however long one takes: neither chance nor other programs decide what passes.
settings.register_profile(
    "repeatable", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    """Every test starts from the same random state, whatever ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
