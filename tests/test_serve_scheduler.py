"""Decisions by hand: one queue, one pool, and what the next step should be."""

import pytest
from decodelab.serve import (
    BlockAllocator,
    ContinuousScheduler,
    DynamicScheduler,
    Request,
    Sequence,
    SharingAllocator,
    StaticScheduler,
)


def sequence(id, prompt, max_tokens=10, arrival=0.0):
    return Sequence(Request([1] * prompt, max_tokens, id=id), arrival)


def queued(scheduler, *sequences):
    for one in sequences:
        scheduler.add(one)
    return scheduler


def continuous(*sequences, num_blocks=100, block_size=4, max_batch=4, token_budget=16, **rest):
    blocks = BlockAllocator(num_blocks, block_size)
    return queued(ContinuousScheduler(blocks, max_batch, token_budget, **rest), *sequences)


def shown(plan):
    return [(c.sequence.id, c.kind, c.start, c.count, c.sample) for c in plan.chunks]


def step(scheduler, now=0.0, **rest):
    plan = scheduler.schedule(now, **rest)
    scheduler.update(plan, [7 if chunk.sample else None for chunk in plan.chunks], now)
    return shown(plan)


def test_a_long_prompt_is_prefilled_in_chunks_beside_those_that_decode():
    scheduler = continuous(sequence("a", 3), sequence("b", 20), token_budget=8)
    assert step(scheduler) == [("a", "prefill", 0, 3, True), ("b", "prefill", 0, 5, False)]
    assert step(scheduler) == [("a", "decode", 3, 1, True), ("b", "prefill", 5, 7, False)]
    assert step(scheduler) == [("a", "decode", 4, 1, True), ("b", "prefill", 12, 7, False)]
    assert step(scheduler) == [("a", "decode", 5, 1, True), ("b", "prefill", 19, 1, True)]
    assert step(scheduler) == [("a", "decode", 6, 1, True), ("b", "decode", 20, 1, True)]


def test_decodes_come_before_an_earlier_prefill():
    scheduler = continuous(sequence("a", 30, 1), sequence("b", 2), token_budget=16)
    scheduler.schedule(0.0)  # admits "a" alone: the budget is spent
    a, b = scheduler.running[0], scheduler.waiting[0]
    a.computed = 16
    assert scheduler.admit(b)
    b.computed = 2
    b.append(7, 0.0)
    assert shown(scheduler.schedule(0.0)) == [
        ("b", "decode", 2, 1, True),
        ("a", "prefill", 16, 14, True),
    ]


def test_a_newcomer_takes_the_place_of_one_that_finished_in_the_very_next_step():
    scheduler = continuous(sequence("a", 1, 2), sequence("b", 1, 9), sequence("c", 1), max_batch=2)
    step(scheduler)
    assert [row[0] for row in step(scheduler)] == ["a", "b"]
    assert step(scheduler) == [("b", "decode", 2, 1, True), ("c", "prefill", 0, 1, True)]
    assert scheduler.running[1].slot == 0


def test_admission_waits_for_free_blocks_and_nobody_overtakes():
    scheduler = continuous(sequence("a", 5), sequence("big", 9), sequence("c", 1), num_blocks=4)
    assert [row[0] for row in step(scheduler)] == ["a"]
    assert [s.id for s in scheduler.waiting] == ["big", "c"]


def test_without_free_blocks_the_last_come_is_preempted_and_keeps_its_tokens():
    scheduler = continuous(sequence("a", 3), sequence("b", 3), num_blocks=3)
    for _ in range(2):
        step(scheduler)
    a, b = scheduler.running
    assert (a.computed, b.computed) == (4, 4)
    plan = scheduler.schedule(0.0)  # both are at the end of a block, and one block is free
    assert shown(plan) == [("a", "decode", 4, 1, True)]
    assert plan.preempted == (b,)
    assert (b.status, b.computed, b.slot, b.output, b.preemptions) == (
        "waiting",
        0,
        None,
        [7, 7],
        1,
    )
    assert scheduler.allocator.free_blocks == 1


def test_a_preempted_sequence_is_first_in_the_queue_and_prefills_all_its_tokens():
    a, b = sequence("a", 3, max_tokens=4), sequence("b", 3)
    scheduler = continuous(a, b, sequence("c", 1), num_blocks=3, max_batch=2)
    for _ in range(3):
        step(scheduler)
    assert [s.id for s in scheduler.waiting] == ["b", "c"]
    step(scheduler)  # the last token of "a"
    assert step(scheduler)[0] == ("b", "prefill", 0, 5, True)
    assert step(scheduler)[0] == ("b", "decode", 5, 1, True)


def test_another_rule_of_preemption_can_be_plugged_in():
    scheduler = continuous(
        sequence("a", 3), sequence("b", 3), num_blocks=3, victim=lambda running: running[0]
    )
    for _ in range(2):
        step(scheduler)
    plan = scheduler.schedule(0.0)
    assert [s.id for s in plan.preempted] == ["a"]
    assert shown(plan) == [("b", "decode", 4, 1, True)]


def test_one_that_cannot_grow_with_the_pool_to_itself_is_refused_with_a_reason():
    a, b = sequence("a", 4, 50), sequence("b", 1, 5)
    scheduler = continuous(a, b, num_blocks=2, max_batch=1)
    for _ in range(20):
        step(scheduler)
    assert a.status == "refused"
    assert "2 blocks of 4" in a.reason
    assert len(a.output) == 5  # what it emitted before stays
    assert b.status == "finished"
    assert scheduler.allocator.free_blocks == 2


@pytest.mark.parametrize("kind", [ContinuousScheduler, StaticScheduler])
def test_one_that_is_never_admitted_does_not_block_the_others(kind):
    big, small = sequence("big", 9), sequence("small", 1, 2)
    scheduler = queued(kind(BlockAllocator(2, 4)), big, small)
    assert scheduler.schedule(0.0).refused == (big,)
    step(scheduler)
    step(scheduler)
    assert (big.status, small.status) == ("refused", "finished")


def test_a_budget_below_the_batch_bounds_the_batch_so_that_all_can_decode():
    scheduler = continuous(*(sequence(i, 1) for i in range(4)), token_budget=2)
    assert len(step(scheduler)) == len(step(scheduler)) == 2


def test_a_static_batch_is_padded_to_its_longest_and_waits_for_its_last():
    a, b = sequence("a", 5, 1), sequence("b", 2, 3)
    scheduler = queued(StaticScheduler(BlockAllocator(9), 2), a, b, sequence("c", 1))
    plan = scheduler.schedule(0.0)
    assert [(c.sequence.id, c.count, c.padding) for c in plan.chunks] == [("a", 5, 0), ("b", 2, 3)]
    scheduler.update(plan, [7, 7], 0.0)
    assert a.status == "finished"
    for _ in range(2):
        assert step(scheduler)[0] == ("a", "padding", 5, 0, False)
    assert step(scheduler) == [("c", "prefill", 0, 1, True)]


def test_a_static_batch_reserves_all_that_its_sequences_may_come_to_hold():
    scheduler = queued(
        StaticScheduler(BlockAllocator(6, 4), 4), *(sequence(i, 1) for i in range(4))
    )
    assert len(step(scheduler)) == 2  # 1 + 10 - 1 tokens: three blocks each


def test_a_static_batch_waits_until_it_is_full_or_nobody_comes():
    scheduler = queued(StaticScheduler(BlockAllocator(9), 2), sequence("a", 1))
    assert step(scheduler, now=99.0, more_to_come=True) == []
    assert len(step(scheduler, now=99.0)) == 1
    full = queued(StaticScheduler(BlockAllocator(9), 2), sequence("a", 1), sequence("b", 1))
    assert len(step(full, more_to_come=True)) == 2


def test_a_dynamic_batch_closes_when_full_or_when_its_window_ends():
    def make(*arrivals):
        sequences = [sequence(i, 1, arrival=arrival) for i, arrival in enumerate(arrivals)]
        return queued(DynamicScheduler(BlockAllocator(9), 3, window=0.5), *sequences)

    assert make(1.0, 1.2).wake() == 1.5
    assert step(make(1.0, 1.2), now=1.4) == []
    assert len(step(make(1.0, 1.2), now=1.5)) == 2
    assert len(step(make(1.0, 1.2, 1.3), now=1.3)) == 3


def test_a_cancelled_sequence_leaves_at_once_but_a_batch_keeps_its_row():
    for kind, free in ((ContinuousScheduler, 8), (StaticScheduler, 7)):
        a, b = sequence("a", 1), sequence("b", 1)
        scheduler = queued(kind(BlockAllocator(9), 2), a, b)
        step(scheduler)
        scheduler.cancel(a)
        assert a.status == "cancelled"
        assert scheduler.allocator.free_blocks == free
        scheduler.cancel(b)
        assert scheduler.allocator.free_blocks == 9


def test_what_is_shared_is_not_prefilled_again():
    scheduler = queued(ContinuousScheduler(SharingAllocator(9, 4)), sequence("a", 9))
    assert step(scheduler) == [("a", "prefill", 0, 9, True)]
    scheduler.add(sequence("b", 9))
    assert step(scheduler)[1] == ("b", "prefill", 8, 1, True)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("max_batch", lambda blocks: ContinuousScheduler(blocks, 0)),
        ("max_batch", lambda blocks: StaticScheduler(blocks, 0)),
        ("token_budget", lambda blocks: ContinuousScheduler(blocks, 4, 0)),
        ("window", lambda blocks: DynamicScheduler(blocks, 4, -1.0)),
    ],
)
def test_numbers_without_meaning_are_refused(name, make):
    with pytest.raises(ValueError, match=name):
        make(BlockAllocator(4))
