"""Serving on this device, in one run: our policies, Hugging Face's and vLLM's continuous batching.

`python tests/bench/serving.py [--quick] [--vllm VENV] [--json FILE]`. Same weights, same requests:
a stretch of the Azure conversation trace, all at once and then at a rate. All take turns, so that
what else a shared machine does meets each alike; the round of median length counts. Then the
control: the gain of continuous over static that lengths alone foretell, and the measured one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # idle threads of one engine yield to another

import torch
import transformers
from decode import TINY, peer
from decodelab.measure import Decoder, ModelRunner, decode, pick_device, pick_dtype
from decodelab.predict import SHAPES
from decodelab.serve import (
    Engine,
    Latencies,
    Request,
    azure,
    offline,
    one_long_in_eight,
    steps_from_lengths,
    summarize,
)

POLICIES = ("static", "dynamic", "continuous")
SCALE, LOAD = 8, 0.7  # lengths of the trace / 8; arrivals at 0.7 of what continuous served at once
CONTROL_SLOTS = 8
VLLM_SCRIPT = Path(__file__).with_name("vllm_cpu.py")


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one system made of the requests: tokens and their times, in seconds from the start."""

    tokens: list[list[int]]
    times: list[list[float]]
    arrivals: list[float]
    useful_rows: float = math.nan
    scheduler_seconds: float = math.nan
    scheduler_share: float = math.nan

    @property
    def seconds(self) -> float:
        return max(own[-1] for own in self.times) - self.arrivals[0]

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.tokens)) / self.seconds

    @property
    def ttft(self) -> Latencies:
        pairs = zip(self.times, self.arrivals, strict=True)
        return Latencies(tuple(own[0] - arrival for own, arrival in pairs))

    @property
    def tpot(self) -> Latencies:
        several = [own for own in self.times if len(own) > 1]
        return Latencies(tuple((own[-1] - own[0]) / (len(own) - 1) for own in several))


System = Callable[[Sequence[Request]], Run]


def ours(runner: ModelRunner, policy: str, slots: int, budget: int) -> System:
    """Our engine; idle time between arrivals is skipped, which changes no latency."""

    def serve(requests: Sequence[Request]) -> Run:
        engine = Engine(runner, policy, slots, budget)
        tokens = engine.run(requests)
        found = summarize(engine.trace, engine.sequences, slots=slots)
        sequences = [engine.sequences[request.id] for request in requests]
        return Run(
            tokens=[tokens[request.id] for request in requests],
            times=[sequence.token_times for sequence in sequences],
            arrivals=[sequence.arrival for sequence in sequences],
            useful_rows=found.useful_rows,
            scheduler_seconds=found.scheduler_seconds,
            scheduler_share=found.scheduler_seconds * found.steps
            / sum(record.seconds for record in engine.trace),
        )  # fmt: skip

    return serve


def hugging_face(model: torch.nn.Module, slots: int, budget: int, tokens: int) -> System:
    """What `generate_batch` does, which has one length for all, with a length for each request.

    Setting up its manager isn't counted.
    """
    page = 16  # our block size, and faster here than its default of 256
    config = transformers.ContinuousBatchingConfig(
        page_size=page,
        num_blocks=-(-tokens // page) + slots,
        max_batch_tokens=budget,
        max_requests_per_batch=slots,
        allow_block_sharing=False,
    )
    generation = transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)

    @torch.no_grad()
    def serve(requests: Sequence[Request]) -> Run:
        with model.continuous_batching_context_manager(
            generation, continuous_batching_config=config
        ) as manager:
            start = time.perf_counter()
            for request in requests:
                time.sleep(max(0.0, start + request.arrival - time.perf_counter()))
                manager.add_request(
                    list(request.prompt),
                    str(request.id),
                    request.max_tokens,
                    record_timestamps=True,
                    eos_token_id=-1,
                )
            found = {}
            while len(found) < len(requests):
                result = manager.get_result(timeout=60)
                if result is None or result.error:
                    raise RuntimeError(f"Hugging Face stopped: {result and result.error}")
                if result.is_finished():
                    found[result.request_id] = result
        results = [found[str(request.id)] for request in requests]
        return Run(
            tokens=[result.generated_tokens for result in results],
            times=[[moment - start for moment in result.timestamps] for result in results],
            arrivals=[request.arrival for request in requests],
        )

    return serve


@contextlib.contextmanager
def vllm(venv: Path, folder: str, slots: int, budget: int, context: int) -> Iterator[System]:
    """vLLM in its own process and venv (`make vllm` makes one), loaded once, fed a round a line."""
    command = [venv / "bin/python", VLLM_SCRIPT, folder, slots, budget, context]
    environment = os.environ | {"PYTHONPATH": "", "OMP_NUM_THREADS": str(torch.get_num_threads())}
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment,
        ) as process,
    ):

        def serve(requests: Sequence[Request]) -> Run:
            rows = [(request.arrival, request.prompt, request.max_tokens) for request in requests]
            print(json.dumps(rows), file=process.stdin, flush=True)
            for line in process.stdout:
                if line.startswith("RESULT "):
                    answer = json.loads(line.removeprefix("RESULT "))
                    return Run(arrivals=[request.arrival for request in requests], **answer)
            log.seek(0)
            raise RuntimeError(f"vLLM stopped: {log.read()[-3000:].decode(errors='replace')}")

        yield serve
        process.stdin.close()


def vllm_version(venv: Path) -> str:
    ask = "import importlib.metadata as m; print(m.version('vllm-cpu'))"
    answer = subprocess.run([venv / "bin/python", "-c", ask], capture_output=True, text=True)
    return answer.stdout.strip()


def rounds(systems: dict[str, System], requests: Sequence[Request], count: int) -> dict[str, Run]:
    """Each system's round of median length, of `count`; they take turns, in both directions."""
    runs: dict[str, list[Run]] = {name: [] for name in systems}
    for number in range(count):
        for name in reversed(systems) if number % 2 else systems:
            runs[name].append(systems[name](requests))
    return {
        name: sorted(own, key=lambda run: run.seconds)[count // 2] for name, own in runs.items()
    }


def alone(model: Decoder, requests: Sequence[Request]) -> list[list[int]]:
    """The tokens of `decode`, which has no scheduler and no blocks."""
    tokens = []
    for first in range(0, len(requests), 16):
        group = requests[first : first + 16]
        prompts, wanted = [r.prompt for r in group], [r.max_tokens for r in group]
        tokens += decode(model, prompts, wanted)
    return tokens


def table(title: str, runs: dict[str, Run], expected: list[list[int]]) -> list[dict]:
    """Print one row per system, and return them."""
    print(f"\n{title}")
    print(
        "system        tokens/s  useful   TTFT p50, p95 s  TPOT p50, p95 ms  sched us, share  same"
    )
    rows = []
    for name, run in runs.items():
        pairs = zip(run.tokens, expected, strict=True)
        same = sum(own == right for own, right in pairs) / len(expected)
        row = {
            "seconds": run.seconds,
            "tokens_per_second": run.tokens_per_second,
            "useful_rows": run.useful_rows,
            "ttft_p50": run.ttft.p50,
            "ttft_p95": run.ttft.p95,
            "tpot_p50": run.tpot.p50,
            "tpot_p95": run.tpot.p95,
            "scheduler_seconds": run.scheduler_seconds,
            "scheduler_share": run.scheduler_share,
            "same": same,
        }
        known = {key: value for key, value in row.items() if not math.isnan(value)}
        rows.append({"system": name, **known})
        print(
            f"{name:12}{run.tokens_per_second:>10.1f}{share(run.useful_rows, 0):>8}"
            f"{run.ttft.p50:>10.2f}{run.ttft.p95:>9.2f}{run.tpot.p50 * 1e3:>10.0f}"
            f"{run.tpot.p95 * 1e3:>9.0f}{microseconds(run.scheduler_seconds):>10}"
            f"{share(run.scheduler_share, 1):>7}{same:>6.0%}",
            flush=True,
        )
    return rows


def share(value: float, digits: int) -> str:
    return "-" if math.isnan(value) else f"{value:.{digits}%}"


def microseconds(value: float) -> str:
    return "-" if math.isnan(value) else f"{value * 1e6:.0f}"


def control(runner: ModelRunner, budget: int, count: int, mix: Sequence) -> dict:
    """The gain of continuous over static on 32 requests: foretold from lengths, and measured."""
    requests = offline(mix, 32, vocab=runner.vocab)
    systems = {
        policy: ours(runner, policy, CONTROL_SLOTS, budget) for policy in ("static", "continuous")
    }
    runs = rounds(systems, requests, count)
    lengths = [request.max_tokens for request in requests]
    steps = [steps_from_lengths(lengths, CONTROL_SLOTS, policy) for policy in systems]
    seconds = [run.seconds for run in runs.values()]
    foretold, measured = steps[0] / steps[1], seconds[0] / seconds[1]
    print(
        f"outputs {sorted(set(lengths))}: {steps[0]} / {steps[1]} steps foretell {foretold:.2f}x; "
        f"{seconds[0]:.2f} / {seconds[1]:.2f} s make {measured:.2f}x; ratio "
        f"{measured / foretold:.2f}",
        flush=True,
    )
    return {"steps": steps, "seconds": seconds, "foretold": foretold, "measured": measured}


def run(args: argparse.Namespace) -> dict:
    device = pick_device()
    dtype = pick_dtype(device)
    shape = TINY if args.quick else SHAPES["SmolLM2-135M"]
    theirs = peer(shape, dtype, device)
    requests = azure("conversation", args.requests, args.seed, scale=SCALE, vocab=shape.vocab)
    context = max(len(request.prompt) + request.max_tokens for request in requests)
    blocks = args.slots * -(-context // 16)  # room for the longest in every slot
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        theirs.save_pretrained(folder)
        model = Decoder.from_pretrained(folder, device=device, dtype=dtype)
        runner = ModelRunner(model, max(blocks, 64))
        systems = {policy: ours(runner, policy, args.slots, args.budget) for policy in POLICIES}
        theirs.set_attn_implementation("sdpa")
        systems["HF paged"] = hugging_face(theirs, args.slots, args.budget, blocks * 16)
        if args.vllm:
            parts = (args.vllm, folder, args.slots, args.budget, shape.max_context)
            systems["vLLM"] = stack.enter_context(vllm(*parts))
        for system in systems.values():  # warm up: first calls allocate, compile, load
            system(offline([(64, 4)], args.slots, vocab=shape.vocab))
        return report(args, systems, runner, requests)


def report(
    args: argparse.Namespace,
    systems: dict[str, System],
    runner: ModelRunner,
    requests: Sequence[Request],
) -> dict:
    """Both tables and the controls, printed as they come."""
    result = {
        "date": date.today().isoformat(),
        "device": device_name(runner.model.device),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "vllm": args.vllm and vllm_version(args.vllm),
        "settings": {name: getattr(args, name) for name in ("slots", "budget", "requests", "seed")},
        "parameters": runner.model.shape.parameters,
    }
    print(json.dumps(result))
    prompts, outputs = (
        statistics.fmean(lengths)
        for lengths in zip(*((len(r.prompt), r.max_tokens) for r in requests), strict=True)
    )
    what = (
        f"{len(requests)} requests, means {prompts:.0f} in, {outputs:.0f} out, {args.slots} slots"
    )
    expected = alone(runner.model, requests)
    at_once = [Request(r.prompt, r.max_tokens, id=r.id) for r in requests]
    runs = rounds(systems, at_once, args.rounds)
    result["at_once"] = table(f"All at once: {what}", runs, expected)
    rate = LOAD * len(requests) / runs["continuous"].seconds
    stretch = (len(requests) - 1) / rate / requests[-1].arrival
    spread = [
        Request(r.prompt, r.max_tokens, id=r.id, arrival=r.arrival * stretch) for r in requests
    ]
    result["rate"] = rate
    runs = rounds(systems, spread, args.rounds)
    result["at_rate"] = table(f"At {rate:.2f} requests/s: {what}", runs, expected)
    print("\nContinuous over static, 32 requests in 8 slots")
    mixes = {"mixed": one_long_in_eight(), "equal": [(16, 10)]}
    for name, mix in mixes.items():
        result[name] = control(runner, args.budget, args.rounds, mix)
    return result


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return f"{line.split(':')[1].strip()}, {torch.get_num_threads()} threads"
    return platform.processor() or platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny shape")
    parser.add_argument("--vllm", type=Path, help="a venv with vLLM, as of `make vllm`")
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--budget", type=int, default=256, help="tokens in a continuous step")
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write all figures here")
    args = parser.parse_args()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()
    result = run(args)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
