"""The engine on a virtual clock: counted steps, padding, arrivals, and what it refuses."""

import math
from dataclasses import replace

import pytest
from decodelab.predict import HARDWARE, SHAPES, decode_step
from decodelab.serve import (
    BlockAllocator,
    ContinuousScheduler,
    Engine,
    Plan,
    RefusedError,
    Request,
    ReservingAllocator,
    RooflineRunner,
    SharingAllocator,
    Work,
)

from tests.serving_checks import alone

SHAPE = replace(SHAPES["SmolLM2-135M"], vocab=97, max_context=512)
H100 = HARDWARE["NVIDIA H100 SXM"]
POLICIES = ["static", "dynamic", "continuous"]


def engine(policy="continuous", max_batch=8, num_blocks=400, runner=None, **rest):
    return Engine(runner or RooflineRunner(SHAPE, H100, num_blocks), policy, max_batch, **rest)


def served(requests, policy="continuous", **rest):
    made = engine(policy, **rest)
    return made.run(requests), made


def thirty_two(long, short):
    """32 requests; the first of each eight wants `long` tokens, the others `short`."""
    return [Request([1, 2, 3], short if i % 8 else long, id=i) for i in range(32)]


def decode_steps(trace):
    """Decode steps of the slot with most of them, padding included: its prefills left out."""
    slots = [row.slot for record in trace for row in record.rows if row.kind != "prefill"]
    return max(slots.count(slot) for slot in set(slots))


def test_396_decode_steps_static_and_126_continuous():
    _, static = served(thirty_two(100, 10), "static")
    _, continuous = served(thirty_two(100, 10), "continuous")
    assert (decode_steps(static.trace), decode_steps(continuous.trace)) == (396, 126)
    # With the step of each prefill, which makes the first token.
    assert (len(static.trace), len(continuous.trace)) == (400, 130)


def test_equal_lengths_gain_nothing():
    _, static = served(thirty_two(10, 10), "static")
    _, continuous = served(thirty_two(10, 10), "continuous")
    assert len(static.trace) == len(continuous.trace) == 40
    assert static.now == continuous.now


@pytest.mark.parametrize("where", ["prompt", "output"])
def test_padding_is_85_3_percent_of_a_batch_of_one_2000_and_seven_50(where):
    lengths = [2000] + [50] * 7
    if where == "prompt":
        requests = [Request([1] * length, 1) for length in lengths]
    else:
        requests = [Request([1], length) for length in lengths]
    runner = RooflineRunner(replace(SHAPE, max_context=None), H100, 1200)
    for policy, share in (("static", 85.3), ("continuous", 0.0)):
        _, made = served(requests, policy, runner=runner, token_budget=4096)
        padded = sum(record.padded_tokens for record in made.trace)
        real = sum(record.prompt_tokens + record.decode_tokens for record in made.trace)
        assert real == 2000 + 7 * 50
        assert round(100 * padded / (padded + real), 1) == share


def test_padding_costs_what_real_tokens_cost():
    long, short = [Request([1] * 400, 1)] * 8, [Request([1] * 400, 1)] + [Request([1] * 10, 1)] * 7
    assert served(long, "static")[1].now == served(short, "static")[1].now


def test_all_policies_give_the_tokens_of_decoding_alone():
    requests = thirty_two(20, 5)
    for policy in POLICIES:
        tokens, _ = served(requests, policy)
        assert tokens == {request.id: alone(request) for request in requests}


def test_a_pool_that_never_fills_makes_paging_and_reservation_equal():
    paged, reserved = (
        served(thirty_two(100, 10), allocator=kind)[1]
        for kind in (BlockAllocator, ReservingAllocator)
    )
    assert [record.rows for record in paged.trace] == [record.rows for record in reserved.trace]
    assert paged.now == reserved.now


def test_in_a_small_pool_paging_runs_more_at_once_than_reservation():
    paged = served(thirty_two(100, 10), num_blocks=16)[1]
    reserved = served(thirty_two(100, 10), num_blocks=16, allocator=ReservingAllocator)[1]
    assert len(paged.trace) < len(reserved.trace)


def test_sharing_saves_blocks_and_prefill_and_changes_no_token():
    prompt = [i % 97 for i in range(100)]
    requests = [Request([*prompt, i], 20, id=i, arrival=i * 1e-4) for i in range(8)]
    plain, alike = served(requests)
    shared, sharing = served(requests, allocator=SharingAllocator)
    assert plain == shared
    assert sum(r.prompt_tokens for r in alike.trace) == 8 * 101
    assert sum(r.prompt_tokens for r in sharing.trace) == 101 + 7 * (101 - 96)
    peak = [max(r.blocks_used for r in made.trace) for made in (alike, sharing)]
    assert peak[1] <= peak[0] - 7 * 6 + 6


def test_preempted_requests_resume_with_the_same_tokens_and_still_emit_each_once():
    requests = [Request([i] * 30, 60, id=i) for i in range(8)]
    tokens, made = served(requests, num_blocks=20)
    assert sum(len(record.preempted) for record in made.trace) > 0
    assert tokens == {request.id: alone(request) for request in requests}
    assert sum(len(record.emitted) for record in made.trace) == 8 * 60


def test_requests_wait_for_their_arrival_and_idle_time_passes_at_once():
    requests = [Request([1], 2, id="now"), Request([1], 2, id="later", arrival=5.0)]
    _, made = served(requests)
    assert made.trace[2].start == 5.0
    assert made.trace[1].end < 0.01
    assert 0 < made.sequences["later"].ttft < 0.01


def test_a_dynamic_batch_starts_when_its_window_ends():
    _, made = served([Request([1], 1)], "dynamic", window=0.25)
    assert made.trace[0].start == 0.25


def test_arrival_counts_from_the_moment_a_request_is_handed_in():
    made = engine()
    made.run([Request([1], 5, arrival=1.0)])
    before = made.now
    made.run([Request([1], 5, arrival=1.0, id="b")])
    assert made.sequences["b"].arrival == before + 1.0


def test_tokens_stream_out_as_they_are_made():
    requests = [Request([1, 2], 3, id="a"), Request([3], 2, id="b")]
    stream = list(engine().stream(requests))
    assert [id for id, _ in stream] == ["a", "b", "a", "b", "a"]
    assert [token for id, token in stream if id == "a"] == alone(requests[0])


def test_whoever_stops_listening_to_a_stream_leaves_nothing_behind():
    made = engine()
    stream = made.stream([Request([1], 50), Request([1], 50, arrival=9.0)])
    next(stream)
    stream.close()
    assert not made.unfinished
    assert made.scheduler.allocator.free_blocks == 400


@pytest.mark.parametrize("policy", POLICIES)
def test_a_cancelled_request_leaves_nothing_behind_and_the_others_go_on(policy):
    made = engine(policy)
    for id in "abc":
        made.add(Request([1], 20, id=id, arrival=1.0 if id == "c" else 0.0))
    made.step()
    assert made.cancel("a")
    assert made.cancel("c")
    assert not made.cancel("a")
    assert not made.cancel("nobody")
    while made.step():
        pass
    assert made.sequences["a"].status == made.sequences["c"].status == "cancelled"
    assert made.sequences["b"].output == alone(Request([1], 20))
    assert made.scheduler.allocator.free_blocks == 400


BAD = [
    (Request([97], 1, id="bad"), "token id 97, outside 0 .. 96"),
    (Request([-1], 1, id="bad"), "token id -1"),
    (Request([1] * 513, 1, id="bad"), "513 tokens and asks for 1 new ones: more than the 512"),
    (Request([1] * 500, 13, id="bad"), "more than the 512 of the model's context"),
    (Request([1] * 300, 100, id="bad"), "25 blocks of KV, and the pool has 20"),
    (Request([1], 1, id="good"), "'good' is already in flight"),
]


@pytest.mark.parametrize(("bad", "sentence"), BAD, ids=[sentence for _, sentence in BAD])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_bad_request_is_refused_with_a_reason_and_the_engine_goes_on(policy, bad, sentence):
    good = Request([1, 2], 10, id="good")
    made = engine(policy, num_blocks=20)
    made.add(good)
    with pytest.raises(RefusedError, match=sentence):
        made.add(bad)
    while made.step():
        pass
    assert made.sequences["good"].output == alone(good)
    assert made.scheduler.allocator.free_blocks == 20


def test_in_a_run_a_refusal_is_a_warning_and_the_others_are_served():
    good, big = Request([1, 2], 10, id="good"), Request([1] * 300, 100, id="big")
    made = engine(num_blocks=20)
    with pytest.warns(UserWarning, match="25 blocks"):
        assert made.run([big, good]) == {"big": [], "good": alone(good)}
    assert made.sequences["big"].status == "refused"
    assert "25 blocks" in made.sequences["big"].reason
    assert made.add(Request([1], 1, id="big")) == "big"  # the id is free again


def test_requests_that_cannot_all_be_made_are_not_handed_in_by_half():
    made = engine()
    with pytest.raises(ValueError, match="empty"):
        made.run(Request(prompt, 3) for prompt in ([1], []))
    assert not made.unfinished


def test_after_shutdown_nothing_is_in_flight_and_nothing_is_taken():
    made = engine()
    made.add(Request([1], 50, id="a"))
    made.add(Request([1], 50, arrival=9.0))
    made.step()
    made.shutdown()
    assert not made.unfinished
    assert made.step() is None
    assert made.sequences["a"].status == "cancelled"
    assert made.scheduler.allocator.free_blocks == 400
    with pytest.raises(RefusedError, match="shutdown"):
        made.add(Request([1], 1))


def test_a_pool_of_no_blocks_and_an_unknown_policy_are_refused():
    with pytest.raises(ValueError, match="num_blocks must be a positive whole number, not 0"):
        engine(num_blocks=0)
    with pytest.raises(ValueError, match="'contiguous'. Policies: static, dynamic, continuous"):
        engine("contiguous")


def test_ids_are_chosen_where_there_are_none():
    assert list(engine().run([Request([1], 1), Request([1], 1, id="x"), Request([1], 1)])) == [
        0,
        "x",
        1,
    ]


def test_one_engine_runs_the_same_requests_again():
    made, requests = engine(), thirty_two(5, 2)
    assert made.run(requests) == made.run(requests)


def test_a_scheduler_of_ones_own_must_fit_the_pool_of_the_runner():
    for blocks in (BlockAllocator(401), BlockAllocator(400, 8)):
        with pytest.raises(ValueError, match="the runner has 400 of 16"):
            engine(ContinuousScheduler(blocks))
    assert engine(ContinuousScheduler(BlockAllocator(400))).run([Request([1], 1)])


@pytest.mark.parametrize("policy", POLICIES)
def test_on_a_wall_clock_idle_time_is_skipped_and_not_slept(policy):
    runner = RooflineRunner(SHAPE, H100, 400)
    runner.real_time = True
    requests = [Request([1], 3, id="a"), Request([1], 3, id="b", arrival=1e6)]
    tokens, made = served(requests, policy, runner=runner)
    assert tokens["b"] == alone(requests[1])
    assert made.now >= 1e6
    assert all(b.start >= a.end for a, b in zip(made.trace, made.trace[1:], strict=False))
    assert all(time >= 1e6 for time in made.sequences["b"].token_times)


def test_a_request_with_the_id_of_another_cannot_cancel_it():
    made = engine()
    made.add(Request([1], 5, id="a"))
    with pytest.warns(UserWarning, match="already in flight"):
        stream = list(made.stream([Request([2], 5, id="a")]))
    assert stream == []  # it tells of its own requests only
    assert made.sequences["a"].status == "finished"


def test_a_scheduler_that_plans_nothing_is_an_error_and_not_an_endless_loop():
    made = engine()
    made.scheduler.schedule = lambda now, more_to_come: Plan()
    made.add(Request([1], 1))
    with pytest.raises(RuntimeError, match="plans no step"):
        made.step()


@pytest.mark.parametrize(("batch", "context"), [(1, 1), (8, 100), (32, 400)])
def test_a_step_of_decodes_takes_what_decode_step_predicts(batch, context):
    runner = RooflineRunner(SHAPE, H100, 16)
    row = Work(id=0, tokens=[1], start=context - 1, table=[0] * 99, sample=True)
    expected = decode_step(SHAPE, H100, batch, context).seconds
    assert math.isclose(runner.step_seconds([row] * batch), expected)


def test_one_forward_for_all_reads_the_weights_once():
    runner = RooflineRunner(SHAPES["Llama-3.1-8B"], H100, 16)
    row = Work(id=0, tokens=[1], start=99, table=[0] * 99, sample=True)
    together, apart = runner.step_seconds([row] * 8), 8 * runner.step_seconds([row])
    assert 7 < apart / together < 8


def test_a_long_prefill_is_bound_by_arithmetic_and_chunks_take_longer_in_all():
    runner = RooflineRunner(SHAPES["Llama-3.1-8B"], H100, 16)

    def seconds(start, count):
        work = Work(id=0, tokens=[1] * count, start=start, table=(), sample=False)
        return runner.step_seconds([work])

    assert math.isclose(seconds(0, 8192) / seconds(0, 4096), 2, rel_tol=0.1)
    assert sum(seconds(start, 64) for start in range(0, 4096, 64)) > 2 * seconds(0, 4096)


def test_without_a_number_the_pool_is_what_the_device_leaves_beside_the_weights():
    runner = RooflineRunner(SHAPES["Llama-3.1-8B"], H100)
    assert runner.num_blocks == runner.deployment.tokens // 16


def test_a_record_shows_the_head_of_a_long_queue_and_counts_all():
    _, made = served([Request([1], 2) for _ in range(100)], max_batch=1)
    assert made.trace[0].num_waiting == 99
    assert made.trace[0].waiting == tuple(range(1, 33))
