"""Walk an engine step by step: three buttons, choosers, and what the step did.

Core ipywidgets and one string of HTML, as in decodelab.explain.explorers. What is said and drawn
is decided in decodelab.explain.walk and stepper_view.
"""

from collections.abc import Callable, Iterable, Sequence
from html import escape

from ipywidgets import HTML, Button, HBox, Layout, ToggleButtons, VBox

from decodelab.explain import stepper_view
from decodelab.explain.explorers import Shown
from decodelab.explain.figures import Figure
from decodelab.explain.walk import Walk
from decodelab.serve import Engine, Request


class Stepper(Shown):
    """A Walk with buttons; choosing another value of an option starts it anew."""

    def __init__(
        self,
        make_engine: Callable[..., Engine],
        requests: Iterable[Request],
        step: int,
        options: dict[str, Sequence],
    ) -> None:
        self.make_engine, self.requests, self.first = make_engine, list(requests), step
        self.choosers = {
            name: ToggleButtons(
                options=[(str(value), value) for value in values], style={"button_width": "auto"}
            )
            for name, values in options.items()
        }
        # Never disabled: a button that is loses the focus, and the keyboard its place.
        self.buttons = {
            name: Button(description=name, tooltip=tooltip)
            for name, tooltip in (
                ("Back", "Show the step before"),
                ("Step", "Run and show the next step"),
                ("Run to end", "Run all steps that are left"),
            )
        }
        self.message, self.chart = HTML(), HTML()
        rows = [_row(name.replace("_", " "), c) for name, c in self.choosers.items()]
        buttons = HBox(list(self.buttons.values()))
        self.view = VBox([*rows, buttons, self.message, self.chart])
        self.walk = self._begin()
        self.redraw()
        for chooser in self.choosers.values():
            chooser.observe(self._choose, names="value")
        for name, move in (("Back", "back"), ("Step", "step"), ("Run to end", "run")):
            self.buttons[name].on_click(lambda button, move=move: self.move(move))

    def move(self, how: str) -> None:
        """Do what a button says: "back", "step" or "run"."""
        getattr(self.walk, how)()
        self.redraw()

    def redraw(self) -> None:
        """Draw the step that is shown."""
        self.chart.value = stepper_view.html(self.walk)

    def figure(self) -> Figure:
        return stepper_view.figure(self.walk)

    def _begin(self) -> Walk:
        engine = self.make_engine(**{name: c.value for name, c in self.choosers.items()})
        walk = Walk(engine, self.requests)
        walk.run(self.first)
        return walk

    def _choose(self, change: object = None) -> None:
        """Start anew; an engine that can't be made is answered in words, and nothing changes."""
        try:
            self.walk, self.message.value = self._begin(), ""
        except ValueError as error:
            self.message.value = (
                f'<p role="alert" style="max-width:720px;line-height:1.4"><b>{escape(str(error))}'
                "</b> What is below is as it was.</p>"
            )
        else:
            self.redraw()


def _row(name: str, chooser: ToggleButtons) -> HBox:
    label = HTML(f"<b>{escape(name)}</b>", layout=Layout(width="90px"))
    return HBox([label, chooser])


def stepper(
    make_engine: Callable[..., Engine],
    requests: Iterable[Request],
    *,
    step: int = 1,
    **options: Sequence,
) -> Stepper:
    """Build the widget that walks an engine through `requests`, from `step` on; `display` shows it.

    `options` are {name: values} to choose from, and `make_engine` is called with one value of each
    by name: `stepper(make, requests, policy=("continuous", "static"), num_blocks=(16, 64))`.
    """
    return Stepper(make_engine, requests, step, options)
