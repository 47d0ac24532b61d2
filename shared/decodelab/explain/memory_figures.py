"""Figures of memory: the frontier of batch and context, what fills a device, the cost of a cache.

They ask a `Deployment` for its numbers and compute no capacity themselves. Each returns a Figure,
as those of decodelab.explain.figures do.
"""

from bisect import bisect_left
from collections.abc import Mapping
from functools import cache, lru_cache
from math import ceil, floor, isfinite, log2, log10

from decodelab.explain.chart import Axis, Panel, Series, stacked
from decodelab.explain.figures import Figure
from decodelab.explain.style import say
from decodelab.predict.capacity import NoRoomError
from decodelab.predict.deployment import Deployment

GIB = 2**30
CONTEXTS, MOST = (128, 131_072), 4096  # what a frontier shows: tokens, and sequences at most
Curve = dict[int, float]  # {context: sequences}
MOST_LEVELS, SHORTEST = 7, 0.25  # lines of equal tokens/s; the least of the width one may take
MISSING = "does not fit"


def frontier(
    deployment: Deployment,
    *,
    before: Deployment | None = None,
    point: tuple[int, int] | None = None,
    measured: Mapping[int, int] | None = None,
    contexts: tuple[int, int] = CONTEXTS,
    max_batch: int = MOST,
    names: tuple[str, str] = ("memory ceiling", "ceiling before"),
    title: str | None = None,
) -> Figure:
    """Draw the largest batch that fits against context, over lines of equal tokens/s, log-log.

    `before` adds the ceiling of another deployment; `point` rings (batch, context), `measured` is
    {context: largest batch}. Each thin line is the batch that makes so many tokens/s at best.
    """
    args = (tuple(contexts), max_batch)
    found, at_best = levels(deployment, *args), "at best "  # said once: it takes room
    series = [
        _line(f"{at_best * (i == 0)}{say(level)} tokens/s", found[level], "level", "start")
        for i, level in enumerate(found)
    ]
    if (batch := ridge_batch(deployment, contexts[0], max_batch)) <= max_batch:
        series.append(_line(f"ridge, batch {say(batch)}", dict.fromkeys(contexts, batch), "bound"))
    for name, role, one in ((names[1], "variant", before), (names[0], "prediction", deployment)):
        if one and largest(one, contexts[0]) and (curve := ceiling(one, *args)):
            series.append(_line(name, curve, role))
    if measured:
        x, y = zip(*sorted(measured.items()), strict=True)
        series.append(Series(name="measured", x=x, y=y, kind="dots", role="measurement"))
    if point:
        fits = point[0] <= deployment.max_sequences(point[1])
        name, role = (f"batch {say(point[0])}", "marker") if fits else (MISSING, "breach")
        series.append(Series(name=name, x=point[1:], y=point[:1], kind="dots", role=role))
    y = Axis(quantity="batch size", unit="sequences", log=2, include=(1, max_batch))
    x = Axis(quantity="context", unit="tokens", log=2, include=tuple(contexts))
    panels = (Panel(y=y, series=tuple(series), tall=300),)
    return Figure(
        title=title or claim(deployment, *(point or (1, contexts[1]))), x=x, panels=panels
    )


def claim(deployment: Deployment, batch: int, context: int) -> str:
    """Say in a line how many sequences fit at `context`, and whether `batch` does."""
    most, where = deployment.max_sequences(context), f"at context {say(context)}"
    if not most:
        return f"Not one sequence fits {where}"
    if batch > most:
        return f"Batch {say(batch)} {where} does not fit: at most {say(most)} does"
    return f"{say(most)} sequence{' fits' if most == 1 else 's fit'} {where}"


def largest(deployment: Deployment, context: int) -> int:
    """Sequences that fit at `context`; 0 also where the weights alone leave no pool."""
    try:
        return deployment.max_sequences(context)
    except NoRoomError:
        return 0


@lru_cache(maxsize=64)
def ceiling(deployment: Deployment, contexts: tuple[int, int], max_batch: int) -> Curve:
    """The largest batch that fits, by context, from where it is `max_batch` to where it is 1."""
    grid = _grid(*contexts, 4)
    if deployment.max_sequences(grid[-1]) < 1:  # then the line ends where one sequence just fits
        grid = [context for context in grid if deployment.max_sequences(context)]
        grid.append(deployment.max_context(1))
    found = {context: deployment.max_sequences(context) for context in grid}
    return {context: batch for context, batch in found.items() if 1 <= batch <= max_batch}


@lru_cache(maxsize=64)
def levels(deployment: Deployment, contexts: tuple[int, int], max_batch: int) -> dict[float, Curve]:
    """The batch at each context that makes so many tokens/s in all: {tokens/s: curve}.

    Levels are round, at most seven; a curve ends where memory does, or where no batch makes them.
    """

    @cache
    def speed(batch: int, context: int) -> float:
        return deployment.step(batch, context, check_memory=False).tokens_per_second

    @cache
    def most(context: int) -> int:
        return min(deployment.max_sequences(context), max_batch)

    def batch(level: float, context: int) -> float:
        tried = [b for b in batches if b < most(context)] + [most(context)]
        at = bisect_left(tried, level, hi=len(tried) - 1, key=lambda b: speed(b, context))
        (low, slow), (high, fast) = ((b, speed(b, context)) for b in tried[at - 1 : at + 1])
        return low + (high - low) * (level - slow) / (fast - slow)

    low, high = contexts
    batches = _grid(1, max_batch, 4)
    curves: dict[float, Curve] = {}
    for level in _round_levels(speed(1, low), speed(max(most(low), 1), low)):
        fails = lambda c, level=level: not most(c) or speed(most(c), c) < level  # noqa: E731
        grid = _grid(low, high, 30)
        grid = grid[: bisect_left(grid, True, key=fails)]
        if grid and grid[-1] > low * (high / low) ** SHORTEST:
            shown = dict.fromkeys([*grid[::10], grid[-1]])
            curves[level] = {context: batch(level, context) for context in shown}
    return curves


@lru_cache(maxsize=64)
def ridge_batch(deployment: Deployment, context: int, max_batch: int) -> int:
    """The least batch whose matrices take longer to multiply than to read, or max_batch + 1."""

    def computes(batch: int) -> bool:
        linear = deployment.step(batch, context, check_memory=False).linear
        return linear.compute_seconds > linear.memory_seconds

    return 1 + bisect_left(range(1, max_batch + 1), True, key=computes)


def memory_bar(
    rows: Mapping[str, Mapping[str, float]],
    *,
    title: str = "What the KV cache may fill is what the rest leaves",
) -> Figure:
    """Draw one stacked bar a row, {row: {part: bytes}}, in GiB, up to the device's memory.

    Parts are those of `Deployment.memory`: weights, KV, activations, reserve, free. Where free is
    negative, so much of KV is drawn as what does not fit.
    """
    names, bars = stacked(
        {n: _overflow(row) for n, row in rows.items()}, 1 / GIB, **{MISSING: "breach"}
    )
    panel = Panel(y=Axis(quantity="", categories=names), series=bars)
    return Figure(title=title, x=Axis(quantity="memory", unit="GiB"), panels=(panel,))


def _overflow(parts: Mapping[str, float]) -> Mapping[str, float]:
    if parts["free"] >= 0:
        return parts
    return {**parts, "KV": parts["KV"] + parts["free"], "free": 0.0, MISSING: -parts["free"]}


def context_sweep(
    measured: Mapping[tuple[int, int], float],
    *,
    kv_bytes_per_token: float,
    kv_bandwidth: float,
    fixed_seconds: float,
    title: str | None = None,
) -> Figure:
    """Draw step time (ms) against tokens in all caches: {(batch, context): seconds} as dots.

    The line is fixed_seconds + tokens x kv_bytes_per_token / kv_bandwidth (bytes/s), fitted by
    `decodelab.measure`; its slope is the effective KV bandwidth.
    """
    dots = sorted((batch * context, s * 1e3) for (batch, context), s in measured.items())
    tokens, times = zip(*dots, strict=True)
    ends = (0, tokens[-1])
    speed = f"{say(kv_bandwidth / 1e9)} GB/s" if isfinite(kv_bandwidth) else "not seen"
    line = tuple((fixed_seconds + t * kv_bytes_per_token / kv_bandwidth) * 1e3 for t in ends)
    series = (
        Series(name=f"slope: {speed}", x=ends, y=line),
        Series(name="measured", x=tokens, y=times, kind="dots", role="measurement"),
    )
    panel = Panel(y=Axis(quantity="step time", unit="ms"), series=series)
    x = Axis(quantity="tokens in all caches", unit="B x S")
    title = title or f"Step time against tokens in all caches: effective KV bandwidth {speed}"
    return Figure(title=title, x=x, panels=(panel,))


def _line(name: str, curve: Mapping[int, float], role: str, named_at: str = "edge") -> Series:
    return Series(name=name, x=tuple(curve), y=tuple(curve.values()), role=role, named_at=named_at)


def _grid(low: int, high: int, points: int) -> list[int]:
    """Whole numbers from `low` to `high`, so many `points` a doubling."""
    steps = ceil(points * log2(high / low))
    return sorted({min(round(low * 2 ** (i / points)), high) for i in range(steps + 1)})


def _round_levels(low: float, high: float) -> list[float]:
    """Round numbers (1, 2, 5 times a power of ten) in between, thinned to a few."""
    tens = range(floor(log10(low)), ceil(log10(high)) + 1)
    found = [m * 10.0**e for e in tens for m in (1, 2, 5) if low * 1.3 < m * 10.0**e < high * 0.9]
    return found[:: ceil(len(found) / MOST_LEVELS) or 1]
