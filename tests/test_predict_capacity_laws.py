"""Laws of the capacity calculator, whatever the model, and what it refuses."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from decodelab.predict import (
    SHAPES,
    ModelShape,
    NoRoomError,
    kv_blocks,
    kv_pool,
    kv_pool_free,
    kv_pool_static,
    kv_tokens,
    max_context,
    max_sequences,
    weight_bytes,
)
from decodelab.predict.quantization import layers_of_stages
from hypothesis import given
from hypothesis import strategies as st

DATA = Path(__file__).parent / "data"
GIB = 2**30
LLAMA_8B = SHAPES["Llama-3.1-8B"]


def config(path):
    return ModelShape.from_config(json.loads((DATA / path).read_text(encoding="utf-8")))


GPT_OSS = config("hf_configs/openai--gpt-oss-20b.json")
GEMMA_27B = config("configs_reduced/google--gemma-3-27b.json")
DEEPSEEK = config("hf_configs/deepseek-ai--DeepSeek-R1.json")
MISTRAL_V01 = replace(LLAMA_8B, windows=(4096,) * 32)
QWEN_27B = replace(LLAMA_8B, layers=64, kv_heads=4, head_dim=256, windows=(0, 0, 0, None) * 16)
ALL_KINDS = [LLAMA_8B, SHAPES["SmolLM2-135M"], GEMMA_27B, GPT_OSS, DEEPSEEK, MISTRAL_V01, QWEN_27B]
shapes = st.sampled_from(ALL_KINDS)
pools = st.integers(2**27, 2**38)
contexts, batches = st.integers(1, 300_000), st.integers(1, 600)
block_sizes, chunks = st.sampled_from([1, 16, 128]), st.sampled_from([1, 512, 8192])


@given(shape=shapes, pool=pools, context=contexts, block_size=block_sizes, chunk=chunks)
def test_the_most_sequences_fit_and_one_more_does_not(shape, pool, context, block_size, chunk):
    most = max_sequences(shape, pool, context, block_size, chunk=chunk)
    blocks = kv_blocks(shape, pool, block_size, chunk=chunk)
    each = blocks.per_sequence(context)
    assert most * each * blocks.block_bytes <= pool
    assert (most + 1) * each > blocks.blocks
    assert max_context(shape, pool, most + 1, block_size, chunk=chunk) < context
    if most:
        assert max_context(shape, pool, most, block_size, chunk=chunk) >= context


@given(shape=shapes, pool=pools, batch=batches, block_size=block_sizes, chunk=chunks)
def test_the_longest_context_fits_and_one_token_more_does_not(
    shape, pool, batch, block_size, chunk
):
    longest = max_context(shape, pool, batch, block_size, chunk=chunk)
    if longest == math.inf:
        assert None not in shape.windows
        assert max_sequences(shape, pool, 10**9, block_size, chunk=chunk) >= batch
        return
    assert max_sequences(shape, pool, longest + 1, block_size, chunk=chunk) < batch
    if longest:
        assert max_sequences(shape, pool, longest, block_size, chunk=chunk) >= batch


@given(shape=shapes, pool=pools, more=st.integers(0, 2**34), context=contexts, batch=batches)
def test_a_larger_pool_never_holds_less(shape, pool, more, context, batch):
    assert kv_tokens(shape, pool + more) >= kv_tokens(shape, pool)
    assert max_sequences(shape, pool + more, context) >= max_sequences(shape, pool, context)
    assert max_context(shape, pool + more, batch) >= max_context(shape, pool, batch)


@given(shape=shapes, pool=pools, context=contexts, more=st.integers(0, 9999), batch=batches)
def test_longer_contexts_and_larger_batches_never_fit_more(shape, pool, context, more, batch):
    assert max_sequences(shape, pool, context + more) <= max_sequences(shape, pool, context)
    assert max_context(shape, pool, batch + more) <= max_context(shape, pool, batch)


@given(shape=shapes, pool=pools, context=contexts)
def test_half_the_bytes_hold_at_least_twice_as_much(shape, pool, context):
    assert kv_tokens(shape, pool, bytes_per_element=1) >= 2 * kv_tokens(shape, pool)
    twice = max_sequences(shape, pool, context, bytes_per_element=1)
    assert twice in (n := 2 * max_sequences(shape, pool, context), n + 1)


@given(shape=shapes, pool=pools)
def test_tokens_are_whole_blocks_within_the_pool(shape, pool):
    blocks = kv_blocks(shape, pool)
    groups = sum(count for _, count in blocks.groups)
    assert blocks.tokens % 16 == 0
    assert blocks.tokens // 16 * groups * blocks.block_bytes <= pool
    assert pool - blocks.blocks * blocks.block_bytes < blocks.block_bytes


@given(layers=st.integers(1, 200), stages=st.integers(1, 32))
def test_stages_hold_every_layer_once(layers, stages):
    if stages > layers:
        with pytest.raises(ValueError, match=f"pipeline_parallel {stages} is more than {layers}"):
            layers_of_stages(layers, stages)
        return
    held = layers_of_stages(layers, stages)
    assert (sum(held), len(held)) == (layers, stages)
    assert max(held) - min(held) <= 1
    assert held[-1] == min(held)  # the last one has the LM head beside


def test_without_windows_the_chunk_plays_no_part():
    cuts = [kv_blocks(LLAMA_8B, 10**10, chunk=chunk).per_sequence(9000) for chunk in (1, 8192)]
    assert cuts == [-(-9000 // 16)] * 2


def test_a_window_saves_nothing_until_the_context_is_longer_than_it_and_the_chunk():
    """The control: at short contexts it costs a block; while decoding alone it saves early."""
    windowed = replace(LLAMA_8B, windows=(1024,) * 32)

    def blocks(shape, context, chunk):
        return kv_blocks(shape, 10**10, chunk=chunk).per_sequence(context)

    for context in (16, 512, 1024, 8192):
        assert blocks(windowed, context, 8192) == blocks(LLAMA_8B, context, 8192) + 1
    assert blocks(windowed, 32768, 8192) == (1023 + 8192 + 15) // 16 + 1
    assert blocks(windowed, 32768, 1) == 1024 // 16 + 1
    assert blocks(LLAMA_8B, 32768, 1) == 32768 // 16


def test_kinds_of_layers_that_are_nearly_as_many_share_one_padded_size():
    shape = replace(LLAMA_8B, windows=(128,) * 15 + (None,) * 17)
    assert kv_blocks(shape, 10**10).groups == ((128, 1), (None, 1))
    assert kv_blocks(shape, 10**10).block_bytes == 17 * 16 * shape.layer_kv_bytes()
    gemma = kv_blocks(GEMMA_27B, 10**10)
    assert dict(gemma.groups) == {1024: 6, None: 1}  # 52 layers in groups of 10


# -- bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [90, 1.01, 100])
@pytest.mark.parametrize(
    ("pool", "name"),
    [
        (lambda share: kv_pool("80 GB", share, "16 GB", 0), "utilization"),
        (lambda share: kv_pool_static("80 GB", share, "16 GB"), "static_fraction"),
        (lambda share: kv_pool_free("80 GB", share, "16 GB", 0), "free_fraction"),
    ],
    ids=["vllm", "sglang", "tensorrt"],
)
def test_a_fraction_over_one_says_how_to_write_it(pool, name, value):
    with pytest.raises(ValueError, match=f"{name} is a fraction .* write {value / 100:g} for"):
        pool(value)


@pytest.mark.parametrize("value", [0, -0.5, None, "0.9", float("nan"), True], ids=repr)
def test_a_fraction_must_be_a_number_above_0(value):
    with pytest.raises(ValueError, match="utilization must be a finite number above 0"):
        kv_pool("80 GB", value, "16 GB", 0)


def test_weights_larger_than_the_budget_name_the_bytes_and_the_way_out():
    with pytest.raises(
        NoRoomError, match="weights take 141.1 GB.*is 72.0 GB: 69.1 GB are missing"
    ) as no:
        kv_pool(
            "80 GB", 0.9, weight_bytes(config("configs_reduced/meta-llama--Llama-3.1-70B.json")), 0
        )
    assert "Take fewer bytes per weight, more GPUs" in str(no.value)
    assert no.value.missing_bytes == pytest.approx(69.1e9, rel=0.001)


@pytest.mark.parametrize("more", [0, 1, 10**9])
def test_nothing_left_is_no_pool(more):
    assert kv_pool(80 * 10**9, 0.9, 72 * 10**9 - 1, 0) == 1
    with pytest.raises(NoRoomError):
        kv_pool(80 * 10**9, 0.9, 72 * 10**9 + more, 0)


@pytest.mark.parametrize("size", ["80", "80GB", "80 gb", ""])
def test_a_size_without_its_unit_is_refused(size):
    with pytest.raises(
        ValueError, match="total_bytes: .*needs a unit.* GB is 10.9 bytes, GiB is 2.30"
    ):
        kv_pool(size, 0.9, 0, 0)


def test_gb_and_gib_are_told_apart():
    assert kv_pool("80 GiB", 1, 0, 0) / kv_pool("80 GB", 1, 0, 0) == pytest.approx(2**30 / 1e9)
    assert kv_tokens(LLAMA_8B, "58.11 GiB") == kv_tokens(LLAMA_8B, 58.11 * GIB)


def test_a_pool_smaller_than_a_block_is_refused_and_says_bytes():
    """58.11 for 58.11 GiB is the usual slip."""
    with pytest.raises(NoRoomError, match=r"pool of 58 bytes.*2,097,152 bytes each.*is in bytes"):
        kv_tokens(LLAMA_8B, 58.11)
    assert kv_tokens(LLAMA_8B, 2097152) == 16
    with pytest.raises(NoRoomError, match="less than 7 block"):
        kv_tokens(GEMMA_27B, 6 * 16 * 10 * GEMMA_27B.layer_kv_bytes())


@pytest.mark.parametrize(
    ("named", "call"),
    [
        ("block_size", lambda: kv_tokens(LLAMA_8B, 10**9, 0)),
        ("block_size", lambda: kv_tokens(LLAMA_8B, 10**9, 16.0)),
        ("bytes_per_element", lambda: kv_tokens(LLAMA_8B, 10**9, bytes_per_element=0)),
        ("tensor_parallel", lambda: kv_tokens(LLAMA_8B, 10**9, tensor_parallel=0)),
        ("pipeline_parallel", lambda: kv_tokens(LLAMA_8B, 10**9, pipeline_parallel=0)),
        ("context", lambda: max_sequences(LLAMA_8B, 10**9, 0)),
        ("batch", lambda: max_context(LLAMA_8B, 10**9, 0)),
        ("chunk", lambda: max_sequences(LLAMA_8B, 10**9, 1, chunk=0)),
        ("pool_bytes", lambda: kv_tokens(LLAMA_8B, -1)),
        ("weight_bytes", lambda: kv_pool(10**9, 0.9, -1, 0)),
        ("state_bytes", lambda: kv_tokens(QWEN_27B, 10**9, state_bytes=-1)),
        ("state_blocks", lambda: max_sequences(QWEN_27B, 10**9, 1, state_bytes=1, state_blocks=0)),
    ],
)
def test_senseless_sizes_are_refused_by_name(named, call):
    with pytest.raises(ValueError, match=named):
        call()


def test_heads_must_split_evenly_and_beyond_them_kv_is_copied():
    with pytest.raises(ValueError, match="kv_heads 5 does not divide heads 32"):
        replace(LLAMA_8B, kv_heads=5)
    with pytest.raises(ValueError, match="tensor_parallel 3 does not split 32 heads"):
        kv_tokens(LLAMA_8B, 10**9, tensor_parallel=3)
    with pytest.raises(ValueError, match="tensor_parallel 3 does not split 32 heads"):
        weight_bytes(LLAMA_8B, "bf16", 3)
    eight, sixteen = (kv_tokens(LLAMA_8B, 10**9, tensor_parallel=n) for n in (8, 16))
    assert eight == sixteen == kv_tokens(LLAMA_8B, 8 * 10**9)


def test_a_state_needs_a_recurrent_layer():
    with pytest.raises(ValueError, match="every layer of this shape keeps a KV cache"):
        kv_tokens(LLAMA_8B, 10**9, state_bytes=10**6)


def test_an_option_that_does_not_exist_is_no_silent_default():
    with pytest.raises(TypeError, match="blok_size"):
        kv_tokens(LLAMA_8B, 10**9, blok_size=32)
