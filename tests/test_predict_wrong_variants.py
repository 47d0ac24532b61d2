"""Wrong formulas that people really use: the facts of the suite must tell each from the right one.

Every fact here is a function that takes an implementation and says whether it agrees.
"""

from types import SimpleNamespace

import pytest
from decodelab.predict import (
    HARDWARE,
    SHAPES,
    ModelShape,
    crossover_batch,
    decode_step,
    linear_intensity,
    ridge_point,
    usd_per_million_tokens,
)

GQA = SHAPES["Llama-3.1-8B"]
QWEN3_06B = ModelShape(
    layers=28,
    hidden=1024,
    heads=16,
    kv_heads=8,
    head_dim=128,
    ffn=3072,
    vocab=151936,
    tied=True,
    qk_norm="head",
)
LLAMA_13B, H100 = SHAPES["Llama-2-13B"], HARDWARE["NVIDIA H100 SXM"]


def near(value, expected, rel=0.01):
    return value == pytest.approx(expected, rel=rel)


def kv_facts(kv_bytes_per_token):
    return near(kv_bytes_per_token(GQA), 128 * 1024, 1e-9) and near(
        kv_bytes_per_token(QWEN3_06B), 112 * 1024, 1e-9
    )


def step_facts(seconds):
    return near(seconds(1), 8.0e-3) and near(seconds(64), 23.8e-3)


def intensity_facts(intensity):
    return near(intensity(1), 1.0, 2e-3) and near(intensity(64), 62.1, 2e-3)


def weights_alone_facts(intensity):
    return all(near(intensity(8, p), 2 * 8 / p, 1e-9) for p in (4, 2, 1, 0.5))


def crossover_facts(batch):
    return near(batch(140), 150.3, 1e-3)


def ridge_facts(ridge):
    return near(ridge(HARDWARE["NVIDIA A100 80GB SXM"]), 153, 3e-3)


def fit_facts(needed_gb):
    return near(needed_gb(256), 241, 2e-3)


def parameter_facts(parameters):
    return parameters(SHAPES["Llama-3.2-1B"]) == 1_235_814_400


def cost_facts(cost):
    return near(cost(2, 2690, 0.3), 0.688, 2e-3)


def kv_by_hand(shape, heads="kv_heads", head_dim=None, copies=2):
    head_dim = head_dim or shape.head_dim
    return shape.layers * copies * getattr(shape, heads) * head_dim * 2


def step_by_hand(batch, weight_reads=1, kv_reads=None, heads=40):
    weights = LLAMA_13B.streamed_parameters * 2 * weight_reads
    cache = (batch if kv_reads is None else kv_reads) * 1024 * 40 * 2 * heads * 128 * 2
    return (weights + cache) / H100.bandwidth


def needed_gb(batch, unit=1e9, parameters=LLAMA_13B.parameters):
    return (parameters * 2 + batch * LLAMA_13B.kv_bytes(1024)) / unit


N = 4096
CASES = {
    kv_facts: SimpleNamespace(
        right=lambda shape: shape.kv_bytes_per_token(),
        by_hand=kv_by_hand,
        wrong={
            "query heads for KV heads": lambda s: kv_by_hand(s, heads="heads"),
            "hidden / heads as head_dim": lambda s: kv_by_hand(s, head_dim=s.hidden // s.heads),
            "K without V": lambda s: kv_by_hand(s, copies=1),
            "bits as bytes": lambda s: kv_by_hand(s) * 8,
        },
    ),
    step_facts: SimpleNamespace(
        right=lambda batch: decode_step(LLAMA_13B, H100, batch, 1024).seconds,
        by_hand=step_by_hand,
        wrong={
            "weights read once per request": lambda b: step_by_hand(b, weight_reads=b),
            "KV read once per batch": lambda b: step_by_hand(b, kv_reads=1),
            "KV forgotten": lambda b: step_by_hand(b, kv_reads=0),
            "3 TB/s times 1024": lambda b: step_by_hand(b) * 3350 / 3072,
        },
    ),
    intensity_facts: SimpleNamespace(
        right=lambda batch: linear_intensity(batch, N, N),
        by_hand=lambda batch: batch / (1 + 2 * batch / N),
        wrong={
            "weights alone": lambda b: float(b),
            "one FLOP per weight": lambda b: linear_intensity(b, N, N) / 2,
            "inputs without outputs": lambda b: b / (1 + b / N),
            "2 x batch at fp16": lambda b: 2.0 * b,
        },
    ),
    weights_alone_facts: SimpleNamespace(
        right=lambda batch, p: linear_intensity(batch, N, N, p, activation_bytes=0),
        by_hand=lambda batch, p: 2 * batch / p,
        wrong={
            "2 x batch at fp16": lambda b, p: 4 * b / p,
            "bytes forgotten": lambda b, p: 1.0 * b,
            "bytes multiplied": lambda b, p: b * p / 2,
        },
    ),
    crossover_facts: SimpleNamespace(
        right=lambda ridge: crossover_batch(ridge, N, N),
        by_hand=lambda ridge: ridge / (1 - 2 * ridge / N),
        wrong={
            "the ridge itself": lambda r: r,
            "half the ridge": lambda r: r / 2,
            "activations of one side": lambda r: r / (1 - r / N),
            "activations on the wrong side": lambda r: r / (1 + 2 * r / N),
        },
    ),
    ridge_facts: SimpleNamespace(
        right=lambda device: ridge_point(device, "bf16"),
        by_hand=lambda device: 312e12 / 2039e9,
        wrong={
            "the sparse rate": lambda d: 624e12 / 2039e9,
            "the fp32 rate": lambda d: d.flops["fp32"] / d.bandwidth,
            "upside down": lambda d: d.bandwidth / d.flops["bf16"],
            "the printed 140": lambda d: 140,
        },
    ),
    fit_facts: SimpleNamespace(
        right=lambda batch: needed_gb_of_the_refusal(batch),
        by_hand=needed_gb,
        wrong={
            "GiB for GB": lambda b: needed_gb(b, unit=2**30),
            "weights forgotten": lambda b: needed_gb(b, parameters=0),
            "one sequence's KV": lambda b: needed_gb(1),
        },
    ),
    parameter_facts: SimpleNamespace(
        right=lambda shape: shape.parameters,
        by_hand=lambda shape: shape.streamed_parameters,
        wrong={
            "a tied head counted twice": lambda s: s.parameters + s.vocab * s.hidden,
            "norms forgotten": lambda s: s.matmul_parameters,
            "an MLP without its gate": lambda s: s.parameters - s.layers * s.hidden * s.ffn,
        },
    ),
    cost_facts: SimpleNamespace(
        right=usd_per_million_tokens,
        by_hand=lambda usd, speed, used: usd / (3600 * speed * used) * 1e6,
        wrong={
            "peak tokens billed": lambda usd, speed, used: usd / (3600 * speed) * 1e6,
            "utilisation multiplied": lambda usd, speed, used: usd * used / (3600 * speed) * 1e6,
            "minutes for seconds": lambda usd, speed, used: usd / (60 * speed * used) * 1e6,
            "per thousand": lambda usd, speed, used: usd / (3600 * speed * used) * 1e3,
        },
    ),
}


def needed_gb_of_the_refusal(batch):
    with pytest.raises(ValueError, match="GB") as refusal:
        decode_step(LLAMA_13B, H100, batch, 1024)
    return refusal.value.needed_bytes / 1e9


@pytest.mark.parametrize("facts", CASES, ids=lambda facts: facts.__name__)
def test_the_library_and_the_formula_by_hand_agree_with_the_facts(facts):
    assert facts(CASES[facts].right)
    assert facts(CASES[facts].by_hand)


@pytest.mark.parametrize(
    ("facts", "variant"),
    [(facts, name) for facts, case in CASES.items() for name in case.wrong],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_known_wrong_variant_is_rejected(facts, variant):
    assert not facts(CASES[facts].wrong[variant])
