"""The memory ceiling: KV bytes known two ways, the batch refused, the error survived."""

import gc
import json
import math
import os
import subprocess
import sys
import weakref
from dataclasses import replace

import pytest
import torch
from decodelab.measure import (
    Decoder,
    KVCache,
    KVPool,
    NotEnoughMemoryError,
    PoolExhaustedError,
    allocated_bytes,
    attempt,
    ceiling,
    decode,
    find_ceiling,
    release_memory,
    run_to_exhaustion,
)
from decodelab.predict import SHAPES, max_sequences
from hypothesis import given, settings
from hypothesis import strategies as st
from test_measure_oracle import TOY

KINDS = {
    "gqa": TOY,
    "mqa": replace(TOY, kv_heads=1),
    "mha": replace(TOY, kv_heads=4),
    "head_dim beside hidden": replace(TOY, head_dim=12),
}
MODELS = {kind: Decoder.random(shape) for kind, shape in KINDS.items()}
MODEL = MODELS["gqa"]
TOKEN = TOY.kv_bytes_per_token(4)


@pytest.fixture(autouse=True, scope="module")
def a_small_heap():
    """Each refusal collects garbage: keep the modules' own objects, half a million, out of it."""
    gc.freeze()
    yield
    gc.unfreeze()


# KV bytes, measured two ways


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_kv_bytes_by_tensor_and_by_allocator_equal_the_formula(kind, dtype):
    shape, size = KINDS[kind], torch.empty(0, dtype=dtype).element_size()
    formula = 3 * 40 * shape.kv_bytes_per_token(size)
    assert KVCache(shape, 3, 40, dtype).bytes / formula == 1.000
    assert allocated_bytes(lambda: KVCache(shape, 3, 40, dtype)) == formula
    wrong = {
        "query heads": 3 * 40 * 2 * shape.layers * shape.heads * shape.head_dim * size,
        "hidden / heads": 3 * 40 * 2 * shape.layers * shape.kv_heads * 8 * size,
        "K without V": formula // 2,
    }
    right = {"gqa": (), "mqa": (), "mha": ("query heads",)}.get(kind, ())
    for name, value in wrong.items():
        same = name in right or (name == "hidden / heads" and shape.head_dim == 8)
        assert (value == formula) == same, name


def test_a_reshaped_cache_counts_the_bytes_it_uses():
    cache = KVCache(TOY, 1, 100)
    small = cache.reshaped(3, 20)
    assert (small.bytes, cache.bytes) == (60 * TOKEN, 100 * TOKEN)
    assert allocated_bytes(lambda: cache.reshaped(3, 20)) == 0, "a view, nothing new"


def test_the_allocator_counts_neither_temporaries_nor_older_garbage():
    class Loop:
        def __init__(self):
            self.me, self.tensor = self, torch.zeros(10_000)

    Loop()  # only the garbage collector can free it
    made = allocated_bytes(lambda: (torch.ones(50, 50) @ torch.ones(50, 50), Loop() and 0)[0])
    assert made == 50 * 50 * 4


# The batch raised until it is refused


@pytest.mark.parametrize("block_size", [1, 16, 24])
@pytest.mark.parametrize("context", [16, 17, 50])
@pytest.mark.parametrize("kind", KINDS)
def test_predicted_batch_equals_the_measured_one(kind, context, block_size):
    shape = KINDS[kind]
    pool_bytes = 417.5 * shape.kv_bytes_per_token(4)
    found = find_ceiling(MODELS[kind], context, pool_bytes, block_size)
    assert found.batch == max_sequences(shape, pool_bytes, context, block_size, 4)
    assert found.refused_at == found.batch + 1
    assert found.pool_tokens % block_size == 0
    assert (
        0
        <= pool_bytes - found.pool_tokens * shape.kv_bytes_per_token(4)
        < (block_size * shape.kv_bytes_per_token(4))
    )


def test_wrong_predictions_miss_the_ceiling():
    pool_bytes = 617.5 * TOKEN
    measured = find_ceiling(MODEL, 50, pool_bytes, 24).batch
    assert measured == max_sequences(TOY, pool_bytes, 50, 24, 4)
    tokens = pool_bytes // TOKEN
    wrong = {
        "no blocks": tokens // 50,
        "query heads": max_sequences(KINDS["mha"], pool_bytes, 50, 24, 4),
        "fp16 for fp32": max_sequences(TOY, pool_bytes, 50, 24, 2),
        "one token of context": max_sequences(TOY, pool_bytes, 1, 24, 4),
    }
    assert measured not in wrong.values()


@settings(max_examples=12)
@given(st.integers(1, 64), st.integers(1, 32), st.integers(32, 900))
def test_any_ceiling_fits_and_one_more_would_not(context, block_size, tokens):
    found = find_ceiling(MODEL, context, tokens * TOKEN, block_size)
    each = math.ceil(context / block_size) * block_size
    assert found.batch * each <= found.pool_tokens <= tokens
    assert (found.batch + 1) * each > found.pool_tokens


def test_each_batch_that_counts_ran_one_real_step_and_few_were_needed():
    seen, before = [], MODEL.forwards
    handle = MODEL.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    found = find_ceiling(MODEL, 8, 100 * 8 * TOKEN, 8)
    handle.remove()
    assert found.batch == 100
    assert seen == sorted(set(seen)), "each larger than the last that ran"
    assert seen[-1] == 100
    assert MODEL.forwards - before == len(seen) <= 2 * math.log2(100)


def test_a_pool_too_small_for_one_sequence_has_ceiling_0():
    found = find_ceiling(MODEL, 33, 32 * TOKEN, 16)
    assert (found.batch, found.refused_at) == (0, 1)


def test_a_windowed_layer_keeps_every_token_in_the_pool():
    """KVCache masks: the batch that a window frees comes with a cache that drops tokens."""
    windowed = replace(TOY, windows=(8, 8))
    found = find_ceiling(Decoder.random(windowed), 48, 480 * TOKEN)
    assert found.batch == 10 == max_sequences(TOY, 480 * TOKEN, 48, 16, 4)


def test_the_refusal_names_tokens_bytes_and_the_largest_batch():
    pool = KVPool(MODEL, 10 * 16 * TOKEN)
    assert pool.take(5, 17).bytes == 5 * 32 * TOKEN == pool.cache.bytes
    with pytest.raises(PoolExhaustedError) as caught:
        pool.take(6, 17)
    for fact in ("6 sequences of 17 tokens", "192 tokens", "holds 160", ": 5 such sequences"):
        assert fact in str(caught.value)
    assert isinstance(caught.value, NotEnoughMemoryError)
    assert caught.value.needed_bytes == 192 * TOKEN
    assert caught.value.available_bytes == 160 * TOKEN
    assert find_ceiling(MODEL, 17, 10 * 16 * TOKEN).message == str(caught.value)


def test_a_device_that_refuses_by_itself_is_asked_until_it_does(monkeypatch):
    """The GPU's path: torch.OutOfMemoryError out of an allocation, every cache given back."""
    caches = []

    def take(batch, context):
        assert not any(ref() for ref in caches), "the last batch's memory is still held"
        if batch > 11:
            held = torch.zeros(7)
            caches.append(weakref.ref(held))
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        cache = KVCache(TOY, batch, context, check_memory=False)
        caches.append(weakref.ref(cache.pool))
        return cache

    monkeypatch.setattr(ceiling, "_unbounded", lambda model, block_size: (take, 300 * TOKEN))
    found = find_ceiling(MODEL, 16)
    assert (found.batch, found.refused_at, found.pool_tokens) == (11, 12, 288)
    assert "Tried to allocate 2.00 GiB" in found.message
    assert not any(ref() for ref in caches)


def test_a_ceiling_survives_json():
    found = find_ceiling(MODEL, 16, 64 * TOKEN)
    assert ceiling.Ceiling(**json.loads(json.dumps(found.as_dict()))) == found
    grown = run_to_exhaustion(MODEL, 2, 5, 64 * TOKEN)
    assert json.loads(json.dumps(grown.as_dict()))["tokens"] == 32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((16,), "Name pool_bytes"),
        ((16, 1e6, 0), "block_size must be a positive whole number, not 0"),
        ((0, 1e6), "must both be at least 1"),
        ((65, 1e6), "beyond the model's 64 tokens"),
        ((16, -1.0), "pool_bytes must be a finite number above 0"),
        ((16, 5 * TOKEN), "holds no block: 16 tokens of this model take 4,096 bytes"),
    ],
)
def test_bad_ceilings_are_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        find_ceiling(MODEL, *arguments)


# Growing into the ceiling


@settings(max_examples=30)
@given(st.integers(1, 9), st.integers(1, 20), st.integers(1, 20), st.integers(20, 500))
def test_growing_sequences_are_refused_where_the_blocks_end(batch, prompt, block_size, tokens):
    tokens = min(tokens, 64 * batch)
    pool_tokens = tokens // block_size * block_size
    each = pool_tokens // batch // block_size * block_size
    run = lambda: run_to_exhaustion(MODEL, batch, prompt, tokens * TOKEN, block_size)  # noqa: E731
    if prompt > each:
        with pytest.raises(ValueError, match=f"{batch} sequences of|holds no block"):
            run()
        return
    grown = run()
    assert (grown.tokens, grown.refused_at) == (each, each + 1)
    assert grown.message.startswith(f"{batch} sequences of {each + 1} tokens")
    first = math.ceil(prompt / block_size) * block_size
    assert [step.context for step in grown.steps] == list(range(first, each + 1, block_size))
    assert all(step.seconds > 0 and step.batch == batch for step in grown.steps)


def test_a_pool_that_outlasts_the_context_is_refused():
    with pytest.raises(ValueError, match="beyond the model's 64 tokens"):
        run_to_exhaustion(MODEL, 2, 5, 1000 * TOKEN)


# Out of memory, survived


def failing(refs):
    """Fill memory, keep a reference of one's own, and fail two frames deep."""
    held = torch.zeros(1000)
    refs.append(weakref.ref(held))
    assert "held" in locals(), "a look at them leaves a snapshot on the frame, as IPython does"
    fail_deeper(held * 2, refs)


def fail_deeper(doubled, refs):
    refs.append(weakref.ref(doubled))
    loop = [doubled]
    loop.append(loop)
    try:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
    except torch.OutOfMemoryError as first:
        error = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")
        kept = first  # a cycle through the frame, as debugging code leaves them  # noqa: F841
        raise error from first


def test_an_attempt_keeps_the_message_and_no_tensor():
    refs = []
    gc.disable()  # what attempt frees, it frees itself
    try:
        outcome = attempt(lambda: failing(refs))
        assert len(refs) == 2
        assert [ref() for ref in refs] == [None, None]
    finally:
        gc.enable()
    assert outcome.value is None
    assert "can't allocate memory" in outcome.error


def test_a_saved_exception_keeps_every_tensor_of_the_failed_frames():
    """The known-wrong variant."""
    refs, saved = [], None
    try:
        failing(refs)
    except RuntimeError as error:
        saved = error
    gc.collect()
    assert all(ref() is not None for ref in refs)
    assert saved is not None


def test_an_attempt_that_succeeds_returns_the_value():
    outcome = attempt(lambda: 42)
    assert (outcome.value, outcome.error) == (42, None)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        MemoryError(),
        NotEnoughMemoryError("KV cache", 2, 1, "Take less."),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"),
    ],
)
def test_every_kind_of_out_of_memory_becomes_a_sentence(error):
    def fail():
        raise error

    assert attempt(fail).error


@pytest.mark.parametrize("error", [ValueError("a typo"), RuntimeError("shape mismatch"), KeyError])
def test_other_errors_are_not_swallowed(error):
    def fail():
        raise error

    with pytest.raises(error if isinstance(error, type) else type(error)):
        attempt(fail)


def test_a_cache_too_large_is_an_outcome_and_the_model_goes_on():
    outcome = attempt(lambda: KVCache(SHAPES["Llama-2-7B"], 10_000, 4096))
    assert "GB are needed" in outcome.error
    assert len(decode(MODEL, [[1, 2]], 3)[0]) == 3


def in_a_process(code):
    """Run code in a Python of its own; what it printed last, read as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": "tests"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


REAL_FAILURE = """
import json, resource, torch
from decodelab.measure import Decoder, attempt, decode
from test_measure_oracle import TOY

MB = 2**20
model = Decoder.random(TOY)
before = decode(model, [[1, 2, 3]], 5)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 400 * MB, used + 400 * MB))

def fill():
    held = []
    while True:
        held.append(torch.ones(50 * MB // 4))

large = lambda: torch.zeros(300 * MB // 4).numel()
filled = attempt(fill).error
after = attempt(large)
saved = None
try:
    fill()
except RuntimeError as error:
    saved = error
naive = attempt(large).error
del saved
print(json.dumps({
    "filled": filled, "after": after.error, "naive": naive, "again": attempt(large).error,
    "same": decode(model, [[1, 2, 3]], 5) == before,
}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits its own address space")
def test_a_real_allocation_failure_is_survived_and_its_memory_is_free_again():
    result = in_a_process(REAL_FAILURE)
    assert "DefaultCPUAllocator: can't allocate memory" in result["filled"]
    assert result["after"] is None, "300 of 400 MB fit again"
    assert "can't allocate memory" in result["naive"], "a saved exception holds them"
    assert result["again"] is None
    assert result["same"], "a decode step works as before"


NOTEBOOK = """
import contextlib, gc, io, json, weakref
import torch
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()
cells = [
    "import torch, weakref; from decodelab.measure import attempt, release_memory; refs = []",
    '''
def fill():
    held = torch.zeros(1000)
    refs.append(weakref.ref(held))
    raise torch.OutOfMemoryError("CUDA out of memory")
''',
    "print(attempt(fill))",
    "fill()",
    "1 + 1",
    "release_memory()",
]
held = []
with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    for cell in cells:
        shell.run_cell(cell, store_history=True)
        gc.collect()
        held.append([ref() is not None for ref in shell.user_ns["refs"]])
print(json.dumps(held))
"""


def test_a_notebook_holds_an_uncaught_errors_tensors_until_they_are_released():
    pytest.importorskip("IPython")
    *_, attempted, failed, later, released = in_a_process(NOTEBOOK)
    assert attempted == [False], "an attempt leaves nothing behind"
    assert failed == later == [False, True], "sys.last_value keeps what a failed cell held"
    assert released == [False, False]


def test_releasing_without_any_error_does_nothing():
    kept = torch.zeros(3)
    release_memory()
    assert kept.sum() == 0
