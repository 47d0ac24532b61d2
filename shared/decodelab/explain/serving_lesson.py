"""Lesson 4's lab: engines as servers in processes of their own, and a client that loads them.

Every load test is stored in its cell's output, so that a grader replays it without any server.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from decodelab.explain.lesson import Lesson, device_name
from decodelab.explain.progress import counted
from decodelab.measure import save_pretrained, smollm2
from decodelab.measure.device import cpu_name
from decodelab.serve import Request, scrape
from decodelab.serve.launch import ADVICE, Endpoint, Program, Server, engines, launch
from decodelab.serve.load_result import LoadResult, Record

RECORDED = Path(__file__).parent / "recorded" / "endpoints" / "vllm_cpu.json"
TERMS = ("queue", "prefill", "decode", "http and client")
CONTEXT = 2048  # tokens a sequence that the servers are started for


class ServingLesson(Lesson):
    """A lesson whose engines stand behind HTTP, as users meet them.

    On a CPU each server leaves one core to the client. Servers end with the notebook's kernel. The
    environment variable DECODELAB_OTHER_ENGINE names the one to compare with, such as vllm or none.
    """

    def __init__(self, name: str, shape: str | None = None) -> None:
        super().__init__(name, shape)
        self._server: Server | None = None
        self._other: Server | Endpoint | None = None

    @property
    def live(self) -> bool:
        """False while a grader replays what was measured: then no server is started."""
        return not self._replay

    @contextlib.contextmanager
    def text_server(self) -> Iterator[str | None]:
        """A server of SmolLM2-135M-Instruct's real weights, while the `with` lasts: its URL.

        None, and a sentence, where the weights can't be had.
        """
        if not self.live:
            yield None
            return
        try:
            weights = smollm2()
        except ValueError as error:
            print(error)
            yield None
            return
        with launch("decodelab", weights, threads=self._threads(), context=CONTEXT) as server:
            yield server.url

    def start(self, **settings: int) -> None:
        """Start the course's engine on this lesson's shape, in place of the one that runs.

        `settings` are `launch`'s: max_batch, token_budget.
        """
        if not self.live:
            return
        if self._server is not None:
            self._server.stop()
        self._server = self._launch("decodelab", **settings)

    def rival(self, **settings: int) -> str | None:
        """Find or start another engine: its name, or None where a recorded run must do."""
        found = self.stored("other engine", lambda: self._find_other(**settings))
        if found["kind"]:
            print(f"The other engine: {found['kind']} {found['version']}.")
            return found["kind"]
        print("No other engine is installed here, so the next cells show a recorded run.")
        print(f"vLLM: {ADVICE['vllm']}\nHugging Face: {ADVICE['transformers']}")
        return None

    def load(self, name: str, requests: Iterable[Request], users: int | None = None) -> LoadResult:
        """Load our server: with `users` in a closed loop, else each request at its arrival."""
        return self._load(name, self._server, requests, users)

    def compare(
        self, name: str, requests: Iterable[Request], users: int
    ) -> tuple[LoadResult, LoadResult]:
        """The same requests to our server and to the other engine, in turns, each twice.

        The faster of each two counts: neighbours only ever add time. Without another engine both
        results are recorded ones, and a sentence says of what.
        """
        if self.live and self._other is None:
            ours, theirs = recorded_pair()
            print(f"Recorded, not measured here: {ours.about['date']}, {ours.about['device']}.")
            return ours, theirs
        requests = tuple(requests)
        pairs = [
            [
                self._load(f"{name}, {whose} {turn}", server, requests, users)
                for whose, server in (("ours", self._server), ("theirs", self._other))
            ]
            for turn in (1, 2)
        ]
        ours, theirs = (min(runs, key=lambda run: run.seconds) for runs in zip(*pairs, strict=True))
        return ours, theirs

    # Servers

    def _threads(self) -> int | None:
        """All cores but one on a CPU: the client needs it."""
        return max(1, (os.cpu_count() or 2) - 1) if self.device.type == "cpu" else None

    def _device(self) -> str:
        """What the engines run on; on a CPU with their threads, which are not the notebook's."""
        threads = self._threads()
        return f"{cpu_name()}, threads: {threads}" if threads else device_name(self.device)

    def _launch(self, kind: str, **settings: int) -> Server:
        server = launch(
            kind,
            self._folder(),
            threads=self._threads(),
            context=CONTEXT,
            dtype=str(self.dtype).removeprefix("torch."),
            **settings,
        )
        print(f"{kind} {server.version} answers at {server.url}, {settings}")
        return server

    def _folder(self) -> Path:
        """This lesson's random weights as a folder that every engine reads."""
        if not hasattr(self, "_files"):
            self._files = tempfile.TemporaryDirectory(prefix="decodelab-")
            save_pretrained(self.shape, self._files.name, dtype=self.dtype)
        return Path(self._files.name)

    def _find_other(self, **settings: int) -> dict[str, str]:
        wanted = os.environ.get("DECODELAB_OTHER_ENGINE")
        for found in engines():
            if found.kind == "decodelab" or wanted not in (None, found.kind):
                continue
            if isinstance(found, Program):
                try:
                    self._other = self._launch(found.kind, **settings)
                except RuntimeError as error:  # installed, and not able to run: the next, then
                    print(str(error)[-500:])
                    continue
            else:
                self._other = found
                print(f"It serves {found.model}, which need not be this lesson's weights.")
            return {"kind": self._other.kind, "version": self._other.version}
        return {"kind": "", "version": ""}

    def _load(
        self,
        name: str,
        server: Server | Endpoint | None,
        requests: Iterable[Request],
        users: int | None,
    ) -> LoadResult:
        requests = tuple(requests)
        if self.live and server is None:
            raise ValueError("No server runs yet: run the cell with lab.start(...) first.")

        def run() -> dict:
            from decodelab.serve.loadtest import closed_loop, open_loop  # needs the extra `serve`

            about = {"device": self._device(), "shape": self.shape_name}
            about |= {"version": server.version}  # not every server tells it
            with counted(len(requests), "request") as tell:
                how = {"progress": tell, "about": about}
                if users is None:
                    return packed(open_loop(server.url, requests, **how))
                return packed(closed_loop(server.url, requests, users, **how))

        result = unpacked(self.stored(name, run))
        for error in sorted({record.error for record in result.unfinished}):
            print(f"{name}: {error}")
        return result


def packed(result: LoadResult) -> dict:
    """A load test as plain JSON, small in a saved notebook: a line a request, gaps in 0.1 ms."""

    def line(record: Record) -> str:
        ticks = [round(1e4 * moment) for moment in (record.due, *record.token_times)]
        gaps = [later - earlier for earlier, later in itertools.pairwise(ticks)]
        sent, prompt = round(record.sent, 4), record.prompt_tokens
        values = [record.id, ticks[0], sent, prompt, record.status, record.error, gaps]
        return json.dumps(values, separators=(",", ":"))

    names = (*scrape.STAGES.values(), scrape.E2E)
    server = {key: value for key, value in result.server.items() if key.startswith(names)}
    fields = {f.name: getattr(result, f.name) for f in dataclasses.fields(result)}
    return {**fields, "records": [line(record) for record in result.records], "server": server}


def unpacked(fields: dict) -> LoadResult:
    """The load test that `packed` wrote down."""

    def record(line: str) -> Record:
        id, due, sent, prompt, status, error, gaps = json.loads(line)
        _, *times = itertools.accumulate([due, *gaps])
        return Record(
            id=id,
            due=due / 1e4,
            sent=sent,
            token_times=tuple(moment / 1e4 for moment in times),
            prompt_tokens=prompt,
            output_tokens=len(times),
            status=status,
            error=error,
        )

    return LoadResult(**{**fields, "records": tuple(map(record, fields["records"]))})


def difference(ours: LoadResult, theirs: LoadResult) -> dict[str, float]:
    """Ours minus theirs, mean seconds a request, term by term.

    A server without vLLM's metrics shows its client two terms: what comes before the first token
    stands under prefill, what comes after it under decode.
    """
    a, b = ours.terms(), theirs.terms()
    if set(a) != set(TERMS) or set(b) != set(TERMS):
        a, b = seen_by_client(ours), seen_by_client(theirs)
    return {name: a[name] - b[name] for name in TERMS}


def seen_by_client(result: LoadResult) -> dict[str, float]:
    """The terms of `difference` where only a client's clock is at hand."""
    first, whole = result.ttft.mean, result.e2e.mean
    return {"queue": 0.0, "prefill": first, "decode": whole - first, "http and client": 0.0}


def recorded_pair() -> tuple[LoadResult, LoadResult]:
    """Our engine and vLLM under the same load, recorded; `about` says when and on what."""
    pair = json.loads(RECORDED.read_text(encoding="utf-8"))
    return unpacked(pair["ours"]), unpacked(pair["theirs"])
