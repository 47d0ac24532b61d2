"""A run of the engine, recorded step by step: who sat where, who owned which block, and why.

Snapshots are taken while a step runs, before those that finish give their blocks back. Nothing here
draws; see decodelab.explain.stepper_view.
"""

import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from decodelab.explain.style import say
from decodelab.serve import Engine, RefusedError, Request, ReservingAllocator, Runner, StepRecord
from decodelab.serve import Sequence as Life
from decodelab.serve.scheduler import BatchScheduler

MOST_NAMED = 6  # ids that a sentence lists


@dataclass(frozen=True, kw_only=True)
class Seat:
    """A slot in one step: `fed` tokens of a request, which then has KV of `cached` tokens.

    `kind` is that of its Row, or "idle" where the step's budget left nothing for it.
    """

    id: Hashable
    kind: str
    fed: int
    prompt: int
    cached: int
    output: int
    max_tokens: int
    finished: bool


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """One step: what happened in a sentence, the slots, the queue and the pool as it ran.

    `taken` are blocks given out for this step, `tables` all block tables by id.
    """

    said: str
    record: StepRecord | None = None
    seats: tuple[Seat | None, ...] = ()
    queue: tuple[Hashable, ...] = ()
    to_come: int = 0
    tables: Mapping[Hashable, tuple[int, ...]] = field(default_factory=dict)
    taken: frozenset[int] = frozenset()

    @property
    def owners(self) -> dict[int, list[Hashable]]:
        """Who lists each block in its table; more than one share it."""
        found: dict[int, list[Hashable]] = {}
        for id, table in self.tables.items():
            for block in table:
                found.setdefault(block, []).append(id)
        return found


class Watched:
    """A runner that calls `look` before each forward, and is otherwise the one it was given."""

    def __init__(self, runner: Runner, look: Callable[[], None]) -> None:
        self.runner, self.look = runner, look

    def __getattr__(self, name: str) -> object:
        return getattr(self.runner, name)

    def run(self, work: Sequence) -> object:
        """Look, then run."""
        self.look()
        return self.runner.run(work)


class Walk:
    """`requests` on `engine`, a step at a time; steps once taken are kept, to go back to.

    `at` is the step that is shown, 0 before the first.
    """

    def __init__(self, engine: Engine, requests: Iterable[Request]) -> None:
        self.engine, self.at = engine, 0
        self.pool = engine.scheduler.allocator
        self.slots = engine.scheduler.max_batch
        engine.runner = Watched(engine.runner, self._look)
        self.ids: list[Hashable] = []
        said = []
        for request in requests:
            try:
                self.ids.append(engine.add(request))
            except RefusedError as refusal:
                said.append(str(refusal))
        self.told = {id for id, life in engine.sequences.items() if life.status == "refused"}
        queue = self._queue()
        later = f", {queue['to_come']} of them to arrive later" if queue["to_come"] else ""
        handed = f"{many(len(self.ids), 'request')} handed in{later}; no step has run."
        self.snapshots = [Snapshot(said=" ".join([handed, *said]), **queue)]

    @property
    def now(self) -> Snapshot:
        """The step that is shown."""
        return self.snapshots[self.at]

    @property
    def ended(self) -> bool:
        """Whether the last step of all is shown."""
        return self.at == len(self.snapshots) - 1 and not self.engine.unfinished

    @property
    def trace(self) -> list[StepRecord]:
        """The steps up to the one that is shown."""
        return [s.record for s in self.snapshots[: self.at + 1] if s.record]

    def step(self) -> None:
        """Show the next step, and run it if nobody has seen it yet."""
        if self.at == len(self.snapshots) - 1 and self.engine.unfinished:
            self._record()
        self.at = min(self.at + 1, len(self.snapshots) - 1)

    def back(self) -> None:
        """Show the step before."""
        self.at = max(self.at - 1, 0)

    def run(self, most: float = float("inf")) -> None:
        """Show the last step, or step `most`."""
        while self.at < most and not self.ended:
            self.step()

    def _record(self) -> None:
        before = self.snapshots[-1]
        self.seated = {life.id for life in self.engine.scheduler.running}
        self.tables, self.running, self.waiting = {}, [], []
        with warnings.catch_warnings(action="ignore"):  # a refusal is said, not warned of
            record = self.engine.step()
        said = self._clauses(record, before)
        owned = {block for id in self.seated for block in before.tables.get(id, ())}
        now = {block for table in self.tables.values() for block in table}
        seats: list[Seat | None] = [None] * self.slots
        for life, slot, _ in self.running:
            seats[slot] = _seat(life, slot, record)
        if said:
            snapshot = Snapshot(
                said=f"{'; '.join(said)}.",
                record=record,
                seats=tuple(seats),
                tables=self.tables,
                taken=frozenset(now - owned),
                **self._queue(),
            )
            self.snapshots.append(snapshot)

    def _look(self) -> None:
        """See the engine while its step runs."""
        scheduler = self.engine.scheduler
        self.running = [(life, life.slot, life.computed) for life in scheduler.running]
        self.waiting = list(scheduler.waiting)
        self.tables = {id: tuple(table) for id, table in self.pool.tables.items()}

    def _queue(self) -> dict:
        """Who has arrived and waits, and how many are yet to arrive."""
        lives = [s for s in self.engine.sequences.values() if s.status == "waiting"]
        here = sorted((s for s in lives if s.arrival <= self.engine.now), key=lambda s: s.arrival)
        return {"queue": tuple(s.id for s in here), "to_come": len(lives) - len(here)}

    def _clauses(self, record: StepRecord | None, before: Snapshot) -> list[str]:
        """What happened in this step and why, most telling first."""
        lives, said = self.engine.sequences, []
        refused = [i for i, s in lives.items() if s.status == "refused" and i not in self.told]
        self.told.update(refused)
        said += [lives[id].reason.rstrip(".") for id in refused]
        if record is None:
            return said
        idle = record.start - before.record.end if before.record and not self.seated else 0
        if idle > record.seconds / 2:  # less lies between any two steps
            said.append(f"the engine was idle for {say(idle * 1e3)} ms")
        for id in record.preempted:
            held = many(len(before.tables.get(id, ())), "block")
            said.append(
                f"blocks ran out, so {id} was preempted and gave up {held}: its tokens are kept, "
                "its KV will be computed again"
            )
        said += self._admitted()
        said += _worked(record)
        if record.finished:
            said.append(f"{names(record.finished)} finished")
        if self.waiting and self.waiting[0].id not in record.preempted:
            said.append(f"{self.waiting[0].id} waits: {self._obstacle(record)}")
        return said

    def _admitted(self) -> list[str]:
        """Who has come in, and what of it was there before."""
        new = [(life, computed) for life, _, computed in self.running if life.id not in self.seated]
        fresh = [life.id for life, _ in new if not life.preemptions]
        again = [life.id for life, _ in new if life.preemptions]
        said = [f"{names(fresh)} {verb(fresh, 'was', 'were')} admitted"] if fresh else []
        if again:
            said.append(f"{names(again)} {verb(again, 'is', 'are')} back after preemption")
        return said + [
            f"{life.id} shares {many(computed // self.pool.block_size, 'block')} with KV of its "
            "first tokens"
            for life, computed in new
            if computed
        ]

    def _obstacle(self, record: StepRecord) -> str:
        """Why the head of the queue was not admitted in this step."""
        scheduler, head = self.engine.scheduler, self.waiting[0]
        batched = isinstance(scheduler, BatchScheduler)
        if len(self.running) == self.slots:
            return "every slot is taken"
        if batched and self.seated:
            return "the batch is closed until its last request is done"
        if record.preempted:
            return "blocks ran out in this step"
        fed = record.prompt_tokens + record.decode_tokens
        if fed >= getattr(scheduler, "token_budget", float("inf")):
            return f"the step's budget of {say(scheduler.token_budget)} tokens is spent"
        whole = isinstance(self.pool, ReservingAllocator)
        needed = self.pool.blocks_for(head.max_length if batched or whole else len(head.tokens))
        free = self.pool.num_blocks - len({b for table in self.tables.values() for b in table})
        piece = " in one piece" if whole else ""
        return f"it needs {many(needed, 'block')}{piece}, and {free} {verb(free, 'is', 'are')} free"


def names(ids: Sequence[Hashable]) -> str:
    """A list as prose has it, shortened if long."""
    shown = [str(id) for id in ids]
    if len(shown) > MOST_NAMED:
        shown = [*shown[: MOST_NAMED - 1], f"{len(shown) - MOST_NAMED + 1} more"]
    return " and ".join(filter(None, [", ".join(shown[:-1]), *shown[-1:]]))


def many(count: int, noun: str) -> str:
    """A number with its noun."""
    return f"{say(count)} {noun}{'' if count == 1 else 's'}"


def verb(subject: int | Sequence, one: str, more: str) -> str:
    """The form that fits how many there are."""
    return one if subject == 1 or (not isinstance(subject, int) and len(subject) == 1) else more


def _seat(life: Life, slot: int, record: StepRecord) -> Seat:
    row = next((row for row in record.rows if row.slot == slot), None)
    return Seat(
        id=life.id,
        kind=row.kind if row else "idle",
        fed=row.tokens if row else 0,
        prompt=len(life.request.prompt),
        cached=life.computed,
        output=len(life.output),
        max_tokens=life.request.max_tokens,
        finished=life.id in record.finished,
    )


def _worked(record: StepRecord) -> list[str]:
    """Who prefilled, decoded, or was padding."""
    said = []
    decoding = [row.id for row in record.rows if row.kind == "decode"]
    prefilling = [row for row in record.rows if row.kind == "prefill"]
    padding = [row.id for row in record.rows if row.kind == "padding"]
    if prefilling:
        tokens = many(record.prompt_tokens, "token")
        ids = [row.id for row in prefilling]
        chunks = [id for id in ids if id not in dict(record.emitted)]
        who = f"{names(chunks)} " if chunks != ids else ""
        chunk = f", {who}only a chunk of its prompt" if chunks else ""
        said.append(f"{names(ids)} {verb(ids, 'prefills', 'prefill')} {tokens}{chunk}")
        if thrown := sum(row.padding for row in prefilling):
            said.append(f"{many(thrown, 'token')} of padding make their prompts equally long")
    if decoding:
        each = verb(decoding, "decodes one token", "decode one token each")
        said.append(f"{names(decoding)} {each}")
    if padding:
        said.append(
            f"{names(padding)} {verb(padding, 'is', 'are')} done, and padding until all are"
        )
    return said
