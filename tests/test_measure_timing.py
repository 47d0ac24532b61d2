"""Calibration, timed steps, the fitted model: sane figures, exact bookkeeping, no thresholds."""

import itertools
import json
import math

import numpy as np
import pytest
import torch
from decodelab.measure import (
    Calibration,
    Decoder,
    KVCache,
    NotEnoughMemoryError,
    StepTimeModel,
    StepTiming,
    calibrate,
    measure_linear,
    measure_prefill,
    measure_step,
    measure_steps,
    memory,
    pick_device,
    pick_dtype,
    steps,
    timed,
)
from decodelab.measure.calibrate import BUFFER_BYTES, MATRIX
from decodelab.measure.forward import bucket
from decodelab.measure.step_model import non_negative_fit
from decodelab.predict import SMOLLM2_135M, decode_step
from hypothesis import given, settings
from hypothesis import strategies as st
from test_measure_oracle import TOY

MACHINE = Calibration(
    device="a machine",
    dtype="fp32",
    bandwidth=20e9,
    flops=120e9,
    seconds_per_call=15e-6,
    memory_bytes=16 * 10**9,
)
SMALL = Decoder.random(TOY)


# Timing and calibration


def test_timed_returns_the_median_and_leaves_the_warm_up_out(monkeypatch):
    ticks = itertools.chain.from_iterable([(0.0, 1.0), (5.0, 9.0), (20.0, 22.0)])
    monkeypatch.setattr("time.perf_counter", lambda: next(ticks))
    calls = []
    timing = timed(lambda: calls.append(1), repeats=3, warmup=2)
    assert timing == (2.0, 3.0, 1.0)
    assert len(calls) == 5


@pytest.fixture
def small_buffers(monkeypatch):
    monkeypatch.setitem(BUFFER_BYTES, "cpu", 2**24)
    monkeypatch.setitem(MATRIX, "cpu", 256)


def test_calibration_gives_positive_figures_that_predict_accepts(small_buffers):
    ceilings = calibrate("cpu", torch.float32)
    assert 0 < ceilings.seconds_per_call < 1
    assert ceilings.ridge_point == ceilings.flops / ceilings.bandwidth > 0
    hardware = ceilings.to_hardware()
    assert hardware.capacity_bytes == memory.total_bytes() > 10**9
    step = decode_step(TOY, hardware, 4, 32, weight_bytes=4, kv_bytes=4, dtype="fp32")
    assert step.seconds > 0


def test_calibration_buffers_lie_beyond_the_caches():
    assert BUFFER_BYTES["cpu"] >= 256 * 2**20


def test_calibration_survives_json():
    assert Calibration.from_dict(json.loads(json.dumps(MACHINE.as_dict()))) == MACHINE


def test_calibration_refuses_a_dtype_without_a_rate():
    with pytest.raises(ValueError, match="float64"):
        calibrate("cpu", torch.float64)


def test_a_linear_layer_is_measured_in_seconds(small_buffers):
    assert 0 < measure_linear(2, 64, 96, "cpu") < 1


def test_a_linear_layer_that_does_not_fit_is_refused():
    with pytest.raises(NotEnoughMemoryError, match="layers of 10000000 x 10000000"):
        measure_linear(1, 10**7, 10**7, "cpu")


# Devices and memory


@pytest.mark.parametrize(
    ("capability", "expected"),
    [((7, 5), torch.float16), ((8, 0), torch.bfloat16), ((9, 0), torch.bfloat16)],
)
def test_bf16_is_picked_from_compute_capability_8_on(monkeypatch, capability, expected):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    # A T4 (7.5) claims bf16 too: emulated. Asking this way is the known-wrong variant.
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_, **__: True)
    assert pick_dtype("cuda") == expected


def test_the_cpu_runs_in_fp32():
    assert pick_dtype("cpu") == torch.float32
    assert pick_device().type in ("cpu", "cuda")


def test_available_memory_is_less_than_all_of_it():
    assert 0 < memory.available_bytes() < memory.total_bytes()


@pytest.mark.parametrize(("limit", "expected"), [("3000", 1000), ("max", 5 * 1024)])
def test_a_containers_limit_counts(monkeypatch, tmp_path, limit, expected):
    (tmp_path / "memory.max").write_text(limit + "\n")
    (tmp_path / "memory.current").write_text("2000\n")
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 5 kB\n")
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    assert memory.available_bytes() == expected


def test_without_proc_the_pages_are_asked_for(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "none")
    assert 0 < memory.available_bytes() <= memory.total_bytes()


# Steps


def test_a_step_reads_exactly_its_context(monkeypatch):
    seen = []
    original = KVCache.at

    def spy(cache, positions, context):
        seen.append((positions.flatten().tolist(), context))
        return original(cache, positions, context)

    monkeypatch.setattr(KVCache, "at", spy)
    timing = measure_step(Decoder.random(TOY), 3, 20, repeats=2)
    assert (timing.batch, timing.context) == (3, 20)
    assert all(call == ([19, 19, 19], 20) for call in seen)
    assert len(seen) == 2 + 2  # warm-up and repeats


def test_a_sweep_yields_one_cell_at_a_time_from_one_cache(monkeypatch):
    made = []
    monkeypatch.setattr(steps, "KVCache", lambda *a: made.append(a) or KVCache(*a))
    cells = [(1, 8), (4, 8), (2, 32)]
    sweep = measure_steps(Decoder.random(TOY), cells, repeats=1)
    first = next(sweep)
    assert (first.batch, first.context) == cells[0]
    assert [(t.batch, t.context) for t in sweep] == cells[1:]
    assert len(made) == 1
    assert made[0][2] == 64, "slots of the largest cell, 2 x 32"


def test_cells_that_do_not_fit_are_left_out_and_an_empty_sweep_is_an_error(monkeypatch):
    token = TOY.kv_bytes_per_token(4)
    for where in ("steps", "memory"):
        monkeypatch.setattr(f"decodelab.measure.{where}.available_bytes", lambda _: 40 * token)
    kept = [(t.batch, t.context) for t in measure_steps(SMALL, [(2, 10), (9, 10), (1, 40)], 1)]
    assert kept == [(2, 10), (1, 40)]
    with pytest.raises(NotEnoughMemoryError, match="GB are needed"):
        measure_step(SMALL, 9, 10)


@pytest.mark.parametrize("cell", [(0, 8), (1, 0), (1, 65)])
def test_impossible_cells_are_refused(cell):
    with pytest.raises(ValueError, match="at least 1|beyond the model's 64"):
        measure_step(SMALL, *cell)


def test_a_prefill_is_one_forward_a_repeat():
    before = SMALL.forwards
    assert measure_prefill(SMALL, 2, 16, repeats=3) > 0
    assert SMALL.forwards - before == 1 + 3


def test_step_timings_survive_json_and_count_tokens_of_the_whole_batch():
    timing = StepTiming(batch=8, context=128, seconds=0.05, spread=0.01)
    assert StepTiming(**json.loads(json.dumps(timing.as_dict()))) == timing
    assert timing.tokens_per_second == 160


def test_a_bucket_is_never_smaller_and_at_most_half_again_as_large():
    for number in range(1, 2000):
        assert number <= bucket(number) <= 1.5 * number
        assert bucket(bucket(number)) == bucket(number)


# The additive model

CELLS = [(b, s) for b in (1, 4, 16, 64) for s in (128, 512, 1024)]
CORNERS = [(b, s) for b in (1, 64) for s in (128, 1024)]


def synthetic(cells, overhead, kv_bandwidth, arithmetic, shape=SMOLLM2_135M):
    weights = shape.streamed_parameters * 4 / MACHINE.bandwidth
    return [
        StepTiming(
            batch=b,
            context=s,
            seconds=overhead + weights + b * (shape.kv_bytes(s, 4) / kv_bandwidth + arithmetic),
            spread=0.0,
        )
        for b, s in cells
    ]


def test_known_terms_are_recovered_from_the_corners_alone():
    truth = {"overhead": 0.02, "kv_bandwidth": 8e9, "arithmetic": 2e-3}
    model = StepTimeModel.fit(SMOLLM2_135M, synthetic(CORNERS, **truth), MACHINE, 4)
    unseen = [cell for cell in CELLS if cell not in CORNERS]
    assert max(map(abs, model.errors(synthetic(unseen, **truth)))) < 1e-9
    terms = model.terms(16, 512)
    assert list(terms) == ["weights", "KV", "arithmetic", "overhead"]
    assert terms == pytest.approx(
        {
            "weights": SMOLLM2_135M.streamed_parameters * 4 / 20e9,
            "KV": 16 * 512 * 30 * 2 * 3 * 64 * 4 / 8e9,
            "arithmetic": 16 * 2e-3,
            "overhead": 0.02,
        }
    )
    assert sum(terms.values()) == pytest.approx(model.predict(16, 512))


def test_a_model_that_reads_the_weights_once_a_sequence_is_far_off():
    """The known-wrong variant: weights multiplied by the batch."""
    cells = synthetic(CELLS, 0.02, 8e9, 1e-4)
    model = StepTimeModel.fit(SMOLLM2_135M, cells, MACHINE, 4)
    wrong = [b * model.weight_seconds + model.predict(b, s) for b, s in CELLS]
    assert max(t / c.seconds for t, c in zip(wrong, cells, strict=True)) > 5
    assert max(map(abs, model.errors(cells))) < 1e-9


def test_windows_cap_the_kv_term():
    shape = TOY.__class__(**{**TOY.__dict__, "windows": (16, 16), "max_context": 4096})
    cells = synthetic([(1, 8), (1, 16), (9, 8), (9, 16)], 0.01, 1e6, 0.0, shape)
    model = StepTimeModel.fit(shape, cells, MACHINE, 4)
    assert model.terms(4, 16)["KV"] == model.terms(4, 2048)["KV"] > 0


def test_overhead_is_never_negative():
    fast = [
        StepTiming(batch=c.batch, context=c.context, seconds=c.seconds - 0.01, spread=0.0)
        for c in synthetic(CELLS, 0.0, 8e9, 2e-3)
    ]
    model = StepTimeModel.fit(SMOLLM2_135M, fast, MACHINE, 4)
    terms = model.terms(1, 128)
    assert terms["overhead"] == 0
    assert terms["weights"] < SMOLLM2_135M.streamed_parameters * 4 / MACHINE.bandwidth
    assert max(map(abs, model.errors(fast))) < 1e-9


@pytest.mark.parametrize("cells", [[(1, 128), (8, 128)], [(1, 128), (1, 512)], []])
def test_a_fit_without_two_batches_and_two_contexts_is_refused(cells):
    with pytest.raises(ValueError, match="two batches and two contexts"):
        StepTimeModel.fit(SMOLLM2_135M, synthetic(cells, 0.01, 8e9, 1e-3), MACHINE, 4)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_the_non_negative_fit_meets_the_optimality_conditions(seed):
    """x >= 0; where x > 0 the gradient is 0, where x = 0 it pushes outwards (KKT)."""
    generator = np.random.default_rng(seed)
    rows, target = generator.normal(size=(6, 3)), generator.normal(size=6)
    x = np.array(non_negative_fit(rows, target))
    gradient = rows.T @ (rows @ x - target)
    assert (x >= 0).all()
    assert np.abs(gradient[x > 0]).max(initial=0) < 1e-9
    assert gradient[x == 0].min(initial=0) > -1e-9


def test_the_measured_toy_can_be_fitted():
    cells = list(measure_steps(SMALL, [(b, s) for b in (1, 4) for s in (8, 64)], repeats=2))
    model = StepTimeModel.fit(TOY, cells, MACHINE, 4)
    assert all(math.isfinite(error) for error in model.errors(cells))
