"""Sizing a fleet: the same engine, and figures that queueing theory and arithmetic foretell."""

from dataclasses import replace
from random import Random
from statistics import fmean

import pytest
from decodelab.predict import HARDWARE, SHAPES, Deployment, MixedStep, NoRoomError, prefill_seconds
from decodelab.predict.quantization import streamed_bytes
from decodelab.serve import (
    SLO,
    Engine,
    Request,
    RooflineRunner,
    azure,
    lognormal,
    make_requests,
    offline,
    poisson,
    summarize,
)
from decodelab.serve.sizing import ROUTERS, Fleet, Outcome, simulate

from tests.test_predict_architecture import shape_of

H100 = HARDWARE["NVIDIA H100 SXM"]
SMALL = Deployment(shape=SHAPES["25M"], hardware=H100)
LLAMA_8B = Deployment(shape=SHAPES["Llama-3.1-8B"], hardware=H100)
SHAPES_OF_ALL_KINDS = {
    "dense": SHAPES["Llama-3.1-8B"],
    "experts": shape_of("hf_configs/mistralai--Mixtral-8x7B-v0.1.json"),
    "windows": shape_of("configs_reduced/google--gemma-2-27b.json"),
    "latent": shape_of("configs_reduced/deepseek-ai--DeepSeek-V2-Lite.json"),
}
ANY = SLO()


def fleet(deployment=SMALL, **rest):
    return Fleet(**{"deployment": deployment, "usd_per_gpu_hour": 2.0} | rest)


# A step of any rows


def summed(shape, rows) -> float:
    """The roofline of a step in bf16, row by row: weights once, each row's KV and attention."""
    peak, bandwidth = H100.peak("bf16"), H100.bandwidth
    tokens = sum(count for _, count in rows)
    cached = sum(shape.kv_bytes(start + count, 2) for start, count in rows)
    attended = sum(count * shape.attention_flops(start + (count + 1) // 2) for start, count in rows)
    head = shape.vocab * shape.hidden
    flops = 2 * (tokens * (shape.matmul_parameters - head) + len(rows) * head)
    weights = streamed_bytes(shape, "bf16", tokens)
    return max(weights / bandwidth, flops / peak) + max(cached / bandwidth, attended / peak)


@pytest.mark.parametrize("shape", SHAPES_OF_ALL_KINDS.values(), ids=SHAPES_OF_ALL_KINDS)
def test_a_mixed_step_reads_weights_once_and_each_row_s_own_kv(shape):
    step = MixedStep(Deployment(shape=shape, hardware=H100))
    random = Random(7)
    for _ in range(30):
        rows = [
            (random.choice([0, 1, 300, 5000]), random.choice([1, 1, 1, 7, 512]))
            for _ in range(random.randint(1, 40))
        ]
        assert step.seconds(rows) == pytest.approx(summed(shape, rows), rel=1e-12)


@pytest.mark.parametrize("shape", SHAPES_OF_ALL_KINDS.values(), ids=SHAPES_OF_ALL_KINDS)
@pytest.mark.parametrize("gpus", [1, 8])
def test_a_step_of_decodes_alone_is_the_deployment_s(shape, gpus):
    """Eight GPUs keep copies of a latent: the KV of a step isn't divided by them."""
    deployment = Deployment(
        shape=shape, hardware=H100, kv_format="fp8", weight_format="int4", tensor_parallel=gpus
    )
    expected = deployment.step(40, 900, check_memory=False).seconds
    seconds = MixedStep(deployment).seconds([(899, 1)] * 40)
    assert seconds == pytest.approx(expected, rel=1e-12)


# One replica is the engine


@pytest.mark.parametrize("max_batch", [2, 16])
def test_one_replica_gives_the_latencies_of_the_engine(max_batch):
    """Arrivals in the middle of a step, several at one moment, and a queue."""
    lengths = lognormal(200, 40, 60, seed=3)
    random = Random(1)
    arrivals = sorted([random.random() * 0.05 for _ in range(57)] + [0.02] * 3)
    requests = make_requests(lengths, arrivals)
    runner = RooflineRunner(SMALL.shape, H100)
    engine = Engine(runner, "continuous", max_batch, 128)
    engine.run(requests)
    expected = summarize(engine.trace, engine.sequences, SLO(ttft=0.01))
    outcome = simulate(fleet(max_batch=max_batch, token_budget=128), requests, SLO(ttft=0.01))
    for name in ("ttft", "tpot", "e2e"):
        samples = sorted(getattr(outcome, name).samples)
        assert samples == pytest.approx(sorted(getattr(expected, name).samples), rel=1e-6)
    assert outcome.new_tokens == expected.new_tokens == sum(n for _, n in lengths)
    assert outcome.prompt_tokens == expected.prompt_tokens
    assert outcome.seconds == pytest.approx(expected.seconds)
    assert outcome.goodput == pytest.approx(expected.goodput)
    assert outcome.preemptions == expected.preemptions


def test_a_queue_is_as_long_as_queueing_theory_says():
    """M/D/1, Pollaczek and Khinchine: at a load of 0.6 the mean wait is 0.6 / (2 x 0.4) services.

    One sequence at a time, all alike: a service is a prefill and a decode step.
    """
    alone = simulate(fleet(max_batch=1), offline([(64, 2)], 1), ANY)
    service = alone.e2e.mean
    requests = poisson(0.6 / service, [(64, 2)], 6000, seed=5)
    outcome = simulate(fleet(max_batch=1), requests, ANY)
    waited = fmean(outcome.ttft.samples) - alone.ttft.mean
    assert waited / service == pytest.approx(0.75, rel=0.06)
    assert outcome.busy == pytest.approx(0.6, rel=0.03)
    # Known wrong: a first token counted from the moment of admission, or exponential service.
    assert waited / service != pytest.approx(0, abs=0.5)
    assert waited / service != pytest.approx(1.5, rel=0.3)


def test_a_request_alone_takes_its_prefill_and_its_steps():
    outcome = simulate(fleet(LLAMA_8B), [Request([1] * 1000, 3, arrival=7.0)], ANY)
    prefill = prefill_seconds(LLAMA_8B, 1000)
    decodes = [LLAMA_8B.step(1, context).seconds for context in (1001, 1002)]
    assert outcome.ttft.samples == (pytest.approx(prefill),)
    assert outcome.tpot.samples == (pytest.approx(sum(decodes) / 2),)
    assert outcome.seconds == pytest.approx(prefill + sum(decodes))
    assert outcome.busy == pytest.approx(1)
    slower = simulate(fleet(LLAMA_8B, overhead_seconds=0.01), [Request([1] * 1000, 3)], ANY)
    assert slower.seconds == pytest.approx(outcome.seconds + 0.03)


# Routers


def test_the_least_loaded_replica_gets_the_next_request():
    """A long request and three short ones, each when the last is done."""
    long, short = Request([1], 4000), [Request([1], 2, arrival=t) for t in (0.01, 0.02, 0.03)]
    loads = {router: [] for router in ROUTERS}
    for router in ROUTERS:
        outcome = simulate(fleet(replicas=2, router=router, max_batch=1), [long, *short], ANY)
        loads[router] = outcome.ttft
    assert loads["least loaded"].p99 < 0.001
    assert loads["round robin"].p99 > 0.01  # the third is queued behind the long one


@pytest.mark.parametrize(
    ("router", "number", "in_flight", "chosen"),
    [
        ("round robin", 4, [9, 0, 0], 1),
        ("least loaded", 4, [2, 1, 3], 1),
        ("least loaded", 4, [1, 1, 1], 0),
    ],
)
def test_a_router_is_a_rule(router, number, in_flight, chosen):
    assert ROUTERS[router](number, in_flight) == chosen


def test_requests_of_one_moment_spread_over_all_replicas():
    together = [Request([1], 50, arrival=3.0) for _ in range(4)]
    spread = simulate(fleet(replicas=4), together, ANY)
    alone = simulate(fleet(), together[:1], ANY)
    assert spread.e2e.p99 == pytest.approx(alone.e2e.p99)
    assert spread.busy == pytest.approx(1)
    shared = simulate(fleet(), together, ANY)
    assert len(set(shared.ttft.samples)) == 1, "one was prefilled before the others were there"


def test_the_order_in_which_requests_are_listed_does_not_matter():
    requests = list(poisson(500, [(64, 10), (9, 30)], 60))
    ordered = simulate(fleet(replicas=2), requests, ANY)
    Random(3).shuffle(requests)
    assert simulate(fleet(replicas=2), requests, ANY) == ordered


def test_a_replica_is_loaded_until_the_step_that_ends_its_request():
    """The second arrives in the last step of the first: replica 0 is still busy then."""
    alone = simulate(fleet(LLAMA_8B), [Request([1], 2)], ANY)
    late = Request([1], 2, arrival=0.9 * alone.seconds)
    outcome = simulate(fleet(LLAMA_8B, replicas=2), [Request([1], 2), late], ANY)
    assert outcome.e2e.samples == pytest.approx([alone.seconds] * 2, rel=1e-6)


# Money


def test_a_fleet_costs_its_gpus_times_its_hours():
    """2 replicas of 4 GPUs at $2: $16 an hour."""
    four = replace(LLAMA_8B, tensor_parallel=4)
    outcome = simulate(fleet(four, replicas=2), offline([(100, 20)], 6), ANY)
    assert outcome.fleet.gpus == 8
    assert outcome.fleet.usd_per_hour == 16
    assert outcome.usd == pytest.approx(16 * outcome.seconds / 3600)
    assert outcome.usd_per_million_tokens == pytest.approx(outcome.usd / 120 * 1e6)
    assert outcome.usd_per_million_requests == pytest.approx(outcome.usd / 6 * 1e6)
    assert outcome.tokens_per_second == pytest.approx(120 / outcome.seconds)
    # Known wrong: one GPU's price, input counted as output.
    assert outcome.usd_per_million_tokens != pytest.approx(outcome.usd / 4 / 120 * 1e6)
    assert outcome.usd_per_million_tokens != pytest.approx(outcome.usd / 720 * 1e6)


def test_a_replica_too_many_doubles_the_price_of_a_token():
    """Idle time is paid for: peak tokens are not billed tokens."""
    requests = poisson(200, [(64, 10)], 400)
    one, two = (simulate(fleet(replicas=n), requests, ANY) for n in (1, 2))
    ratio = two.usd_per_million_tokens / one.usd_per_million_tokens
    assert ratio == pytest.approx(2, rel=0.01)
    assert two.busy < 0.6 * one.busy


def test_goodput_counts_every_request_that_was_sent():
    """One of four can never be served, and one waits too long."""
    tight = fleet(max_batch=1)
    first = simulate(tight, [Request([1], 100)], ANY).seconds
    sent = [Request([1], 100), Request([1], 1), Request([1], 1, arrival=1.0)]
    refused = Request([SMALL.shape.vocab], 1, arrival=2.0)  # of another tokenizer
    outcome = simulate(tight, [*sent, refused], SLO(ttft=first / 2))
    assert (outcome.requests, outcome.met, outcome.refused) == (4, 2, 1)
    assert outcome.goodput_share == 0.5
    assert outcome.goodput == pytest.approx(2 / outcome.seconds)


def test_nobody_served_well_costs_infinitely_much():
    outcome = simulate(fleet(), offline([(9, 9)], 2), SLO(ttft=1e-12))
    assert outcome.usd_per_million_requests == float("inf")
    assert outcome.goodput == 0


# What binds


def pool_of(tokens):
    """A device whose memory leaves so many tokens of KV beside the 25M's weights."""
    needed = SMALL.weight_bytes + tokens * SMALL.kv_bytes_per_token
    device = replace(H100, memory_bytes=int(needed / 0.9) + 1, usable_memory_bytes=None)
    return replace(SMALL, hardware=device)


@pytest.mark.parametrize(
    ("setting", "lengths", "binds"),
    [
        ({"max_batch": 2}, (16, 50), "max_batch"),
        ({"max_batch": 2}, (16, 1), "max_batch"),  # both are done when the step ends
        ({"token_budget": 64, "max_batch": 64}, (500, 2), "token_budget"),
        ({"deployment": pool_of(1024)}, (100, 200), "KV pool"),
        ({}, (16, 2), "nothing"),
    ],
)
def test_what_the_queue_waits_for_is_named(setting, lengths, binds):
    outcome = simulate(fleet(**setting), offline([lengths], 40), ANY)
    assert outcome.binds == binds
    assert all(0 < share <= 1 for share in outcome.waits.values())
    assert (outcome.preemptions > 0) == (binds == "KV pool")


def test_a_burst_binds_nothing():
    """The first of 42 steps has no token left for the third prompt, and the second is as long."""
    outcome = simulate(fleet(token_budget=128), offline([(100, 40)], 3), ANY)
    assert 0 < outcome.waits["token_budget"] < 0.2
    assert replace_waits(outcome, 0.04).binds == "nothing"
    assert replace_waits(outcome, 0.06).binds == "token_budget"


def replace_waits(outcome: Outcome, share: float) -> Outcome:
    return replace(outcome, waits={"token_budget": share, "max_batch": share / 2})


def test_more_replicas_bring_the_goodput_back():
    requests = azure("conversation", 100, seed=2, rate=150)
    slo = SLO(ttft=0.5, tpot=0.02)
    shares = [simulate(fleet(LLAMA_8B, replicas=n), requests, slo).goodput_share for n in (1, 2, 4)]
    assert shares == sorted(shares)
    assert shares[0] < 0.9 < shares[-1]


# Bad input


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ({"usd_per_gpu_hour": 0}, "usd_per_gpu_hour"),
        ({"replicas": 0}, "replicas"),
        ({"max_batch": 1.5}, "max_batch"),
        ({"token_budget": -1}, "token_budget"),
        ({"router": "random"}, "round robin, least loaded"),
        ({"overhead_seconds": -1}, "overhead_seconds"),
        ({"deployment": replace(SMALL, pipeline_parallel=2)}, "pipeline_parallel=1"),
    ],
)
def test_a_senseless_fleet_is_refused_by_name(setting, named):
    with pytest.raises(ValueError, match=named):
        fleet(**setting)


def test_no_request_and_none_that_fits_are_refused_with_the_reason():
    with pytest.raises(ValueError, match="at least one"):
        simulate(fleet(), [], ANY)
    with pytest.raises(ValueError, match="None of 1 requests can be served.*pool has 64"):
        simulate(fleet(pool_of(1024)), [Request([1] * 2000, 1)], ANY)


def test_weights_that_do_not_fit_are_named_in_gb():
    small = Deployment(shape=LLAMA_8B.shape, hardware=HARDWARE["NVIDIA T4"], dtype="fp16")
    with pytest.raises(NoRoomError, match="16.1 GB"):
        simulate(fleet(small), offline([(9, 9)], 2), ANY)
