"""Decoding on a GPU: a CUDA graph gives the eager logits, and how much bandwidth it reaches.

In bf16 or fp16 two kernels round differently: logits are compared within a tolerance, and tokens
only where the two best logits are further apart than that.
"""

import pytest
import torch
from decodelab.measure import Decoder, KVCache, calibrate, decode, measure_step, pick_dtype
from decodelab.measure.decode import prefill
from decodelab.measure.forward import EagerForward, GraphForward, length_for, rows_for
from decodelab.predict import SHAPES, ModelShape, decode_step

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

SHAPE = ModelShape(
    layers=4,
    hidden=512,
    heads=8,
    kv_heads=2,
    head_dim=64,
    ffn=1408,
    vocab=4096,
    max_context=2048,
    windows=(None, 48, None, 48),
)
PROMPTS = [[n * k % 4096 for n in range(1, length)] for k, length in ((3, 70), (5, 9), (7, 130))]
TOLERANCE = {torch.float32: 2e-2, torch.float16: 5e-2, torch.bfloat16: 2e-1}  # fp32: TF32 kernels


@pytest.fixture(scope="module", params=["fp32", "native"])
def model(request):
    dtype = torch.float32 if request.param == "fp32" else pick_dtype("cuda")
    return Decoder.random(SHAPE, device="cuda", dtype=dtype)


def filled(model, rows, length):
    cache = KVCache(
        model.shape, rows_for(model, rows), length_for(model, length), model.dtype, model.device
    )
    cache.pool.uniform_(-1, 1)
    return cache


@pytest.mark.parametrize("batch", [1, 3, 5, 16])
@pytest.mark.parametrize("context", [7, 100, 700])
@torch.inference_mode()
def test_graph_logits_equal_eager_logits(model, batch, context):
    cache = filled(model, batch, context)
    twin = filled(model, batch, context)
    twin.pool.copy_(cache.pool)
    tokens = [11 * row % SHAPE.vocab for row in range(batch)]
    positions = [max(0, context - 1 - row) for row in range(batch)]
    eager = EagerForward(model, twin)
    graph = GraphForward(model, cache)
    for step in range(2):  # the second call replays what the first captured, at new inputs
        shifted = [token + step for token in tokens]
        torch.testing.assert_close(
            graph(shifted, positions, context),
            eager(shifted, positions, context),
            rtol=0,
            atol=TOLERANCE[model.dtype],
        )


def test_batched_tokens_equal_tokens_alone_where_the_margin_is_clear(model):
    before = model.forwards
    together = decode(model, PROMPTS, 24)
    assert model.forwards - before == 24
    for prompt, tokens in zip(PROMPTS, together, strict=True):
        for n, token in enumerate(tokens):
            context = prompt + tokens[:n]
            cache = KVCache(SHAPE, 1, len(context), model.dtype, model.device)
            with torch.inference_mode():
                logits = prefill(model, [context], cache)[0].float()
            best, second = logits.topk(2).values
            if best - second > 2 * TOLERANCE[model.dtype]:
                assert token == int(logits.argmax())


def test_finished_rows_leave_on_the_gpu_too(model):
    steps = []
    decode(model, PROMPTS, [2, 9, 5], on_step=steps.append)
    assert [s.batch for s in steps] == [3, 3, 2, 2, 2, 1, 1, 1, 1]


def test_the_dtype_follows_the_compute_capability():
    native_bf16 = torch.cuda.get_device_capability() >= (8, 0)
    assert pick_dtype("cuda") == (torch.bfloat16 if native_bf16 else torch.float16)


@pytest.mark.parametrize("batch", [1, 8, 64])
def test_bandwidth_reached_at_real_size(batch, capsys):
    """Prints MBU; asserts only what physics demands."""
    total = torch.cuda.get_device_properties(0).total_memory
    shape = SHAPES["Llama-3.1-8B" if total >= 40e9 else "Llama-3.2-1B"]
    ceilings = calibrate("cuda")
    model = Decoder.random(shape, device="cuda", dtype=pick_dtype("cuda"))
    timing = measure_step(model, batch, 128)
    step = decode_step(shape, ceilings.to_hardware(), batch, 128, dtype=ceilings.dtype)
    mbu = step.bytes / timing.seconds / ceilings.bandwidth
    with capsys.disabled():
        print(
            f"\n{ceilings.device}, {shape.parameters / 1e9:.1f}B {ceilings.dtype}, B = {batch}: "
            f"{timing.seconds * 1e3:.2f} ms, {ceilings.bandwidth / 1e9:.0f} GB/s, MBU {mbu:.0%}"
        )
    assert 0 < mbu < 1.2
