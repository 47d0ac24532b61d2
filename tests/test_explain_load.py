"""Figures of load tests, and the drills: they draw and say what was measured, and no more."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from decodelab.explain import drills
from decodelab.explain.chart import Series
from decodelab.explain.drills import Drill
from decodelab.explain.figures import Figure
from decodelab.explain.load_figures import gaps, latency_and_goodput, open_and_closed, terms
from decodelab.explain.paint_matplotlib import png
from decodelab.explain.paint_plotly import paint_plotly
from decodelab.explain.paint_svg import paint_svg
from decodelab.serve import SLO
from decodelab.serve.load_result import LoadResult, Record, knee
from decodelab.serve.scrape import STAGES

LIMIT = SLO(ttft=1.0, tpot=0.05)


def answered(id: int, due: float, ttft: float, tokens: int = 11, gap: float = 0.02) -> Record:
    times = tuple(due + ttft + gap * i for i in range(tokens))
    counts = {"prompt_tokens": 8, "output_tokens": tokens}
    return Record(id=id, due=due, sent=due, token_times=times, status="finished", **counts)


def result(rate: float | None = 1.0, ttfts: tuple = (0.1, 0.2, 0.4), **more: object) -> LoadResult:
    """Requests a second apart, with these TTFTs in turn."""
    gap = more.pop("gap", 0.02)
    records = tuple(answered(i, float(i), ttfts[i % len(ttfts)], gap=gap) for i in range(20))
    values = {"kind": "open loop", "records": records, "seconds": 20.0, "cpu_share": 0.1}
    return LoadResult(**values | {"rate": rate} | more)


def with_terms(queue: float, prefill: float, decode: float, **more: object) -> LoadResult:
    """The server's own means are these, in seconds."""
    means = zip(STAGES.values(), (queue, prefill, decode), strict=True)
    server = {f"{name}_{of}": v for name, s in means for of, v in (("sum", 20 * s), ("count", 20))}
    return result(server=server, **more)


@pytest.fixture
def sweep() -> list[LoadResult]:
    """Kept up to 2 requests/s, missed at 4; not in order."""
    return [result(4.0, (0.5, 3.0)), result(1.0), result(2.0, (0.2, 0.3))]


def named(figure: Figure, panel: int) -> dict[str, Series]:
    return {series.name: series for series in figure.panels[panel].series}


# Latency and goodput


def test_one_engine_shows_median_and_tail_in_ms_by_rate(sweep: list[LoadResult]) -> None:
    figure = latency_and_goodput(sweep, slo=LIMIT)
    ttft = named(figure, 0)
    assert ttft["p50"].x == (1.0, 2.0, 4.0)
    assert ttft["p50"].y == pytest.approx((200, 200, 500))
    assert ttft["p95"].y == pytest.approx((400, 300, 3000))
    assert named(figure, 1)["p95"].y == pytest.approx((20, 20, 20))
    assert [rule.at for rule in figure.panels[0].rules] == [1000]


def test_several_engines_have_one_line_each_that_tells_them_apart_in_grey(
    sweep: list[LoadResult],
) -> None:
    figure = latency_and_goodput({"ours": sweep, "theirs": sweep}, slo=LIMIT, percent=99)
    ttft = named(figure, 0)
    assert set(ttft) == {"ours", "theirs"}
    assert ttft["ours"].role != ttft["theirs"].role
    assert "p99" in figure.panels[0].y.title


def test_the_knee_is_ringed_where_the_load_test_finds_it(sweep: list[LoadResult]) -> None:
    figure = latency_and_goodput(sweep, slo=LIMIT)
    ring = named(figure, 2)["knee"]
    assert ring.x == (knee(sweep, LIMIT),) == (2.0,)
    assert ring.y == pytest.approx((sweep[2].goodput(LIMIT),))
    assert figure.title == "Goodput follows the load up to 2 requests/s"


def test_an_slo_that_no_rate_keeps_is_said_and_rings_nothing(sweep: list[LoadResult]) -> None:
    figure = latency_and_goodput({"a": sweep, "b": sweep}, slo=SLO(ttft=0.01))
    assert figure.title.endswith("at no rate tried with a, at no rate tried with b")
    assert "knee" not in named(figure, 2)
    assert not figure.panels[1].rules, "no SLO on TPOT was given"


def test_goodput_counts_requests_within_all_limits_and_not_all_that_finish(
    sweep: list[LoadResult],
) -> None:
    line = named(latency_and_goodput(sweep, slo=LIMIT), 2)["goodput"]
    assert line.y == pytest.approx([r.goodput(LIMIT) for r in sorted(sweep, key=lambda r: r.rate)])
    assert line.y[-1] < sweep[0].requests_per_second


def test_a_rate_at_which_nobody_finished_is_left_out_of_latency_alone() -> None:
    failed = tuple(replace(r, status="failed", token_times=()) for r in result().records)
    dead = result(8.0, records=failed)
    figure = latency_and_goodput([result(1.0), dead], slo=LIMIT)
    assert named(figure, 0)["p95"].x == (1.0,)
    assert named(figure, 2)["goodput"].y[-1] == 0
    with pytest.raises(ValueError, match="no request was finished"):
        latency_and_goodput([dead], slo=LIMIT)


@pytest.mark.parametrize(
    ("sweeps", "words"),
    [([], "no load"), ({"a": []}, "no load"), (dict.fromkeys("abcd", [result()]), "not 4")],
)
def test_what_cannot_be_drawn_is_refused_in_words(sweeps: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        latency_and_goodput(sweeps, slo=LIMIT)


# Open and closed loops


def test_an_open_loop_stands_at_what_it_offers_a_closed_one_at_what_it_gets() -> None:
    opened = [result(2.0, (0.5,)), result(8.0, (9.0,))]
    closed = [result(None, (0.2,), kind="closed loop", concurrency=n) for n in (16, 1)]
    closed[0] = replace(closed[0], seconds=5.0)
    figure = open_and_closed(opened, closed)
    lines = named(figure, 0)
    assert lines["open loop"].x == (2.0, 8.0)
    assert lines["open loop"].y == pytest.approx((500, 9000))
    assert lines["closed loop"].x == pytest.approx((1.0, 4.0)), "reached, in order of users"
    assert lines["closed loop"].labels == ("1 user", "16 users")
    assert "9,000 ms at 8 requests/s" in figure.describe()
    assert "200 ms for 1 user, at 1 requests/s" in figure.describe()


# Gaps


def test_each_point_of_the_tail_is_the_share_of_gaps_that_are_longer() -> None:
    found = result(gap=0.02)
    slow = replace(found.records[0], token_times=(0.1, 0.9, *(1.0 + 0.02 * i for i in range(9))))
    found = replace(found, records=(slow, *found.records[1:]))
    samples = [1e3 * gap for gap in found.itl.samples]
    [line] = gaps(found).panels[0].series
    for x, share in zip(line.x, line.y, strict=True):
        longer = 100 * sum(gap > x for gap in samples) / len(samples)
        assert longer <= share + 1e-9, "so many are longer at most"
        shorter = 100 * sum(gap < x for gap in samples) / len(samples)
        assert shorter <= 100 - share + 1e-9
    assert max(line.x) == pytest.approx(800)
    assert "20 and 20 ms" in gaps(found).title, "one gap of 200 is rarer than the p99"


def test_tokens_that_came_in_one_piece_have_no_place_on_a_log_scale() -> None:
    times = (0.1, 0.1, 0.3, 0.3, 0.5)
    pairs = tuple(replace(r, token_times=tuple(r.due + t for t in times)) for r in result().records)
    [line] = gaps(result(records=pairs)).panels[0].series
    assert line.x == pytest.approx([200] * len(line.x))
    assert max(line.y) < 55, "half of the gaps are 0"
    at_once = tuple(replace(r, token_times=(r.due,) * 5) for r in result().records)
    with pytest.raises(ValueError, match="one after the other"):
        gaps({"ours": result(records=at_once)})
    with pytest.raises(ValueError, match="one after the other"):
        gaps(result(records=tuple(replace(r, token_times=(r.due,)) for r in pairs)))


# Terms


def test_terms_add_up_to_the_mean_of_a_request_in_ms() -> None:
    found = with_terms(0.05, 0.1, 0.2)
    figure = terms({"ours": found})
    bars = named(figure, 0)
    assert sum(bar.x[0] for bar in bars.values()) == pytest.approx(1e3 * found.e2e.mean)
    assert bars["queue"].x[0] == pytest.approx(50)
    assert "largest term: decode" in figure.title


def test_the_title_of_two_names_the_term_that_makes_the_difference() -> None:
    slow = with_terms(0.3, 0.1, 0.15, ttfts=(0.5,))
    fast = with_terms(0.0, 0.1, 0.15, ttfts=(0.2,))
    title = terms({"theirs": fast, "ours": slow}).title
    assert title.startswith("ours takes 1.75 times as long as theirs")
    assert "300 of 300 ms more are queue" in title


def test_beside_a_server_that_tells_less_all_are_split_as_their_clients_saw_them() -> None:
    figure = terms({"ours": with_terms(0.05, 0.1, 0.2), "theirs": result()})
    assert [series.name for series in figure.panels[0].series] == ["to first token", "after it"]


def test_without_the_servers_metrics_two_terms_remain() -> None:
    bars = named(terms({"ours": result()}), 0)
    assert len(bars) == 2
    assert sum(bar.x[0] for bar in bars.values()) == pytest.approx(1e3 * result().e2e.mean)


# All of them


def drawn() -> dict[str, Figure]:
    sweep = [result(rate) for rate in (1.0, 2.0)]
    closed = [result(None, kind="closed loop", concurrency=n) for n in (1, 2)]
    return {
        "the load itself": latency_and_goodput({"ours": sweep, "theirs": sweep}, slo=LIMIT),
        "closed loop": open_and_closed(sweep, closed),
        "theirs": gaps({"ours": sweep[0], "theirs": result(gap=0.03)}, slo=0.05),
        "http and client": terms({"ours": with_terms(0.05, 0.1, 0.2)}),
    }


@pytest.mark.parametrize("name", list(drawn()))
def test_every_painter_names_what_is_drawn(name: str) -> None:
    figure = drawn()[name]
    assert name in paint_svg(figure)
    assert name in json.dumps(paint_plotly(figure))
    assert name in figure.describe().lower().replace("closed loop:", "closed loop")
    assert len(png(figure)) < 25_000


def test_a_saved_load_test_is_drawn_as_the_live_one(tmp_path: Path) -> None:
    live = with_terms(0.05, 0.1, 0.2)
    saved = LoadResult.load(live.save(tmp_path / "run.json"))
    assert latency_and_goodput([saved], slo=LIMIT) == latency_and_goodput([live], slo=LIMIT)
    assert terms({"ours": saved}) == terms({"ours": live})


# Drills

PAGE = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="m"}} {running}
# TYPE vllm:request_success_total counter
vllm:request_success_total{{finished_reason="stop",model_name="m"}} {stop}
vllm:request_success_total{{finished_reason="length",model_name="m"}} {length}
vllm:request_success_total{{finished_reason="abort",model_name="m"}} 3.0
# TYPE vllm:inter_token_latency_seconds histogram
vllm:inter_token_latency_seconds_bucket{{le="0.01",model_name="m"}} {fast}
vllm:inter_token_latency_seconds_bucket{{le="1.0",model_name="m"}} {gaps}
vllm:inter_token_latency_seconds_bucket{{le="+Inf",model_name="m"}} {gaps}
vllm:inter_token_latency_seconds_sum{{model_name="m"}} {seconds}
vllm:inter_token_latency_seconds_count{{model_name="m"}} {gaps}
"""
BEFORE = {"running": 4, "stop": 10, "length": 100, "fast": 1000, "gaps": 1000, "seconds": 8.0}
AFTER = {"running": 7, "stop": 14, "length": 116, "fast": 1180, "gaps": 1200, "seconds": 18.0}


@pytest.fixture
def drill() -> Drill:
    pages = {"before": PAGE.format(**BEFORE), "after": PAGE.format(**AFTER)}
    return Drill(name="x", about={"engine": "<b>e"}, client="All is slow.", seconds=10.0, **pages)


def test_gauges_are_read_twice_and_counters_are_rates_of_the_time_between(drill: Drill) -> None:
    assert drill.gauges()[0] == ("requests running", "4", "7")
    rates = dict(drill.rates())
    assert rates["requests finished"] == "2", "stop and length, over 10 s; not since the start"
    assert rates["requests aborted"] == "0"
    assert rates["preemptions"] == "not reported"


def test_means_and_percentiles_are_of_the_time_between_and_not_since_the_start(
    drill: Drill,
) -> None:
    gap = next(row for row in drill.times() if row[0].startswith("gap"))
    assert gap[1:] == ("0.05", "0.01", "1"), "10 s over 200 gaps; a tenth of them above 0.01 s"
    assert ("prefill, s", "none") in drill.times()


def test_a_drill_is_a_table_with_the_page_folded_below(drill: Drill) -> None:
    page = drill._repr_html_()
    assert "<details>" in page
    assert "vllm:num_requests_running" in page
    assert "_bucket" not in page
    assert "<b>e" not in page, "whatever is recorded is shown as text"
    assert "requests running: 4, 7" in repr(drill)


def test_a_saved_drill_is_the_same_drill(drill: Drill, tmp_path: Path) -> None:
    drill.save(tmp_path)
    assert drills.load("x", tmp_path) == drill


def test_an_unknown_drill_is_answered_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="Drills: d1, d2, d3, d4, d5, d6"):
        drills.load("d7")


def of(name: str) -> dict[str, tuple[str, ...]]:
    one = drills.load(name)
    return {what: values for what, *values in (*one.gauges(), *one.rates(), *one.times())}


def number(text: str) -> float:
    return float(text.rstrip("%").replace(",", ""))


@pytest.mark.parametrize("name", drills.names())
def test_a_recorded_drill_says_whose_it_is_and_of_when_but_not_what_ails_it(name: str) -> None:
    one = drills.load(name)
    assert set(one.about) == {"engine", "model", "device", "date"}
    assert one.seconds > 5
    assert "max_batch" not in json.dumps(one.about)
    rows = of(name)
    assert all(value != "not reported" for values in rows.values() for value in values)
    assert number(rows["tokens generated"][0]) > 0


def test_each_drill_can_be_told_from_the_others_by_its_numbers() -> None:
    """What the answers rest on, so that a recording that lost its symptom is not shipped."""
    rows = {name: of(name) for name in drills.names()}

    def value(name: str, what: str, column: int = 0) -> float:
        return number(rows[name][what][column])

    waits = {name: value(name, "requests waiting", 1) for name in rows}
    assert waits["d1"] > 5
    assert value("d1", "requests running") == value("d1", "requests running", 1) <= 2
    assert value("d1", "KV blocks in use", 1) < 20
    assert value("d1", "in the queue, s") > value("d1", "decode, s")
    assert waits["d2"] == waits["d3"] == 0
    assert value("d2", "requests running") > 1 >= value("d3", "requests running", 1)
    assert value("d4", "KV blocks in use", 1) > 85
    preempting = [name for name in rows if value(name, "preemptions")]
    assert preempting == ["d4"]
    aborted = [name for name in rows if value(name, "requests aborted")]
    assert aborted == ["d5"]
    assert value("d5", "requests aborted") > value("d5", "requests finished")
    tails = {name: value(name, "gap between two tokens, s", 2) for name in rows}
    steps = {name: value(name, "tokens of a step", 2) for name in rows}
    assert max(tails, key=tails.get) == max(steps, key=steps.get) == "d6"
    assert tails["d6"] > 8 * value("d6", "gap between two tokens, s", 1)
