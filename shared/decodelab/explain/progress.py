"""A progress bar around whatever takes over two seconds.

An HTML element that is updated and at the end emptied, not tqdm's widget: a saved notebook would
show that one as "Error displaying widget: model not found" wherever it is opened again.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from html import escape
from time import monotonic

from IPython import get_ipython
from IPython.display import display


def progress(iterable: Iterable, *, total: int | None = None, unit: str = "step") -> Iterator:
    """Yield from `iterable` below a bar that goes away at the end; outside a notebook, no bar."""
    total = len(iterable) if total is None else total
    with counted(total, unit) as tell:
        for done, item in enumerate(iterable, 1):
            yield item
            tell(done)


@contextmanager
def counted(total: int, unit: str) -> Iterator[Callable[[int], None]]:
    """The same bar for what counts by itself: a function of how many are done."""
    if not hasattr(get_ipython(), "kernel"):
        yield lambda done: None
        return
    start, handle = monotonic(), display(_bar(0, total, unit, 0), raw=True, display_id=True)
    try:
        yield lambda done: handle.update(_bar(done, total, unit, monotonic() - start), raw=True)
    finally:
        handle.update({"text/html": "", "text/plain": ""}, raw=True)


def _bar(done: int, total: int, unit: str, seconds: float) -> dict[str, str]:
    left = f", about {seconds / done * (total - done):.0f} s left" if done else ""
    words = f"{done} of {total} {unit}s{left}"
    html = f'<label><progress value="{done}" max="{total}"></progress> {escape(words)}</label>'
    return {"text/html": html, "text/plain": words}
