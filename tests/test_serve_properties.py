"""Whatever the requests, the pool and the policy: the same tokens as alone, and nothing is left.

Each rule has a wrong variant that these checks find.
"""

import re
from dataclasses import replace
from random import Random

import pytest
from decodelab.serve import (
    BlockAllocator,
    ContinuousScheduler,
    Engine,
    SharingAllocator,
    StaticScheduler,
)
from hypothesis import Phase, find, given, settings

from tests.serving_checks import CheckedRunner, serve, settings_of_engines


@settings(max_examples=300)
@given(setting=settings_of_engines())
def test_every_request_gets_the_tokens_of_decoding_alone_and_leaves_nothing_behind(setting):
    serve(setting, setting.engine())


@pytest.mark.filterwarnings("ignore:Request")
@settings(max_examples=50)
@given(setting=settings_of_engines())
def test_output_does_not_depend_on_the_order_of_arrival(setting):
    random = Random(len(setting.requests))
    now = [replace(request, arrival=0.0) for request in setting.requests]
    later = [replace(request, arrival=random.random() / 100) for request in reversed(now)]
    assert setting.engine().run(now) == setting.engine().run(later)


class GivesABlockTwice(BlockAllocator):
    def take(self):
        block = super().take()
        if block % 7 == 3:
            self.free_list[block] = None
        return block


class GrowsOneBlockLate(BlockAllocator):
    def blocks_for(self, length):
        return max(1, length // self.block_size)


class FreesAllButTheLastBlock(BlockAllocator):
    def free(self, id):
        self.tables[id] = self.tables[id][:-1] or self.tables[id]
        super().free(id)


class SharesBeforeKVIsComputed(SharingAllocator):
    def admit(self, id, tokens, max_length):
        computed = super().admit(id, tokens, max_length)
        if computed is not None:
            self.publish(id, tokens, len(tokens) + len(tokens) % self.block_size)
        return computed


class SharesByTheBlocksOwnTokensAlone(SharingAllocator):
    """No chain: a block with the same tokens after another beginning is taken for the same."""

    def publish(self, id, tokens, computed):
        super().publish(id, tokens, computed)
        for index in range(computed // self.block_size):
            key = 0, tuple(tokens[index * self.block_size : (index + 1) * self.block_size])
            self.known.setdefault(key, (index + 1, self.tables[id][index]))


class RemembersOverwrittenBlocks(SharingAllocator):
    def take(self):
        return BlockAllocator.take(self)


class SharesTheLastTokenToo(SharingAllocator):
    def admit(self, id, tokens, max_length):
        return super().admit(id, [*tokens, 0], max_length)


class ForgetsEmittedTokens(ContinuousScheduler):
    def preempt(self, sequence):
        del sequence.tokens[len(sequence.request.prompt) :]
        return super().preempt(sequence)


class BelievesThatKVSurvives(ContinuousScheduler):
    def preempt(self, sequence):
        computed = sequence.computed
        super().preempt(sequence).computed = computed
        return sequence

    def admit(self, sequence, reserve=False):
        computed = sequence.computed
        admitted = super().admit(sequence, reserve)
        sequence.computed = max(computed, sequence.computed)
        return admitted


class LeavesTheQueueOnPreemption(ContinuousScheduler):
    def preempt(self, sequence):
        super().preempt(sequence)
        self.waiting.remove(sequence)
        return sequence


class PutsThePreemptedLast(ContinuousScheduler):
    def preempt(self, sequence):
        super().preempt(sequence)
        self.waiting.append(self.waiting.pop(self.waiting.index(sequence)))
        return sequence


class LastComeFirstServed(ContinuousScheduler):
    def add(self, sequence):
        super().add(sequence)
        self.waiting.sort(key=lambda s: -s.number)


class StopsDecodingForAPrefill(ContinuousScheduler):
    def schedule(self, now, more_to_come=False):
        plan = super().schedule(now, more_to_come)
        prefills = tuple(c for c in plan.chunks if c.kind == "prefill")
        return replace(plan, chunks=prefills or plan.chunks)


class ChunksWithoutBudget(ContinuousScheduler):
    def __init__(self, allocator, max_batch, token_budget, victim):
        super().__init__(allocator, max_batch, 10**6, victim)


class SamplesAfterEveryChunk(ContinuousScheduler):
    def schedule(self, now, more_to_come=False):
        plan = super().schedule(now, more_to_come)
        return replace(plan, chunks=tuple(replace(c, sample=True) for c in plan.chunks))


class KeepsBlocksOfTheCancelled(ContinuousScheduler):
    def cancel(self, sequence):
        if sequence.status == "running":
            sequence.status = "cancelled"
            self.running.remove(sequence)
        else:
            super().cancel(sequence)


class GivesUpOnThePreempted(ContinuousScheduler):
    def preempt(self, sequence):
        super().preempt(sequence)
        self.refuse(sequence)
        return sequence


class LeavesTheBatchWhenDone(StaticScheduler):
    retire = ContinuousScheduler.retire


class RunsARowAtATime(CheckedRunner):
    def run(self, work):
        parts = [super(RunsARowAtATime, self).run([row]) for row in work]
        return parts[0]._replace(
            tokens=[token for part in parts for token in part.tokens],
            seconds=sum(part.seconds for part in parts),
        )


class FeedsTheTokenBefore(Engine):
    def _work(self, chunk):
        work = super()._work(chunk)
        if chunk.kind == "decode" and chunk.start > 1:
            work = replace(work, tokens=[chunk.sequence.tokens[chunk.start - 1]])
        return work


class DrawsByStepNotByIndex(Engine):
    def _work(self, chunk):
        return replace(super()._work(chunk), output_index=len(self.trace))


WRONG = [
    ("allocator", GivesABlockTwice, "owned|lost|two rows"),
    ("allocator", GrowsOneBlockLate, "index out of range"),
    ("allocator", FreesAllButTheLastBlock, "disagree|lost|leak"),
    ("allocator", SharesBeforeKVIsComputed, "not the tokens"),
    ("allocator", SharesByTheBlocksOwnTokensAlone, "not the tokens"),
    ("allocator", RemembersOverwrittenBlocks, "not the tokens|shared block is written"),
    ("allocator", SharesTheLastTokenToo, "plans no step|for ever"),
    ("continuous", ForgetsEmittedTokens, "streamed"),
    ("continuous", BelievesThatKVSurvives, "not the tokens"),
    ("continuous", LeavesTheQueueOnPreemption, "didn't finish|leak"),
    ("continuous", PutsThePreemptedLast, "overtook"),
    ("continuous", LastComeFirstServed, "overtook"),
    ("continuous", StopsDecodingForAPrefill, "left out"),
    ("continuous", ChunksWithoutBudget, "token_budget"),
    ("continuous", SamplesAfterEveryChunk, "not the tokens"),
    ("continuous", KeepsBlocksOfTheCancelled, "leak"),
    ("continuous", GivesUpOnThePreempted, "didn't finish"),
    ("static", LeavesTheBatchWhenDone, "batch changed"),
    ("runner", RunsARowAtATime, "not one forward"),
    ("engine", FeedsTheTokenBefore, "not the tokens"),
    ("engine", DrawsByStepNotByIndex, "not the tokens"),
]


@pytest.mark.filterwarnings("ignore:Request")
@pytest.mark.parametrize(
    ("part", "wrong", "fault"), WRONG, ids=[wrong.__name__ for _, wrong, _ in WRONG]
)
def test_a_wrong_variant_is_found(part, wrong, fault):
    def fails(setting):
        try:
            serve(setting, setting.engine(**{part: wrong}))
        except Exception as error:
            return re.search(fault, str(error))

    find(
        settings_of_engines(),
        fails,
        settings=settings(phases=[Phase.generate], max_examples=1000, database=None),
        random=Random(0),
    )
