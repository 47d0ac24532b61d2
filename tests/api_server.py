"""A real server on a free port for the tests, and a look at whether anything is left in it."""

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import httpx
import uvicorn
from decodelab.predict import HARDWARE, SHAPES
from decodelab.serve import BlockAllocator, Engine, Result, RooflineRunner
from decodelab.serve.api import Server, create_app
from decodelab.serve.async_engine import AsyncEngine

SHAPE = replace(SHAPES["SmolLM2-135M"], vocab=256, max_context=4096)
H100 = HARDWARE["NVIDIA H100 SXM"]
PATIENCE = 20  # seconds until something that must happen counts as never


class Bytes:
    """A token is a byte; 0 ends an answer."""

    eos = frozenset({0})

    def encode(self, text):
        return list(text.encode())

    def decode(self, ids):
        return bytes(ids).decode(errors="replace")

    def chat(self, messages):
        if messages[0]["role"] == "assistant":
            raise ValueError("The chat template refuses these messages: the user speaks first.")
        return self.encode("".join(f"{m['role']}: {m['content']}\n" for m in messages))


class ToyRunner(RooflineRunner):
    """Sleeps `step_sleep` seconds a step and raises `broken`, if any; `says` what it answers."""

    def __init__(self, says="", num_blocks=512, step_sleep=0.0):
        super().__init__(SHAPE, H100, num_blocks)
        self.script, self.step_sleep = [*says.encode(), 0], step_sleep
        self.broken = None
        self.hold = threading.Event()  # a step waits for it
        self.hold.set()

    def run(self, work):
        assert self.hold.wait(PATIENCE)
        if self.broken:
            raise self.broken
        time.sleep(self.step_sleep)
        tokens, seconds = super().run(work)
        if len(self.script) > 1:
            place = [row.output_index % len(self.script) for row in work]
            tokens = [
                self.script[place] if row.sample else None
                for place, row in zip(place, work, strict=True)
            ]
        return Result(tokens, seconds)


@dataclass
class Running:
    """A server that runs in a thread of its own."""

    url: str
    engine: Engine
    serving: AsyncEngine
    server: uvicorn.Server
    loop: asyncio.AbstractEventLoop

    @property
    def runner(self) -> ToyRunner:
        """What computes."""
        return self.engine.runner

    def post(self, path: str, **body) -> httpx.Response:
        """One call; its answer may have any status."""
        return httpx.post(f"{self.url}{path}", json=body, timeout=PATIENCE)

    def metric(self, name: str, **labels: str) -> float:
        """The value of a metric of this full name, summed over its label sets that match."""
        from prometheus_client.parser import text_string_to_metric_families as parse

        text = httpx.get(f"{self.url}/metrics", timeout=PATIENCE).text
        return sum(
            sample.value
            for family in parse(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def tasks(self) -> int:
        """Tasks on the server's loop."""
        return len(asyncio.all_tasks(self.loop))

    def check_nothing_is_left(self, tasks: int) -> None:
        """All blocks free, no request, no connection, and `tasks` tasks again."""
        eventually(lambda: not self.serving.in_flight, "a request is left")
        eventually(lambda: not self.server.server_state.connections, "a connection is left")
        eventually(lambda: self.tasks() <= tasks, "a task is left")
        pool = self.engine.scheduler.allocator
        pool.check()
        assert pool.free_blocks == pool.num_blocks, "blocks leak"
        assert not self.engine.sequences
        assert not self.engine.unfinished
        assert not self.serving._tickets


def eventually(holds: Callable[[], bool], otherwise: str) -> None:
    """Wait until something holds; AssertionError when it never does."""
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.005)


def open_files() -> int:
    """File descriptors of this process, sockets among them."""
    return len(os.listdir("/proc/self/fd"))


@contextmanager
def serve(
    runner: ToyRunner | None = None,
    *,
    max_batch: int = 8,
    allocator: type[BlockAllocator] = BlockAllocator,
    drain_seconds: float = 5,
    **options,
) -> Iterator[Running]:
    """A server for a test, its model "toy"; shut down at the end, as by SIGTERM."""
    engine = Engine(runner or ToyRunner(), max_batch=max_batch, allocator=allocator)
    app = create_app(engine, Bytes(), model="toy", **options)
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        server = Server(uvicorn.Config(app, log_level="warning"), drain_seconds)
        thread = threading.Thread(target=server.run, args=[[listener]])
        thread.start()
        eventually(lambda: server.started, "the server doesn't start")
        serving = app.state.engine
        try:
            yield Running(url, engine, serving, server, serving._loop)
        finally:
            engine.runner.hold.set()
            server.should_exit = True
            thread.join(PATIENCE)
            assert not thread.is_alive(), "the server doesn't stop"
            assert not serving._thread.is_alive(), "the engine's thread is left"
