"""The figures of the course, in one style. Each function takes data and returns a matplotlib `Figure`.

Figures are made without pyplot: nothing global changes, and none stays open. Marks that carry data have a
`gid`, by which the tests find them and an SVG reader can address them.
"""

from coursekit.figures.blocks import blocks_and_table
from coursekit.figures.card import card_filled
from coursekit.figures.gather import gathered_through_table
from coursekit.figures.memory import (
    StepSample,
    lines_against_length,
    memory_against_length,
    memory_over_time,
)
from coursekit.figures.paging import block_size_tradeoff, table_growing
from coursekit.figures.style import png_bytes, save, show
from coursekit.figures.waste import arena_map, arena_over_time, waste_bars
from coursekit.figures.work import work_per_step

__all__ = [
    "StepSample",
    "arena_map",
    "arena_over_time",
    "block_size_tradeoff",
    "blocks_and_table",
    "card_filled",
    "gathered_through_table",
    "lines_against_length",
    "memory_against_length",
    "memory_over_time",
    "png_bytes",
    "save",
    "show",
    "table_growing",
    "waste_bars",
    "work_per_step",
]
