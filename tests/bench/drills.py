"""Record the diagnosis drills: two readings of /metrics of our server in each of six situations.

Run as `python tests/bench/drills.py [NAME ...]` on a quiet machine: it writes what
decodelab.explain.drills shows, and prints it. The names are in no order, so that they tell nothing.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date

import torch
from decodelab.explain.drills import Drill
from decodelab.explain.style import say
from decodelab.serve import make_requests, poisson, scrape
from decodelab.serve.launch import Server, launch
from decodelab.serve.load_result import LoadResult
from decodelab.serve.loadtest import Client, closed_loop, connect, open_loop
from serving import device_name

MODEL = "25M"  # a shape: its weights are random, which no speed depends on
WARM, WINDOW, AFTER = 8.0, 12.0, 4.0  # seconds of load before, between and after the two readings
CHAT = (64, 32)  # tokens of a prompt, and of its answer
AMPLE = 256  # KV blocks, of 16 tokens


@dataclass(frozen=True, kw_only=True)
class Situation:
    """A server, and the users who meet it.

    `patience`: seconds after which a user goes away without an answer; `wish`: what he asks for.
    """

    ails: str
    load: Callable[[Client], LoadResult]
    max_batch: int = 16
    token_budget: int = 256
    blocks: int = AMPLE
    patience: float = 600.0
    wish: str = ""


def arrivals(rate: float, *lengths: tuple[int, int]) -> Callable[[Client], LoadResult]:
    """Users who come at random, `rate` a second, with each of `lengths` in turn."""
    requests = poisson(rate, lengths, round(rate * (WARM + WINDOW + AFTER)))
    return lambda client: open_loop(client, requests, warmup=0, progress=False)


def one_by_one(count: int) -> Callable[[Client], LoadResult]:
    """A script that sends a request when the one before is answered."""
    requests = make_requests([CHAT] * count, [0.0] * count)
    return lambda client: closed_loop(client, requests, 1, warmup=0, progress=False)


SITUATIONS = {
    "d1": Situation(ails="batch limit", load=arrivals(5, CHAT), max_batch=2),
    "d2": Situation(ails="nothing", load=arrivals(2.5, CHAT)),
    "d3": Situation(
        ails="the load generator", load=one_by_one(70), wish=" Its owner wants 6 answers a second."
    ),
    "d4": Situation(ails="KV pool", load=arrivals(6, (48, 96)), max_batch=32, blocks=48),
    "d5": Situation(
        ails="clients give up", load=arrivals(1.2, CHAT, (64, 320), (64, 320)), patience=4
    ),
    "d6": Situation(ails="token budget", load=arrivals(1.6, CHAT, (1000, 16)), token_budget=8192),
}


def record(name: str, situation: Situation) -> Drill:
    """Load a server of its own, and read its /metrics twice."""
    settings = {"max_batch": situation.max_batch, "token_budget": situation.token_budget}
    pool = ("--blocks", str(situation.blocks))
    with (
        launch("decodelab", MODEL, threads=1, extra=pool, **settings) as server,
        ThreadPoolExecutor(1) as users,
    ):
        client = connect(server.url, timeout=situation.patience)
        loading = users.submit(situation.load, client)
        time.sleep(WARM)
        before, began = page(server.url), time.perf_counter()
        time.sleep(WINDOW)
        seconds, after = time.perf_counter() - began, page(server.url)
        return Drill(
            name=name,
            about=about(server),
            client=f"{said(situation)} {counted(loading.result())}{situation.wish}",
            seconds=round(seconds, 3),
            before=before,
            after=after,
        )


def said(situation: Situation) -> str:
    """What the server was told."""
    return (
        f"A server with {situation.max_batch} seats, a budget of {situation.token_budget} tokens a "
        f"step, and {situation.blocks} KV blocks of 16."
    )


def page(url: str) -> str:
    """/metrics as it is, but for the dates at which counters began, a quarter of its lines."""
    lines = scrape.fetch(url).splitlines(keepends=True)
    return "".join(line for line in lines if "_created" not in line)


def about(server: Server) -> dict[str, str]:
    """Whose pages these are."""
    return {
        "engine": f"{server.kind} {server.version}",
        "model": f"{MODEL} parameters",
        "device": f"{device_name(torch.device('cpu')).split(',')[0]}, 1 thread",
        "date": date.today().isoformat(),
    }


def counted(found: LoadResult) -> str:
    """What the client saw, in a sentence; not how it sent."""
    asked = f"The client asked {say(found.rate)} times a second" if found.rate else "A script asked"
    gone = len(found.unfinished)
    lost = f", {gone} of {len(found.records)} requests without a whole answer" if gone else ""
    ttft, itl = found.ttft, found.itl
    return (
        f"{asked} and got {say(found.requests_per_second)} answers a second{lost}: TTFT p50 "
        f"{say(ttft.p50)} s, p95 {say(ttft.p95)} s; gap between tokens p50 {say(itl.p50)} s, p99 "
        f"{say(itl.p99)} s."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(SITUATIONS), help="such as d1 d4")
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # of clients that give up, which is the point of one of them
    for name in args.names:
        drill = record(name, SITUATIONS[name])
        print(f"{drill.save()}: {SITUATIONS[name].ails}\n{drill}\n", flush=True)


if __name__ == "__main__":
    main()
