"""Ten thousand short requests: every block is free in the end, and memory stays where it was."""

import gc
import os
import random
from pathlib import Path

import pytest
import torch
from decodelab.measure import Decoder, ModelRunner, decode
from decodelab.predict import ModelShape
from decodelab.serve import Engine, Request, Sampling, SharingAllocator

SHAPE = ModelShape(
    layers=1, hidden=16, heads=2, kv_heads=1, head_dim=8, ffn=16, vocab=50, max_context=64
)
ROUNDS, REQUESTS, BLOCKS = 10, 1000, 24
SPARE_BYTES = 4e6  # of resident memory: what Python's own allocator may take in 8,000 requests


def resident_bytes():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def live_tensors():
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def round_of(choose):
    """Short prompts, of which many begin alike; every tenth request samples."""
    for n in range(REQUESTS):
        prompt = [*[7] * choose.randint(0, 9), choose.randrange(SHAPE.vocab)]
        sampling = Sampling(temperature=1.0 if n % 10 == 0 else 0.0, top_p=0.9, seed=n)
        yield Request(prompt, choose.randint(1, 12), sampling=sampling)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's own figures")
def test_ten_thousand_requests_leave_all_blocks_free_and_memory_flat():
    model, choose = Decoder.random(SHAPE, dtype=torch.float64), random.Random(0)
    runner = ModelRunner(model, BLOCKS, 4)
    engine = Engine(runner, max_batch=32, allocator=SharingAllocator)
    pool, served, preemptions, seen = runner.cache.pool.data_ptr(), 0, 0, []
    for turn in range(ROUNDS):
        requests = list(round_of(choose))
        outputs = list(engine.run(requests).values())
        for request, output in list(zip(requests, outputs, strict=True))[1::100]:
            assert output == decode(model, [request.prompt], request.max_tokens)[0]
        served += sum(sequence.status == "finished" for sequence in engine.sequences.values())
        preemptions += sum(sequence.preemptions for sequence in engine.sequences.values())
        engine.scheduler.allocator.check()
        assert engine.scheduler.allocator.free_blocks == BLOCKS, f"after round {turn}"
        # The trace and the sequences are kept by design, until someone drops them.
        engine.trace.clear()
        engine.sequences.clear()
        del requests, outputs
        seen.append((live_tensors(), resident_bytes()))
    assert served == ROUNDS * REQUESTS
    assert preemptions > 0, "the pool was never short: the soak proves less"
    assert runner.cache.pool.data_ptr() == pool
    (tensors, resident), (last_tensors, last_resident) = seen[1], seen[-1]
    assert last_tensors == tensors
    assert last_resident - resident < SPARE_BYTES
