"""Figures of a trace, and the stepper without a browser: both are pure functions of what ran."""

import json
import random
import re
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from decodelab.explain import explorers, serving_figures, stepper_view
from decodelab.explain.chart import Axis, Chart, Panel, Series
from decodelab.explain.paint_matplotlib import paint_matplotlib, png
from decodelab.explain.paint_plotly import paint_plotly
from decodelab.explain.paint_svg import paint_svg
from decodelab.explain.serving_figures import (
    blocks,
    decode_gaps,
    gantt,
    latency_against_load,
    occupancy,
)
from decodelab.explain.stepper import Stepper, stepper
from decodelab.explain.style import ROLES
from decodelab.explain.timeline import Stretch, shares, staircase, stretches
from decodelab.explain.walk import Walk, names
from decodelab.predict import HARDWARE, SHAPES
from decodelab.serve import (
    BlockAllocator,
    Engine,
    Request,
    ReservingAllocator,
    RooflineRunner,
    Row,
    SharingAllocator,
    StepRecord,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from ipywidgets import Widget

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def make(
    policy: str = "continuous",
    num_blocks: int = 64,
    max_batch: int = 4,
    token_budget: int = 64,
    allocator: type[BlockAllocator] = BlockAllocator,
) -> Engine:
    runner = RooflineRunner(SHAPES["Llama-3.1-8B"], HARDWARE["NVIDIA H100 SXM"], num_blocks)
    return Engine(runner, policy, max_batch, token_budget, allocator=allocator)


def requests(lengths: list[tuple[int, int]], arrivals: dict[int, float] | None = None) -> list:
    """(prompt, new tokens) of A, B, C, ...; prompts share their first tokens."""
    arrivals = arrivals or {}
    return [
        Request(range(1, prompt + 1), new, id=LETTERS[i], arrival=arrivals.get(i, 0.0))
        for i, (prompt, new) in enumerate(lengths)
    ]


def mixed(count: int, seed: int = 0, longest: int = 60) -> list[Request]:
    draw = random.Random(seed)
    return requests([(draw.randrange(4, 60), draw.randrange(1, longest)) for _ in range(count)])


def served(work: list[Request], **options: object) -> Engine:
    engine = make(**options)
    engine.run(work)
    return engine


def record(*rows: tuple, start: float = 0.0, seconds: float = 1.0, **more: object) -> StepRecord:
    """A step of (id, slot, kind) rows."""
    values = {
        "emitted": (), "waiting": (), "num_waiting": 0, "preempted": (), "finished": (),
        "blocks_used": 1, "blocks_total": 8, "scheduler_seconds": 0.0,
    } | more  # fmt: skip
    made = tuple(Row(id, slot, kind, 1, 0) for id, slot, kind in rows)
    return StepRecord(start=start, seconds=seconds, rows=made, **values)


A, B = ("A", 0, "decode"), ("B", 1, "decode")


# A trace as bars


def test_steps_of_one_kind_for_one_request_are_one_bar() -> None:
    trace = [record(("A", 0, "prefill")), record(A, B), record(A, B), record(("A", 0, "padding"))]
    assert stretches(trace) == [
        Stretch(0, "A", "prefill", 0, 1),
        Stretch(0, "A", "decode", 1, 2),
        Stretch(1, "B", "decode", 1, 2),
        Stretch(0, "A", "padding", 3, 1),
    ]


def test_a_request_that_left_its_slot_and_came_back_has_two_bars() -> None:
    assert len(stretches([record(A), record(B), record(A)])) == 3
    assert len(stretches([record(A), record(("B", 0, "decode")), record(A)])) == 3


def test_bars_in_seconds_lie_where_the_steps_did_and_start_at_zero() -> None:
    trace = [record(A, start=5.0, seconds=0.5), record(A, start=5.5, seconds=0.25)]
    assert stretches(trace, "seconds") == [Stretch(0, "A", "decode", 0.0, 0.75)]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 30)), min_size=1, max_size=10),
    st.sampled_from(["static", "dynamic", "continuous"]),
    st.integers(5, 20),
)
def test_bars_are_the_rows_of_the_trace_no_more_and_no_less(
    lengths: list[tuple[int, int]], policy: str, num_blocks: int
) -> None:
    trace = served(requests(lengths), policy=policy, num_blocks=num_blocks).trace
    bars = stretches(trace)
    rows = Counter(row.kind for step in trace for row in step.rows)
    drawn = Counter()
    for bar in bars:
        drawn[bar.kind] += bar.length
    assert drawn == rows
    for slot in {bar.slot for bar in bars}:
        mine = sorted(bar for bar in bars if bar.slot == slot)
        mine.sort(key=lambda bar: bar.start)
        assert all(one.end <= other.start for one, other in pairwise(mine)), "bars overlap"


def test_idle_time_is_a_gap_in_a_curve_and_the_pause_between_steps_is_not() -> None:
    close = [record(A, start=0.0), record(A, start=1.1)]
    apart = [record(A, start=0.0), record(A, start=9.0)]
    assert all(value == 1 for _, value in staircase(close, [1, 1], "seconds"))
    assert (1.0, 0.0) in staircase(apart, [1, 1], "seconds")
    assert staircase(apart, [1, 1]) == [(0, 1), (2, 1)], "steps have no pauses"


# The Gantt


def test_a_gantt_has_a_row_a_slot_and_names_the_requests() -> None:
    figure = gantt(served(mixed(10)).trace)
    slots, queue = figure.panels
    assert slots.y.categories == ("slot 0", "slot 1", "slot 2", "slot 3")
    assert {s.name for s in slots.series} == {"prefill", "decode"}
    assert set().union(*(s.labels for s in slots.series)) == set(LETTERS[:10])
    assert queue.series[0].y[0] == max(queue.series[0].y) > 0
    assert figure.x.title == "step"
    assert gantt(served(mixed(10)).trace, by="seconds").x.title == "time (s)"


def test_padding_shows_under_static_and_never_under_continuous() -> None:
    traces = {p: served(mixed(12), policy=p).trace for p in ("static", "continuous")}
    static, continuous = gantt(traces).panels
    assert "padding" in {s.name for s in static.series}
    assert "padding" not in {s.name for s in continuous.series}


def test_two_gantts_share_one_scale_and_the_title_is_their_ratio() -> None:
    slow, fast = [record(A)] * 30, [record(A)] * 12
    figure = gantt({"static": slow, "continuous": fast})
    assert figure.title == ("continuous is done after 12 steps, static after 30: 2.5 times as long")
    assert figure.x_span[1] > 30
    assert [panel.y.title for panel in figure.panels] == ["static", "continuous"]
    assert gantt({"a": slow, "b": slow}).title == "All are done after 30 steps"


def test_the_claim_of_one_gantt_counts_useful_rows_and_leaves_padding_out() -> None:
    trace = [record(A, B), record(A, ("B", 1, "padding"))]
    assert "have work 75% of the time" in gantt(trace).title
    assert gantt(trace, title="Mine").title == "Mine"


def test_a_preemption_is_a_red_dot_at_the_end_of_the_bar_that_it_cut() -> None:
    trace = [record(A, B), record(A, B), record(A, preempted=("B",)), record(A, B)]
    [dots] = [s for s in gantt(trace).panels[0].series if s.kind == "dots"]
    assert (dots.x, dots.y) == ((2,), (1,))
    assert dots.role == "breach"
    twice = gantt([*trace, record(A, preempted=("B",)), record(A)])
    assert twice.panels[0].series[1].x == (2, 4), "each at a bar of its own"
    engine = served(mixed(8), num_blocks=10)
    found = sum(len(step.preempted) for step in engine.trace)
    [dots] = [s for s in gantt(engine.trace).panels[0].series if s.kind == "dots"]
    assert found > 0
    assert len(dots.x) == found


def test_a_gantt_says_in_words_what_a_picture_would_say() -> None:
    trace = [record(A, B, num_waiting=3), record(A, ("B", 1, "padding"))]
    words = gantt({"static": trace}).describe()
    for part in ("static: 2 requests in 2 steps of 2 slots", "3 decode", "1 padding", "3 wait"):
        assert part in words, part
    assert len(gantt(served(mixed(20)).trace).describe()) < 400, "not a list of bars"


def test_a_long_gantt_stays_small() -> None:
    engine = served(mixed(26, longest=200), policy="static", max_batch=8, num_blocks=400)
    assert len(engine.trace) > 400
    figure = gantt({"one": engine.trace, "other": engine.trace})
    assert len(png(figure)) < 40_000
    assert len(paint_svg(figure)) < 60_000


def test_a_trace_without_steps_is_refused_with_what_to_do() -> None:
    for nothing in ([], {"static": []}, {}):
        with pytest.raises(ValueError, match="no step to draw: run the engine"):
            gantt(nothing)


# Occupancy and blocks


def test_areas_are_stacked_and_their_shares_are_of_all_slots() -> None:
    trace = [record(("A", 0, "prefill"), B), record(A, ("B", 1, "padding"))]
    [panel] = occupancy(trace, slots=4).panels
    assert {s.name for s in panel.series} == {
        "decode 25%", "prefill 12%", "padding 12%", "empty 50%",
    }  # fmt: skip
    tops = {s.role: s.y[0] for s in panel.series}
    assert (tops["decode"], tops["prefill"], tops["free"]) == (1, 2, 4)
    assert [s.role for s in panel.series][0] == "free", "the largest is drawn first"


def test_shares_in_seconds_weigh_a_step_by_its_length() -> None:
    trace = [record(A, B, seconds=3.0), record(A, start=3.0, seconds=1.0)]
    assert shares(trace, "step", 2)["decode"] == 0.75
    assert shares(trace, "seconds", 2)["decode"] == pytest.approx(7 / 8)
    assert "88%" in occupancy(trace, by="seconds").title


def test_the_pool_is_a_line_and_a_dot_is_where_it_ran_out() -> None:
    trace = [record(A, blocks_used=7), record(A, blocks_used=5, preempted=("B",))]
    figure = blocks(trace)
    assert figure.title == "Blocks in use at most: 7 of 8, 1 preemption"
    [panel] = figure.panels
    assert (panel.rules[0].at, panel.rules[0].axis) == (8, "y")
    assert panel.series[0].y == (7, 7, 5, 5)
    assert panel.series[1].x == (1,)
    assert blocks({"a": trace[:1]}).title == "Blocks in use at most: a 7 of 8"


# Percentiles


TTFT = {1: {50: 0.1, 99: 0.2}, 2: {50: 0.1, 99: 0.4}, 4: {50: 0.2, 99: 0.9}, 8: {50: 2, 99: 0.3}}
TPOT = {rate: {50: 0.01, 99: 0.02} for rate in TTFT}


def test_the_slo_holds_up_to_the_first_load_whose_tail_misses_it() -> None:
    title = latency_against_load(TTFT, TPOT, ttft_slo=0.5, tpot_slo=0.05).title
    assert title == "p99 keeps to the SLO up to 2 requests/s", "4 by the median, 8 after a gap"
    both = latency_against_load(TTFT, TPOT, ttft_slo=0.5, tpot_slo=0.015).title
    assert both == "p99 keeps to the SLO not even at 1 requests/s"


def test_latencies_are_drawn_in_milliseconds_and_the_slo_in_red() -> None:
    figure = latency_against_load(TTFT, TPOT, ttft_slo=0.5)
    ttft, tpot = figure.panels
    assert {s.name: s.y[0] for s in ttft.series} == {"p50": 100, "p99": 200}
    assert [(r.at, r.role) for r in ttft.rules] == [(500, "breach")]
    assert not tpot.rules
    assert "SLO" not in latency_against_load(TTFT, TPOT).title


def test_gaps_between_tokens_are_drawn_against_the_token_budget() -> None:
    figure = decode_gaps({64: {50: 0.01, 99: 0.02}, 1024: {50: 0.01, 99: 0.08}}, slo=0.05)
    assert figure.title == (
        "The p99 gap between tokens: 20 ms at a budget of 64 tokens, "
        "80 ms at a budget of 1,024 tokens"
    )
    assert figure.x.title == "token budget of a step (tokens), log scale"
    assert len(decode_gaps(TPOT, TTFT).panels) == 2


def test_a_percentile_that_is_not_a_number_is_left_out() -> None:
    figure = decode_gaps({64: {50: 0.01, 99: float("nan")}, 128: {50: 0.01, 99: 0.02}})
    assert {s.name: s.x for s in figure.panels[0].series} == {"p50": (64, 128), "p99": (128,)}
    with pytest.raises(ValueError, match="There is no gap between tokens"):
        decode_gaps({64: {50: float("nan")}})


# Painting


@pytest.fixture
def timeline() -> Chart:
    """Bars that begin where they are told to, one too short for its label, above an area."""
    bars = Series(
        name="decode", x=(60, 2), y=(0, 1), kind="bar", role="decode", start=(10, 80),
        labels=("chat", "tiny"),
    )  # fmt: skip
    area = Series(name="waiting", x=(0, 50, 50, 90), y=(4, 4, 1, 1), kind="area", role="queue")
    return Chart(
        title="Bars",
        x=Axis(quantity="step"),
        panels=(
            Panel(y=Axis(quantity="", categories=("slot 0", "slot 1")), series=(bars,), row=26),
            Panel(y=Axis(quantity="queue"), series=(area,), tall=90),
        ),
    )


def test_a_bar_begins_at_its_start_and_an_area_reaches_down_to_zero(timeline: Chart) -> None:
    assert [(start, length) for *_, start, length in timeline.panels[0].bars()] == [
        (10, 60), (80, 2),
    ]  # fmt: skip
    left, right = (float(x) for x in re.findall(r'<rect x="([\d.]+)"', paint_svg(timeline))[:2])
    assert (right - left) == pytest.approx(70 * (720 - timeline.left - 176) / 97.2, rel=0.01)
    [points] = set(re.findall('polygon points="([^"]*)"', paint_svg(timeline)))
    heights = [float(p.split(",")[1]) for p in points.split()]
    assert heights[0] == heights[-1] == max(heights)
    assert paint_plotly(timeline)["data"][0]["base"] == [10, 80]
    assert paint_plotly(timeline)["data"][1]["fill"] == "tozeroy"
    assert len(paint_matplotlib(timeline).axes[1].collections) == 1


def test_a_label_is_written_only_in_a_bar_that_holds_it(timeline: Chart) -> None:
    svg, axes = paint_svg(timeline), paint_matplotlib(timeline).axes[0]
    assert ">chat</text>" in svg
    assert ">tiny</text>" not in svg
    assert {"chat"} == {t.get_text() for t in axes.texts} - {"decode"}


def test_plotly_itself_accepts_a_timeline(timeline: Chart) -> None:
    graph_objects = pytest.importorskip("plotly.graph_objects")
    painted = json.loads(json.dumps(paint_plotly(timeline)))
    graph_objects.Figure(data=painted["data"], layout=painted["layout"])


def test_kinds_of_a_row_differ_in_grey() -> None:
    assert len({ROLES[kind].hatch for kind in ("prefill", "decode", "padding", "queue")}) == 4
    for role, look in ROLES.items():
        bar = Series(name="a", x=(1,), y=(0,), kind="bar", role=role)
        panel = Panel(y=Axis(quantity="", categories=("r",)), series=(bar,))
        svg = paint_svg(Chart(title="", x=Axis(quantity="q"), panels=(panel,)))
        drawn = re.findall(r"url\(#([\w-]+)\)", svg)
        assert bool(drawn) is bool(look.hatch), role
        assert all(f'<pattern id="{name}"' in svg for name in drawn), role


# The walk: what happened, and why


def said(walk: Walk) -> str:
    walk.run()
    return " | ".join(snapshot.said for snapshot in walk.snapshots)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20)), min_size=1, max_size=8),
    st.sampled_from(["static", "dynamic", "continuous"]),
    st.sampled_from([BlockAllocator, ReservingAllocator, SharingAllocator]),
    st.integers(4, 20),
)
def test_a_walk_serves_as_a_run_does_and_shows_what_was_recorded(
    lengths: list[tuple[int, int]], policy: str, allocator: type, num_blocks: int
) -> None:
    options = {"policy": policy, "allocator": allocator, "num_blocks": num_blocks}
    walk = Walk(make(**options), requests(lengths))
    walk.run()
    alone = make(**options)
    outputs = alone.run(requests(lengths)) if walk.ids else {}
    assert {id: walk.engine.sequences[id].output for id in walk.ids} == {
        id: outputs[id] for id in walk.ids
    }
    for snapshot in walk.snapshots:
        assert snapshot.said.count("..") == 0
        if snapshot.record:
            assert len(snapshot.owners) == snapshot.record.blocks_used
            seated = {(s.id, slot, s.kind) for slot, s in enumerate(snapshot.seats) if s}
            assert seated >= {(r.id, r.slot, r.kind) for r in snapshot.record.rows}
            assert set(snapshot.tables) == {id for id, *_ in seated}
            assert snapshot.taken <= set(snapshot.owners)
    assert walk.trace == walk.engine.trace
    assert walk.ended


def test_back_shows_the_very_step_again_and_runs_nothing() -> None:
    walk = Walk(make(), mixed(6))
    for _ in range(5):
        walk.step()
    shown, ran = stepper_view.html(walk), len(walk.engine.trace)
    walk.back()
    walk.back()
    assert stepper_view.html(walk) != shown
    assert walk.at == 3
    walk.step()
    walk.step()
    assert stepper_view.html(walk) == shown
    assert len(walk.engine.trace) == ran
    for _ in range(9):
        walk.back()
    assert walk.at == 0
    assert "no step has run" in stepper_view.status(walk)


def test_the_end_is_said_and_is_where_steps_stop() -> None:
    walk = Walk(make(), mixed(3))
    walk.run()
    end = walk.at
    walk.step()
    assert walk.at == end == len(walk.engine.trace)
    assert stepper_view.status(walk).endswith(f"All is done, in {end} steps.")
    walk.back()
    assert "All is done" not in stepper_view.status(walk)


def test_the_tables_are_those_of_the_running_step_and_not_of_after_it() -> None:
    walk = Walk(make(), requests([(20, 1)]))
    walk.step()
    assert walk.now.record.finished == ("A",)
    assert walk.now.tables == {"A": (0, 1)}, "A gave its blocks back only after this step"
    assert walk.now.seats[0].finished


def test_blocks_are_taken_once() -> None:
    walk = Walk(make(), requests([(16, 9)]))
    taken = []
    while not walk.ended:
        walk.step()
        taken.append(set(walk.now.taken))
    assert taken[:3] == [{0}, {1}, set()]


@pytest.mark.parametrize(
    ("options", "lengths", "words"),
    [
        ({"token_budget": 30}, [(20, 3), (20, 3)], "B prefill 30 tokens, B only a chunk of its"),
        ({"token_budget": 9}, [(20, 3)], "A prefills 9 tokens, only a chunk of its prompt"),
        ({"token_budget": 20}, [(20, 3), (20, 3)], "B waits: the step's budget of 20 tokens is"),
        ({"max_batch": 1}, [(4, 3), (4, 3)], "B waits: every slot is taken"),
        ({"num_blocks": 3}, [(20, 3), (20, 3)], "B waits: it needs 2 blocks, and 1 is free"),
        ({"num_blocks": 3}, [(16, 20), (16, 3)], "blocks ran out, so B was preempted and gave up"),
        ({"num_blocks": 3}, [(16, 20), (16, 3)], "B is back after preemption"),
        ({"num_blocks": 3}, [(40, 9), (4, 2)], "3 blocks of KV, and the pool has 3|A decodes one"),
        ({"policy": "static"}, [(9, 5), (3, 2)], "6 tokens of padding make their prompts equally"),
        ({"policy": "static"}, [(9, 5), (3, 2)], "B is done, and padding until all are"),
        (
            {"policy": "static", "num_blocks": 3},
            [(16, 9), (30, 3)],
            "B waits: it needs 2 blocks, and 1 is free",
        ),
        (
            {"policy": "static", "num_blocks": 3},
            [(16, 9), (30, 3)],
            "B waits: the batch is closed until its last request is done",
        ),
        (
            {"allocator": ReservingAllocator, "num_blocks": 4},
            [(16, 17), (16, 30)],
            "B waits: it needs 3 blocks in one piece, and 2 are free",
        ),
        (
            {"allocator": SharingAllocator, "token_budget": 20},
            [(20, 5), (20, 3)],
            "B shares 1 block with KV of its first tokens",
        ),
    ],
)
def test_the_sentence_names_what_happened_and_why(
    options: dict, lengths: list[tuple[int, int]], words: str
) -> None:
    found = said(Walk(make(**options), requests(lengths)))
    assert any(part in found for part in words.split("|")), found


def test_a_refused_request_is_said_with_its_reason_and_the_others_go_on() -> None:
    walk = Walk(make(num_blocks=4), [*requests([(5, 3)]), Request(range(1, 99), 9, id="big")])
    assert "1 request handed in" in walk.now.said
    assert "'big' has 98 tokens" in walk.now.said
    assert "A finished" in said(walk)


def test_idle_time_before_an_arrival_is_said_and_a_short_pause_is_not() -> None:
    late = said(Walk(make(), requests([(5, 3), (5, 3)], {1: 2.0})))
    assert late.startswith("2 requests handed in, 1 of them to arrive later")
    assert "the engine was idle for" in late
    assert "idle" not in said(Walk(make(), requests([(5, 3), (5, 3)])))


def test_a_shared_block_has_more_than_one_owner() -> None:
    options = {"allocator": SharingAllocator, "token_budget": 20}
    walk = Walk(make(**options), requests([(20, 9), (20, 9)]))
    walk.run(3)
    assert walk.now.owners[0] == ["A", "B"]
    assert "×2" in stepper_view.html(walk)


def test_names_are_listed_as_prose_does_and_cut_when_many() -> None:
    assert names("A") == "A"
    assert names("AB") == "A and B"
    assert names("ABC") == "A, B and C"
    assert names("ABCDEFGH") == "A, B, C, D, E and 3 more"


# What the stepper shows


def test_the_page_has_the_sentence_as_status_and_every_number_in_its_words() -> None:
    walk = Walk(make(num_blocks=9), requests([(20, 9), (5, 2), (30, 4)]))
    walk.run(2)
    page, words = stepper_view.html(walk), stepper_view.words(walk)
    assert re.search(r'role="status">Step 2: [^<]*A', page)
    assert "Slot 0: A, decode 1; 21 with KV, 2 of 9 new; blocks 0, 1." in words
    assert "Slot 3 is empty." in words
    assert "5 of 9 blocks of 16 tokens in use, 4 free." in page
    assert page.count('class="cell') == 9
    assert 'title="block 0: A"' in page


def test_the_track_of_a_request_is_filled_as_far_as_there_is_kv() -> None:
    walk = Walk(make(token_budget=10), requests([(40, 10)]))
    walk.run(1)
    track = stepper_view.html(walk).split("<svg")[2]
    filled, whole = (float(width) for width in re.findall(r'<rect [^>]*?width="([\d.]+)"', track))
    assert filled / whole == pytest.approx(10 / 50)
    walk.run(7)
    prompt, new, whole = (
        float(width)
        for width in re.findall(
            r'<rect [^>]*?width="([\d.]+)"', stepper_view.html(walk).split("<svg")[2]
        )
    )
    assert (prompt / whole, new / whole) == (pytest.approx(40 / 50), pytest.approx(3 / 50))


def test_whatever_an_id_holds_is_shown_as_text() -> None:
    walk = Walk(make(), [Request([1, 2], 3, id="<b>&'\"")])
    walk.run(1)
    page = stepper_view.html(walk)
    assert "<b>&'" not in page
    assert page.count("&lt;b&gt;&amp;") >= 3


def test_a_large_pool_is_drawn_without_its_free_blocks() -> None:
    walk = Walk(make(num_blocks=5000), mixed(4))
    walk.run(2)
    page = stepper_view.html(walk)
    assert page.count('class="cell') == len(walk.now.owners)
    assert len(page) < 20_000


def test_nothing_in_the_page_comes_from_the_network() -> None:
    walk = Walk(make(), mixed(4))
    walk.run(3)
    assert "http" not in stepper_view.html(walk)


def make_small(policy: str = "continuous", num_blocks: int = 16) -> Engine:
    if num_blocks < 2:
        raise ValueError("A pool of 1 block serves nobody: take 2 or more.")
    return make(policy, num_blocks)


@pytest.fixture
def small() -> Stepper:
    return stepper(
        make_small, mixed(5), policy=("continuous", "static"), num_blocks=(16, 10, 1), step=2
    )


def test_the_buttons_walk_and_are_never_disabled(small: Stepper) -> None:
    back, step, run = small.buttons.values()
    assert "Step 2:" in small.chart.value
    step.click()
    assert "Step 3:" in small.chart.value
    back.click()
    assert "Step 2:" in small.chart.value
    run.click()
    step.click()
    assert "All is done" in small.chart.value
    for _ in range(3):
        back.click()
    assert "All is done" not in small.chart.value
    assert not any(button.disabled for button in small.buttons.values()), "focus would be lost"


def test_choosing_starts_anew_with_the_same_requests(small: Stepper) -> None:
    small.buttons["Run to end"].click()
    continuous = small.walk.at
    small.choosers["policy"].value = "static"
    assert "Step 2:" in small.chart.value
    small.buttons["Run to end"].click()
    assert small.walk.at > continuous
    assert "padding until all are" in said(small.walk)


def test_an_engine_that_cannot_be_made_is_answered_in_words(small: Stepper) -> None:
    before = small.chart.value
    small.choosers["num_blocks"].value = 1
    assert 'role="alert"' in small.message.value
    assert "serves nobody" in small.message.value
    assert small.chart.value == before
    small.choosers["num_blocks"].value = 10
    assert small.message.value == ""


def test_the_stepper_is_one_display_with_a_still_picture_and_core_widgets_only(
    small: Stepper, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = []
    monkeypatch.setattr(explorers, "display", lambda bundle, raw: shown.append(bundle))
    small._ipython_display_()
    assert set(shown[0]) == {explorers.WIDGET_MIME, "image/png", "text/plain"}
    assert shown[0]["text/plain"] == small.figure().describe()
    assert "Slot 0: A" in shown[0]["text/plain"]
    small.walk.run(0)
    modules, waiting = set(), [small.view]
    while waiting:
        widget: Widget = waiting.pop()
        modules.add(widget._model_module)
        waiting += getattr(widget, "children", ())
    assert modules == {"@jupyter-widgets/controls"}


def test_before_the_first_step_there_is_a_picture_too(small: Stepper) -> None:
    for _ in range(2):
        small.buttons["Back"].click()
    assert small.walk.at == 0
    assert "no step has run" in small.figure().describe()
    assert len(png(small.figure())) > 1000
    replace(small.figure(), title="still a figure")
    assert serving_figures.KINDS == ("prefill", "decode", "padding")
