"""What tokens cost. Each figure is worked out by hand beside the assertion."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
from decodelab.predict import (
    HARDWARE,
    SHAPES,
    Curve,
    Deployment,
    NoRoomError,
    TokenPrice,
    break_even,
    cheapest_batch,
    day,
    decode_step,
    experts_read,
    largest_batch,
    mixed_tokens_per_second,
    prefill_seconds,
    smallest_batch,
    token_price,
    usd_per_million_tokens,
)
from hypothesis import given
from hypothesis import strategies as st

from tests.test_predict_architecture import shape_of

H100 = HARDWARE["NVIDIA H100 SXM"]  # 3350 GB/s, 989.4 TFLOP/s, 79.19 GiB = 85.03 GB
LLAMA_8B = Deployment(shape=SHAPES["Llama-3.1-8B"], hardware=H100)
# Per step: all but the embedding, 8,030,261,248 - 128,256 x 4096 = 7,504,924,672 parameters of
# 2 bytes. Per sequence of 1024: 1024 x 2 x 32 layers x 8 heads x 128 x 2 bytes = 2^27.
WEIGHT_MS = 7_504_924_672 * 2 / 3350e6
KV_MS = 2**27 / 3350e6
MIXTRAL = shape_of("hf_configs/mistralai--Mixtral-8x7B-v0.1.json")  # 2 of 8 experts
# A SmolLM2-135M of a 2-core CPU with packed weights: batch, seconds per step.
CPU = [(1, 0.070), (2, 0.071), (4, 0.084), (8, 0.104), (16, 0.153), (32, 0.206), (64, 0.344)]
# At a context of 1024, one run: 56 tokens/s at 16 and 43 at 32, as K and V are copied.
LONG_CPU = [(8, 8 / 40), (16, 16 / 56), (32, 32 / 43)]


def near(value, fact, tolerance=2e-3):
    return value == pytest.approx(fact, rel=tolerance)


@pytest.fixture(scope="module")
def curve():
    return Curve.predicted(LLAMA_8B, 1024)


# One number: price over tokens


@pytest.mark.parametrize(
    ("tokens_per_second", "utilization", "usd"),
    [(125, 1.0, 4.44), (2690, 1.0, 0.207), (2690, 0.3, 0.688)],
)
def test_two_dollars_an_hour_buy_tokens_at(tokens_per_second, utilization, usd):
    assert usd_per_million_tokens(2, tokens_per_second, utilization) == pytest.approx(
        usd, rel=2.5e-3
    )


@given(price=st.floats(0.01, 1000), speed=st.floats(1, 1e6), utilization=st.floats(0.01, 1))
def test_an_hour_s_tokens_at_that_price_cost_an_hour(price, speed, utilization):
    tokens = 3600 * speed * utilization
    assert usd_per_million_tokens(price, speed, utilization) * tokens / 1e6 == pytest.approx(price)


def test_a_batch_of_64_divides_the_cost_by_twenty():
    """Not by 64: the KV of the other 63 sequences has to be read too."""
    alone, together = (
        decode_step(SHAPES["Llama-2-13B"], HARDWARE["NVIDIA H100 SXM"], batch, 1024)
        for batch in (1, 64)
    )
    costs = [usd_per_million_tokens(2, step.tokens_per_second) for step in (alone, together)]
    assert costs[0] / costs[1] == pytest.approx(21.4, abs=0.1)


# Input and output apart


def test_input_and_output_cost_what_their_own_speed_makes_them():
    """$2.95 at 50,000 tokens/s read: 2.95 / 0.18 G tokens an hour; at 5,000 written, ten times."""
    price = token_price(2.95, 50_000, 5_000)
    assert near(price.input, 0.01639)
    assert near(price.output, 0.1639)
    half = token_price(2.95, 50_000, 5_000, 0.5)
    assert (half.input, half.output) == (2 * price.input, 2 * price.output)


def test_a_mix_of_tokens_costs_the_same_counted_together_or_apart():
    """900 read in 18 ms and 100 written in 20 ms: 1000 tokens in 38 ms, 26,316 a second."""
    speed = mixed_tokens_per_second(900, 100, 50_000, 5_000)
    assert near(speed, 1000 / 0.038, 1e-9)
    together = usd_per_million_tokens(2.95, speed)
    assert near(token_price(2.95, 50_000, 5_000).blended(900, 100), together, 1e-9)


def test_a_prompt_of_1024_is_read_at_69_thousand_tokens_a_second():
    """2 x 6,979,321,856 FLOPs a token, the LM head once, and attention of 1024 x 512 pairs."""
    head = 128_256 * 4096
    body = 7_504_924_672 - head - 65 * 4096  # 65 norms are no products
    products = 2 * (1024 * body + head)
    attention = 32 * 4 * 32 * 128 * 1024 * 512  # layers, FLOPs a pair of each of 32 heads of 128
    seconds = (products + attention) / 989.4e12
    assert prefill_seconds(LLAMA_8B, 1024) == pytest.approx(seconds, rel=1e-9)
    assert near(1024 / seconds, 69_540)


def test_a_short_prompt_still_streams_all_weights():
    assert prefill_seconds(LLAMA_8B, 1) * 1e3 == pytest.approx(WEIGHT_MS + KV_MS / 1024)


def test_a_long_prompt_is_read_in_chunks_that_attend_to_what_came_before():
    whole = prefill_seconds(replace(LLAMA_8B, chunk=4096), 4096)
    halves = prefill_seconds(replace(LLAMA_8B, chunk=2048), 4096)
    assert whole < halves < 1.01 * whole
    assert halves > 2 * prefill_seconds(LLAMA_8B, 2048)


# The curve, and which batch to run


def test_a_tpot_of_10_ms_allows_137_sequences(curve):
    """(10 - 4.4805) ms of KV at 0.04007 ms a sequence: 137.76."""
    assert math.floor((10 - WEIGHT_MS) / KV_MS) == 137
    choice = largest_batch(curve, 0.010)
    assert (choice.batch, choice.binds) == (137, "TPOT")
    assert "batch 138 takes 10.01 ms" in choice.reason


def test_without_an_slo_the_pool_allows_450_sequences(curve):
    """0.9 of 79.19 GiB less 16.06 GB of weights: 60.47 GB, and 2^27 bytes a sequence: 450.5."""
    assert (0.9 * 79.19 * 2**30 - 8_030_261_248 * 2) // 2**27 == 450
    assert largest_batch(curve)[:2] == (450, "KV pool")
    assert "450 sequences of 1024 tokens" in curve.reason


def test_no_batch_keeps_to_an_slo_below_one_step_of_one_sequence(curve):
    choice = largest_batch(curve, 0.0045)  # 4.4805 + 0.0401 ms
    assert choice[:2] == (None, "TPOT")
    assert "batch 1 takes 4.52 ms" in choice.reason
    with pytest.raises(ValueError, match="no batch keeps to it"):
        cheapest_batch(curve, 2.95, tpot=0.0045)
    assert largest_batch(curve, 0.00453).batch == 1


def test_no_batch_fits_where_the_pool_holds_not_one_sequence():
    """60.47 GB hold 461,390 tokens."""
    longest = 60.47e9 / 2**17
    assert longest < 500_000
    choice = largest_batch(Curve.predicted(LLAMA_8B, 500_000), 0.1)
    assert choice[:2] == (None, "KV pool")
    assert "holds 0 sequences of 500000 tokens" in choice.reason


def test_no_batch_fits_where_the_weights_do_not():
    small = replace(LLAMA_8B, hardware=HARDWARE["NVIDIA T4"], dtype="fp16")
    too_large = Curve.predicted(small, 1024)
    for choice in (largest_batch(too_large), smallest_batch(too_large, 1, 1)):
        assert choice[:2] == (None, "weights")
        assert "GB are missing" in choice.reason
    with pytest.raises(ValueError, match="GB are missing"):
        too_large.cost(1, 1)
    with pytest.raises(NoRoomError):
        _ = small.pool_bytes


def test_beyond_the_ridge_a_larger_batch_costs_latency_and_saves_nothing(curve):
    """The ridge is at 989.4 / 3.35 = 295.3 FLOP/byte, so at batch 296 of 2-byte weights."""
    best = cheapest_batch(curve, 2.95)
    assert best.batch == 296
    assert curve.cost(450, 2.95).usd_per_million_tokens == pytest.approx(best[3], rel=1e-6)
    seconds = 296 * (2 * 7_504_658_432 / 989.4e12 + KV_MS / 1e3)
    assert best.seconds == pytest.approx(seconds, rel=1e-9)
    assert best.usd_per_million_tokens == pytest.approx(2.95e6 / 3600 * seconds / 296)


def test_below_the_ridge_the_cheapest_batch_is_the_largest_in_time(curve):
    best = cheapest_batch(curve, 2.95, tpot=0.010)
    assert best.batch == 137
    assert near(best.usd_per_million_tokens, 2.95e6 * (WEIGHT_MS / 137 + KV_MS) / 3.6e6, 1e-9)


def test_at_18_cents_an_h100_must_run_25_sequences(curve):
    """0.18 / (2.95e6 / 3600) s = 0.21966 ms a token; 4.4805 / (0.21966 - 0.04007) = 24.95."""
    assert near(WEIGHT_MS / (0.18 * 3.6e6 / 2.95e6 - KV_MS), 24.95, 1e-3)
    choice = smallest_batch(curve, 2.95, 0.18)
    assert (choice.batch, choice.binds) == (25, "price")
    # At half the utilization a token must take half the time: 4.4805 / (0.10983 - 0.04007).
    assert smallest_batch(curve, 2.95, 0.18, utilization=0.5).batch == 65


def test_a_price_below_the_cheapest_batch_is_named_with_the_cheapest(curve):
    choice = smallest_batch(curve, 2.95, 0.04)
    assert choice[:2] == (None, "price")
    assert "batch 296, costs $0.0453" in choice.reason


def test_four_gpus_are_four_times_the_price(curve):
    """Weights and KV are divided by four, so is the time: the token costs the same."""
    four = Curve.predicted(replace(LLAMA_8B, tensor_parallel=4), 1024)
    assert four.step(64) == pytest.approx(curve.step(64) / 4)
    costs = [c.cost(64, 2.95).usd_per_million_tokens for c in (curve, four)]
    assert costs[1] == pytest.approx(costs[0])


def test_experts_make_a_small_batch_dearer_than_its_share():
    """Mixtral reads 2 of 8 experts at batch 1 and nearly all at 16: the step grows."""
    moe = Curve.predicted(
        Deployment(shape=MIXTRAL, hardware=H100, weight_format="int4", tensor_parallel=1), 128
    )
    dense = Curve.predicted(replace(LLAMA_8B, weight_format="int4"), 128)
    assert moe.step(16) > 3 * moe.step(1)
    assert dense.step(16) < 1.1 * dense.step(1)


# One's own curve


def test_between_two_measured_batches_lies_a_straight_line():
    """8 take 104 ms and 16 take 153: 6.125 ms a sequence, so 120 ms allow 10.6."""
    measured = Curve.measured(CPU)
    assert measured.step(10) == pytest.approx(0.11625)
    assert [measured.step(batch) for batch, _ in CPU] == [seconds for _, seconds in CPU]
    assert largest_batch(measured, 0.120)[:2] == (10, "TPOT")
    assert largest_batch(measured, 0.104)[:2] == (8, "TPOT")
    assert largest_batch(measured, 1)[:2] == (64, "measurement")
    # $0.10 an hour: 64 tokens in 0.344 s are $0.149 per 10^6.
    assert near(cheapest_batch(measured, 0.10).usd_per_million_tokens, 0.10e6 / 3600 * 0.344 / 64)


def test_the_largest_batch_is_not_always_the_cheapest():
    measured = Curve.measured(LONG_CPU)
    assert cheapest_batch(measured, 1).batch == 16
    assert largest_batch(measured).batch == 32


def test_a_batch_does_not_count_if_a_smaller_one_is_too_slow():
    """max_batch 4 lets 2 and 3 run too. 100 ms at 1 and 300 at 2: nothing in between."""
    measured = Curve.measured([(4, 0.2), (1, 0.1), (2, 0.3)])
    assert largest_batch(measured, 0.25).batch == 1


def test_nothing_is_said_beyond_what_was_measured():
    measured = Curve.measured(LONG_CPU, gpus=2)
    assert measured.costs(3) == tuple(measured.cost(batch, 3) for batch in (8, 16, 32))
    assert near(measured.cost(8, 3).usd_per_million_tokens, 2 * 3e6 / 3600 / 40)
    for batch in (7, 33):
        with pytest.raises(ValueError, match=f"from batch 8 to 32, not to {batch}"):
            measured.cost(batch, 3)


measured_points = st.dictionaries(
    st.integers(1, 60), st.floats(1e-3, 1), min_size=1, max_size=6
).map(lambda points: list(points.items()))


@given(points=measured_points, tpot=st.floats(1e-3, 1), target=st.floats(0.1, 1e3))
def test_the_chosen_batches_are_those_of_trying_all(points, tpot, target):
    curve = Curve.measured(points)
    costs = [curve.cost(b, 1) for b in range(curve.batches[0], curve.batches[-1] + 1)]
    late = next((i for i, cost in enumerate(costs) if cost.seconds > tpot), len(costs))
    good = costs[:late]
    assert largest_batch(curve, tpot).batch == (good[-1].batch if good else None)
    cheap = [c.batch for c in costs if c.usd_per_million_tokens <= target]
    assert smallest_batch(curve, 1, target).batch == (cheap[0] if cheap else None)
    if good:
        least = min(cost.usd_per_million_tokens for cost in good)
        chosen = cheapest_batch(curve, 1, tpot)
        assert chosen in good
        assert chosen.usd_per_million_tokens == pytest.approx(least)


@pytest.mark.parametrize("tpot", [0.0047, 0.006, 0.012, 0.0163, 0.0171, 0.02])
def test_a_predicted_limit_is_that_of_trying_all(curve, tpot):
    steps = [curve.step(batch) for batch in range(1, 451)]
    assert largest_batch(curve, tpot).batch == sum(seconds <= tpot for seconds in steps)


def test_a_curve_stops_where_it_is_told_to():
    assert largest_batch(Curve.predicted(LLAMA_8B, 1024, most=100))[:2] == (100, "most")
    assert largest_batch(Curve.predicted(LLAMA_8B, 1024, most=1000))[:2] == (450, "KV pool")


# A day


def test_idle_replicas_are_paid_for():
    """12 h at 1000 tokens/s and 12 at 250, replicas of 500 at $2: 54 M tokens, $96 or $72."""
    loads = [1000] * 12 + [250] * 12
    always, scaled = day(loads, 500, 2, replicas=2), day(loads, 500, 2)
    assert always.tokens == scaled.tokens == 54e6
    assert (always.usd, scaled.usd) == (96, 72)
    assert always.usd_per_million_tokens == pytest.approx(96 / 54)
    assert always.utilization == 15000 / (24 * 1000)
    assert scaled.replicas == (2,) * 12 + (1,) * 12
    assert scaled.utilization == 15000 / (36 * 500)


@given(
    loads=st.lists(st.floats(0, 1e5), min_size=24, max_size=24).filter(any),
    replicas=st.none() | st.integers(1, 9),
)
def test_a_day_costs_what_its_utilization_says(loads, replicas):
    """Only the day's own utilization does: replicas x hours is what it is of."""
    load = day(loads, 1000, 3, replicas)
    if load.tokens > 1:
        cost = usd_per_million_tokens(3, 1000, min(1, load.utilization))
        assert load.usd_per_million_tokens == pytest.approx(cost)
    assert load.tokens + load.unserved == pytest.approx(3600 * sum(loads))
    if replicas is None:
        assert load.unserved == pytest.approx(0, abs=1)


def test_what_the_replicas_cannot_make_is_not_sold():
    short = day([1000] * 12 + [250] * 12, 500, 2, replicas=1)
    assert short.tokens == 3600 * 12 * (500 + 250)
    assert short.unserved == 3600 * 12 * 500
    assert short.usd == 48


def test_a_target_leaves_room_and_costs_for_it():
    """2.1 tokens/s on replicas of 1: 2.1 / 0.7 is 3.0000000000000004 and means three."""
    loads = [2.1] * 23 + [0]
    counts = {target: day(loads, 1, 2, target=target).replicas for target in (1, 0.7, 0.6)}
    assert counts == {1: (3,) * 23 + (0,), 0.7: (3,) * 23 + (0,), 0.6: (4,) * 23 + (0,)}


# Known-wrong variants


def break_even_facts(function):
    """$2 an hour at 2690 tokens/s cost $0.2065; at an API's $0.88 that is 23.5%, 54.5 M a day."""
    utilization, tokens = function(2, 2690, 0.88)
    return near(utilization, 0.2347) and near(tokens, 54.545e6)


def expert_facts(function):
    """8 (1 - 0.75^4) = 5.47 at batch 4."""
    return (
        function(1) == pytest.approx(2)
        and function(4) == pytest.approx(5.46875)
        and function(64) == pytest.approx(8)
    )


def request_facts(function):
    """1000 in, 600 of them cached, 200 out at 2.50, 1.25 and 10: 1000 + 750 + 2000 millionths."""
    return near(function(TokenPrice(input=2.5, output=10, cached=1.25), 1000, 200, 600), 0.00375)


def curve_facts(function):
    """137 sequences on 4 GPUs at $2.95 each: a quarter of the time at four times the price."""
    return near(function(4, 137), 2.95e6 * (WEIGHT_MS / 137 + KV_MS) / 3.6e6)


def pool_facts(function):
    """16.06 GB of weights and 2^27 bytes a sequence in 0.9 of 85.03 GB."""
    return function(0.9 * 79.19 * 2**30, 16_060_522_496) == 450


def mix_facts(function):
    return near(function(900, 100, 50_000, 5_000), 26_316)


def utilization_facts(function):
    return near(function([1000] * 12 + [250] * 12), 15 / 18)


GROUP = Curve.predicted(replace(LLAMA_8B, tensor_parallel=4), 1024)
CASES = {
    break_even_facts: SimpleNamespace(
        right=break_even,
        wrong={
            "upside down": lambda usd, speed, api: (api / (usd / speed / 3600 * 1e6), 54.545e6),
            "peak tokens sold": lambda usd, speed, api: (0.2347, speed * 86400),
            "an hour for a day": lambda usd, speed, api: (0.2347, usd / api * 1e6),
            "minutes for seconds": lambda usd, speed, api: (usd * 1e6 / 60 / speed / api, 54.545e6),
        },
    ),
    expert_facts: SimpleNamespace(
        right=lambda batch: experts_read(MIXTRAL, batch),
        wrong={
            "all of them": lambda batch: 8,
            "k": lambda batch: 2,
            "k for each token": lambda batch: min(8, 2 * batch),
            "k alike experts": lambda batch: 8 * (1 - (1 - 1 / 8) ** batch),
        },
    ),
    request_facts: SimpleNamespace(
        right=lambda price, prompt, output, cached: price.usd(prompt, output, cached),
        wrong={
            "input priced as output": lambda p, i, o, c: (i + o) * p.output / 1e6,
            "output priced as input": lambda p, i, o, c: (i + o) * p.input / 1e6,
            "cached ones on top": lambda p, i, o, c: (i * 2.5 + c * 1.25 + o * 10) / 1e6,
            "cached ones free": lambda p, i, o, c: ((i - c) * 2.5 + o * 10) / 1e6,
            "per thousand": lambda p, i, o, c: p.usd(i, o, c) * 1000,
        },
    ),
    curve_facts: SimpleNamespace(
        right=lambda gpus, batch: GROUP.cost(batch, 2.95).usd_per_million_tokens,
        wrong={
            "one GPU's price": lambda g, b: usd_per_million_tokens(2.95, b / GROUP.step(b)),
            "a user's tokens as all": lambda g, b: usd_per_million_tokens(
                g * 2.95, 1 / GROUP.step(b)
            ),
            "every GPU makes a batch": lambda g, b: usd_per_million_tokens(
                g * 2.95, g * b / GROUP.step(b)
            ),
        },
    ),
    pool_facts: SimpleNamespace(
        right=lambda budget, weights: largest_batch(Curve.predicted(LLAMA_8B, 1024)).batch,
        wrong={
            "GiB for GB": lambda budget, weights: (budget - weights / 1e9 * 2**30) // 2**27,
            "GB for GiB": lambda budget, weights: (0.9 * 79.19e9 - weights) // 2**27,
            "weights forgotten": lambda budget, weights: budget // 2**27,
            "query heads": lambda budget, weights: (budget - weights) // 2**29,
        },
    ),
    mix_facts: SimpleNamespace(
        right=mixed_tokens_per_second,
        wrong={
            "an arithmetic mean": lambda p, o, fast, slow: (p * fast + o * slow) / (p + o),
            "output alone": lambda p, o, fast, slow: slow,
            "input alone": lambda p, o, fast, slow: fast,
        },
    ),
    utilization_facts: SimpleNamespace(
        right=lambda loads: day(loads, 500, 2).utilization,
        wrong={
            "the mean of the hours": lambda loads: (
                sum(load / (500 * math.ceil(load / 500)) for load in loads) / 24
            ),
            "of the peak's replicas": lambda loads: sum(loads) / (24 * 1000),
        },
    ),
}


@pytest.mark.parametrize("facts", CASES, ids=lambda facts: facts.__name__)
def test_the_library_agrees_with_the_figures_by_hand(facts):
    assert facts(CASES[facts].right)


@pytest.mark.parametrize(
    ("facts", "variant"),
    [(facts, name) for facts, case in CASES.items() for name in case.wrong],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_known_wrong_variant_is_rejected(facts, variant):
    assert not facts(CASES[facts].wrong[variant])


def test_an_api_cheaper_than_a_full_machine_cannot_be_matched():
    """$2.95 at 5000 tokens/s is $0.164; at $0.08 the machine would have to be 205% full."""
    never = break_even(2.95, 5000, 0.08)
    assert not never.possible
    assert near(never.utilization, 2.049)
    assert break_even(2.95, 5000, 0.18).possible


# Bad input


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: usd_per_million_tokens(0, 100), "usd_per_hour"),
        (lambda: usd_per_million_tokens(-2, 100), "usd_per_hour"),
        (lambda: usd_per_million_tokens(2, 0), "tokens_per_second"),
        (lambda: usd_per_million_tokens(2, math.nan), "tokens_per_second"),
        (lambda: usd_per_million_tokens(2, 100, 0), "utilization"),
        (lambda: usd_per_million_tokens(2, 100, 30), "30% is 0.3"),
        (lambda: break_even(2, 100, 0), "usd_per_million_api"),
        (lambda: mixed_tokens_per_second(10, 10, 0, 5), "prefill_tokens_per_second"),
        (lambda: experts_read(SHAPES["Llama-3.1-8B"], 4), "no routed experts"),
        (lambda: experts_read(MIXTRAL, 0), "batch"),
        (lambda: Curve.measured([]), "at least one"),
        (lambda: Curve.measured([(1, 0.1), (1, 0.2)]), "one point for each batch"),
        (lambda: Curve.measured([(1, 0)]), "Measured seconds"),
        (lambda: Curve.measured([(1.5, 1)]), "A measured batch"),
        (lambda: Curve.measured([(1, 1)], gpus=0), "gpus"),
        (lambda: largest_batch(Curve.measured(CPU), -1), "tpot"),
        (lambda: Curve.measured(CPU).cost(8, 0), "usd_per_gpu_hour"),
        (lambda: smallest_batch(Curve.measured(CPU), 1, -1), "usd_per_million"),
        (lambda: Curve.predicted(replace(LLAMA_8B, pipeline_parallel=2), 64), "in flight"),
        (lambda: Curve.predicted(LLAMA_8B, 0), "context"),
        (lambda: Curve.predicted(LLAMA_8B, 64, most=0), "most"),
        (lambda: prefill_seconds(LLAMA_8B, 0), "prompt"),
        (lambda: TokenPrice(input=1, output=-1), "output"),
        (lambda: TokenPrice(input=1, output=1).usd(10, 5, 11), "part of the prompt"),
        (lambda: TokenPrice(input=1, output=1).usd(0, 0), "makes no sense"),
        (lambda: day([1] * 23, 1, 1), "24 loads"),
        (lambda: day([0] * 24, 1, 1), "above 0"),
        (lambda: day([1, -1] * 12, 1, 1), "none negative"),
        (lambda: day([1] * 24, 1, 1, replicas=0), "replicas"),
        (lambda: day([1] * 24, 1, 1, target=70), "write 0.7 for 70%"),
    ],
)
def test_senseless_figures_are_refused_by_name(call, named):
    with pytest.raises(ValueError, match=named):
        call()
