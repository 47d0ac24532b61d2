"""Figures and explorer of memory: they draw what a Deployment says, and refuse in words."""

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from decodelab.explain import explorers
from decodelab.explain.capacity_explorer import PASTED, CapacityExplorer, capacity_explorer
from decodelab.explain.capacity_view import BASELINE, Capacity, on_card, options, pull_all
from decodelab.explain.chart import Series, start_of_line
from decodelab.explain.explorers import Surface, number_row
from decodelab.explain.figures import Figure
from decodelab.explain.memory_figures import (
    CONTEXTS,
    MOST,
    ceiling,
    context_sweep,
    frontier,
    levels,
    memory_bar,
    ridge_batch,
)
from decodelab.explain.paint_matplotlib import png
from decodelab.explain.paint_plotly import paint_plotly
from decodelab.explain.paint_svg import paint_svg
from decodelab.explain.pasted_config import read_config
from decodelab.predict import HARDWARE, SHAPES
from decodelab.predict.deployment import LEVERS, Deployment, Lever, pull
from ipywidgets import IntSlider, Widget

MIXTRAL = {
    "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000,
}  # fmt: skip
CONFIGS = Path(__file__).parent / "data" / "hf_configs"
DEEPSEEK = (CONFIGS / "deepseek-ai--DeepSeek-V3.json").read_text(encoding="utf-8")
GPT_OSS = (CONFIGS / "openai--gpt-oss-20b.json").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def llama() -> Deployment:
    return Deployment(shape=SHAPES["Llama-3.1-8B"], hardware=HARDWARE["NVIDIA H100 SXM"])


@pytest.fixture(scope="module")
def huge(llama: Deployment) -> Deployment:
    """Weights that fill the device by themselves, unless they are quantized."""
    return replace(llama, shape=replace(llama.shape, layers=200))


@pytest.fixture(scope="module")
def mine() -> Deployment:
    """A lesson's machine: 32 bits, and a pool that the whole of its memory is made from."""
    shape = SHAPES["SmolLM2-135M"]
    size = int(4 * shape.parameters + 3e8)
    own = {"name": "this machine", "memory_bytes": size, "usable_memory_bytes": size}
    hardware = replace(HARDWARE["NVIDIA T4"], flops={"fp32": 1e11}, bandwidth=1e10, **own)
    formats = dict.fromkeys(("weight_format", "kv_format", "dtype"), "fp32")
    return Deployment(shape=shape, hardware=hardware, utilization=1.0, **formats)


@pytest.fixture
def explorer(llama: Deployment) -> CapacityExplorer:
    return capacity_explorer(llama, batch=32, context=8192, kv_bandwidth=2e12, measured={1024: 9})


def series(figure: Figure, role: str) -> Series:
    return next(s for s in figure.panels[0].series if s.role == role)


# The figures


def test_the_ceiling_is_the_largest_batch_that_the_deployment_holds(llama: Deployment) -> None:
    line = series(frontier(llama), "prediction")
    assert list(line.y) == [llama.max_sequences(context) for context in line.x]
    assert line.y[0] > line.y[-1]


def test_the_ceiling_stays_in_view_and_ends_where_one_sequence_just_fits(
    llama: Deployment,
) -> None:
    small = replace(llama, hardware=HARDWARE["NVIDIA RTX 4090"])
    curve = ceiling(small, (16, 131_072), 256)
    end = max(curve)
    assert curve[end] == 1
    assert small.max_sequences(end + 1) == 0
    assert max(curve.values()) <= 256
    assert small.max_sequences(16) > 256


def test_each_level_is_the_batch_that_makes_so_many_tokens_per_second(llama: Deployment) -> None:
    for level, curve in levels(llama, CONTEXTS, MOST).items():
        for context, batch in curve.items():
            slow, fast = (
                llama.step(b, context, check_memory=False).tokens_per_second
                for b in (max(1, int(batch * 0.96)), int(batch * 1.04) + 1)
            )
            assert slow <= level <= fast
            assert batch <= llama.max_sequences(context)


def test_levels_are_round_few_and_rise_with_context(llama: Deployment) -> None:
    curves = levels(llama, CONTEXTS, MOST)
    names = [s.name for s in frontier(llama).panels[0].series if s.role == "level"]
    assert names[:2] == ["at best 500 tokens/s", "1,000 tokens/s"], "the roofline's, said once"
    assert "at best 500 tokens/s" in frontier(llama).describe()
    assert list(curves) == [500, 1000, 2000, 5000, 10_000, 20_000]
    for curve in curves.values():
        assert all(a <= b for a, b in pairwise(curve.values()))


def test_levels_are_of_all_users_and_not_of_each(llama: Deployment) -> None:
    batch = levels(llama, CONTEXTS, MOST)[2000][128]
    step = llama.step(round(batch), 128)
    assert step.tokens_per_second == pytest.approx(2000, rel=0.1)
    assert step.tokens_per_second_per_user < 300


def test_the_ridge_is_where_arithmetic_overtakes_reading_the_weights(llama: Deployment) -> None:
    batch = ridge_batch(llama, 128, MOST)
    before, at = (llama.step(b, 128).linear for b in (batch - 1, batch))
    assert before.compute_seconds <= before.memory_seconds
    assert at.compute_seconds > at.memory_seconds
    assert ridge_batch(llama, 128, 8) == 9, "beyond the batches shown"


def test_a_point_is_ringed_where_it_fits_and_red_where_it_does_not(llama: Deployment) -> None:
    most = llama.max_sequences(8192)
    fits, beyond = (frontier(llama, point=(most + more, 8192)) for more in (0, 1))
    assert (series(fits, "marker").x, series(fits, "marker").y) == ((8192,), (most,))
    assert fits.title == f"{most} sequences fit at context 8,192"
    assert series(beyond, "breach").name == "does not fit"
    assert f"at most {most} does" in beyond.title
    assert not [s for s in beyond.panels[0].series if s.role == "marker"]


def test_a_pulled_lever_is_drawn_beside_the_ceiling_before(llama: Deployment) -> None:
    pulled = pull(llama, "kv_format", "fp8")
    figure = frontier(pulled, before=llama, measured={1024: 448})
    assert series(figure, "variant").y == series(frontier(llama), "prediction").y
    assert series(figure, "measurement").y == (448,)


def test_weights_that_leave_no_pool_have_no_ceiling(huge: Deployment) -> None:
    figure = frontier(pull(huge, "weight_format", "int4"), before=huge)
    assert not [s for s in figure.panels[0].series if s.role == "variant"]
    with pytest.raises(ValueError, match="No room for a KV cache"):
        frontier(huge)


def test_memory_is_stacked_in_gib_up_to_the_device(llama: Deployment) -> None:
    figure = memory_bar({"B = 32": llama.memory(32, 8192)})
    parts = {s.name: s.x[0] for s in figure.panels[0].series}
    assert parts["KV"] == pytest.approx(32 * 8192 * 131_072 / 2**30)
    assert parts["KV"] != pytest.approx(32 * 8192 * 131_072 / 1e9), "GB for GiB"
    assert sum(parts.values()) == pytest.approx(llama.hardware.capacity_bytes / 2**30)
    assert figure.x.unit == "GiB"


def test_what_does_not_fit_stands_beyond_the_device_in_red(llama: Deployment) -> None:
    figure = memory_bar({"B = 64": llama.memory(64, 8192), "B = 1": llama.memory(1, 8192)})
    bars = {s.name: s for s in figure.panels[0].series}
    assert bars["does not fit"].role == "breach"
    assert bars["does not fit"].x == (pytest.approx(-llama.memory(64, 8192)["free"] / 2**30), 0)
    assert bars["free"].x[0] == 0
    end = sum(s.x[0] for s in bars.values() if s.name != "does not fit")
    assert end == pytest.approx(llama.hardware.capacity_bytes / 2**30)


def test_the_slope_of_a_context_sweep_is_named_as_bandwidth() -> None:
    measured = {(8, 128): 0.065, (8, 1024): 0.105, (1, 128): 0.061}
    model = {"kv_bytes_per_token": 46_080, "kv_bandwidth": 9e9, "fixed_seconds": 0.06}
    figure = context_sweep(measured, **model)
    line, dots = series(figure, "prediction"), series(figure, "measurement")
    assert dots.x == (128, 1024, 8192)
    assert line.y == pytest.approx((60, 60 + 8192 * 46_080 / 9e9 * 1e3))
    assert "effective KV bandwidth 9 GB/s" in figure.title
    assert "9 GB/s" in line.name
    flat = context_sweep(measured, **model | {"kv_bandwidth": float("inf")})
    assert "not seen" in flat.title


@pytest.mark.parametrize("text", ["500 tokens/s", "free"])
def test_every_painter_names_what_is_drawn(llama: Deployment, text: str) -> None:
    figures = frontier(llama, point=(8, 1024)), memory_bar({"B = 8": llama.memory(8, 1024)})
    figure = figures[text == "free"]
    assert text in paint_svg(figure)
    assert text in json.dumps(paint_plotly(figure))
    assert text in figure.describe()
    assert len(png(figure)) < 25_000


def test_a_line_begins_behind_the_name_in_it() -> None:
    line = [(0.0, 0.0), (100.0, 10.0), (200.0, 20.0)]
    (x, y), *rest = start_of_line(line, "ten letter")
    assert 0 < x < 100
    assert y == pytest.approx(x / 10)
    assert rest == line[1:]
    assert start_of_line(line, "a name longer than the line that it is to stand in") == [line[-1]]


# What the explorer says


def test_every_lever_there_is_gets_offered_and_none_is_known_by_name(
    llama: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = Lever("share of memory", lambda d: (0.9, 0.5), lambda d, v: replace(d, utilization=v))
    monkeypatch.setitem(LEVERS, "utilization", half)
    explorer = capacity_explorer(llama)
    assert set(explorer.levers) == set(LEVERS)
    before = explorer.capacity.deployment.tokens
    explorer.levers["utilization"].value = 0.5
    assert explorer.capacity.deployment.utilization == 0.5
    assert explorer.capacity.deployment.tokens < before


def test_the_value_that_changes_nothing_is_the_baseline(llama: Deployment) -> None:
    assert ("8 (baseline)", BASELINE) in options(llama, "kv_heads")
    assert ("none (baseline)", BASELINE) in options(llama, "window")
    mixed = replace(llama, shape=replace(llama.shape, windows=(None, 1024) * 16))
    assert options(mixed, "window")[0] == (BASELINE, BASELINE)
    assert ("none", None) in options(mixed, "window")
    assert pull_all(llama, dict.fromkeys(LEVERS, BASELINE)) == llama


def test_the_readout_names_what_ends_the_batch(llama: Deployment) -> None:
    capacity = Capacity(baseline=llama, deployment=llama, kv_bandwidth=2.1e12)
    said = capacity.readout(32, 8192)
    speed = round(llama.step(32, 8192).tokens_per_second, -1)
    for words in (
        f"{speed:,.0f} tokens/s in all", f"{llama.tokens:,} tokens", "131,072 bytes of KV",
        f"memory ends the batch at {llama.max_sequences(8192)}, before the ridge at 296",
        "effective KV bandwidth 2,100 GB/s, measured",
    ):  # fmt: skip
        assert words in said, words
    assert "arithmetic ends the batch at the ridge, 296" in capacity.readout(32, 512)


def test_out_of_memory_is_said_with_the_largest_batch_and_raises_nothing(
    llama: Deployment,
) -> None:
    capacity = Capacity(baseline=llama, deployment=llama)
    assert "Out of memory by" in capacity.readout(4096, 8192)
    assert f"at most {llama.max_sequences(8192)} does" in capacity.html(4096, 8192)
    assert capacity.memory(4096, 8192).panels[0].y.categories == ("B = 56",)
    small = replace(llama, hardware=HARDWARE["NVIDIA RTX 4090"])
    none = Capacity(baseline=small, deployment=small)
    assert f"the longest takes {small.max_context(1):,} tokens" in none.readout(1, 131_072)
    assert "Not one sequence fits" in none.html(1, 131_072)
    assert "1 sequence fits" in none.html(1, small.max_context(1))


def test_a_context_beyond_the_models_own_is_said(llama: Deployment) -> None:
    short = replace(llama, shape=replace(llama.shape, max_context=4096))
    capacity = Capacity(baseline=short, deployment=short)
    assert "the model itself ends at 4,096 tokens" in capacity.readout(1, 8192)
    assert "itself ends" not in capacity.readout(1, 4096)


def test_assumptions_stand_below_the_chart(llama: Deployment) -> None:
    shown = Capacity(baseline=llama, deployment=llama).html(8, 1024)
    assert llama.assumptions
    assert all(sentence in shown for sentence in llama.assumptions)


def test_both_charts_are_images_that_say_their_numbers(llama: Deployment) -> None:
    shown = Capacity(baseline=llama, deployment=pull(llama, "kv_format", "fp8")).html(8, 8192)
    chart, bars = re.findall('role="img" aria-label="([^"]*)"', shown)
    assert "112 sequences fit at context 8,192; baseline 56" in chart
    assert "at baseline, B = 8" in bars


# The explorer


def test_a_lever_moves_the_frontier_and_back(explorer: CapacityExplorer) -> None:
    before = explorer.figure()
    explorer.levers["kv_format"].value = "fp8"
    assert "112 sequences fit at context 8,192; baseline 56" in explorer.chart.value
    assert series(explorer.figure(), "variant").y == series(before, "prediction").y
    explorer.levers["kv_format"].value = BASELINE
    assert explorer.figure() == before


def test_sliders_move_by_ratio_and_the_box_holds_what_is_in_between() -> None:
    row, box = number_row("Batch size", 32, 1, 4096, 1, log=True)
    slider = next(w for w in row.children if isinstance(w, IntSlider))
    seen = []
    for position in range(slider.min, slider.max + 1):
        slider.value = position
        seen.append(box.value)
    assert seen[:9] == [1, 2, 3, 4, 5, 6, 7, 8, 9], "no notch may repeat a value"
    assert seen[-1] == 4096
    assert sorted(set(seen)) == seen
    box.value = 1000
    assert box.value == 1000
    assert abs(seen[slider.value] / 1000 - 1) < 0.05


def test_a_pasted_config_is_shown_at_once(explorer: CapacityExplorer) -> None:
    explorer.levers["kv_format"].value = "fp8"
    explorer.config.value = json.dumps(MIXTRAL | {"num_hidden_layers": 16})
    shape = explorer.capacity.baseline.shape
    assert (shape.layers, shape.model_type) == (16, "mixtral")
    assert explorer.model.value == PASTED
    assert explorer.capacity.deployment.kv_format == "fp8", "a pulled lever stays pulled"
    explorer.config.value = json.dumps(MIXTRAL | {"num_hidden_layers": 8})
    assert explorer.capacity.baseline.shape.layers == 8


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"model_type": "llama"', "This is not JSON"),
        ("[1, 2]", "holds one object, in braces"),
        ('{"model_type": "clippy"}', "clippy"),
        (json.dumps(MIXTRAL | {"num_key_value_heads": 5}), "5"),
        (json.dumps(MIXTRAL | {"hidden_size": "<b>wide</b>"}), "&lt;b&gt;wide"),
    ],
)
def test_a_bad_config_is_refused_in_words_and_changes_nothing(
    explorer: CapacityExplorer, text: str, words: str
) -> None:
    before = explorer.chart.value, explorer.model.value, explorer.capacity
    explorer.config.value = text
    assert 'role="alert"' in explorer.message.value
    assert words in explorer.message.value
    assert (explorer.chart.value, explorer.model.value, explorer.capacity) == before
    explorer.config.value = ""
    assert explorer.message.value == ""


def test_read_config_names_the_place_of_a_slip() -> None:
    with pytest.raises(ValueError, match="line 2 column"):
        read_config('{"a": 1,\n "b": }')


def test_a_model_too_large_is_refused_until_a_lever_makes_it_fit(
    llama: Deployment, huge: Deployment
) -> None:
    explorer = capacity_explorer(llama, models=SHAPES | {"huge": huge.shape})
    before = explorer.chart.value
    explorer.model.value = "huge"
    assert "No room for a KV cache" in explorer.message.value
    assert "still shows Llama-3.1-8B on NVIDIA H100 SXM" in explorer.message.value
    assert explorer.chart.value == f'<div style="opacity:0.35">{before}</div>'
    explorer.batch.value = 7
    assert "opacity" in explorer.chart.value, "the sliders move a chart that stays grey"
    explorer.levers["weight_format"].value = "int4"
    assert explorer.message.value == ""
    assert "opacity:0.35" not in explorer.chart.value
    assert "baseline 0" in explorer.chart.value


def test_emptying_the_config_does_not_hide_what_the_menus_still_refuse(
    llama: Deployment, huge: Deployment
) -> None:
    explorer = capacity_explorer(llama, models=SHAPES | {"huge": huge.shape})
    explorer.model.value = "huge"
    explorer.config.value = "{"
    assert "This is not JSON" in explorer.message.value
    explorer.config.value = ""
    assert "No room for a KV cache" in explorer.message.value
    explorer.model.value = "Llama-3.1-8B"
    assert explorer.message.value == ""


# Served on a card


def test_a_card_is_served_as_the_lesson_serves_it_and_not_as_the_students_machine(
    mine: Deployment, llama: Deployment
) -> None:
    cards = replace(
        llama, utilization=0.95, activation_bytes="1.89 GiB", other_bytes="0.25 GiB", chunk=512
    )
    explorer = capacity_explorer(mine, cards=cards)
    explorer.model.value, explorer.device.value = "Llama-3.1-8B", "NVIDIA H100 SXM"
    assert explorer.capacity.deployment == cards
    assert explorer.capacity.deployment.max_sequences(4096) == 116
    assert "each 131,072 bytes of KV" in explorer.chart.value
    assert "utilization 0.95, 2.3 GB for activations" in explorer.chart.value
    as_mine = replace(mine, shape=cards.shape, hardware=cards.hardware)
    assert as_mine.kv_bytes_per_token == 262_144, "what a card must not be priced at"
    explorer.device.value, explorer.model.value = "this machine", "SmolLM2-135M"
    assert explorer.capacity.deployment == mine


def test_without_a_word_on_cards_they_are_served_as_vllm_does(mine: Deployment) -> None:
    explorer = capacity_explorer(mine)
    for device, sixteen in (("NVIDIA L4", "bf16"), ("NVIDIA T4", "fp16"), ("Apple M2", "fp16")):
        explorer.device.value = device
        card = explorer.capacity.deployment
        assert (card.weight_format, card.kv_format, card.utilization) == (sixteen, sixteen, 0.9)
        assert card.dtype in card.hardware.flops
        assert f"KV in {sixteen}; utilization 0.9." in explorer.chart.value
        assert "Activations are taken as 0 bytes" in explorer.chart.value


def test_a_format_that_cards_are_given_stays_unless_it_has_16_bits(llama: Deployment) -> None:
    cards = replace(llama, kv_format="fp8")
    card = on_card(cards, llama.shape, HARDWARE["NVIDIA T4"])
    assert (card.weight_format, card.kv_format, card.dtype) == ("fp16", "fp8", "fp16")


def test_a_device_of_the_tables_name_stays_the_one_that_was_given(llama: Deployment) -> None:
    less = replace(llama, hardware=replace(llama.hardware, usable_memory_bytes=40 * 10**9))
    explorer = capacity_explorer(less)
    explorer.levers["kv_format"].value = "fp8"
    assert explorer.capacity.baseline == less


@pytest.mark.parametrize("device", ["NVIDIA H200 SXM", "NVIDIA B300 SXM"])
def test_deepseek_fits_on_eight_gpus_in_the_format_that_it_is_shipped_in(
    mine: Deployment, device: str
) -> None:
    explorer = capacity_explorer(mine)
    explorer.device.value = device
    explorer.config.value = DEEPSEEK
    assert "more GPUs" in explorer.message.value
    explorer.levers["tensor_parallel"].value = 8
    assert explorer.message.value == ""
    card = explorer.capacity.deployment
    assert (card.weight_format, card.kv_format, card.tensor_parallel) == ("fp8", "bf16", 8)
    assert "GB on each GPU holds" in explorer.chart.value
    assert "Memory of one GPU" in explorer.chart.value
    assert "bytes are those of one GPU" in explorer.chart.value
    with pytest.raises(ValueError, match="No room"):
        _ = replace(card, weight_format="bf16", hardware=HARDWARE["NVIDIA H200 SXM"]).pool_bytes


def test_as_many_gpus_are_offered_as_split_the_heads(explorer: CapacityExplorer) -> None:
    offered = explorer.levers["tensor_parallel"]
    assert [value for _, value in offered.options] == [BASELINE, 2, 4, 8]
    explorer.model.value = "SmolLM2-135M"
    assert offered.options == (("1 (baseline)", BASELINE),)


def test_what_a_pulled_lever_moves_besides_is_said(explorer: CapacityExplorer) -> None:
    words = "KV heads size the K and V projections too"
    assert words not in explorer.chart.value
    explorer.levers["kv_heads"].value = 1
    assert words in explorer.chart.value
    before, after = explorer.capacity.baseline, explorer.capacity.deployment
    assert after.max_sequences(4096) > 8 * before.max_sequences(4096)


def test_a_memory_that_is_usable_is_not_called_nominal(mine: Deployment) -> None:
    assert "usable." in Capacity(baseline=mine, deployment=mine).html(8, 512)
    assert "nominal" not in Capacity(baseline=mine, deployment=mine).html(8, 512)


def _compressed(kind: str, bits: int, group: int | None) -> dict:
    weights = {"type": kind, "num_bits": bits, "group_size": group}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": weights}},
    }


@pytest.mark.parametrize(
    ("quantization", "found"),
    [
        (None, None),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "int4"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "int4"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        (_compressed("float", 8, None), "fp8"),
        (_compressed("int", 8, None), "int8"),
        (_compressed("int", 4, 128), "int4"),
        (_compressed("float", 4, 16), "nvfp4"),
    ],
)
def test_the_weight_format_is_the_one_that_the_config_ships(
    quantization: dict | None, found: str | None
) -> None:
    text = json.dumps(MIXTRAL | {"quantization_config": quantization})
    shape, shipped = read_config(text)
    assert shipped == found
    assert any(f"shipped in {found}" in note for note in shape.notes) == bool(found)
    assert read_config(GPT_OSS)[1] == "mxfp4"


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {"quant_method": "gptq", "bits": 4, "group_size": 32},  # other scales than FORMATS counts
        {"quant_method": "gptq", "bits": [4], "group_size": {}},
        {"quant_method": "compressed-tensors", "config_groups": ["all"]},
        {"bits": 4},
        "fp8",
    ],
)
def test_a_quantization_that_is_not_known_counts_as_none_and_says_so(
    mine: Deployment, quantization: object
) -> None:
    explorer = capacity_explorer(mine)
    explorer.device.value = "NVIDIA B200 SXM (HGX)"
    explorer.config.value = json.dumps(MIXTRAL | {"quantization_config": quantization})
    assert explorer.message.value == ""
    assert explorer.capacity.deployment.weight_format == "bf16"
    assert "weights count as not quantized" in explorer.chart.value


def test_a_shipped_format_is_that_of_the_pasted_model_alone(mine: Deployment) -> None:
    explorer = capacity_explorer(mine)
    explorer.device.value = "NVIDIA H100 SXM"
    explorer.config.value = GPT_OSS
    assert explorer.capacity.deployment.weight_format == "mxfp4"
    explorer.model.value = "Llama-3.1-8B"
    assert explorer.capacity.deployment.weight_format == "bf16"


def test_what_was_measured_is_shown_only_where_it_was_measured(explorer: CapacityExplorer) -> None:
    own = ("KV bandwidth", "measured 9 at context 1,024")
    assert all(words in explorer.chart.value for words in own)
    explorer.device.value = "NVIDIA H200 SXM"
    assert not any(words in explorer.chart.value for words in own)
    explorer.device.value = "NVIDIA H100 SXM"
    assert all(words in explorer.chart.value for words in own)


def test_every_device_of_the_table_can_be_chosen(llama: Deployment) -> None:
    own = replace(llama.hardware, name="this machine", flops={"fp32": 1e12})
    explorer = capacity_explorer(replace(llama, hardware=own, dtype="fp32"))
    assert explorer.device.options[0] == "this machine"
    explorer.levers["weight_format"].value = "int4"
    for name in HARDWARE:
        explorer.device.value = name
        assert explorer.capacity.baseline.hardware == HARDWARE[name]
    explorer.device.value = "this machine"
    assert explorer.capacity.baseline.dtype == "fp32"


def test_a_lever_that_the_next_model_cannot_follow_goes_back(explorer: CapacityExplorer) -> None:
    explorer.levers["kv_heads"].value = 1
    explorer.model.value = "SmolLM2-135M"
    assert explorer.capacity.deployment.shape.kv_heads == 1
    explorer.model.value = "Llama-3.1-8B"
    explorer.levers["kv_heads"].value = 16
    explorer.model.value = "SmolLM2-135M"
    assert explorer.levers["kv_heads"].value == BASELINE
    assert not explorer.capacity.pulled


def test_the_explorer_is_one_display_with_a_still_picture_and_core_widgets_only(
    explorer: CapacityExplorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = []
    monkeypatch.setattr(explorers, "display", lambda bundle, raw: shown.append(bundle))
    explorer._ipython_display_()
    assert set(shown[0]) == {explorers.WIDGET_MIME, "image/png", "text/plain"}
    assert "56 sequences fit" in shown[0]["text/plain"]
    modules, waiting = set(), [explorer.view]
    while waiting:
        widget: Widget = waiting.pop()
        modules.add(widget._model_module)
        waiting += getattr(widget, "children", ())
    assert modules == {"@jupyter-widgets/controls"}


def test_contexts_that_do_not_rise_are_refused(llama: Deployment) -> None:
    with pytest.raises(ValueError, match="contexts \\(low, high\\) that rise"):
        capacity_explorer(llama, contexts=(512, 512))


def test_lesson_one_says_its_kv_bandwidth_only_where_given() -> None:
    surface = Surface(predicted=lambda b, c: 0.1, measured={}, kv_bandwidth=9.5e9)
    assert "effective KV bandwidth 9.5 GB/s" in surface.readout(1, 64)
    assert "bandwidth" not in replace(surface, kv_bandwidth=None).readout(1, 64)
