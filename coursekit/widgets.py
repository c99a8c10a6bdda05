"""Two widgets that are live in JupyterLab and a picture with words everywhere else.

Both carry an `image/png` and a `text/plain` of their first state beside the widget itself. A viewer without a
kernel (GitHub, a printed page) shows the picture; strict nbval compares the words; no state is stored.
"""

import base64
from collections.abc import Callable, Mapping
from typing import Any

import ipywidgets
from matplotlib.figure import Figure

from coursekit.figures.style import PIXELS_PER_INCH, png_bytes

Drawing = tuple[Figure, str]
"""A figure, and one sentence that says what it shows."""


class Explorable(ipywidgets.VBox):
    """Sliders over a figure: moving one draws the figure again.

    Args:
        controls: argument of `draw` -> the widget that sets it; its description is what the reader sees.
        draw: called with one value for each control; returns the figure and the sentence.
        shows: what the picture shows at any setting, for those who cannot see it; the sentence follows it.
    """

    def __init__(
        self,
        controls: Mapping[str, ipywidgets.ValueWidget],
        draw: Callable[..., Drawing],
        *,
        shows: str = "",
    ) -> None:
        self.controls = dict(controls)
        self._draw = draw
        self._shows = shows
        self._picture = ipywidgets.Image(format="png")
        self._words = ipywidgets.HTML()
        self.text = ""
        super().__init__([*self.controls.values(), self._picture, self._words])
        for control in self.controls.values():
            control.observe(self._update, "value")
        self._update()

    def _update(self, change: object = None) -> None:
        figure, self.text = self._draw(**{name: control.value for name, control in self.controls.items()})
        width = round(figure.get_figwidth() * PIXELS_PER_INCH / 2)
        self._picture.value, self._picture.width = png_bytes(figure), str(width)
        self._picture.layout.max_width = "100%"
        self._words.value = self.text

    def _repr_mimebundle_(self, **options: Any) -> tuple[dict[str, str], dict[str, Any]]:
        data = dict(super()._repr_mimebundle_(**options))
        data["image/png"] = base64.b64encode(self._picture.value).decode()
        data["text/plain"] = f"[run this cell to move the sliders] {self.text}"
        return data, {
            "image/png": {"width": int(self._picture.width), "alt": f"{self._shows} {self.text}".strip()}
        }


class Stepper(Explorable):
    """A history to walk through, one step at a time, with a slider and two buttons.

    Args:
        num_steps: steps of the history, counted from 0.
        draw: called with the step; returns the figure and the sentence.
        start: the step that is shown first, and in the static picture.
        shows: what the picture shows at any step, for those who cannot see it.
    """

    def __init__(
        self, num_steps: int, draw: Callable[[int], Drawing], *, start: int = 0, shows: str = ""
    ) -> None:
        if not 0 <= start < num_steps:
            raise ValueError(f"start is {start}, there are {num_steps} steps")
        slider = ipywidgets.IntSlider(value=start, min=0, max=num_steps - 1, description="step")
        super().__init__({"step": slider}, lambda step: draw(step), shows=shows)
        self.back = ipywidgets.Button(description="◀ back", layout={"width": "6em"})
        self.forward = ipywidgets.Button(description="next ▶", layout={"width": "6em"})
        self.back.on_click(lambda _: self.move(-1))
        self.forward.on_click(lambda _: self.move(1))
        row = ipywidgets.HBox([self.back, slider, self.forward])
        self.children = (row, self._picture, self._words)

    def move(self, steps: int) -> None:
        """Go `steps` forward, or back, and stop at the ends."""
        slider = self.controls["step"]
        slider.value = min(max(slider.value + steps, slider.min), slider.max)
