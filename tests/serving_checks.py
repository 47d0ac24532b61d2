"""Random workloads, and what must hold of every run, whatever the policy."""

import zlib
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from decodelab.predict import HARDWARE, SHAPES
from decodelab.serve import (
    BlockAllocator,
    ContinuousScheduler,
    DynamicScheduler,
    Engine,
    Request,
    ReservingAllocator,
    RooflineRunner,
    Sampling,
    SharingAllocator,
    StaticScheduler,
)
from decodelab.serve.scheduler import last_come
from hypothesis import strategies as st

SHAPE = replace(SHAPES["SmolLM2-135M"], vocab=97)  # few ids, so that an EOS is drawn now and then
H100 = HARDWARE["NVIDIA H100 SXM"]
MOST_STEPS = 3000  # far more than any of these workloads needs: beyond, it's a livelock
VICTIMS = {
    "last come": last_come,
    "first come": lambda running: running[0],
    "longest": lambda running: max(running, key=lambda sequence: len(sequence.tokens)),
}


def alone(request: Request, vocab: int = SHAPE.vocab) -> list[int]:
    """What RooflineRunner's rule makes of a request by itself, written without any engine."""
    ids, sampling = list(request.prompt), request.sampling
    for index in range(request.max_tokens):
        drawn = zlib.crc32(f"{sampling.seed} {index}".encode()) if sampling.temperature else 0
        ids.append(zlib.crc32(array("i", ids), drawn) % vocab)
        if ids[-1] in request.eos:
            break
    return ids[len(request.prompt) :]


class CheckedRunner(RooflineRunner):
    """Counts its calls, and looks at every row before it runs."""

    calls = 0
    allocator: BlockAllocator

    def run(self, work):
        self.calls += 1
        assert len({row.id for row in work}) == len(work), "a sequence has two rows"
        size, written = self.block_size, []
        for row in work:
            stop = row.start + len(row.tokens)
            written += [row.table[p // size] * size + p % size for p in range(row.start, stop)]
        assert len(set(written)) == len(written), "two rows write one slot"
        for slot in written:
            assert self.allocator.owners[slot // size] == 1, "a shared block is written"
        return super().run(work)


@dataclass(frozen=True)
class Setting:
    """Requests, cancellations (step, id), and the engine that they meet."""

    requests: tuple[Request, ...]
    cancels: tuple[tuple[int, int], ...] = ()
    num_blocks: int = 64
    block_size: int = 4
    max_batch: int = 4
    token_budget: int = 32
    policy: str = "continuous"
    allocator: type[BlockAllocator] = BlockAllocator
    victim: str = "last come"

    def engine(
        self,
        continuous: type[ContinuousScheduler] = ContinuousScheduler,
        static: type[StaticScheduler] = StaticScheduler,
        allocator: Callable[[int, int], BlockAllocator] | None = None,
        runner: type[RooflineRunner] = CheckedRunner,
        engine: type[Engine] = Engine,
    ) -> Engine:
        """As described; a part may be replaced by a wrong one."""
        runner = runner(SHAPE, H100, self.num_blocks, self.block_size)
        runner.allocator = (allocator or self.allocator)(self.num_blocks, self.block_size)
        if self.policy == "continuous":
            victim = VICTIMS[self.victim]
            scheduler = continuous(runner.allocator, self.max_batch, self.token_budget, victim)
        elif self.policy == "static":
            scheduler = static(runner.allocator, self.max_batch)
        else:
            scheduler = DynamicScheduler(runner.allocator, self.max_batch, window=2e-4)
        return engine(runner, scheduler)


@st.composite
def settings_of_engines(draw) -> Setting:
    """Pools from ample to a block, requests that share prompts or don't fit, some cancelled."""
    random = Random(draw(st.integers(0, 2**32)))  # one draw: shrinking matters less than speed
    block_size = random.choice([1, 2, 4, 16])
    bases = [[random.randrange(97) for _ in range(40)] for _ in range(2)]
    requests = []
    for index in range(random.randint(1, 12)):
        start = random.choice([0, 0, 0, 16])  # the same blocks after another beginning
        prompt = random.choice(bases)[start : start + random.randint(1, 40)]
        prompt += [random.randrange(97) for _ in range(random.choice([0, 0, 1, 9]))]
        requests.append(
            Request(
                prompt,
                random.choice([1, 2, 8, 20, 30, 30]),
                id=index,
                arrival=random.choice([0, 0, 1e-4, random.random() * 1e-2]),
                sampling=Sampling(temperature=random.choice([0, 0, 0.8]), seed=random.randrange(9)),
                eos=random.choice([(), (), range(5)]),
            )
        )
    random.shuffle(requests)
    cancels = tuple(
        (random.randint(0, 30), random.randrange(12)) for _ in range(random.choice([0, 0, 1, 3]))
    )
    return Setting(
        requests=tuple(requests),
        cancels=cancels,
        num_blocks=max(1, random.choice([8, 30, 80, 80, 100, 130, 800]) // block_size),
        block_size=block_size,
        max_batch=random.randint(1, 8),
        token_budget=random.choice([1, 2, 5, 16, 64, 256]),
        policy=random.choice(["continuous"] * 4 + ["static", "dynamic"]),
        allocator=random.choice([BlockAllocator, SharingAllocator, ReservingAllocator]),
        victim=random.choice(["last come"] * 3 + list(VICTIMS)),
    )


def serve(setting: Setting, engine: Engine) -> None:
    """Run to the end, looking after every step; AssertionError says what doesn't hold."""
    refused = set()
    for request in setting.requests:
        try:
            engine.add(request)
        except ValueError:
            refused.add(request.id)
    going = True
    while going:
        for step, id in setting.cancels:
            if step == len(engine.trace):
                engine.cancel(id)
        going = engine.step()
        engine.scheduler.allocator.check()
        assert len(engine.trace) < MOST_STEPS, "it goes on for ever"
    assert engine.runner.calls == len(engine.trace), "not one forward a step"
    check_outputs(setting, engine, refused)
    check_nothing_is_left(engine)
    check_rows(setting, engine)
    check_decodes(engine)
    check_turns(setting, engine)
    if setting.policy != "continuous":
        check_batches(engine)


def check_outputs(setting: Setting, engine: Engine, refused: set) -> None:
    """Everybody finishes with the tokens of decoding alone, or there's a reason why not."""
    for request in setting.requests:
        sequence = engine.sequences[request.id]
        length = len(request.prompt) + request.max_tokens - 1
        fits = -(-length // setting.block_size) <= setting.num_blocks
        assert (request.id in refused) == (not fits)
        expected = alone(request)
        emitted = [t for r in engine.trace for id, t in r.emitted if id == request.id]
        assert emitted == sequence.output, "what was streamed isn't what was kept"
        if sequence.status == "cancelled":
            assert request.id in {id for _, id in setting.cancels}
            expected = expected[: len(emitted)]
        elif fits:
            assert sequence.status == "finished", "it didn't finish"
        else:
            assert sequence.status == "refused"
            assert "blocks" in sequence.reason
            expected = []
        assert sequence.output == expected, "not the tokens of decoding alone"
        assert len(sequence.token_times) == len(expected)
        assert all(time >= sequence.arrival for time in sequence.token_times)


def check_nothing_is_left(engine: Engine) -> None:
    """All blocks are free, and nobody is listed anywhere."""
    allocator, scheduler = engine.scheduler.allocator, engine.scheduler
    allocator.check()
    assert allocator.free_blocks == allocator.num_blocks, "blocks leak"
    assert not allocator.tables
    assert not scheduler.waiting
    assert not scheduler.running
    assert not engine.unfinished


def check_rows(setting: Setting, engine: Engine) -> None:
    """The limits hold, and a sequence keeps its slot while it runs."""
    places: dict = {}
    for record in engine.trace:
        slots = {row.id: row.slot for row in record.rows}
        assert len(set(slots.values())) == len(record.rows) <= setting.max_batch
        assert set(slots.values()) <= set(range(setting.max_batch))
        assert 0 < record.blocks_used <= setting.num_blocks == record.blocks_total
        if setting.policy == "continuous":
            tokens = record.prompt_tokens + record.decode_tokens
            assert tokens <= setting.token_budget, "beyond token_budget"
            assert record.padded_tokens == 0
        gone = set(record.preempted)
        places = {id: slot for id, slot in places.items() if id not in gone}
        assert all(places.get(id, slot) == slot for id, slot in slots.items()), "it changed slots"
        places |= slots
        assert record.end > record.start >= 0


def check_decodes(engine: Engine) -> None:
    """Whoever has a token and isn't done decodes one token in the next step, or is preempted."""
    cancelled = {s.id for s in engine.sequences.values() if s.status == "cancelled"}
    due: set = set()
    for record in engine.trace:
        decoding = {row.id for row in record.rows if row.kind == "decode"}
        emitted = [id for id, _ in record.emitted]
        assert all(row.tokens == 1 for row in record.rows if row.kind == "decode")
        assert decoding <= set(emitted), "a decode without a token"
        assert len(set(emitted)) == len(emitted)
        assert due - cancelled - set(record.preempted) <= decoding, "a decode was left out"
        due = set(emitted) - set(record.finished)


def check_turns(setting: Setting, engine: Engine) -> None:
    """Nobody overtakes: all that run came before all that wait, and the last come is preempted."""
    order = {s.id: (s.arrival, s.number) for s in engine.sequences.values()}
    for record in engine.trace:
        ran = [order[row.id] for row in record.rows]
        assert max(ran)[0] <= record.start, "it ran before it arrived"
        if setting.victim == "last come":
            for id in (*record.waiting, *record.preempted):
                assert order[id] > max(ran), "one overtook another"


def check_batches(engine: Engine) -> None:
    """A batch stays as it is until its last is done, and all of its rows are as long."""
    cancelled = {s.id for s in engine.sequences.values() if s.status == "cancelled"}
    batch: set = set()
    for record in engine.trace:
        assert not record.preempted
        rows = {row.id for row in record.rows}
        assert not batch or rows == batch, "the batch changed"
        assert len({row.tokens + row.padding for row in record.rows}) == 1, "a row is shorter"
        alive = {row.id for row in record.rows if row.tokens} - set(record.finished) - cancelled
        batch = rows if alive else set()
