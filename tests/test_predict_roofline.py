"""Intensity, ridge, crossover and the step time: the course's own numbers, then their laws."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from decodelab.predict import (
    HARDWARE,
    SHAPES,
    SMOLLM2_135M,
    DoesNotFitError,
    ModelShape,
    crossover_batch,
    decode_step,
    linear_intensity,
    ridge_point,
)
from hypothesis import given
from hypothesis import strategies as st

DATA = Path(__file__).parent / "data"
H100 = HARDWARE["NVIDIA H100 SXM"]
LLAMA_13B = SHAPES["Llama-2-13B"]
N = 4096

batches = st.integers(1, 4096)
contexts = st.integers(1, 131072)
shapes = st.sampled_from(list(SHAPES.values()))
devices = st.sampled_from([device for device in HARDWARE.values() if "bf16" in device.flops])


# -- intensity of one layer ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "intensity"),
    [(1, 1.00), (8, 7.97), (32, 31.5), (64, 62.1), (128, 120.5), (256, 227.6)],
)
def test_intensity_of_a_square_fp16_layer_with_its_activations(batch, intensity):
    assert linear_intensity(batch, N, N) == pytest.approx(intensity, rel=0.002)


@pytest.mark.parametrize(
    ("weight_bytes", "per_sequence"), [(4, 0.5), (2, 1), (1, 2), (0.5, 4)], ids=str
)
def test_weights_alone_give_two_b_over_p(weight_bytes, per_sequence):
    """fp32 B/2, fp16 B, int8 2B, int4 4B; the 64.0 often printed for B = 64 is this count."""
    for batch in (1, 64):
        assert linear_intensity(batch, N, N, weight_bytes, activation_bytes=0) == pytest.approx(
            batch * per_sequence
        )


def test_intensity_tends_to_half_the_width_and_not_to_infinity():
    assert linear_intensity(10**9, N, N) == pytest.approx(2048, rel=1e-5)
    assert linear_intensity(10**9, N, N) < 2048


@given(batch=batches, d_in=st.integers(1, 10**5), d_out=st.integers(1, 10**5))
def test_intensity_grows_with_the_batch_but_slower_than_it(batch, d_in, d_out):
    one, next_one = (linear_intensity(b, d_in, d_out) for b in (batch, batch + 1))
    assert one < next_one < one * (batch + 1) / batch
    assert next_one < linear_intensity(batch + 1, d_in, d_out, activation_bytes=0)


# -- crossover -------------------------------------------------------------------------------


# T4: the fraction is 225.49, which rounds either way; half a sequence of slack for it.
@pytest.mark.parametrize(
    ("name", "dtype", "batch"),
    [
        ("NVIDIA A100 80GB SXM", "bf16", 165),
        ("NVIDIA A100 40GB SXM", "bf16", 222),
        ("NVIDIA H100 SXM", "bf16", 345),
        ("NVIDIA T4", "fp16", 226),
        ("NVIDIA L4", "bf16", 502),
    ],
)
def test_crossover_of_a_4096_layer_on_real_devices(name, dtype, batch):
    assert crossover_batch(ridge_point(HARDWARE[name], dtype), N, N) == pytest.approx(
        batch, abs=0.55
    )


def test_crossover_at_the_given_ridge_of_140():
    assert crossover_batch(140, N, N) == pytest.approx(150.3, abs=0.05)
    assert crossover_batch(140, N, N, activation_bytes=0) == 140


@pytest.mark.parametrize(
    ("weight_bytes", "batch"), [(4, 280), (2, 140), (1, 70), (0.5, 35)], ids=str
)
def test_crossover_of_weights_alone_is_ridge_times_bytes_over_two(weight_bytes, batch):
    assert crossover_batch(140, N, 11008, weight_bytes, activation_bytes=0) == pytest.approx(batch)


def test_int4_weights_with_bf16_arithmetic_cross_at_74_on_an_h100():
    ridge = ridge_point(H100, "bf16")
    assert crossover_batch(ridge, N, N, 0.5, activation_bytes=0) == pytest.approx(74, abs=0.5)
    fp8_ridge = ridge_point(H100, "fp8")
    assert crossover_batch(fp8_ridge, N, N, 1, activation_bytes=0) == pytest.approx(295, abs=0.5)


@pytest.mark.parametrize("ridge", [2048, 2049, 1e9])
def test_a_ridge_at_or_beyond_the_limit_of_intensity_is_refused_with_the_limit(ridge):
    with pytest.raises(ValueError, match="tends to 2048 and stays below"):
        crossover_batch(ridge, N, N)


@given(
    ridge=st.floats(2, 200),
    d_in=st.integers(1024, 20000),
    d_out=st.integers(1024, 20000),
    weight_bytes=st.sampled_from([0.5, 1, 2, 4]),
)
def test_the_crossover_lies_between_the_two_batches_around_the_ridge(
    ridge, d_in, d_out, weight_bytes
):
    batch = crossover_batch(ridge, d_in, d_out, weight_bytes)
    assert batch > ridge * weight_bytes / 2
    above = linear_intensity(int(batch) + 1, d_in, d_out, weight_bytes)
    below = linear_intensity(max(1, int(batch)), d_in, d_out, weight_bytes)
    assert above > ridge * (1 - 1e-9)
    assert below < ridge * (1 + 1e-9) or batch < 1


# -- the decode step -------------------------------------------------------------------------

# The course's figures for Llama-2-13B count every parameter as read: 8.0 ms and 125 tok/s at
# B = 1, 23.8 ms and 2,690 at B = 64. A step does not read the input embedding (164 M parameters,
# 1.3% of the model), so this library says 7.92 ms and 126, 23.7 ms and 2,701: within 1%.


def test_a_step_of_llama_2_13b_alone_takes_8_ms():
    step = decode_step(LLAMA_13B, H100, 1, 1024)
    assert step.seconds == pytest.approx(8.0e-3, rel=0.01)
    assert step.seconds == pytest.approx(7.92e-3, rel=0.001)
    assert step.tokens_per_second == pytest.approx(125, rel=0.0125)
    assert step.bound == "memory"


def test_a_step_of_64_takes_24_ms_and_gives_twenty_times_the_tokens():
    step = decode_step(LLAMA_13B, H100, 64, 1024)
    assert step.seconds == pytest.approx(23.8e-3, rel=0.01)
    assert step.tokens_per_second == pytest.approx(2690, rel=0.01)
    assert step.tokens_per_second_per_user == pytest.approx(1 / step.seconds)
    assert step.bound == "memory"


def test_a_batch_of_256_is_refused_and_the_refusal_names_the_bytes():
    with pytest.raises(DoesNotFitError) as refusal:
        decode_step(LLAMA_13B, H100, 256, 1024)
    error = refusal.value
    assert isinstance(error, ValueError)
    assert error.needed_bytes == pytest.approx(241e9, rel=0.002)
    for figure in ("240.8 GB", "26.0 GB of weights", "214.7 GB of KV", "has 85.0 GB"):
        assert figure in str(error)


def test_the_refusal_names_the_largest_batch_that_would_fit():
    with pytest.raises(DoesNotFitError, match="largest batch that fits at this context is 70"):
        decode_step(LLAMA_13B, H100, 256, 1024)
    decode_step(LLAMA_13B, H100, 70, 1024)
    with pytest.raises(DoesNotFitError):
        decode_step(LLAMA_13B, H100, 71, 1024)
    with pytest.raises(DoesNotFitError, match="Not even one sequence fits"):
        decode_step(LLAMA_13B, HARDWARE["NVIDIA T4"], 1, 1024, dtype="fp16")


def test_usable_memory_decides_where_it_is_known():
    bare = replace(H100, usable_memory_bytes=None)
    decode_step(LLAMA_13B, bare, 64, 1024)
    with pytest.raises(DoesNotFitError, match=r"has 80\.0 GB\. .* is 64\."):
        decode_step(LLAMA_13B, bare, 65, 1024)


def test_memory_can_be_left_unchecked_to_draw_the_curve_beyond_the_cliff():
    step = decode_step(LLAMA_13B, H100, 256, 1024, check_memory=False)
    assert step.tokens_per_second > 0


def test_the_step_reads_the_weights_once_and_each_sequence_s_own_kv():
    one, many = (decode_step(SMOLLM2_135M, H100, b, 512) for b in (1, 64))
    assert one.linear.bytes == many.linear.bytes == SMOLLM2_135M.streamed_parameters * 2
    assert many.attention.bytes == 64 * SMOLLM2_135M.kv_bytes(512)
    assert many.flops == 64 * one.flops
    assert many.bytes == many.linear.bytes + many.attention.bytes
    assert many.intensity == many.flops / many.bytes


def test_an_untied_input_embedding_is_stored_but_not_streamed():
    untied = replace(SMOLLM2_135M, tied=False)
    step, tied = (decode_step(shape, H100, 1, 512) for shape in (untied, SMOLLM2_135M))
    assert step == tied


def test_short_contexts_become_compute_bound_and_long_ones_never_do():
    small = SHAPES["Llama-3.2-1B"]
    batch = 2 * int(ridge_point(H100, "bf16"))
    assert decode_step(small, H100, 1, 16).bound == "memory"
    assert decode_step(small, H100, batch, 16).bound == "compute"
    assert decode_step(small, H100, batch, 4096, check_memory=False).bound == "memory"


def test_halving_the_weights_helps_alone_and_hardly_in_a_large_batch():
    def gain(batch):
        times = [
            decode_step(LLAMA_13B, H100, batch, 2048, weight_bytes=p, check_memory=False).seconds
            for p in (2, 0.5)
        ]
        return times[0] / times[1]

    assert gain(1) > 3
    assert gain(256) < 1.1


def test_the_device_must_have_the_dtype():
    with pytest.raises(ValueError, match=r"no dense bf16 rate. It has: fp16"):
        decode_step(SMOLLM2_135M, HARDWARE["NVIDIA T4"], 1, 128)
    assert decode_step(SMOLLM2_135M, HARDWARE["NVIDIA T4"], 1, 128, dtype="fp16").seconds > 0


@pytest.mark.parametrize("bad", [0, -1, 1.5, 8.0, True, "8", None, np.True_], ids=repr)
@pytest.mark.parametrize("argument", ["batch", "context"])
def test_batch_and_context_must_be_positive_whole_numbers(argument, bad):
    arguments = {"batch": 1, "context": 128} | {argument: bad}
    with pytest.raises(ValueError, match=f"{argument} must be a positive whole number"):
        decode_step(SMOLLM2_135M, H100, **arguments)


def test_numpy_integers_are_whole_numbers():
    step = decode_step(SMOLLM2_135M, H100, np.int64(4), np.int32(128))
    assert step == decode_step(SMOLLM2_135M, H100, 4, 128)


@pytest.mark.parametrize("bad", [0, -2, float("inf"), float("nan"), "2", True], ids=repr)
@pytest.mark.parametrize("argument", ["weight_bytes", "kv_bytes"])
def test_bytes_per_element_must_be_positive_numbers(argument, bad):
    with pytest.raises(ValueError, match=argument):
        decode_step(SMOLLM2_135M, H100, 1, 128, **{argument: bad})


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"batch": 0, "d_in": 8, "d_out": 8}, "batch"),
        ({"batch": 1, "d_in": 0, "d_out": 8}, "d_in"),
        ({"batch": 1, "d_in": 8, "d_out": 8.5}, "d_out"),
        ({"batch": 1, "d_in": 8, "d_out": 8, "weight_bytes": 0}, "weight_bytes"),
        ({"batch": 1, "d_in": 8, "d_out": 8, "activation_bytes": -1}, "activation_bytes"),
    ],
)
def test_a_layer_with_senseless_sizes_is_refused(arguments, named):
    with pytest.raises(ValueError, match=named):
        linear_intensity(**arguments)


# -- laws ------------------------------------------------------------------------------------


def unchecked(shape, device, batch, context):
    return decode_step(shape, device, batch, context, check_memory=False)


@given(shape=shapes, device=devices, batch=batches, context=contexts)
def test_step_time_grows_from_the_second_sequence_on(shape, device, batch, context):
    """Latency is not flat: each sequence brings its own KV to read."""
    one, next_one = (unchecked(shape, device, b, context) for b in (batch, batch + 1))
    assert next_one.seconds > one.seconds
    assert next_one.tokens_per_second >= one.tokens_per_second * (1 - 1e-12)


@given(shape=shapes, device=devices, batch=batches, context=contexts)
def test_step_time_grows_with_the_context(shape, device, batch, context):
    one, next_one = (unchecked(shape, device, batch, c) for c in (context, context + 1))
    assert next_one.seconds > one.seconds


@given(shape=shapes, device=devices, batch=batches, context=contexts)
def test_throughput_never_passes_bandwidth_over_kv(shape, device, batch, context):
    ceiling = device.bandwidth / shape.kv_bytes(context)
    assert unchecked(shape, device, batch, context).tokens_per_second < ceiling


def test_throughput_saturates_at_bandwidth_over_kv_even_with_infinite_memory():
    ceiling = H100.bandwidth / LLAMA_13B.kv_bytes(4096)
    assert unchecked(LLAMA_13B, H100, 10**5, 4096).tokens_per_second > 0.9 * ceiling
    assert unchecked(LLAMA_13B, H100, 16, 4096).tokens_per_second > 0.6 * ceiling


@given(shape=shapes, device=devices, batch=batches, context=contexts)
def test_a_step_is_no_faster_than_its_bytes_or_its_flops(shape, device, batch, context):
    step = unchecked(shape, device, batch, context)
    slack = 1 + 1e-12
    assert step.seconds * slack >= step.bytes / device.bandwidth
    assert (
        step.seconds * slack
        >= step.flops / device.peak("bf16")
        == pytest.approx(step.compute_seconds)
    )
    assert step.seconds <= (step.weight_seconds + step.kv_seconds + step.compute_seconds) * slack


@given(shape=shapes, device=devices, batch=batches, context=contexts)
def test_decode_is_memory_bound_below_the_ridge_point(shape, device, batch, context):
    step = unchecked(shape, device, batch, context)
    if step.intensity < ridge_point(device, "bf16") / 2:
        assert step.bound == "memory"


# -- the world -------------------------------------------------------------------------------

ROWS = list(csv.DictReader((DATA / "decode_speed.csv").read_text(encoding="utf-8").splitlines()))


def predicted(row):
    shape = ModelShape.from_config(json.loads((DATA / row["config"]).read_text(encoding="utf-8")))
    return decode_step(
        shape,
        HARDWARE[row["device"]],
        1,
        int(row["context"]),
        weight_bytes=float(row["weight_bytes"]),
        kv_bytes=float(row["kv_bytes"]),
    )


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["id"])
def test_no_honest_measurement_beats_the_roofline_and_a_false_label_does(row):
    step = predicted(row)
    utilization = float(row["tok_s"]) / step.tokens_per_second  # MBU, at batch 1
    assert (utilization <= 1) == (row["honest"] == "yes"), f"MBU {utilization:.2f}"
    assert utilization > 0.3
    assert step.linear.bytes / 1e9 == pytest.approx(float(row["weights_read_gb"]), abs=1e-3)
    if row["roofline_tok_s"]:
        assert step.tokens_per_second == pytest.approx(float(row["roofline_tok_s"]), rel=1e-3)


def test_achieved_bandwidth_falls_as_weights_shrink():
    """gpt-fast, Llama-2-7B, one A100: what is left is overhead that no roofline knows."""
    rows = {row["weights"]: row for row in ROWS if row["id"].startswith("gptfast-Llama-2-7B")}
    published = [rows[weights]["published_gb_s"] for weights in ("bf16", "int8", "int4-g32")]
    assert [round(float(value)) for value in published] == [1397, 1069, 863]
    achieved = [
        predicted(rows[weights]).bytes * float(rows[weights]["tok_s"]) / 1e9
        for weights in ("bf16", "int8", "int4-g32")
    ]
    assert achieved == sorted(achieved, reverse=True)
    assert achieved == pytest.approx([float(value) for value in published], rel=0.05)
