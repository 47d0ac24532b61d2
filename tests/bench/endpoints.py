"""Our endpoint beside vLLM's and Hugging Face's: same weights, same client, same trace, in one run.

`python tests/bench/endpoints.py [--quick] [--engines NAME ...] [--json FILE]`. A stretch of the
Azure conversation trace, all at once and then at a rate that loads ours to 0.7. All are up at the
same time and take turns, so that what else a shared machine does meets each alike; of each the
round of median length counts. The terms are the servers' own means, and what remains to the client.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import tempfile
import urllib.request
import warnings
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path

import torch
from decodelab.measure import pick_device, pick_dtype, save_pretrained
from decodelab.predict import SHAPES
from decodelab.serve import Request, azure
from decodelab.serve.launch import Server, engines, launch
from decodelab.serve.loadtest import Client, LoadResult, connect, open_loop

LOAD = 0.7  # the rate, as a share of the requests per second that ours served at once
SCALE = 8  # lengths of the trace are divided by this
LETTERS = 26  # prompts are of the bytes a to z: the same tokens whether sent as ids or as text
COMPARED, ANSWER = 4, 8  # prompts whose greedy answers must be the same, and their tokens
TERMS = ("queue", "prefill", "decode", "http and client")


def letters(request: Request, turn: int = 0) -> Request:
    """With a prompt of letters, another one each `turn`, which no prefix cache has seen."""
    prompt = [ord("a") + (id + turn) % LETTERS for id in request.prompt]
    return replace(request, prompt=prompt)


def text(ids: list[int]) -> str:
    """What a tokenizer of bytes makes `ids` of."""
    return bytes(ids).decode("ascii")


def answers(client: Client, requests: Sequence[Request]) -> list[str]:
    """The text that a server gives for each prompt, greedily."""
    found = []
    for request in requests[:COMPARED]:
        body = json.loads(client.body(replace(request, max_tokens=ANSWER))) | {"stream": False}
        body.pop("stream_options", None)
        ask = urllib.request.Request(
            f"{client.url}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(ask) as answer:
            found.append(json.load(answer)["choices"][0]["text"])
    return found


def rounds(
    clients: dict[str, Client], requests: Sequence[Request], count: int, first: int
) -> dict[str, LoadResult]:
    """Each engine's round of median length, of `count`; they take turns, in both directions."""
    results: dict[str, list[LoadResult]] = {name: [] for name in clients}
    for turn in range(count):
        for name in reversed(clients) if turn % 2 else clients:
            own = [letters(request, first + turn) for request in requests]
            results[name].append(open_loop(clients[name], own, progress=False))
    return {
        name: sorted(own, key=lambda result: result.seconds)[count // 2]
        for name, own in results.items()
    }


def table(title: str, results: dict[str, LoadResult]) -> list[dict]:
    """Print a row per engine, and return them; a ratio above 1 means that ours is better."""
    print(f"\n{title}\nengine        tokens/s   ratio  TTFT p50, p95 s  TPOT p50, p95 ms   E2E s"
          "  ratio = queue prefill  decode    http  client CPU  failed")  # fmt: skip
    ours, rows = next(iter(results.values())), []
    for name, result in results.items():
        terms = result.terms()
        row = {
            "engine": name,
            "seconds": result.seconds,
            "tokens_per_second": result.tokens_per_second,
            "tokens_ratio": ours.tokens_per_second / result.tokens_per_second,
            "e2e_ratio": result.e2e.mean / ours.e2e.mean,
            "ttft": [result.ttft.p50, result.ttft.p95],
            "tpot": [result.tpot.p50, result.tpot.p95],
            "e2e_mean": result.e2e.mean,
            "terms": terms,
            "cpu_share": result.cpu_share,
            "lag_p99": result.lag.p99,
            "prompt_tokens": sum(record.prompt_tokens for record in result.records),
            "output_tokens": sum(record.output_tokens for record in result.records),
            "failed": [record.error for record in result.unfinished],
        }
        rows.append(row)
        shown = [f"{terms[term]:8.3f}" if term in terms else "       -" for term in TERMS]
        print(
            f"{name:12}{result.tokens_per_second:>10.1f}{row['tokens_ratio']:>8.2f}"
            f"{result.ttft.p50:>9.2f}{result.ttft.p95:>8.2f}"
            f"{result.tpot.p50 * 1e3:>10.0f}{result.tpot.p95 * 1e3:>8.0f}"
            f"{result.e2e.mean:>10.3f}{row['e2e_ratio']:>7.2f}{''.join(shown)}{result.cpu_share:>11.1%}"
            f"{len(result.unfinished):>8}",
            flush=True,
        )
    return rows


def start(args: argparse.Namespace, folder: Path, stack: contextlib.ExitStack) -> dict[str, Server]:
    """Every engine that is here, one after the other, ours first."""
    here = [found.kind for found in engines(ports=())]
    servers = {}
    for kind in args.engines or here:
        print(f"starting {kind}", flush=True)
        servers[kind] = stack.enter_context(
            launch(
                kind,
                folder,
                max_batch=args.slots,
                token_budget=args.budget,
                context=args.context,
                threads=args.threads,
            )
        )
    return servers


def run(args: argparse.Namespace) -> dict:
    device = pick_device()
    shape = SHAPES["25M" if args.quick else "SmolLM2-135M"]
    requests = azure("conversation", args.requests, args.seed, scale=SCALE, vocab=LETTERS)
    at_once = [replace(request, arrival=0.0) for request in requests]
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        save_pretrained(shape, folder, dtype=pick_dtype(device))
        servers = start(args, Path(folder), stack)
        clients = {name: connect(server.url, text=text) for name, server in servers.items()}
        said = [answers(client, [letters(r) for r in requests]) for client in clients.values()]
        result = {
            "date": date.today().isoformat(),
            "device": device_name(device),
            "torch": torch.__version__,
            "engines": {name: server.version for name, server in servers.items()},
            "prompts": {name: client.dialect for name, client in clients.items()},
            "same_answers": all(own == said[0] for own in said),
            "model": f"{shape.parameters / 1e6:.0f}M parameters, {pick_dtype(device)}, random",
            "settings": {key: str(value) for key, value in vars(args).items()},
        }
        print(json.dumps(result, indent=1))
        for client in clients.values():  # compile, allocate, fill what is filled once
            open_loop(client, [letters(request, 99) for request in at_once], progress=False)
        found = rounds(clients, at_once, args.rounds, first=0)
        workload = next(iter(found.values())).about["workload"]
        result["at_once"] = table(f"All at once: {workload}", found)
        rate = LOAD * next(iter(found.values())).requests_per_second
        stretch = (len(requests) - 1) / rate / requests[-1].arrival
        spaced = [replace(request, arrival=request.arrival * stretch) for request in requests]
        found = rounds(clients, spaced, args.rounds, first=args.rounds)
        result["at_rate"] = table(f"At {rate:.2f} requests/s: {workload}", found)
    return result


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":")[1].strip()
    return platform.processor() or platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a shape of 25 million parameters")
    parser.add_argument("--engines", nargs="+", help="all that are here by default; ours first")
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--budget", type=int, default=256, help="tokens in a step")
    parser.add_argument("--context", type=int, default=2048, help="tokens of a sequence, at most")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write all figures here")
    args = parser.parse_args()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        result = run(args)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
