"""Decode speed on this device, in one run: ceilings, our steps, Hugging Face's, the fitted model.

`python tests/bench/decode.py [--quick] [--compile] [--json FILE]`. Random weights: speed does not
depend on them. Ours and Hugging Face's steps alternate in one process, on the same weights and
prompts. Milliseconds on a shared machine mean little: read the ratios.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path

import torch
import torch._inductor.config as inductor
import transformers
from decodelab.measure import (
    Calibration,
    Decoder,
    KVCache,
    StepTimeModel,
    calibrate,
    decode,
    measure_steps,
    pick_device,
    pick_dtype,
)
from decodelab.measure.device import element_bytes
from decodelab.measure.forward import decode_forward
from decodelab.predict import SHAPES, ModelShape, decode_step

CONTEXT, NEW, ROUNDS = 128, 17, 3  # 16 decode steps, centred on the context
SURFACE = [(b, s) for b in (1, 4, 16, 64) for s in (128, 512, 1024)]
COMPILE = {"freezing": True, "max_autotune": True, "max_autotune_gemm_backends": "CPP,ATEN"}
TINY = ModelShape(
    layers=4, hidden=128, heads=4, kv_heads=2, head_dim=32, ffn=384, vocab=4096, max_context=2048
)


def peer(shape: ModelShape, dtype: torch.dtype, device: torch.device) -> torch.nn.Module:
    """Hugging Face's own Llama of this shape, random weights."""
    config = transformers.LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab,
        rms_norm_eps=shape.norm_eps,
        max_position_embeddings=shape.max_context,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=shape.tied,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).to(device=device, dtype=dtype).eval()


class Stamps(transformers.StoppingCriteria):
    """Stops nothing; notes when each step ended."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)


def hugging_face_steps(
    model: torch.nn.Module, prompts: list[list[int]]
) -> tuple[list[float], list[list[int]]]:
    """Seconds of each decode step of `generate` with a static cache, and the new tokens."""
    ids, stamps = torch.tensor(prompts, device=model.device), Stamps()
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW,
        do_sample=False,
        cache_implementation="static",
        disable_compile=ids.device.type == "cpu",
        stopping_criteria=transformers.StoppingCriteriaList([stamps]),
    )
    return gaps(stamps.times), out[:, len(prompts[0]) :].tolist()


def our_steps(model: Decoder, prompts: list[list[int]]) -> tuple[list[float], list[list[int]]]:
    """Seconds of each decode step of `decode`, and the new tokens."""
    times: list[float] = []
    tokens = decode(model, prompts, NEW, on_step=lambda _: times.append(time.perf_counter()))
    return gaps(times), tokens


def gaps(times: list[float]) -> list[float]:
    return [later - earlier for earlier, later in zip(times, times[1:], strict=False)]


def compare(ours: Decoder, theirs: torch.nn.Module, batch: int) -> dict:
    """Median decode step of both, their rounds alternating, and the share of equal tokens."""
    generator = torch.Generator().manual_seed(batch)
    size = (batch, CONTEXT - NEW // 2)
    prompts = torch.randint(0, ours.shape.vocab, size, generator=generator).tolist()
    seconds: dict[str, list[float]] = {"ours": [], "hf": []}
    for _ in range(ROUNDS):
        steps, our_tokens = our_steps(ours, prompts)
        seconds["ours"] += steps
        steps, their_tokens = hugging_face_steps(theirs, prompts)
        seconds["hf"] += steps
    pairs = [pair for rows in zip(our_tokens, their_tokens, strict=True) for pair in zip(*rows)]  # noqa: B905
    mine, other = (statistics.median(seconds[name]) for name in ("ours", "hf"))
    same = sum(a == b for a, b in pairs) / len(pairs)
    return {"loop_seconds": mine, "hf_seconds": other, "hf_ratio": other / mine, "equal": same}


def batch_curve(
    model: Decoder, theirs: torch.nn.Module, batches: Sequence[int], ceilings: Calibration
) -> list[dict]:
    """One row per batch at CONTEXT: our step, MBU, roofline, ratio to Hugging Face."""
    rows = []
    for timing in measure_steps(model, [(b, CONTEXT) for b in batches]):
        floor = roofline(model, ceilings, timing.batch, CONTEXT)
        row = timing.as_dict() | {
            "mbu": floor.bytes / timing.seconds / ceilings.bandwidth,
            "roofline_seconds": floor.seconds,
        }
        rows.append(row | compare(model, theirs, timing.batch))
        print(
            f"{row['batch']:>4} {timing.seconds * 1e3:>9.1f} {row['mbu']:>6.0%} "
            f"{floor.seconds * 1e3:>9.1f} {timing.tokens_per_second:>8.0f} "
            f"{rows[-1]['loop_seconds'] * 1e3:>9.1f} {rows[-1]['hf_seconds'] * 1e3:>9.1f} "
            f"{rows[-1]['hf_ratio']:>6.2f} {rows[-1]['equal']:>6.0%}",
            flush=True,
        )
    return rows


def roofline(model: Decoder, ceilings: Calibration, batch: int, context: int):
    size = element_bytes(model.dtype)
    hardware = ceilings.to_hardware()
    return decode_step(model.shape, hardware, batch, context, size, size, ceilings.dtype)


def surface(model: Decoder, ceilings: Calibration, cells: list[tuple[int, int]]) -> dict:
    """Fit the additive model on the corners, score it and the roofline on what they never saw."""
    timings = list(measure_steps(model, cells))
    ends = [{min(n), max(n)} for n in ([t.batch for t in timings], [t.context for t in timings])]
    corners = [t for t in timings if t.batch in ends[0] and t.context in ends[1]]
    unseen = [t for t in timings if t not in corners]
    fitted = StepTimeModel.fit(model.shape, corners, ceilings, element_bytes(model.dtype))
    errors = [abs(error) for error in fitted.errors(unseen)]
    floors = [roofline(model, ceilings, t.batch, t.context).seconds / t.seconds for t in timings]
    return {
        "cells": [t.as_dict() for t in timings],
        "unseen_errors": fitted.errors(unseen),
        "unseen_median_error": statistics.median(errors),
        "unseen_worst_error": max(errors),
        "roofline_over_measured_max": max(floors),
    }


def compiled(shape: ModelShape, eager: Decoder, ceilings: Calibration) -> dict:
    """Batch 1 under torch.compile (frozen weights, tuned C++ GEMMs), alternating with eager."""
    plain = Decoder.random(shape, device=eager.device, dtype=eager.dtype, pack=False)
    fast = torch.compile(plain)
    caches = [KVCache(shape, 1, CONTEXT, eager.dtype, eager.device) for _ in range(2)]
    position = torch.tensor([[CONTEXT - 1]], device=eager.device)
    token = torch.ones_like(position)
    forward = decode_forward(eager, caches[1])
    calls: dict[str, Callable] = {
        "compiled": lambda: fast(token, position, caches[0].at(position, CONTEXT)),
        "eager": lambda: forward([1], [CONTEXT - 1], CONTEXT),
    }
    samples: dict[str, list[float]] = {name: [] for name in calls}
    # Patched, not passed as options: dynamo must see `freezing` too, or weights stay inputs.
    with inductor.patch(COMPILE), torch.no_grad():
        start = time.perf_counter()
        for _ in range(3):
            calls["compiled"]()
        compile_seconds = time.perf_counter() - start
        for name in [*calls] * 30:
            start = time.perf_counter()
            calls[name]()
            samples[name].append(time.perf_counter() - start)
    medians = {f"{name}_seconds": statistics.median(samples[name]) for name in calls}
    bytes_read = roofline(eager, ceilings, 1, CONTEXT).bytes
    mbu = bytes_read / medians["compiled_seconds"] / ceilings.bandwidth
    return medians | {"compile_seconds": compile_seconds, "mbu": mbu}


def run(args: argparse.Namespace) -> dict:
    device = pick_device()
    dtype = pick_dtype(device)
    shape = TINY if args.quick else SHAPES["SmolLM2-135M"]
    batches = (1, 4) if args.quick else (1, 2, 4, 8, 16, 32, 64)
    ceilings = calibrate(device, dtype)
    print(
        f"{ceilings.device}: {ceilings.bandwidth / 1e9:.1f} GB/s, {ceilings.flops / 1e9:.0f} "
        f"GFLOP/s {ceilings.dtype}, {ceilings.seconds_per_call * 1e6:.0f} us a call, ridge "
        f"{ceilings.ridge_point:.1f} FLOP/byte"
    )
    theirs = peer(shape, dtype, device)
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = Decoder.from_pretrained(folder, device=device, dtype=dtype)
    print("   B   step ms    MBU  roof. ms    tok/s   loop ms     HF ms  ratio  equal")
    result = {
        "date": date.today().isoformat(),
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "calibration": ceilings.as_dict(),
        "curve": batch_curve(ours, theirs, batches, ceilings),
        "surface": surface(ours, ceilings, SURFACE[:6] if args.quick else SURFACE),
        "calibration_after": calibrate(device, dtype).as_dict(),
    }
    print_surface(result)
    if args.compile:
        result["compiled"] = row = compiled(shape, ours, ceilings)
        print(
            f"compiled, B = 1: {row['compiled_seconds'] * 1e3:.1f} ms, MBU {row['mbu']:.0%}, after "
            f"{row['compile_seconds']:.0f} s; eager beside it {row['eager_seconds'] * 1e3:.1f} ms"
        )
    return result


def print_surface(result: dict) -> None:
    scores, after = result["surface"], result["calibration_after"]
    print(
        f"additive model on unseen cells: median error {scores['unseen_median_error']:.0%}, worst "
        f"{scores['unseen_worst_error']:.0%}; roofline / measured at most "
        f"{scores['roofline_over_measured_max']:.2f}; bandwidth afterwards "
        f"{after['bandwidth'] / 1e9:.1f} GB/s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny shape, a few cells")
    parser.add_argument("--compile", action="store_true", help="also torch.compile: minutes")
    parser.add_argument("--json", type=Path, help="write all figures here")
    args = parser.parse_args()
    result = run(args)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
