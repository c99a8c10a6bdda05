"""Reads and moves one of the course's widgets in a page of JupyterLab, as a reader would."""

import re
import time
from collections.abc import Callable
from typing import Any

SETTLE_S = 300
PICTURE_HASH = """async picture => {
    const bytes = await (await fetch(picture.src)).arrayBuffer();
    const digest = await crypto.subtle.digest('SHA-256', bytes);
    return Array.from(new Uint8Array(digest)).join(' ');
}"""


class Widget:
    """The last widget with a picture in the open notebook."""

    def __init__(self, page: Any) -> None:
        self.page = page
        picture = "img.widget-image"
        self.root = page.locator(".jp-OutputArea-output .widget-vbox", has=page.locator(picture)).last
        self.root.wait_for(state="attached")
        self.root.evaluate("box => box.scrollIntoView({block: 'center'})")  # out of sight it is not laid out
        self.root.wait_for()
        self.picture = self.root.locator(picture)
        self.handle = self.root.locator(".noUi-handle").first

    def resting_box(self, locator: Any) -> dict[str, float]:
        """Where something is on the page, once it is at rest: a slider glides to where it was clicked."""
        before: dict[str, float] = {}
        while (box := locator.bounding_box()) != before:
            before = box
            self.page.wait_for_timeout(150)
        return box

    def controls(self) -> dict[str, str]:
        """What each control shows: description -> value, as text."""
        shown = {}
        for slider in self.root.locator(".widget-slider, .widget-selectionslider, .widget-hslider").all():
            shown[slider.locator(".widget-label").inner_text()] = slider.locator(
                ".widget-readout"
            ).inner_text()
        for button in self.root.locator(".widget-toggle-button.mod-active").all():
            shown["choice"] = button.inner_text()
        return shown

    def words(self) -> str:
        return str(self.root.locator(".widget-html-content").inner_text())

    def numbers(self) -> list[float]:
        """The numbers in the sentence below the picture; thin spaces group digits."""
        text = re.sub(r"(?<=\d)[\u202f\u2009](?=\d)", "", self.words())
        return [float(found) for found in re.findall(r"\d+(?:\.\d+)?", text)]

    def picture_hash(self) -> str:
        return str(self.picture.evaluate(PICTURE_HASH))

    def at_end(self) -> bool:
        value, end = (self.handle.get_attribute(f"aria-value{name}") for name in ("now", "max"))
        return value == end

    def press_arrow(self) -> None:
        """One step with the keyboard: right, or left at the end."""
        self.handle.focus()
        self.page.keyboard.press("ArrowLeft" if self.at_end() else "ArrowRight")

    def drag(self) -> None:
        """Take the first slider with the mouse to a place in its other half."""
        self.handle.scroll_into_view_if_needed()
        grip = self.resting_box(self.handle)
        track = self.resting_box(self.root.locator(".noUi-base").first)
        x, y = grip["x"] + grip["width"] / 2, grip["y"] + grip["height"] / 2
        share = 0.2 if x > track["x"] + track["width"] / 2 else 0.8
        self.page.mouse.move(x, y)
        self.page.mouse.down()
        self.page.mouse.move(track["x"] + share * track["width"], y, steps=4)
        self.page.mouse.up()

    def click_button(self) -> None:
        """One click: a stepper's button, the other one of two choices, or the start of the slider."""
        if self.root.locator(".widget-toggle-button").count():
            self.root.locator(".widget-toggle-button:not(.mod-active)").first.click()
        elif self.root.get_by_role("button").count():
            self.root.get_by_role("button", name="back" if self.at_end() else "next").click()
        else:
            self.root.locator(".noUi-base").first.click(position={"x": 2, "y": 2})

    def after(self, action: Callable[[], None], expected: Callable[[dict[str, str]], list[float]]) -> None:
        """Do it until the picture is another one: in a history two steps may look the same, three do not.

        Args:
            action: moves a control.
            expected: the numbers that the sentence must have after each move, from what the controls show.
        """
        picture = self.picture_hash()
        for _ in range(3):
            controls = self.controls()
            action()
            self.settle(controls, expected)
            for _ in range(30):  # the picture is drawn after it has arrived
                if self.picture_hash() != picture:
                    return
                self.page.wait_for_timeout(100)
        raise AssertionError("the picture has not changed")

    def settle(self, controls: dict[str, str], expected: Callable[[dict[str, str]], list[float]]) -> None:
        """Wait until the controls are no longer `controls` and the sentence says what they mean."""
        deadline = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline:
            shown = self.controls()
            if shown != controls and self.numbers() == expected(shown):
                return
            self.page.wait_for_timeout(100)
        assert self.controls() != controls, "the control has not moved"
        assert self.numbers() == expected(self.controls()), self.words()
