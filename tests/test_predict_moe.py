"""Routed experts and latent attention: what is stored, what a token uses, what a step reads."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from decodelab.predict import HARDWARE, MLA, SHAPES, Experts, Linear, ModelShape, decode_step
from hypothesis import given
from hypothesis import strategies as st

DATA = Path(__file__).parent / "data"
GIB = 2**30


def shape_of(path):
    return ModelShape.from_config(json.loads((DATA / path).read_text(encoding="utf-8")))


MIXTRAL = shape_of("hf_configs/mistralai--Mixtral-8x7B-v0.1.json")
GPT_OSS = shape_of("hf_configs/openai--gpt-oss-120b.json")
DEEPSEEK = shape_of("configs_reduced/deepseek-ai--DeepSeek-V3.json")
LITE = shape_of("configs_reduced/deepseek-ai--DeepSeek-V2-Lite.json")
GEMMA = shape_of("configs_reduced/google--gemma-3-27b.json")
QWEN3 = shape_of("hf_configs/Qwen--Qwen3-0.6B.json")
FALCON = shape_of("configs_reduced/tiiuae--falcon-7b.json")
# Qwen3.5-27B: 16 of 64 layers keep KV, 4 heads of 256.
HYBRID = ModelShape(
    layers=64, hidden=5120, heads=24, kv_heads=4, head_dim=256, ffn=17408, vocab=248320,
    windows=(0, 0, 0, None) * 16,
)  # fmt: skip
H200 = HARDWARE["NVIDIA H200 SXM"]


# -- parameters ------------------------------------------------------------------------------


def test_a_token_of_mixtral_meets_two_of_eight_experts():
    one_expert = 3 * 4096 * 14336
    assert MIXTRAL.parameters - MIXTRAL.active_parameters == 32 * 6 * one_expert
    streamed = MIXTRAL.streamed_parameters - MIXTRAL.matmul_parameters
    assert streamed == 32 * 6 * one_expert + (2 * 32 + 1) * 4096


def test_expert_matrices_routers_and_the_head_have_the_names_that_others_look_for():
    linears = {linear.name: linear for linear in DEEPSEEK.linears()}
    experts = {name for name in linears if name.startswith("expert")}
    assert experts == {"expert_gate_proj", "expert_up_proj", "expert_down_proj"}
    assert linears["expert_up_proj"].count == 58 * 256
    assert linears["expert_up_proj"].used == 58 * 8
    assert linears["router"][1:5] == (7168, 256, 58, True)
    assert linears["gate_proj"].count == 3  # the first layers are dense
    assert linears["shared_up_proj"].d_out == 2048
    assert DEEPSEEK.linears()[-1] == Linear("lm_head", 7168, 129280)


def test_sinks_and_biases_of_gpt_oss_are_counted():
    without = replace(GPT_OSS, sinks=False)
    assert GPT_OSS.parameters - without.parameters == 36 * 64
    plain = replace(GPT_OSS, experts=replace(GPT_OSS.experts, bias=False, router_bias=False))
    assert GPT_OSS.parameters - plain.parameters == 36 * 128 * (3 * 2880 + 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"routed": 0}, "routed"),
        ({"used": 9}, "can't use 9 of 8 experts"),
        ({"ffn": 2.5}, "ffn"),
        ({"shared_ffn": -1}, "shared_ffn"),
    ],
)
def test_senseless_experts_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(MIXTRAL.experts, **change)


@pytest.mark.parametrize(
    ("dense_layers", "message"),
    [
        ((8,), "dense_layers has 8; layers are 0 to 7"),
        ((1, 1), "dense_layers names a layer twice"),
        (tuple(range(8)), "every layer is dense"),
    ],
)
def test_senseless_dense_layers_are_refused(dense_layers, message):
    experts = Experts(routed=8, used=2, ffn=64, dense_layers=dense_layers)
    with pytest.raises(ValueError, match=message):
        replace(SHAPES["25M"], experts=experts)


def test_a_senseless_latent_is_refused():
    with pytest.raises(ValueError, match="kv_lora"):
        MLA(kv_lora=0, qk_nope=8, qk_rope=4, v=8)


# -- what a step reads -----------------------------------------------------------------------


def test_a_dense_model_streams_the_same_at_any_batch():
    for shape in SHAPES.values():
        assert shape.streamed(1) == shape.streamed(512) == shape.streamed_parameters


def test_one_sequence_reads_the_experts_of_one_token():
    idle = MIXTRAL.parameters - MIXTRAL.active_parameters
    assert MIXTRAL.streamed(1) == pytest.approx(MIXTRAL.streamed_parameters - idle, rel=1e-12)


def test_a_large_batch_reads_every_expert():
    assert MIXTRAL.streamed(256) == pytest.approx(MIXTRAL.streamed_parameters, rel=1e-9)
    assert DEEPSEEK.streamed(64) < 0.9 * DEEPSEEK.streamed_parameters


@given(batch=st.integers(1, 40))
def test_the_experts_met_are_those_of_a_draw_by_hand(batch):
    """8 experts, 2 a token: P(an expert idle after B tokens) = (6/8)^B, as C(7, 2) / C(8, 2)."""
    experts = 32 * 8 * 3 * 4096 * 14336
    dense = MIXTRAL.streamed_parameters - experts
    expected = dense + experts * (1 - (21 / 28) ** batch)
    assert MIXTRAL.streamed(batch) == pytest.approx(expected, rel=1e-12)


@given(batch=st.integers(1, 1000))
def test_a_larger_batch_never_reads_less(batch):
    assert MIXTRAL.streamed(batch) <= MIXTRAL.streamed(batch + 1) <= MIXTRAL.streamed_parameters


def test_a_decode_step_reads_the_experts_met_and_computes_the_active_ones():
    one, many = (decode_step(MIXTRAL, H200, batch, 1024) for batch in (1, 64))
    assert one.linear.flops == 2 * MIXTRAL.matmul_parameters == many.linear.flops / 64
    assert one.linear.bytes == 2 * MIXTRAL.streamed(1)
    assert many.linear.bytes == 2 * MIXTRAL.streamed(64)
    assert many.linear.bytes > 3.5 * one.linear.bytes


# -- latent attention ------------------------------------------------------------------------


def test_every_gpu_keeps_the_whole_latent():
    for tensor_parallel in (1, 2, 8, 16):
        per_token = DEEPSEEK.kv_bytes_per_token(tensor_parallel=tensor_parallel)
        assert per_token == 61 * (512 + 64) * 2
    with pytest.raises(ValueError, match="tensor_parallel 3 does not split 128 heads"):
        DEEPSEEK.kv_bytes_per_token(tensor_parallel=3)


def test_latent_attention_has_an_intensity_of_about_twice_its_heads():
    intensity = DEEPSEEK.attention_flops(1000) / DEEPSEEK.kv_bytes(1000)
    assert intensity == pytest.approx(2 * 128 * (2 * 512 + 64) / (2 * 576))
    assert 1.8 * 128 < intensity < 2 * 128


def test_layer_kv_bytes_is_one_layer_of_those_that_keep_kv():
    for shape in (DEEPSEEK, GEMMA, QWEN3):
        assert shape.kv_bytes_per_token() == shape.layers * shape.layer_kv_bytes()
    assert HYBRID.kv_bytes_per_token(1, 2) == 16 * HYBRID.layer_kv_bytes(1, 2) == 16 * 2 * 2 * 256


# -- wrong formulas that people really use ------------------------------------------------------

CACHES = [  # published wrong, here right: tests/data/wrong_calculators.csv
    (GEMMA, 131072, 10.41),
    (DEEPSEEK, 163840, 10.72),
    (HYBRID, 262144, 16.00),
    (QWEN3, 40960, 4.38),
    (FALCON, 131072, 1.00),
]
COUNTS = [(MIXTRAL, 46_702_792_704, 12_879_925_248), (LITE, 15_706_484_224, 2_661_150_208)]
COUNTS += [(DEEPSEEK, 671_026_419_200, 37_552_297_472)]


def cache_facts(kv_bytes):
    return all(kv_bytes(s, n) / GIB == pytest.approx(gib, abs=0.006) for s, n, gib in CACHES)


def kv_by_hand(shape, context, *, windows=None, latent=None, heads=None, head_dim=None):
    windows = windows or shape.windows or (None,) * shape.layers
    visible = sum(context if w is None else min(context, w) for w in windows)
    pair = 2 * (heads or shape.kv_heads) * (head_dim or shape.head_dim)
    kept = shape.mla.cached if shape.mla else pair
    return visible * 2 * (pair if latent is False else kept)


WRONG_CACHES = {
    "query heads for KV heads": lambda s, n: kv_by_hand(s, n, heads=s.heads),
    "hidden / heads as head_dim": lambda s, n: kv_by_hand(s, n, head_dim=s.hidden // s.heads),
    "every layer sees everything": lambda s, n: kv_by_hand(s, n, windows=(None,) * s.layers),
    "every layer windowed": lambda s, n: kv_by_hand(
        s, n, windows=s.windows and (max(w or 0 for w in s.windows) or n,) * s.layers
    ),
    "K and V of every head instead of the latent": lambda s, n: kv_by_hand(s, n, latent=False),
    "a latent for K and one for V": lambda s, n: kv_by_hand(s, n) * (2 if s.mla else 1),
    "GiB as GB": lambda s, n: kv_by_hand(s, n) * GIB / 1e9,
}


def test_the_library_and_the_formula_by_hand_agree_with_the_facts():
    assert cache_facts(lambda shape, context: shape.kv_bytes(context))
    assert cache_facts(kv_by_hand)
    for shape, parameters, active in COUNTS:
        assert (shape.parameters, shape.active_parameters) == (parameters, active)


@pytest.mark.parametrize("wrong", WRONG_CACHES.values(), ids=WRONG_CACHES)
def test_a_wrong_kv_size_is_rejected(wrong):
    assert not cache_facts(wrong)


def test_a_latent_divided_by_tensor_parallelism_is_rejected():
    assert DEEPSEEK.kv_bytes_per_token(tensor_parallel=8) != DEEPSEEK.kv_bytes_per_token() / 8


@pytest.mark.parametrize(
    "change",
    [{"shared_ffn": 0}, {"used": 64}, {"routed": 6}, {"router_bias": True}, {"dense_layers": ()}],
    ids=str,
)
def test_experts_forgotten_or_all_active_are_rejected(change):
    wrong = replace(LITE, experts=replace(LITE.experts, **change))
    assert (wrong.parameters, wrong.active_parameters) != COUNTS[1][1:]
