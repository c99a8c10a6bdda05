"""One kernel launch as a value: what to run, over which grid, with which arguments.

Launchers return a `Launch` and the backend runs it. Because a launch can be built from tensors on torch's
`meta` device as well, `minipaged kernels` compiles exactly what a GPU would be given, on a machine that has
none.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Launch:
    """A Triton kernel with everything it is called with.

    `args` holds every parameter of the kernel by name, the `tl.constexpr` ones included. `num_warps` is the
    number of warps that work on one program, `num_stages` the depth of the software pipeline.
    """

    kernel: Any  # a function decorated with @triton.jit
    grid: tuple[int, ...]
    args: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 2

    def run(self) -> None:
        """Launch on the current stream. An empty grid launches nothing."""
        if all(self.grid):
            self.kernel[self.grid](**self.args, num_warps=self.num_warps, num_stages=self.num_stages)
