"""How one step of a Walk is shown: a sentence, the slots, the queue, the pool, the steps so far.

HTML and one SVG that follow the page's theme; the same in words for a screen reader, and as a
Figure for places without widgets.
"""

from dataclasses import replace
from html import escape

from decodelab.explain.chart import Axis, Panel
from decodelab.explain.figures import Figure
from decodelab.explain.paint_svg import paint_svg
from decodelab.explain.serving_figures import gantt
from decodelab.explain.style import ROLES, say
from decodelab.explain.timeline import KINDS
from decodelab.explain.walk import Seat, Walk, many

MOST_BLOCKS, MOST_LISTED = 96, 7  # cells of the map; blocks of a table
TRACK = 160  # pixels of the longest request
STYLE = f"""<style>
.decodelab-step {{max-width:720px; line-height:1.35; font-size:13px}}
.decodelab-step table {{border-collapse:collapse; table-layout:fixed; width:720px; margin:4px 0}}
.decodelab-step th {{text-align:left; font-weight:bold}}
.decodelab-step td, .decodelab-step th {{padding:1px 10px 1px 0; height:22px; white-space:nowrap}}
.decodelab-step td:nth-child(2) {{overflow:hidden; text-overflow:ellipsis}}
.decodelab-step h4 {{font-size:13px; margin:10px 0 2px}}
.decodelab-step .cell {{display:inline-block; width:46px; height:32px; margin:0 3px 3px 0;
  box-sizing:border-box; text-align:center; font-size:12px; line-height:15px; overflow:hidden;
  border:1px dashed currentColor; vertical-align:top}}
.decodelab-step .cell small {{font-size:10px; display:block; line-height:13px}}
.decodelab-step .owned {{border-style:solid; background:{ROLES["typical"].color}}}
.decodelab-step .owned > span {{color:#000}}
.decodelab-step .shared {{background:{ROLES["queue"].color}}}
.decodelab-step .taken {{outline:2px solid; outline-offset:-1px; font-weight:bold}}
.decodelab-step svg {{vertical-align:middle}}
</style>"""
COLUMNS = {  # of the slots' table: name and width, which stands still from step to step
    "Slot": 34, "Request": 64, "This step": 140, "Prompt, new tokens": TRACK + 12,
    "With KV, and new": 166, "Block table": 144,
}  # fmt: skip


def html(walk: Walk) -> str:
    """All that the stepper shows of the step that `walk` is at."""
    return (
        f'{STYLE}<div class="decodelab-step"><p role="status">{escape(status(walk))}</p>'
        f"{_slots(walk)}{_queue(walk)}{_pool(walk)}</div>"
        + paint_svg(_so_far(walk, title="The steps so far"))
    )


def status(walk: Walk) -> str:
    """What happened in this step, and whether it's the last."""
    end = f" All is done, in {many(walk.at, 'step')}." if walk.ended else ""
    return f"Step {walk.at}: {walk.now.said}{end}"


def figure(walk: Walk) -> Figure:
    """The static twin: the steps so far under the sentence of this one, all of it in words."""
    return replace(_so_far(walk, title=status(walk)), words=words(walk))


def words(walk: Walk) -> str:
    """Slots, queue and pool in words and numbers."""
    now, said = walk.now, []
    for slot, seat in enumerate(now.seats):
        if seat:
            table = ", ".join(map(str, now.tables.get(seat.id, ())))
            said.append(f"Slot {slot}: {seat.id}, {_deed(seat)}; {_tokens(seat)}; blocks {table}.")
        else:
            said.append(f"Slot {slot} is empty.")
    queue = ", ".join(map(str, now.queue)) or "nobody"
    said.insert(0, _cost(walk))
    return " ".join([*said, f"In the queue: {queue}; {now.to_come} yet to arrive.", _used(walk)])


def _so_far(walk: Walk, title: str) -> Figure:
    """The Gantt up to this step, on an axis that stands still while one goes back."""
    seen = len(walk.snapshots) - 1
    if not walk.trace:
        rows = Axis(quantity="", categories=tuple(f"slot {i}" for i in range(walk.slots)))
        x = Axis(quantity="step", include=(10, seen))
        return Figure(title=title, x=x, panels=(Panel(y=rows, series=(), row=26),))
    return gantt({"": walk.trace}, slots=walk.slots, until=seen, title=title)


def _deed(seat: Seat) -> str:
    """What its row did in this step."""
    deed = {
        "prefill": f"prefill {say(seat.fed)}",
        "decode": "decode 1",
        "padding": "padding",
        "idle": "no budget left",
    }[seat.kind]
    return f"{deed}, finished" if seat.finished else deed


def _tokens(seat: Seat) -> str:
    return f"{say(seat.cached)} with KV, {say(seat.output)} of {say(seat.max_tokens)} new"


def _slots(walk: Walk) -> str:
    now = walk.now
    lives = walk.engine.sequences.values()
    longest = max(len(s.request.prompt) + s.request.max_tokens for s in lives)
    rows = []
    for slot, seat in enumerate(now.seats or [None] * walk.slots):
        cells = ["", "", "", "", ""]
        if seat:
            table = now.tables.get(seat.id, ())
            cells = [
                f"<b>{escape(str(seat.id))}</b>", _swatch(seat.kind) + _deed(seat),
                _track(seat, TRACK / longest), _tokens(seat), _listed(table, now.taken),
            ]  # fmt: skip
        rows.append(f"<tr><td>{slot}</td>" + "".join(f"<td>{cell}</td>" for cell in cells))
    head = "".join(
        f'<th scope="col" style="width:{width}px">{name}</th>' for name, width in COLUMNS.items()
    )
    return f"<h4>{_cost(walk)}</h4><table><tr>{head}</tr>{'</tr>'.join(rows)}</tr></table>"


def _cost(walk: Walk) -> str:
    """What the step computed, and how long it took."""
    record = walk.now.record
    if not record:
        return "Batch: nothing computed yet."
    counts = {
        "prefill": record.prompt_tokens,
        "decode": record.decode_tokens,
        "padding": record.padded_tokens,
    }
    each = ", ".join(f"{say(count)} {kind}" for kind, count in counts.items() if count)
    return (
        f"Batch: {many(sum(counts.values()), 'token')} ({each}) in {say(record.seconds * 1e3)} ms."
    )


def _swatch(kind: str) -> str:
    box = _box(kind, 1, 1, 10, 10) if kind in KINDS else ""
    return f'<svg width="12" height="12" aria-hidden="true">{box}</svg> '


def _box(kind: str, x: float, y: float, width: float, height: float) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" '
        f'fill="{ROLES[kind].color}" stroke="currentColor" stroke-width=".7"/>'
    )


def _track(seat: Seat, unit: float) -> str:
    """A request's tokens from left to right: KV of its prompt, KV of new ones, what is to come."""
    whole, prompt = (seat.prompt + seat.max_tokens) * unit, seat.prompt * unit
    parts = [("prefill", 0, min(seat.cached, seat.prompt)), ("decode", seat.prompt, seat.cached)]
    bars = [
        _box(kind, 1 + start * unit, 2, (stop - start) * unit, 12)
        for kind, start, stop in parts
        if stop > start
    ]
    edge = 'fill="none" stroke="currentColor"'
    return (
        f'<svg width="{TRACK + 2}" height="16" aria-hidden="true">{"".join(bars)}'
        f'<rect x="1" y="2" width="{whole:.1f}" height="12" {edge}/>'
        f'<path d="M{1 + prompt:.1f} 0v16" {edge} stroke-width="2"/></svg>'
    )


def _listed(table: tuple[int, ...], taken: frozenset[int]) -> str:
    """A block table, its middle left out where it is long; what was taken now is bold."""
    shown = [f"<b>{block}</b>" if block in taken else str(block) for block in table]
    if len(shown) > MOST_LISTED:
        shown = [*shown[:2], "…", *shown[3 - MOST_LISTED :]]
    return " ".join(shown)


def _queue(walk: Walk) -> str:
    now = walk.now
    ids = " ".join(escape(str(id)) for id in now.queue[:24]) or "nobody"
    more = f" and {len(now.queue) - 24} more" if len(now.queue) > 24 else ""
    later = f"; {now.to_come} yet to arrive" if now.to_come else ""
    return f"<h4>Queue</h4><div>{ids}{more}{later}</div>"


def _used(walk: Walk) -> str:
    used, size = len(walk.now.owners), walk.pool.block_size
    free = walk.pool.num_blocks - used
    return f"{used} of {many(walk.pool.num_blocks, 'block')} of {size} tokens in use, {free} free."


def _pool(walk: Walk) -> str:
    """A cell a block: its number, and whose it is."""
    owners, shown = walk.now.owners, range(walk.pool.num_blocks)
    rest = ""
    if len(shown) > MOST_BLOCKS:
        shown = sorted(owners)[:MOST_BLOCKS]
        rest = " Only blocks in use are drawn."
    cells = "".join(_cell(block, owners.get(block, []), block in walk.now.taken) for block in shown)
    key = "Thick edge: taken in this step." * bool(walk.now.taken)
    if any(len(ids) > 1 for ids in owners.values()):
        key += " Yellow: shared by so many."
    return f"<h4>Pool: {_used(walk)}{rest}</h4><div>{cells}</div><div>{key}</div>"


def _cell(block: int, ids: list, taken: bool) -> str:
    kinds = ["cell"] + ["owned"] * bool(ids) + ["shared"] * (len(ids) > 1) + ["taken"] * taken
    names = ", ".join(map(str, ids)) or "free"
    text = escape(str(ids[0])) if ids else ""
    count = f" ×{len(ids)}" if len(ids) > 1 else ""
    head = f'<span class="{" ".join(kinds)}" title="{escape(f"block {block}: {names}")}">'
    return f"{head}<span><small>{block}{count}</small>{text}</span></span>"
