"""Counts that follow from a config.json, against published ones."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest
from decodelab.predict import SHAPES, SMOLLM2_135M, ModelShape
from hypothesis import given
from hypothesis import strategies as st

DATA = Path(__file__).parent / "data"
MODELS = list(csv.DictReader((DATA / "models.csv").read_text(encoding="utf-8").splitlines()))
KIB, GIB = 1024, 2**30


def read(path):
    return json.loads((DATA / path).read_text(encoding="utf-8"))


def shape_of(path):
    return ModelShape.from_config(read(path))


LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 100,
}
QWEN2 = {**LLAMA, "model_type": "qwen2", "num_key_value_heads": 2}
MISTRAL = {**QWEN2, "model_type": "mistral"}
GPT2 = {
    "model_type": "gpt2",
    "n_layer": 2,
    "n_embd": 64,
    "n_head": 4,
    "n_positions": 32,
    "vocab_size": 100,
}
QWEN3_4B = {
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "hidden_size": 2560,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 9728,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}


# -- parameters ------------------------------------------------------------------------------


@pytest.mark.parametrize("row", MODELS, ids=lambda row: row["model"])
def test_parameters_and_kv_bytes_equal_the_published_ones(row):
    shape = shape_of(row["config"])
    published = row["params_published"] or row["params_computed"]
    assert shape.parameters == int(published)
    assert shape.active_parameters == int(row["params_active_computed"] or published)
    assert shape.kv_bytes_per_token() == int(row["kv_bytes_per_token_bf16"])


def test_forty_one_rows_are_exact_and_five_have_routed_experts():
    assert sum(row["published_status"] == "exact" for row in MODELS) == 41
    assert sum(bool(row["params_active_computed"]) for row in MODELS) == 5


# From the safetensors totals of the model pages, less the head that Qwen3-0.6B stores twice.
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("Qwen--Qwen3-0.6B", 751_632_384 - 151936 * 1024),
        ("Qwen--Qwen3-8B", 8_190_735_360),
        ("Qwen--Qwen3-32B", 32_762_123_264),
        ("meta-llama--Meta-Llama-3.1-8B", 8_030_261_248),
        ("meta-llama--Meta-Llama-3.1-405B", 405_853_388_800),
        ("mistralai--Mixtral-8x7B-v0.1", 46_702_792_704),
    ],
)
def test_whole_config_files_give_the_count_of_the_model_page(name, parameters):
    assert shape_of(f"hf_configs/{name}.json").parameters == parameters


def test_parameters_are_the_matrices_the_norms_the_biases_and_the_lookups():
    shape = ModelShape.from_config(GPT2)
    matrices = 2 * (64 * 192 + 64 * 64 + 2 * 64 * 256) + 64 * 100
    biases = 2 * (192 + 64 + 256 + 64)
    norms = (2 * 2 + 1) * 2 * 64
    assert shape.matmul_parameters == matrices == sum(w.weights for w in shape.linears())
    assert shape.streamed_parameters == matrices + biases + norms
    assert shape.parameters == matrices + biases + norms + 32 * 64


def test_a_tied_head_is_stored_once_and_read_whole():
    untied = replace(SMOLLM2_135M, tied=False)
    assert untied.parameters - SMOLLM2_135M.parameters == 49152 * 576
    assert untied.streamed_parameters == SMOLLM2_135M.streamed_parameters


def test_the_named_shapes_have_their_published_sizes():
    published = {"SmolLM2-135M": 134_515_008, "Llama-3.2-1B": 1_235_814_400}
    published |= {"Llama-2-7B": 6_738_415_616, "Llama-3.1-8B": 8_030_261_248}
    published |= {"Llama-2-13B": 13_015_864_320}
    for name, parameters in published.items():
        assert SHAPES[name].parameters == parameters
    assert SHAPES["25M"].parameters * 4 > 100e6


def test_a_named_shape_equals_what_its_config_says():
    config = read("hf_configs/meta-llama--Meta-Llama-3.1-8B.json")
    assert ModelShape.from_config(config) == SHAPES["Llama-3.1-8B"]


# -- the KV cache ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "kib"),
    [
        ("configs_reduced/openai-community--gpt2.json", 36),
        ("configs_reduced/meta-llama--Llama-2-7b-hf.json", 512),
        ("configs_reduced/huggyllama--llama-13b.json", 800),  # Llama-2-13B has the same shape
        ("hf_configs/meta-llama--Meta-Llama-3.1-8B.json", 128),
        ("hf_configs/meta-llama--Meta-Llama-3.1-70B.json", 320),  # and so has Llama-3.3-70B
        ("configs_reduced/Qwen--Qwen2.5-0.5B.json", 12),
        ("hf_configs/Qwen--Qwen3-0.6B.json", 112),
        (QWEN3_4B, 144),
    ],
    ids=str,
)
def test_kv_kib_per_token_of_real_models(config, kib):
    config = config if isinstance(config, dict) else read(config)
    assert ModelShape.from_config(config).kv_bytes_per_token() == kib * KIB


def test_kv_bytes_of_published_cases():
    """Both were printed wrong: Qwen3-0.6B at 40,960 tokens, Llama-2-7B at 32,768."""
    small = shape_of("hf_configs/Qwen--Qwen3-0.6B.json")
    assert small.kv_bytes(40960) / GIB == pytest.approx(4.38, abs=0.01)
    assert SHAPES["Llama-2-7B"].kv_bytes(32768) == 16 * GIB


def test_kv_bytes_scale_with_the_element_size_and_stay_whole():
    shape = SHAPES["Llama-3.1-8B"]
    assert isinstance(shape.kv_bytes_per_token(), int)
    assert shape.kv_bytes_per_token(1) * 2 == shape.kv_bytes_per_token(2)
    assert shape.kv_bytes(100, 34 / 32) == 100 * shape.kv_bytes_per_token(34 / 32)


def test_tensor_parallelism_splits_kv_heads_until_each_gpu_has_one():
    shape = SHAPES["Llama-3.1-8B"]
    per_gpu = [shape.kv_bytes_per_token(tensor_parallel=n) // KIB for n in (1, 2, 4, 8, 16, 32)]
    assert per_gpu == [128, 64, 32, 16, 16, 16]
    with pytest.raises(ValueError, match="tensor_parallel 3 does not split 32 heads and 8 KV"):
        shape.kv_bytes_per_token(tensor_parallel=3)


def test_a_window_bounds_the_cache_of_its_own_layer_only():
    full = SHAPES["25M"]
    shape = replace(full, windows=(100, None) * 4)
    one_layer = full.kv_bytes_per_token() // full.layers
    assert shape.kv_bytes(50) == full.kv_bytes(50)
    assert shape.kv_bytes(1000) == 4 * (100 + 1000) * one_layer
    assert shape.attention_flops(1000) == 4 * 6 * 64 * 4 * (100 + 1000)


@given(
    kv_heads=st.sampled_from([1, 2, 4, 8]),
    group=st.sampled_from([1, 2, 4, 8]),
    context=st.integers(1, 10**6),
)
def test_decode_attention_has_the_intensity_of_its_head_ratio(kv_heads, group, context):
    """G = heads / kv_heads FLOPs per byte at 16 bits, at any context: batching can't raise it."""
    shape = replace(SHAPES["25M"], heads=kv_heads * group, kv_heads=kv_heads)
    assert shape.attention_flops(context) == group * shape.kv_bytes(context)


# -- reading a config ------------------------------------------------------------------------


def test_head_dim_is_read_from_the_config_where_it_is_given():
    shape = shape_of("hf_configs/Qwen--Qwen3-0.6B.json")
    assert shape.head_dim == 128 != shape.hidden // shape.heads
    assert ModelShape.from_config(LLAMA).head_dim == 16
    assert ModelShape.from_config({**LLAMA, "head_dim": None}).head_dim == 16


def test_biases_and_norms_follow_the_family():
    llama, qwen2 = ModelShape.from_config(LLAMA), ModelShape.from_config(QWEN2)
    qwen3 = ModelShape.from_config({**QWEN2, "model_type": "qwen3"})
    assert (llama.qkv_bias, llama.qk_norm, llama.kv_heads) == (False, None, 4)
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.qk_norm) == (True, False, None)
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_dim) == (False, "head", 128)


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        ({**MISTRAL, "sliding_window": 8}, (8, 8)),
        ({**MISTRAL, "sliding_window": None}, None),
        (MISTRAL, None),
        ({**QWEN2, "sliding_window": 8, "max_window_layers": 0}, None),  # use_sliding_window: false
        (
            {**QWEN2, "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1},
            (None, 8),
        ),
        (
            {**QWEN2, "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0},
            (8, 8),
        ),
        (
            {**QWEN2, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
            (8, None),
        ),
    ],
)
def test_sliding_windows_are_read_layer_by_layer(config, windows):
    assert ModelShape.from_config(config).windows == windows


def test_rotary_scaling_is_kept_in_both_spellings():
    scaling = {"factor": 4.0, "rope_type": "linear"}
    old = {**LLAMA, "rope_theta": 5e5, "rope_scaling": {"factor": 4.0, "type": "linear"}}
    new = {**LLAMA, "rope_parameters": {**scaling, "rope_theta": 5e5}}
    for config in (old, new):
        shape = ModelShape.from_config(config)
        assert shape.rope_theta == 5e5
        assert shape.rope_scaling["rope_type"] == "linear"
        assert shape.rope_scaling["factor"] == 4.0
    plain = ModelShape.from_config({**LLAMA, "rope_scaling": {"rope_type": "default"}})
    assert plain.rope_scaling is None


@pytest.mark.parametrize("field", [name for name in LLAMA if name != "model_type"])
@pytest.mark.parametrize("bad", [None, 0, -4, 2.5, "64", True], ids=repr)
def test_a_missing_or_senseless_field_is_refused_by_name(field, bad):
    with pytest.raises(ValueError, match=field):
        ModelShape.from_config({**LLAMA, field: bad})
    with pytest.raises(ValueError, match=field):
        ModelShape.from_config({name: LLAMA[name] for name in LLAMA if name != field})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "No field 'model_type'.*llama"),
        ({**LLAMA, "model_type": "mamba"}, "'mamba' is not served.*gpt2"),
        ({**LLAMA, "model_type": ["llama"]}, "is not served"),
        ({**LLAMA, "num_attention_heads": 5}, "hidden_size 64 is not a multiple"),
        ({**LLAMA, "num_key_value_heads": 3}, "kv_heads 3 does not divide heads 4"),
        ({**LLAMA, "num_key_value_heads": 8}, "kv_heads 8 does not divide heads 4"),
        ({**LLAMA, "tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({**LLAMA, "rope_scaling": {"rope_type": "spiral"}}, "'spiral' is not served"),
        ({**LLAMA, "rope_scaling": "linear"}, "rope_scaling must be a table"),
        ({**LLAMA, "max_position_embeddings": 0}, "max_position_embeddings"),
        ({**LLAMA, "num_experts": 8}, "'num_experts' = 8"),
        ({**LLAMA, "sliding_window": 128}, "'sliding_window' = 128"),
        ({**LLAMA, "kv_lora_rank": 512}, "'kv_lora_rank' = 512"),
        ({**LLAMA, "layer_types": ["full_attention"] * 2}, "'layer_types' ="),
        ({**QWEN2, "layer_types": "full_attention"}, "layer_types must be a list"),
        ({**MISTRAL, "sliding_window": 0}, "sliding_window"),
        ({**MISTRAL, "attention_bias": True}, "'attention_bias' = True"),
        ({**LLAMA, "model_type": "mistral"}, "no field 'num_key_value_heads'"),
        ({**QWEN2, "layer_types": ["linear_attention"] * 2}, "linear_attention"),
        ({**QWEN2, "use_sliding_window": True}, "no field 'sliding_window'"),
        ({**QWEN2, "layer_types": ["full_attention"]}, "layer_types names 1 layers"),
        ({**GPT2, "add_cross_attention": True}, "add_cross_attention"),
        ({name: GPT2[name] for name in GPT2 if name != "n_positions"}, "n_positions"),
    ],
)
def test_what_is_not_served_is_refused_with_a_sentence(config, message):
    with pytest.raises(ValueError, match=message):
        ModelShape.from_config(config)


@pytest.mark.parametrize("config", [None, "config.json", [LLAMA]])
def test_something_else_than_a_dict_is_refused(config):
    with pytest.raises(ValueError, match=r"dict of a config\.json"):
        ModelShape.from_config(config)


def test_fields_that_do_not_shape_the_model_are_ignored():
    extra = {"torch_dtype": "bfloat16", "bos_token_id": 1, "quantization_config": {"bits": 4}}
    extra |= {"num_experts": 0, "rope_interleaved": False, "transformers_version": "5.0"}
    assert ModelShape.from_config(LLAMA | extra) == ModelShape.from_config(LLAMA)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 0}, "layers"),
        ({"head_dim": 64.0}, "head_dim"),
        ({"vocab": True}, "vocab"),
        ({"kv_heads": 4}, "kv_heads 4 does not divide heads 6"),
        ({"qk_norm": "all"}, "qk_norm"),
        ({"positions": "learned"}, "max_context"),
        ({"windows": (4,)}, "windows has 1 entries"),
        ({"windows": (-4,) * 8}, "windows"),
        ({"windows": (0,) * 8}, "at least one must keep a KV cache"),
    ],
)
def test_a_shape_made_by_hand_is_checked_too(change, message):
    with pytest.raises(ValueError, match=message):
        replace(SHAPES["25M"], **change)


@pytest.mark.parametrize("context", [0, -1, 1.5, True, None])
def test_a_context_that_is_not_a_positive_whole_number_is_refused(context):
    with pytest.raises(ValueError, match="context"):
        SMOLLM2_135M.kv_bytes(context)
