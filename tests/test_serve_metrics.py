"""Metrics by hand on logs that fit in a few lines, and on real traces; wrong ones are found."""

import math
import statistics
from dataclasses import replace

import pytest
from decodelab.predict import HARDWARE, SHAPES
from decodelab.serve import (
    SLO,
    Engine,
    Request,
    RooflineRunner,
    Sequence,
    StepRecord,
    decode_steps,
    lognormal,
    metrics,
    offline,
    one_long_in_eight,
    percentile,
    poisson,
    steps_from_lengths,
    summarize,
)
from decodelab.serve.trace import Row
from hypothesis import given, settings
from hypothesis import strategies as st

SHAPE = replace(SHAPES["SmolLM2-135M"], vocab=256, max_context=None)
H100 = HARDWARE["NVIDIA H100 SXM"]


def engine(policy="continuous", max_batch=8, num_blocks=2000, **rest):
    return Engine(RooflineRunner(SHAPE, H100, num_blocks), policy, max_batch, **rest)


def served(requests, policy="continuous", **rest):
    made = engine(policy, **rest)
    made.run(requests)
    return made


def summary(made, **rest):
    return summarize(made.trace, made.sequences, **rest)


def sequence(id, arrival, *times, status="finished"):
    made = Sequence(Request([1], max(1, len(times)), id=id), arrival)
    for time in times:
        made.append(0, time)
    made.status = status
    return made


def step(start, end, *rows, emitted=(), **rest):
    usual = {
        "waiting": (), "num_waiting": 0, "preempted": (), "finished": (),
        "blocks_used": 1, "blocks_total": 8, "scheduler_seconds": 0.001,
    }  # fmt: skip
    tokens = tuple((id, 0) for id in emitted)
    return StepRecord(start=start, seconds=end - start, rows=rows, emitted=tokens, **usual | rest)


# a arrives at 0.5 and is prefilled from 1 on, b arrives at 2 and waits for a until 4; c is
# cancelled and d refused. A step takes a second, but the last one takes three.
SEQUENCES = {
    made.id: made
    for made in (
        sequence("a", 0.5, 2.0, 3.0, 4.0),
        sequence("b", 2.0, 5.0, 8.0),
        sequence("c", 2.5, 6.0, status="cancelled"),
        sequence("d", 0.0, status="refused"),
    )
}
TRACE = [
    step(1.0, 2.0, Row("a", 0, "prefill", 5, 0), emitted="a"),
    step(2.0, 3.0, Row("a", 0, "decode", 1, 0), emitted="a"),
    step(3.0, 4.0, Row("a", 0, "decode", 1, 0), emitted="a", blocks_used=3),
    step(
        4.0, 5.0, Row("b", 0, "prefill", 3, 2), Row("c", 1, "prefill", 5, 0), emitted="b",
        preempted=("a", "e"),
    ),
    step(5.0, 8.0, Row("b", 0, "decode", 1, 0), Row("c", 1, "padding", 0, 1), emitted="b"),
]  # fmt: skip


def test_ttft_counts_from_arrival_and_holds_queue_and_prefill():
    assert metrics.ttft(SEQUENCES).samples == (1.5, 3.0)


def test_tpot_leaves_the_first_token_out():
    assert metrics.tpot(SEQUENCES).samples == (1.0, 3.0)


def test_itl_pools_the_gaps_of_all_requests():
    assert metrics.itl(SEQUENCES).samples == (1.0, 1.0, 3.0)
    assert metrics.itl(SEQUENCES).mean == pytest.approx(5 / 3)


def test_e2e_goes_from_arrival_to_the_last_token():
    assert metrics.e2e(SEQUENCES).samples == (3.5, 6.0)


def test_a_request_of_one_token_has_no_tpot_and_misses_none():
    one = {"x": sequence("x", 0.0, 0.0)}  # at time 0, which counts
    assert metrics.tpot(one).samples == metrics.itl(one).samples == ()
    assert metrics.ttft(one).samples == (0.0,)
    assert SLO(ttft=1.0, tpot=1e-9).met(one["x"])


def test_goodput_counts_those_that_meet_all_limits():
    def goodput(**limits):
        return summarize(TRACE, SEQUENCES, SLO(**limits)).goodput * 7.5

    assert goodput() == pytest.approx(2)  # neither the cancelled nor the refused one
    assert goodput(ttft=1.5) == pytest.approx(1)
    assert goodput(ttft=1.4, tpot=1.0, e2e=3.5) == 0
    assert goodput(ttft=3.0, tpot=3.0, e2e=6.0) == pytest.approx(2)
    assert goodput(ttft=3.0, tpot=2.9, e2e=6.0) == pytest.approx(1)


def test_a_summary_adds_up_what_the_steps_say():
    found = summarize(TRACE, SEQUENCES)
    assert (found.seconds, found.steps, found.requests) == (7.5, 5, 2)
    assert (found.prompt_tokens, found.new_tokens, found.preemptions) == (13, 5, 2)
    assert found.tokens_per_second == pytest.approx(5 / 7.5)
    assert found.requests_per_second == pytest.approx(2 / 7.5)
    assert found.occupancy == pytest.approx((1 + 1 + 1 + 2 + 3 * 1) / (2 * 7))
    assert found.useful_rows == pytest.approx(6 / 7)
    assert found.padding == pytest.approx(3 / (3 + 16))
    assert (found.blocks_peak, found.blocks_mean) == (3, pytest.approx(9 / 7))
    assert found.scheduler_seconds == pytest.approx(0.001)
    assert summarize(TRACE, SEQUENCES, slots=4).occupancy == pytest.approx(8 / 28)


def test_idle_time_counts_for_throughput_and_not_for_occupancy():
    made = served([Request([1], 5), Request([1], 5, arrival=1.0)])
    found = summary(made, slots=1)
    assert found.occupancy == pytest.approx(1)
    assert found.tokens_per_second == pytest.approx(10, rel=0.01)


def test_of_nothing_there_is_nothing_to_say():
    found = summarize([], {})
    assert (found.steps, found.requests, found.blocks_peak) == (0, 0, 0)
    values = (
        found.goodput,
        found.occupancy,
        found.tokens_per_second,
        found.ttft.p99,
        found.padding,
    )
    assert all(math.isnan(value) for value in values)
    assert decode_steps([]) == 0


@pytest.mark.parametrize("where", ["prompt", "output"])
def test_padding_is_85_3_percent_of_a_batch_of_one_2000_and_seven_50(where):
    lengths = [2000] + [50] * 7
    requests = offline([(n, 1) if where == "prompt" else (1, n) for n in lengths], 8)
    shares = [summary(served(requests, policy)).padding for policy in ("static", "continuous")]
    assert [round(100 * share, 1) for share in shares] == [85.3, 0.0]


def test_a_static_batch_keeps_a_fifth_of_its_rows_useful_and_a_continuous_one_all():
    static, continuous = (
        summary(served(offline(one_long_in_eight(), 32), policy), slots=8)
        for policy in ("static", "continuous")
    )
    assert static.useful_rows == pytest.approx(680 / 3200)
    assert continuous.useful_rows == 1
    assert static.occupancy < 0.22 < 0.6 < continuous.occupancy < 0.7


@settings(max_examples=50)
@given(st.lists(st.floats(0, 10), min_size=1, max_size=300), st.integers(1, 100))
def test_a_percentile_is_the_smallest_sample_that_so_many_do_not_exceed(values, percent):
    def enough(value):
        return 100 * sum(other <= value for other in values) >= percent * len(values)

    assert percentile(values, percent) == min(value for value in values if enough(value))


@pytest.mark.parametrize("percent", [0, -1, 101, math.nan])
def test_a_percentile_outside_1_to_100_is_refused(percent):
    with pytest.raises(ValueError, match="percent must be above 0 and at most 100"):
        percentile([1.0], percent)


def token_times(made):
    """When each request got its tokens, from the trace alone."""
    times = {id: [] for id in made.sequences}
    for record in made.trace:
        for id, _ in record.emitted:
            times[id].append(record.end)
    return times


@settings(max_examples=30)
@given(
    policy=st.sampled_from(["static", "dynamic", "continuous"]),
    rate=st.sampled_from([300.0, 3000.0]),
    num_blocks=st.sampled_from([12, 60]),
    seed=st.integers(0, 999),
)
def test_latencies_are_those_that_the_trace_tells(policy, rate, num_blocks, seed):
    requests = poisson(rate, lognormal(20, 12, 30, seed, most=80), 30, seed)
    made = served(requests, policy, max_batch=4, num_blocks=num_blocks)
    times, found = token_times(made), summary(made)
    assert found.requests == 30
    assert found.new_tokens == sum(map(len, times.values())) == sum(r.max_tokens for r in requests)
    assert found.ttft.samples == pytest.approx([times[r.id][0] - r.arrival for r in requests])
    assert found.e2e.samples == pytest.approx([times[r.id][-1] - r.arrival for r in requests])
    gaps = [b - a for own in times.values() for a, b in zip(own, own[1:], strict=False)]
    assert found.itl.samples == pytest.approx(gaps)
    tpot = [(own[-1] - own[0]) / (len(own) - 1) for own in times.values() if len(own) > 1]
    assert found.tpot.samples == pytest.approx(tpot)
    assert 0 < found.occupancy <= found.useful_rows <= 1 or policy == "continuous"
    assert found.blocks_mean <= found.blocks_peak <= num_blocks


@settings(max_examples=200)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=60),
    slots=st.integers(1, 9),
    policy=st.sampled_from(["static", "dynamic", "continuous"]),
)
def test_lengths_alone_foretell_the_decode_steps_of_the_engine(lengths, slots, policy):
    requests = offline([(2, length) for length in lengths], len(lengths))
    made = served(requests, policy, max_batch=slots, window=0)
    assert decode_steps(made.trace) == steps_from_lengths(lengths, slots, policy)


def test_the_gain_that_lengths_foretell_is_3_14_and_of_equal_lengths_1():
    mixed = [length.output for length in one_long_in_eight()] * 4
    assert steps_from_lengths(mixed, 8, "static") == 396
    assert steps_from_lengths(mixed, 8, "continuous") == 126
    for policy in ("static", "continuous"):
        assert steps_from_lengths([10] * 32, 8, policy) == 36


def test_nobody_foretells_steps_of_no_slots_no_tokens_or_no_policy():
    for bad, words in (
        (([1], 0, "static"), "slots must be a positive"),
        (([1, 0], 2, "static"), "A length must be a positive"),
        (([1], 2, "first come"), "No policy 'first come'"),
    ):
        with pytest.raises(ValueError, match=words):
            steps_from_lengths(*bad)


# Wrong metrics that people really use. Each fact takes an implementation, and says if it agrees.
def ttft_facts(ttft):
    return ttft(SEQUENCES) == [1.5, 3.0]


def tpot_facts(tpot):
    return tpot(SEQUENCES) == [1.0, 3.0]


def itl_facts(mean_itl):
    return mean_itl(SEQUENCES) == pytest.approx(5 / 3)


def goodput_facts(met):
    limits = SLO(ttft=1.5, tpot=1.0, e2e=9.0)
    return [id for id, made in SEQUENCES.items() if met(limits, made)] == ["a"]


def percentile_facts(of):
    values = range(1, 21)
    return (of(values, 95), of(values, 5), of(values, 100), of([7], 50)) == (19, 1, 20, 7)


def steps_facts(steps):
    return steps([2, 2, 2, 9], 2) == 9 and steps([9, 2, 2, 2], 2) == 8


def by_admission(sequences):
    began = {row.id: r.start for r in reversed(TRACE) for row in r.rows}
    return [s.token_times[0] - began[s.id] for s in metrics.finished(sequences)]


def after_the_prefill(sequences):
    return [s.token_times[1] - s.arrival for s in metrics.finished(sequences)]


def any_limit(slo, made):
    within = made.ttft <= slo.ttft or made.tpot <= slo.tpot or made.e2e <= slo.e2e
    return made.status == "finished" and within


def at(values, place):
    return sorted(values)[min(place, len(values) - 1)]


def longest_first(lengths, slots):
    return steps_from_lengths(sorted(lengths, reverse=True), slots, "continuous")


RIGHT = {
    ttft_facts: lambda sequences: list(metrics.ttft(sequences).samples),
    tpot_facts: lambda sequences: list(metrics.tpot(sequences).samples),
    itl_facts: lambda sequences: metrics.itl(sequences).mean,
    goodput_facts: SLO.met,
    percentile_facts: percentile,
    steps_facts: lambda lengths, slots: steps_from_lengths(lengths, slots, "continuous"),
}
WRONG = {
    "ttft without the queue": (ttft_facts, by_admission),
    "ttft of the second token": (ttft_facts, after_the_prefill),
    "tpot with the prefill": (
        tpot_facts,
        lambda sequences: [s.e2e / len(s.token_times) for s in metrics.finished(sequences)],
    ),
    "tpot over n, not n - 1": (
        tpot_facts,
        lambda all: [(s.e2e - s.ttft) / len(s.token_times) for s in metrics.finished(all)],
    ),
    "mean of means, not pooled": (
        itl_facts,
        lambda sequences: statistics.fmean(
            statistics.fmean(s.itl) for s in metrics.finished(sequences)
        ),
    ),
    "goodput of any limit": (goodput_facts, any_limit),
    "goodput of what was cancelled": (goodput_facts, lambda slo, s: not s.ttft > 9),
    "percentile one too high": (
        percentile_facts,
        lambda values, percent: at(values, math.ceil(len(values) * percent / 100)),
    ),
    "percentile rounded down": (
        percentile_facts,
        lambda values, percent: at(values, max(0, int(len(values) * percent / 100) - 2)),
    ),
    "steps of total work over slots": (
        steps_facts,
        lambda lengths, slots: math.ceil(sum(n - 1 for n in lengths) / slots),
    ),
    "steps with the prefill": (
        steps_facts,
        lambda lengths, slots: 1 + steps_from_lengths(lengths, slots, "continuous"),
    ),
    "steps of the longest first": (steps_facts, longest_first),
    "steps of static batches": (
        steps_facts,
        lambda n, slots: steps_from_lengths(n, slots, "static"),
    ),
}


@pytest.mark.parametrize("facts", RIGHT, ids=lambda facts: facts.__name__)
def test_the_library_agrees_with_the_facts(facts):
    assert facts(RIGHT[facts])


@pytest.mark.parametrize(("facts", "wrong"), WRONG.values(), ids=WRONG)
def test_a_wrong_metric_is_found(facts, wrong):
    assert not facts(wrong)
