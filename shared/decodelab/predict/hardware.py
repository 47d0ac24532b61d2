"""What a device can hold, stream and compute, read off its data sheet.

The table is data (hardware.toml): dense rates only, a source a row. It does not measure anything:
`decodelab.measure.calibrate` does, and gives a `Hardware` of this machine.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .checks import positive_int, positive_number

DTYPES = ("fp32", "tf32", "bf16", "fp16", "int8", "fp8")
UNITS = {"GB": 10**9, "GiB": 2**30, "MiB": 2**20}


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One device: `memory_bytes` as the vendor prints it, `bandwidth` in bytes/s, dense FLOP/s.

    `usable_memory_bytes` is what software reports (None if no source says). It may exceed the
    nominal figure: vendors print GB and often build GiB, so an "80 GB" H100 shows 85.0 GB.
    """

    name: str
    memory_bytes: int
    bandwidth: float
    flops: Mapping[str, float] = field(hash=False)
    usable_memory_bytes: int | None = None
    usd_per_hour: float | None = None
    price_source: str = ""
    source: str = ""
    verified: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        positive_int("memory_bytes", self.memory_bytes)
        if self.usable_memory_bytes is not None:
            positive_int("usable_memory_bytes", self.usable_memory_bytes)
        positive_number("bandwidth", self.bandwidth)
        for dtype, rate in self.flops.items():
            if dtype not in DTYPES:
                raise ValueError(f"Unknown dtype {dtype!r} in flops: use {', '.join(DTYPES)}.")
            positive_number(f"flops[{dtype!r}]", rate)

    @property
    def capacity_bytes(self) -> int:
        """Bytes a program can count on: usable where known, else nominal."""
        return self.usable_memory_bytes or self.memory_bytes

    def peak(self, dtype: str) -> float:
        """Dense FLOP/s at `dtype`; ValueError naming the dtypes there are."""
        if dtype not in self.flops:
            have = ", ".join(self.flops) or "none"
            raise ValueError(f"{self.name} has no dense {dtype} rate. It has: {have}.")
        return self.flops[dtype]


def parse_bytes(text: str) -> int:
    """Turn "16 GB" or "14.56 GiB" into bytes; a size without its unit is an error."""
    number, _, unit = text.partition(" ")
    if unit not in UNITS:
        raise ValueError(f"Memory size {text!r} needs a unit: one of {', '.join(UNITS)}.")
    return round(float(number) * UNITS[unit])


def _from_row(name: str, row: dict) -> Hardware:
    row = dict(row)
    usable = row.pop("usable", None)
    return Hardware(
        name=name,
        memory_bytes=parse_bytes(row.pop("memory")),
        usable_memory_bytes=parse_bytes(usable) if usable else None,
        bandwidth=row.pop("bandwidth") * 1e9,
        flops={dtype: rate * 1e12 for dtype, rate in row.pop("dense").items()},
        **row,
    )


class UnknownDeviceError(ValueError, KeyError):
    """No device has this name; the message gives the nearest."""

    __str__ = ValueError.__str__  # KeyError would print the repr of the sentence


def find_hardware(name: str) -> Hardware:
    """The device called `name`, or the only one whose name has all its words ("h200", "RTX 4090").

    Raises UnknownDeviceError, a ValueError, with the nearest names.
    """
    words = _words(name)
    for device in HARDWARE:
        if _words(device) == words:
            return HARDWARE[device]
    matches = [device for device in HARDWARE if words and set(words) <= set(_words(device))]
    if len(matches) == 1:
        return HARDWARE[matches[0]]
    near = matches or sorted(HARDWARE, key=lambda device: -_likeness(words, _words(device)))[:4]
    raise UnknownDeviceError(
        f"{'Several devices match' if matches else 'Unknown device'} {name!r}. "
        f"Nearest names: {'; '.join(near)}. HARDWARE lists all {len(HARDWARE)}."
    )


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", str(name).lower())


def _likeness(wanted: list[str], words: list[str]) -> float:
    """Sum over the wanted words of the best match in `words`: "H1000" is near "H100"."""
    return sum(
        max(difflib.SequenceMatcher(a=want, b=word).ratio() for word in words) for want in wanted
    )


class _Table(dict[str, Hardware]):
    """A dict by exact name whose missing keys are answered with the nearest names."""

    def __missing__(self, name: str) -> Hardware:
        device = find_hardware(name)
        raise UnknownDeviceError(f"Unknown device {name!r}. Did you mean {device.name!r}?")


HARDWARE: dict[str, Hardware] = _Table(
    (name, _from_row(name, row))
    for name, row in tomllib.loads(
        Path(__file__).with_name("hardware.toml").read_text(encoding="utf-8")
    ).items()
)
