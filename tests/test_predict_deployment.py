"""A deployment: what it holds, how fast it is at best, and what each lever moves and leaves."""

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest
from decodelab.predict import (
    FORMATS,
    HARDWARE,
    KV_FORMATS,
    LEVERS,
    SHAPES,
    Deployment,
    Linear,
    ModelShape,
    NoRoomError,
    decode_step,
    pull,
    weight_bytes,
)
from decodelab.predict.quantization import stage_weight_bytes, streamed_bytes
from hypothesis import given
from hypothesis import strategies as st

DATA = Path(__file__).parent / "data"
GIB = 2**30
H100, T4 = HARDWARE["NVIDIA H100 SXM"], HARDWARE["NVIDIA T4"]
LLAMA_8B, LLAMA_7B = SHAPES["Llama-3.1-8B"], SHAPES["Llama-2-7B"]


def config(path):
    return ModelShape.from_config(json.loads((DATA / path).read_text(encoding="utf-8")))


GPT_OSS = config("hf_configs/openai--gpt-oss-20b.json")
DEEPSEEK = config("hf_configs/deepseek-ai--DeepSeek-R1.json")
LLAMA_70B = config("configs_reduced/meta-llama--Llama-3.1-70B.json")
PLAIN = Deployment(shape=LLAMA_8B, hardware=H100)
LOGGED = replace(PLAIN, utilization=0.95, activation_bytes="1.89 GiB", other_bytes="0.25 GiB")


# -- weight formats ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "name", "gib"),
    [
        (LLAMA_7B, "q4_0", 3.56),  # llama-bench's size column
        (LLAMA_7B, "q8_0", 6.67),
        (LLAMA_8B, "q8_0", 7.95),
        (LLAMA_7B, "int4", 3.62),  # 3.89 GB: TheBloke/Llama-2-7B-AWQ
    ],
)
def test_quantized_files_have_the_size_that_their_format_says(shape, name, gib):
    assert weight_bytes(shape, name) / GIB == pytest.approx(gib, abs=0.006)


@pytest.mark.parametrize(
    ("name", "num_bytes"),
    [
        ("bf16", 4096 * 512 * 2),
        ("int8", 4096 * 512 + 512 * 4),  # a scale for each output channel
        ("fp8", 4096 * 512 + 512 * 4),
        ("int4", 4096 * 512 // 2 + 4096 * 512 // 128 * 2.5),
        ("nvfp4", 4096 * 512 // 2 + 4096 * 512 // 16),
        ("q8_0", 4096 * 512 // 32 * 34),
        ("q4_0", 4096 * 512 // 32 * 18),
    ],
)
def test_a_matrix_takes_its_bits_and_its_scales(name, num_bytes):
    assert FORMATS[name].matrix_bytes(Linear("k_proj", 4096, 512)) == num_bytes
    three = Linear("k_proj", 4096, 512, 3, bias=True)
    rest = FORMATS[name].rest
    assert FORMATS[name].matrix_bytes(three) == 3 * num_bytes + 3 * 512 * rest


def test_bits_alone_miss_the_scales_the_head_and_the_embedding():
    """The known-wrong size of a 4-bit model: parameters / 2."""
    for name in ("int4", "nvfp4", "q4_0"):
        assert weight_bytes(LLAMA_8B, name) > 1.12 * LLAMA_8B.parameters / 2
    assert weight_bytes(LLAMA_8B, "int8") > 1.12 * LLAMA_8B.parameters


def test_16_and_32_bits_cover_everything():
    for shape in (LLAMA_8B, SHAPES["SmolLM2-135M"], GPT_OSS, DEEPSEEK, LLAMA_70B):
        assert weight_bytes(shape, "bf16") == pytest.approx(2 * shape.parameters, rel=1e-12)
        assert weight_bytes(shape, "fp32") == pytest.approx(4 * shape.parameters, rel=1e-12)
        assert streamed_bytes(shape, "bf16", 10**6) == pytest.approx(2 * shape.streamed_parameters)


def test_learned_positions_are_stored_and_a_row_of_them_is_read():
    gpt2 = config("configs_reduced/openai-community--gpt2.json")
    assert weight_bytes(gpt2, "bf16") == 2 * gpt2.parameters
    assert streamed_bytes(gpt2, "bf16", 1) == 2 * gpt2.streamed_parameters


def test_mxfp4_covers_experts_alone():
    dense = sum(m.parameters for m in GPT_OSS.linears() if not m.name.startswith("expert"))
    experts = sum(m.weights for m in GPT_OSS.linears() if m.name.startswith("expert"))
    rest = GPT_OSS.parameters - experts
    assert weight_bytes(GPT_OSS, "mxfp4") == pytest.approx(experts * 4.25 / 8 + rest * 2)
    assert dense < rest
    assert weight_bytes(LLAMA_8B, "mxfp4") == weight_bytes(LLAMA_8B, "bf16")


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_tensor_parallelism_divides_matrices_and_copies_norms(gpus):
    whole = weight_bytes(LLAMA_8B, "bf16")
    norms = 2 * sum(norm.parameters for norm in LLAMA_8B.norms())
    assert weight_bytes(LLAMA_8B, "bf16", gpus) == pytest.approx((whole - norms) / gpus + norms)


def test_beyond_the_kv_heads_their_matrices_are_copied():
    sixteen = weight_bytes(LLAMA_8B, "bf16", 16)
    k_and_v = 2 * 2 * LLAMA_8B.layers * LLAMA_8B.hidden * LLAMA_8B.head_dim  # one head of each
    norms = 2 * sum(norm.parameters for norm in LLAMA_8B.norms())
    others = (weight_bytes(LLAMA_8B, "bf16") - norms - 8 * k_and_v) / 16
    assert sixteen == pytest.approx(others + k_and_v + norms)


def test_every_gpu_keeps_the_way_into_the_latent_and_the_router():
    copied = ("q_a_proj", "kv_a_proj", "router")
    whole = 2 * sum(m.weights for m in DEEPSEEK.linears() if m.name in copied)
    one, eight = (weight_bytes(DEEPSEEK, "bf16", gpus) for gpus in (1, 8))
    norms = 2 * sum(norm.parameters for norm in DEEPSEEK.norms())
    assert eight == pytest.approx((one - whole - norms) / 8 + whole + norms, rel=1e-6)


def test_the_first_stage_holds_the_embedding_and_the_last_the_head():
    first, second, third = stage_weight_bytes(LLAMA_70B, "bf16", 1, 3)
    head = 2 * LLAMA_70B.vocab * LLAMA_70B.hidden
    layer = (2 * LLAMA_70B.parameters - 2 * head) / 80
    assert (first, second, third) == pytest.approx(
        (27 * layer + head, 27 * layer, 26 * layer + head)
    )
    tied = stage_weight_bytes(SHAPES["Llama-3.2-1B"], "bf16", 1, 2)
    assert sum(tied) == pytest.approx(
        2 * (SHAPES["Llama-3.2-1B"].parameters + 128256 * 2048)
    )  # on both


# -- what it holds -----------------------------------------------------------------------------


def test_a_real_start_up_is_predicted_from_the_shape_alone():
    """vLLM 0.19 printed 476,016 tokens; our weights lack its table of rotary positions."""
    assert LOGGED.tokens == pytest.approx(476_016, rel=0.001)
    assert LOGGED.max_sequences(8192) == 58
    assert LOGGED.max_context(58) >= 8192 > LOGGED.max_context(59)


@given(batch=st.integers(1, 400), context=st.integers(1, 100_000))
def test_memory_adds_up_and_what_is_free_says_whether_it_fits(batch, context):
    memory = LOGGED.memory(batch, context)
    assert list(memory) == ["weights", "KV", "activations", "reserve", "free"]
    assert sum(memory.values()) == pytest.approx(H100.capacity_bytes)
    assert memory["reserve"] == pytest.approx(0.05 * H100.capacity_bytes + 0.25 * GIB)
    assert (memory["free"] >= 0) == (batch <= LOGGED.max_sequences(context))


def test_memory_can_be_drawn_even_where_the_weights_do_not_fit():
    crowded = replace(PLAIN, shape=LLAMA_70B)
    assert crowded.memory(1, 4096)["free"] < -60e9
    with pytest.raises(NoRoomError, match=r"weights take 141.1 GB.*64.\d GB are missing"):
        _ = crowded.pool_bytes
    with pytest.raises(NoRoomError, match="No room for a KV cache"):
        crowded.step(1, 4096)
    assert crowded.step(1, 4096, check_memory=False).seconds > 0
    assert replace(crowded, tensor_parallel=2).tokens > 0


def test_pipeline_stages_share_layers_and_the_fullest_decides():
    half = replace(LOGGED, pipeline_parallel=2)
    assert half.kv_bytes_per_token == LOGGED.kv_bytes_per_token / 2
    assert half.tokens > 2 * LOGGED.tokens
    uneven = replace(LOGGED, pipeline_parallel=3)  # 11, 11 and 10 layers
    assert uneven.kv_bytes_per_token == LOGGED.kv_bytes_per_token * 11 / 32


# -- the step ----------------------------------------------------------------------------------


def test_on_one_gpu_at_16_bits_the_step_is_the_roofline_s():
    assert PLAIN.step(16, 4096) == decode_step(LLAMA_8B, H100, 16, 4096)


def test_a_step_beyond_the_pool_is_refused_with_its_bytes_and_the_most_that_fit():
    assert LOGGED.step(58, 8192).batch == 58
    with pytest.raises(NoRoomError, match=r"59 .* 63.4 GB of KV.* 16.1 GB .* at most 58 fit") as no:
        LOGGED.step(59, 8192)
    assert no.value.missing_bytes == pytest.approx(-LOGGED.memory(59, 8192)["free"])
    assert LOGGED.step(59, 8192, check_memory=False).batch == 59


def test_a_step_reads_each_part_in_its_own_format():
    eight = replace(PLAIN, weight_format="fp8").step(1, 1024)
    head = 2 * LLAMA_8B.vocab * LLAMA_8B.hidden
    layers = LLAMA_8B.streamed_parameters - head / 2
    assert eight.linear.bytes == pytest.approx(layers + head, rel=0.001)
    assert eight.attention == PLAIN.step(1, 1024).attention


def test_a_step_of_experts_reads_those_it_meets():
    device = replace(PLAIN, shape=GPT_OSS, weight_format="mxfp4")
    one, many = (device.step(batch, 1024).linear.bytes for batch in (1, 1000))
    experts = sum(m.weights for m in GPT_OSS.linears() if m.name.startswith("expert"))
    assert many - one == pytest.approx(experts * 4.25 / 8 * (1 - 4 / 32), rel=0.01)


def test_two_gpus_halve_the_step_unless_they_keep_copies():
    two = replace(PLAIN, tensor_parallel=2)
    assert two.step(16, 4096).seconds == pytest.approx(PLAIN.step(16, 4096).seconds / 2)
    mla = Deployment(shape=DEEPSEEK, hardware=HARDWARE["NVIDIA H200 SXM"], weight_format="fp8")
    one, eight = (
        replace(mla, tensor_parallel=gpus).step(64, 4096, check_memory=False) for gpus in (1, 8)
    )
    assert eight.attention.memory_seconds == pytest.approx(one.attention.memory_seconds)
    assert eight.linear.seconds == pytest.approx(one.linear.seconds / 8)


# -- levers ------------------------------------------------------------------------------------

PULLS = [
    ("kv_heads", 1),
    ("window", 1024),
    ("kv_format", "fp8"),
    ("weight_format", "int4"),
    ("tensor_parallel", 2),
]


def test_every_lever_is_pulled_here():
    assert LEVERS.keys() == {name for name, _ in PULLS}


@pytest.mark.parametrize(("lever", "value"), PULLS)
def test_a_lever_changes_one_thing_and_leaves_the_rest(lever, value):
    pulled = pull(PLAIN, lever, value)
    where = {"kv_heads": "shape", "window": "shape"}.get(lever, lever)
    for field in fields(Deployment):
        same = getattr(pulled, field.name) == getattr(PLAIN, field.name)
        assert same == (field.name != where)
    if where == "shape":
        name = {"window": "windows"}.get(lever, lever)
        assert replace(pulled.shape, **{name: getattr(LLAMA_8B, name)}) == LLAMA_8B


@pytest.mark.parametrize(("lever", "value"), PULLS)
def test_each_lever_is_a_batch_size_feature(lever, value):
    """At 32,768 tokens each lets more sequences in, and none makes a step slower."""
    pulled = pull(PLAIN, lever, value)
    assert pulled.max_sequences(32768) > PLAIN.max_sequences(32768)
    assert pulled.step(8, 32768).seconds < PLAIN.step(8, 32768).seconds


def test_everything_follows_from_fewer_kv_heads():
    mqa = pull(PLAIN, "kv_heads", 1)
    removed = 2 * 7 * 128 * 4096 * 32  # of k_proj and v_proj, seven heads of eight
    assert mqa.shape.parameters == LLAMA_8B.parameters - removed
    assert mqa.weight_bytes == PLAIN.weight_bytes - 2 * removed
    assert mqa.kv_bytes_per_token == PLAIN.kv_bytes_per_token / 8
    assert mqa.tokens > 8 * PLAIN.tokens


def test_a_window_covers_every_layer_that_keeps_kv_and_none_lifts_it():
    hybrid = replace(PLAIN, shape=replace(LLAMA_8B, windows=(0, None) * 16))
    assert pull(hybrid, "window", 512).shape.windows == (0, 512) * 16
    assert pull(pull(PLAIN, "window", 512), "window", None) == PLAIN
    assert pull(pull(hybrid, "window", 512), "window", None) == hybrid


def gain(lever, value, batch, context):
    """How many times faster a step gets."""
    slow, fast = (
        one.step(batch, context, check_memory=False).seconds
        for one in (PLAIN, pull(PLAIN, lever, value))
    )
    return slow / fast


@pytest.mark.parametrize(
    ("lever", "value", "helps", "control"),
    [
        ("kv_heads", 1, (64, 32768), (1, 128)),
        ("kv_format", "fp8", (64, 32768), (1, 128)),
        ("window", 1024, (64, 32768), (64, 1024)),
        ("weight_format", "int4", (1, 128), (256, 8192)),
    ],
)
def test_each_lever_has_its_control_where_it_buys_nothing(lever, value, helps, control):
    """Short contexts for what shrinks KV, a large batch for what shrinks weights."""
    assert gain(lever, value, *helps) > 1.8
    assert 1 <= gain(lever, value, *control) < 1.07


def test_a_window_longer_than_the_context_changes_no_byte():
    pulled = pull(PLAIN, "window", 8192)
    assert pulled.shape.kv_bytes(8192) == LLAMA_8B.kv_bytes(8192)
    assert pulled.step(4, 8192) == PLAIN.step(4, 8192)


@given(
    values=st.permutations(PULLS),
    batch=st.integers(1, 64),
    context=st.integers(1, 30_000),
)
def test_levers_commute(values, batch, context):
    one, other = PLAIN, PLAIN
    for lever, value in values:
        one = pull(one, lever, value)
    for lever, value in PULLS:
        other = pull(other, lever, value)
    assert one == other
    assert one.step(batch, context) == other.step(batch, context)


# -- bad input and assumptions -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("lever", "value", "says"),
    [
        ("heads", 1, "No lever 'heads'. Levers: kv_heads, window, kv_format, weight_format"),
        ("tensor_parallel", 3, "tensor_parallel can't be 3 here. Allowed: 1, 2, 4, 8"),
        ("kv_heads", 5, "kv_heads can't be 5 here. Allowed: 32, 16, 8, 4, 2, 1"),
        ("kv_heads", 8.0, "kv_heads must be a positive whole number"),
        ("window", 0, "window .None: no window. must be a positive whole number"),
        ("window", "4k", "window"),
        ("kv_format", "fp9", "kv_format can't be 'fp9' here. Allowed: fp32, bf16"),
        ("weight_format", "int3", "weight_format can't be 'int3' here. Allowed: fp32"),
        ("weight_format", "mxfp4", "weight_format can't be 'mxfp4' here"),  # no experts
    ],
)
def test_a_senseless_pull_names_the_lever_and_what_it_takes(lever, value, says):
    with pytest.raises(ValueError, match=says):
        pull(PLAIN, lever, value)


def test_a_latent_has_no_kv_heads_to_pull():
    with pytest.raises(ValueError, match="this model caches a latent"):
        pull(replace(PLAIN, shape=DEEPSEEK), "kv_heads", 64)
    assert "mxfp4" in LEVERS["weight_format"].values(replace(PLAIN, shape=DEEPSEEK))


def test_only_as_many_gpus_are_offered_as_split_the_heads():
    offered = LEVERS["tensor_parallel"].values
    assert offered(PLAIN) == (1, 2, 4, 8)
    assert offered(replace(PLAIN, tensor_parallel=16)) == (1, 2, 4, 8, 16), "as it stands"
    assert offered(replace(PLAIN, shape=SHAPES["SmolLM2-135M"])) == (1,), "9 heads, 3 KV heads"
    assert offered(replace(PLAIN, shape=DEEPSEEK)) == (1, 2, 4, 8)
    assert LEVERS["kv_heads"].note
    assert "those of one GPU" in LEVERS["tensor_parallel"].note


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"utilization": 90}, "utilization is a fraction above 0 and up to 1.* 0.9 for 90%"),
        ({"weight_format": "int3"}, "Weight format 'int3' is not one of fp32, bf16"),
        ({"kv_format": "int4"}, "KV format 'int4' is not one of fp32, bf16"),
        ({"block_size": 0}, "block_size"),
        ({"chunk": 0}, "chunk"),
        ({"activation_bytes": "2"}, "activation_bytes: .*needs a unit"),
        ({"other_bytes": -1}, "other_bytes"),
        ({"tensor_parallel": 3}, "tensor_parallel 3 does not split 32 heads and 8 KV heads"),
        ({"pipeline_parallel": 33}, "pipeline_parallel 33 is more than 32 layers"),
    ],
)
def test_a_senseless_deployment_is_refused_when_it_is_made(change, says):
    with pytest.raises(ValueError, match=says):
        replace(PLAIN, **change)


def test_the_memory_figure_is_stated_with_both_units():
    assert "NVIDIA H100 SXM is 85.0 GB (79.19 GiB), usable" in PLAIN.assumptions[0]
    bare = replace(PLAIN, hardware=replace(H100, usable_memory_bytes=None))
    assert "80.0 GB (74.51 GiB), nominal, for want of a usable" in bare.assumptions[0]
    assert bare.tokens < PLAIN.tokens


def test_what_is_taken_for_granted_is_said():
    def says(sentence, **change):
        return any(sentence in told for told in replace(LOGGED, **change).assumptions)

    assert len(LOGGED.assumptions) == 1
    assert says("Activations are taken as 0 bytes", activation_bytes=0)
    assert says("Other bytes, such as for a CUDA context, are taken as 0", other_bytes=0)
    assert says("Communication between GPUs takes no time", tensor_parallel=2)
    assert not says("copies", tensor_parallel=8)
    assert says("Each of 16 GPUs keeps copies of KV: there are 8 KV heads", tensor_parallel=16)
    one = pull(LOGGED, "kv_heads", 1).shape
    assert says(
        "Each of 2 GPUs keeps copies of KV: there is 1 KV head", shape=one, tensor_parallel=2
    )
    assert says("a latent has no heads", shape=DEEPSEEK, tensor_parallel=2)
    assert says("a step is no faster", pipeline_parallel=2)
    assert says("A window keeps its tokens and up to 8192 of a prompt", shape=GPT_OSS)


def test_the_device_must_have_the_arithmetic():
    card = Deployment(shape=SHAPES["Llama-3.2-1B"], hardware=T4)
    with pytest.raises(ValueError, match="no dense bf16 rate"):
        card.step(1, 128)
    assert replace(card, dtype="fp16").step(1, 128).seconds > 0


def test_every_format_says_where_it_comes_from():
    assert all(layout.source for layout in FORMATS.values())
    assert {"fp32", "bf16", "fp16", "fp8", "int8", "q8_0"} <= KV_FORMATS.keys()
    assert KV_FORMATS["q8_0"] == 34 / 32
