"""The memory ceiling on a GPU: met by allocating, predicted beforehand, and survived."""

import gc
import weakref

import pytest
import torch
from decodelab.measure import (
    Decoder,
    KVCache,
    allocated_bytes,
    attempt,
    decode,
    find_ceiling,
    pick_dtype,
    run_to_exhaustion,
)
from decodelab.predict import ModelShape, max_sequences

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

# A small model with a large cache, 128 KiB a token at 16 bit: the ceiling is near, a step is short.
SHAPE = ModelShape(layers=8, hidden=512, heads=32, kv_heads=32, head_dim=128, ffn=1024, vocab=4096)
TOKEN = SHAPE.kv_bytes_per_token(2)


@pytest.fixture(scope="module")
def model():
    return Decoder.random(SHAPE, device="cuda", dtype=pick_dtype("cuda"))


def test_the_allocator_holds_what_the_formula_says(model):
    held = allocated_bytes(lambda: KVCache(SHAPE, 4, 1024, model.dtype, "cuda"), "cuda")
    assert 0 <= held - 4 * 1024 * TOKEN <= 2**21


@pytest.mark.parametrize("context", [1000, 4096])
def test_the_batch_is_refused_by_the_gpu_itself_and_all_memory_comes_back(model, context, capsys):
    before = torch.cuda.memory_allocated()
    found = find_ceiling(model, context)
    predicted = max_sequences(SHAPE, found.pool_bytes, context, 16, 2)
    with capsys.disabled():
        print(f"\n{context} tokens: {found.batch} sequences run, {predicted} predicted")
    assert "out of memory" in found.message
    assert found.refused_at == found.batch + 1
    assert 0.8 * predicted <= found.batch <= predicted  # activations take the rest
    gc.collect()
    assert torch.cuda.memory_allocated() == before
    assert len(decode(model, [[1, 2, 3]], 4)[0]) == 4


def test_a_bounded_pool_is_predicted_to_the_block(model):
    pool_bytes = 10_000 * TOKEN
    found = find_ceiling(model, 300, pool_bytes)
    assert found.batch == max_sequences(SHAPE, pool_bytes, 300, 16, 2)
    grown = run_to_exhaustion(model, 8, 1000, pool_bytes)
    assert grown.tokens == 10_000 // 8 // 16 * 16


def test_an_attempt_gives_the_memory_of_failed_frames_back(model):
    refs, before = [], torch.cuda.memory_allocated()

    def fill():
        held = torch.ones(2**28, device="cuda")
        refs.append(weakref.ref(held))
        return torch.empty(2**50, device="cuda")

    outcome = attempt(fill)
    assert "out of memory" in outcome.error
    assert refs[0]() is None
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("context", [7, 64, 100])
def test_a_row_that_sees_nothing_is_finite(dtype, context):
    model = Decoder.random(SHAPE, device="cuda", dtype=dtype)
    positions = torch.full((3, 1), context - 1, device="cuda")
    view = KVCache(SHAPE, 3, context, dtype, "cuda").at(positions, context)
    columns = torch.arange(context, device="cuda").repeat(3, 1)
    columns[1] = -1
    view.columns = lambda window: columns
    with torch.inference_mode():
        assert model(torch.full_like(positions, 3), positions, view).isfinite().all()
