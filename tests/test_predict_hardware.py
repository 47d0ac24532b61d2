"""The device table and the names by which it is asked."""

import subprocess
import sys
from dataclasses import replace

import pytest
from decodelab.predict import HARDWARE, Hardware, find_hardware, ridge_point
from decodelab.predict.hardware import parse_bytes

GB, GIB, MIB = 10**9, 2**30, 2**20
ALL = pytest.mark.parametrize("device", HARDWARE.values(), ids=lambda device: device.name)


def test_importing_the_wing_loads_neither_torch_nor_numpy():
    code = (
        "import sys; before = set(sys.modules); import decodelab.predict;"
        "print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    assert {name.split(".")[0] for name in loaded} <= {*sys.stdlib_module_names, "decodelab"}
    assert len(loaded) < 120, loaded


def test_the_table_has_at_least_thirty_devices():
    assert len(HARDWARE) >= 30


@ALL
def test_every_device_has_a_source_and_says_how_far_it_is_verified(device):
    assert device.source
    assert device.verified.startswith(("stored copy", "partly"))
    assert device.flops
    assert (device.usd_per_hour is None) == (device.price_source == "")


@ALL
def test_usable_memory_is_near_the_nominal_figure(device):
    """Within 10%, GB or GiB: a factor of 1024 or a wrong unit would show."""
    assert 0.9 < device.capacity_bytes / device.memory_bytes < 1.1


SPARSE_FIGURES = {
    "NVIDIA A100 80GB SXM": 624,
    "NVIDIA A100 40GB SXM": 624,
    "NVIDIA H100 SXM": 1979,
    "NVIDIA H100 PCIe": 1513,
    "NVIDIA H200 SXM": 1979,
    "NVIDIA B200 SXM (HGX)": 4500,
    "NVIDIA L4": 242,
    "NVIDIA L40S": 733,
    "NVIDIA A10": 250,
    "NVIDIA RTX A6000": 309.7,
    "NVIDIA RTX 4090": 330.3,
}


@pytest.mark.parametrize(("name", "sparse"), SPARSE_FIGURES.items())
def test_no_rate_is_a_sparse_figure(name, sparse):
    for dtype in ("bf16", "fp16"):
        assert HARDWARE[name].flops[dtype] == pytest.approx(sparse * 1e12 / 2, rel=0.02)


RIDGES = {
    ("NVIDIA T4", "fp16"): 203,
    ("NVIDIA L4", "bf16"): 403,
    ("NVIDIA A100 40GB SXM", "bf16"): 201,
    ("NVIDIA A100 80GB SXM", "bf16"): 153,
    ("NVIDIA A100 80GB PCIe", "bf16"): 161,
    ("NVIDIA H100 SXM", "bf16"): 295,
    ("NVIDIA H100 PCIe", "bf16"): 378,
    ("NVIDIA H200 SXM", "bf16"): 206,
    ("NVIDIA B200 SXM (HGX)", "bf16"): 281,
}


@pytest.mark.parametrize(("device", "ridge"), RIDGES.items(), ids=str)
def test_ridge_points_follow_from_dense_rates(device, ridge):
    name, dtype = device
    assert ridge_point(HARDWARE[name], dtype) == pytest.approx(ridge, abs=0.5)


def test_no_a100_has_the_ridge_of_140_that_is_often_printed():
    for name in HARDWARE:
        if "A100" in name:
            assert ridge_point(HARDWARE[name], "fp16") > 150


def test_the_a10g_is_not_an_a10_and_the_4090_accumulates_in_fp32():
    assert HARDWARE["NVIDIA A10G"].flops["bf16"] == 70e12
    assert HARDWARE["NVIDIA RTX 4090"].flops["fp16"] == pytest.approx(165e12, rel=2e-3)


def test_the_t4_has_no_bf16_and_says_what_it_has():
    with pytest.raises(ValueError, match=r"NVIDIA T4 has no dense bf16.*fp16, int8, fp32"):
        ridge_point(HARDWARE["NVIDIA T4"], "bf16")


USABLE = {
    "NVIDIA T4": 14.56 * GIB,
    "NVIDIA A10": 23028 * MIB,
    "NVIDIA L4": 23034 * MIB,
    "NVIDIA L40S": 46068 * MIB,
    "NVIDIA A100 80GB SXM": 79.15 * GIB,
    "NVIDIA H100 SXM": 79.19 * GIB,
    "NVIDIA H200 SXM": 143771 * MIB,
}


@pytest.mark.parametrize(("name", "usable"), USABLE.items())
def test_usable_memory_is_what_software_reports(name, usable):
    device = HARDWARE[name]
    assert device.usable_memory_bytes == pytest.approx(usable, rel=1e-9)
    assert device.capacity_bytes == device.usable_memory_bytes != device.memory_bytes


def test_nominal_memory_keeps_the_unit_that_the_vendor_prints():
    assert HARDWARE["NVIDIA H100 SXM"].memory_bytes == 80 * GB
    assert HARDWARE["Google TPU v4"].memory_bytes == 32 * GIB


def test_capacity_is_nominal_where_no_source_states_usable_memory():
    device = HARDWARE["AMD MI300X"]
    assert device.usable_memory_bytes is None
    assert device.capacity_bytes == 192 * GB


def test_a_size_without_its_unit_is_refused():
    assert parse_bytes("14.56 GiB") == round(14.56 * GIB)
    with pytest.raises(ValueError, match="needs a unit"):
        parse_bytes("16")


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("nvidia t4", "NVIDIA T4"),
        ("H200", "NVIDIA H200 SXM"),
        ("RTX-4090", "NVIDIA RTX 4090"),
        ("a100 40gb pcie", "NVIDIA A100 40GB PCIe"),
        ("L40", "NVIDIA L40"),
    ],
)
def test_a_device_is_found_by_the_words_of_its_name(asked, name):
    assert find_hardware(asked).name == name


@pytest.mark.parametrize("asked", ["NVIDIA H1000 SXM", "H100 SMX", "H100"])
def test_an_unknown_or_ambiguous_device_is_answered_with_the_nearest_names(asked):
    with pytest.raises(ValueError, match="NVIDIA H100 SXM"):
        find_hardware(asked)
    with pytest.raises(ValueError, match="NVIDIA H100 SXM"):
        HARDWARE[asked]


def test_the_table_itself_asks_for_the_exact_name():
    with pytest.raises(KeyError, match="Did you mean 'NVIDIA T4'"):
        HARDWARE["t4"]
    assert HARDWARE.get("t4") is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("memory_bytes", 0),
        ("memory_bytes", 80.5),
        ("usable_memory_bytes", -1),
        ("bandwidth", 0.0),
        ("bandwidth", float("nan")),
        ("flops", {"fp64": 1e12}),
        ("flops", {"bf16": -1.0}),
    ],
)
def test_a_device_with_a_bad_figure_is_refused_by_the_name_of_the_figure(field, value):
    with pytest.raises(ValueError, match=field):
        replace(HARDWARE["NVIDIA T4"], **{field: value})


def test_a_device_of_ones_own_needs_five_figures():
    laptop = Hardware(name="laptop", memory_bytes=16 * GIB, bandwidth=40e9, flops={"fp32": 4e11})
    assert ridge_point(laptop, "fp32") == 10
    assert hash(laptop) == hash(replace(laptop))
