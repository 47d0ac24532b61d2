"""Requests by the dozen: real traces as published, arrivals at the rate asked for, all seeded."""

import statistics
from pathlib import Path

import decodelab.serve
import pytest
from decodelab.predict import HARDWARE, SHAPES
from decodelab.serve import (
    Engine,
    RooflineRunner,
    SharingAllocator,
    azure,
    azure_trace,
    lognormal,
    make_requests,
    offline,
    one_long_in_eight,
    percentile,
    poisson,
)
from hypothesis import given, settings
from hypothesis import strategies as st

NAMES = ["conversation", "code"]
# As published with the traces' copies: requests, duration, rps; then mean, p50, p90, p99 and
# largest of the prompts and of the outputs.
PUBLISHED = {
    "code": (8819, 3435.9, 2.567, (2047.8, 1469, 5194, 7436, 7437), (27.9, 13, 55, 252, 1899)),
    "conversation": (19366, 3501.7, 5.53, (1154.7, 1020, 2735, 4142, 14050),
                     (211.1, 129, 424, 601, 1000)),
}  # fmt: skip


def statistics_of(lengths):
    tail = [percentile(lengths, percent) for percent in (50, 90, 99, 100)]
    return round(statistics.fmean(lengths), 1), *tail


@pytest.mark.parametrize("name", NAMES)
def test_a_trace_has_the_published_statistics(name):
    trace = azure_trace(name)
    requests, duration, rate, prompts, outputs = PUBLISHED[name]
    assert len(trace) == requests
    assert round(trace[-1].seconds, 1) == duration
    assert round(requests / trace[-1].seconds, 3) == rate
    assert statistics_of([row.prompt for row in trace]) == prompts
    assert statistics_of([row.output for row in trace]) == outputs
    assert trace[0].seconds == 0
    moments = [row.seconds for row in trace]
    assert moments == sorted(moments)


def test_a_trace_comes_with_its_source_and_licence_and_stays_small():
    folder = Path(decodelab.serve.__file__).parent / "traces"
    words = (folder / "README.md").read_text(encoding="utf-8")
    assert all(word in words for word in ("Splitwise", "ISCA 2024", "CC BY 4.0", "Microsoft"))
    assert sum(path.stat().st_size for path in folder.iterdir()) < 200_000


@pytest.mark.parametrize("name", NAMES)
def test_unscaled_requests_are_a_stretch_of_the_trace(name):
    requests = azure(name, 50, seed=3)
    rows = [(row.prompt, row.output) for row in azure_trace(name)]
    mine = [(len(request.prompt), request.max_tokens) for request in requests]
    places = [i for i in range(len(rows)) if rows[i : i + 50] == mine]
    assert len(places) == 1
    moments = [row.seconds for row in azure_trace(name)[places[0] : places[0] + 50]]
    assert [r.arrival for r in requests] == [moment - moments[0] for moment in moments]


@settings(max_examples=30)
@given(
    name=st.sampled_from(NAMES),
    scale=st.sampled_from([1, 7.5, 64, 10**6]),
    rate=st.sampled_from([0.1, 20.0]),
    seed=st.integers(0, 99),
)
def test_lengths_shrink_by_one_factor_and_arrivals_stretch_by_one(name, scale, rate, seed):
    real, small = (azure(name, 40, seed), azure(name, 40, seed, scale=scale, rate=rate))
    for before, after in zip(real, small, strict=True):
        pairs = ((len(r.prompt), r.max_tokens) for r in (before, after))
        for large, little in zip(*pairs, strict=True):
            assert little == max(1, round(large / scale))
    assert small[-1].arrival == pytest.approx(39 / rate)
    factor = small[-1].arrival / real[-1].arrival
    assert [r.arrival for r in small] == pytest.approx([r.arrival * factor for r in real])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("max_context", "prefix"), [(8, 0), (256, 100), (1024, 0)])
def test_with_a_max_context_the_whole_trace_fits_by_one_factor(name, max_context, prefix):
    count = len(azure_trace(name))
    requests = azure(name, count, max_context=max_context, prefix=prefix)
    longest = max(len(request.prompt) + request.max_tokens for request in requests)
    assert longest <= max_context
    assert longest >= 0.95 * max_context - 2  # and no smaller than it must be
    assert azure(name, 20, max_context=32768) == azure(name, 20)


def test_poisson_arrivals_come_at_their_rate_and_ignore_each_other():
    requests = poisson(20.0, [(4, 4)], 4000)
    gaps = [b.arrival - a.arrival for a, b in zip(requests, requests[1:], strict=False)]
    assert statistics.fmean(gaps) == pytest.approx(1 / 20, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(1 / 20, rel=0.05)  # an even pace would have 0
    late = sum(gap > 3 / 20 for gap in gaps) / len(gaps)
    assert late == pytest.approx(0.0498, abs=0.01)  # exp(-3)


def test_the_mix_of_the_source_is_one_in_eight():
    requests = offline(one_long_in_eight(), 32)
    assert [r.max_tokens for r in requests] == ([100] + [10] * 7) * 4
    assert {r.arrival for r in requests} == {0.0}
    assert {len(r.prompt) for r in requests} == {16}


def test_lognormal_lengths_have_the_median_and_the_tail_that_was_asked_for():
    lengths = lognormal(27, 40, 4000, most=192)
    outputs = [length.output for length in lengths]
    assert percentile(outputs, 50) == pytest.approx(40, rel=0.05)
    assert percentile([length.prompt for length in lengths], 50) == pytest.approx(27, rel=0.05)
    assert percentile(outputs, 84.13) == pytest.approx(40 * 2.46, rel=0.08)  # exp(0.9): one sigma
    assert (min(outputs) >= 1, max(outputs)) == (True, 192)
    assert set(lognormal(27, 40, 100, sigma=0)) == {(27, 40)}


WORKLOADS = {
    "azure": lambda seed, **rest: azure("code", 20, seed, scale=32, **rest),
    "poisson": lambda seed, **rest: poisson(3.0, lognormal(9, 9, 20, seed), 20, seed, **rest),
    "offline": lambda seed, **rest: offline([(5, 2)], 20, seed, **rest),
}


@pytest.mark.parametrize("make", WORKLOADS.values(), ids=WORKLOADS)
def test_a_workload_depends_on_its_seed_and_on_nothing_else(make):
    assert make(1) == make(1)
    assert make(1) != make(2)
    assert [request.id for request in make(1)] == list(range(20))
    assert {token for request in make(1, vocab=7) for token in request.prompt} <= set(range(7))


@pytest.mark.parametrize("make", WORKLOADS.values(), ids=WORKLOADS)
def test_a_prefix_comes_before_every_prompt_and_is_the_same_for_all(make):
    plain, prefixed = make(1), make(1, prefix=32)
    assert len({request.prompt[:32] for request in prefixed}) == 1
    assert [r.prompt[32:] for r in prefixed] == [r.prompt for r in plain]


def test_a_prefix_is_shared_by_an_allocator_that_shares():
    runner = RooflineRunner(SHAPES["SmolLM2-135M"], HARDWARE["NVIDIA H100 SXM"], 400)
    engine = Engine(runner, max_batch=1, allocator=SharingAllocator)
    engine.run(offline([(8, 2)], 10, prefix=64))
    assert sum(record.prompt_tokens for record in engine.trace) == 64 + 10 * 8


def test_equal_lengths_differ_in_their_prompts():
    assert len({request.prompt for request in offline([(16, 2)], 50)}) == 50


BAD = {
    "No trace 'chat'. Traces: conversation, code": lambda: azure("chat", 3),
    "has 8819 requests, not 9000": lambda: azure("code", 9000),
    "count must be a positive": lambda: offline([(1, 1)], 0),
    "scale must be a finite number above 0": lambda: azure("code", 3, scale=0),
    "max_context - prefix - 1 must be a positive": lambda: azure("code", 3, max_context=1),
    "rate must be a finite number above 0": lambda: poisson(0, [(1, 1)], 3),
    "There are no lengths": lambda: poisson(1, [], 3),
    "prefix must be a positive": lambda: offline([(1, 1)], 3, prefix=-1),
    "The prompt is empty": lambda: offline([(0, 1)], 3),
    "max_tokens must be a positive": lambda: make_requests([(1, 0)], [0]),
    "shorter": lambda: make_requests([(1, 1)], []),
}


@pytest.mark.parametrize(("sentence", "make"), BAD.items(), ids=BAD)
def test_a_workload_that_cannot_be_made_says_why(sentence, make):
    with pytest.raises(ValueError, match=sentence):
        make()
