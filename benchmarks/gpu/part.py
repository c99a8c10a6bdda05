"""One part of the check, in a process of its own: where it runs, how long it may take, and what it has found.

A part that crashes, hangs or runs out of time takes nothing else with it: every entry is written at once.
"""

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from minipaged.attention.targets import Target


@dataclass
class Part:
    """What a part needs to know, and the entries it has found so far."""

    device: torch.device
    target: Target
    dry_run: bool
    deadline: float  # time.monotonic() when the part should be done
    path: Path
    found: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    @classmethod
    def begin(cls, path: Path, seconds: float, *, dry_run: bool) -> "Part":
        """A part that may take `seconds`: on the GPU, or in Triton's interpreter for a dry run."""
        device = torch.device("cpu" if dry_run else "cuda")
        torch.manual_seed(0 if dry_run else time.time_ns() % 2**31)  # fresh inputs in every run on a card
        return cls(device, Target.of(device), dry_run, time.monotonic() + seconds, path)

    @property
    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    @property
    def dtype(self) -> torch.dtype:
        """The 16-bit type to time: bfloat16 where the card has it; in the interpreter float32."""
        if self.dry_run:
            return torch.float32
        return torch.bfloat16 if self.target.has_bfloat16 else torch.float16

    def add(self, section: str, **entry: Any) -> None:
        """Keep one entry, and write all of them to the part's file."""
        self.found.setdefault(section, []).append(entry)
        write_json(self.path, self.found)


def write_json(path: Path, content: Any) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(temporary, path)
