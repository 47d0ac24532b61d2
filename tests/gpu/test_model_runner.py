"""The real runner on a GPU: replayed graphs over block tables, mixed steps, and its step time.

In bf16 or fp16 two kernels round differently: logits are compared within a tolerance, and tokens
only where the two best logits are further apart than that.
"""

import time

import pytest
import torch
from decodelab.measure import Decoder, ModelRunner, decode, measure_step, pick_dtype
from decodelab.measure.forward import GraphForward
from decodelab.predict import SHAPES
from decodelab.serve import Engine, Request, Sampling, Work
from test_graphs import PROMPTS, SHAPE, TOLERANCE

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.fixture(scope="module", params=["fp32", "native"])
def model(request):
    dtype = torch.float32 if request.param == "fp32" else pick_dtype("cuda")
    return Decoder.random(SHAPE, device="cuda", dtype=dtype)


def rows_at(context, batch, blocks):
    """Decode rows of one context, their blocks strewn over the pool."""
    return [
        Work(
            id=row,
            tokens=[11 * row % SHAPE.vocab],
            start=context - 1 - row,
            table=[(n * batch + row) * 7 % blocks for n in range(-(-context // 16))],
            sample=True,
        )
        for row in range(batch)
    ]


@pytest.mark.parametrize("batch", [1, 3, 5, 16])
@pytest.mark.parametrize("context", [20, 100, 700])
@torch.inference_mode()
def test_a_replayed_step_gives_the_logits_of_the_mixed_path(model, batch, context):
    runner = ModelRunner(model, 1009)
    runner.cache.pool.uniform_(-1, 1)
    assert isinstance(runner.forward, GraphForward)
    work = rows_at(context, batch, 1009)
    for _ in range(2):  # the second call replays what the first captured
        graph = runner._decode(work).clone()
        eager = runner._mixed(work)
        torch.testing.assert_close(graph, eager, rtol=0, atol=TOLERANCE[model.dtype])


@pytest.mark.parametrize("policy", ["static", "continuous"])
def test_the_engine_gives_the_tokens_of_decoding_alone_where_the_margin_is_clear(model, policy):
    engine = Engine(ModelRunner(model, 30), policy, max_batch=3, token_budget=64)
    before = model.forwards
    outputs = list(engine.run(Request(prompt, 24) for prompt in PROMPTS).values())
    assert model.forwards - before == len(engine.trace)
    assert engine.scheduler.allocator.free_blocks == 30
    for prompt, tokens in zip(PROMPTS, outputs, strict=True):
        for n, token in enumerate(tokens):
            context = prompt + tokens[:n]
            if margin(model, context) > 2 * TOLERANCE[model.dtype]:
                assert token == decode(model, [context], 1)[0][0]


@torch.inference_mode()
def margin(model, context):
    """How far the best next token is ahead of the second, as the runner's own prefill has it."""
    runner = ModelRunner(model, 40)
    work = [Work(id=0, tokens=context, start=0, table=range(40), sample=True)]
    best, second = runner._mixed(work)[0].float().topk(2).values
    return float(best - second)


def test_sampling_on_the_gpu_is_repeatable(model):
    hot = Sampling(temperature=1.0, top_p=0.9, seed=3)
    request = Request(PROMPTS[1], 12, sampling=hot)
    first, second = (Engine(ModelRunner(model, 20)).run([request]) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("batch", [8, 64])
def test_a_paged_step_beside_a_contiguous_one(batch, capsys):
    """Prints both; asserts nothing about time."""
    total = torch.cuda.get_device_properties(0).total_memory
    shape = SHAPES["Llama-3.1-8B" if total >= 40e9 else "Llama-3.2-1B"]
    model = Decoder.random(shape, device="cuda", dtype=pick_dtype("cuda"))
    runner, seconds = ModelRunner(model, batch * 16), []
    work = [
        Work(id=r, tokens=[1], start=255, table=range(r, 16 * batch, batch), sample=True)
        for r in range(batch)
    ]
    for _ in range(12):
        begin = time.perf_counter()
        tokens = runner.run(work).tokens
        seconds.append(time.perf_counter() - begin)
    contiguous = measure_step(model, batch, 256).seconds
    with capsys.disabled():
        print(f"\nB = {batch}: paged {sorted(seconds)[6] * 1e3:.2f} ms, {contiguous * 1e3:.2f} ms")
    assert len(tokens) == batch
