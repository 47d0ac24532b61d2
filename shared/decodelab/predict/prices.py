"""What GPUs and APIs were offered for, each row with its source and date. Dated facts, not quotes.

The tables are data: gpu_prices.csv and api_prices.csv. Prices move, and not only down: the same
V100 and RTX A6000 at Lambda cost 36-44% more in the later list than in the earlier one.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from .checks import positive_number


@dataclass(frozen=True, kw_only=True)
class TokenPrice:
    """Dollars per 10^6 tokens, input and output apart.

    `cached` is for input found in a prefix cache; None: it costs what other input costs.
    """

    input: float
    output: float
    cached: float | None = None

    def __post_init__(self) -> None:
        positive_number("input", self.input)
        positive_number("output", self.output)
        if self.cached is not None:
            positive_number("cached", self.cached)

    def usd(self, prompt: float, output: float, cached: float = 0) -> float:
        """Dollars of `prompt` input tokens, `cached` of them from a cache, and `output` new ones.

        ValueError where there is no token at all, or more cached ones than the prompt has.
        """
        if not 0 <= cached <= prompt or output < 0 or prompt + output <= 0:
            raise ValueError(
                f"A request of {prompt} prompt tokens, {cached} of them cached, and {output} new "
                "ones makes no sense: none is negative, and cached ones are part of the prompt."
            )
        hit = self.input if self.cached is None else self.cached
        return ((prompt - cached) * self.input + cached * hit + output * self.output) / 1e6

    def blended(self, prompt: float, output: float, cached: float = 0) -> float:
        """Dollars per 10^6 tokens of both kinds counted together, at this mix."""
        return self.usd(prompt, output, cached) * 1e6 / (prompt + output)


@dataclass(frozen=True, kw_only=True)
class GPUPrice:
    """One offer. `usd_per_hour` is of the instance, with `gpus` of them in it.

    `hardware` is its name in HARDWARE, empty where the offer doesn't say which device it is.
    """

    gpu: str
    hardware: str
    provider: str
    kind: str
    usd_per_hour: float
    gpus: int
    as_of: str
    source: str
    note: str

    @property
    def usd_per_gpu_hour(self) -> float:
        """Dollars per hour of one GPU."""
        return self.usd_per_hour / self.gpus


@dataclass(frozen=True, kw_only=True)
class APIPrice:
    """What a provider bills for a model: `price` in dollars per 10^6 tokens."""

    model: str
    provider: str
    price: TokenPrice
    as_of: str
    source: str
    page: str
    note: str

    @property
    def name(self) -> str:
        """Model and provider, as a label of a figure says it."""
        return f"{self.model}, {self.provider}"


def gpu_prices(hardware: str) -> tuple[GPUPrice, ...]:
    """The offers of one device of HARDWARE, cheapest first; none is an empty tuple."""
    offers = (offer for offer in GPU_PRICES if offer.hardware == hardware)
    return tuple(sorted(offers, key=lambda offer: offer.usd_per_gpu_hour))


def api_price(model: str, provider: str) -> APIPrice:
    """The row of this model and provider; ValueError naming those there are."""
    for row in API_PRICES:
        if (row.model, row.provider) == (model, provider):
            return row
    raise ValueError(
        f"No price of {model!r} at {provider!r}. There are: "
        f"{'; '.join(row.name for row in API_PRICES)}."
    )


def _rows(name: str) -> list[dict[str, str]]:
    with Path(__file__).with_name(name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _gpu(row: dict[str, str]) -> GPUPrice:
    numbers = {"usd_per_hour": float(row["usd_per_hour"]), "gpus": int(row["gpus"])}
    return GPUPrice(**row | numbers)


def _api(row: dict[str, str]) -> APIPrice:
    dollars = {kind: row.pop(f"usd_{kind}") for kind in ("input", "output", "cached")}
    price = TokenPrice(**{kind: float(text) for kind, text in dollars.items() if text})
    return APIPrice(price=price, **row)


GPU_PRICES: tuple[GPUPrice, ...] = tuple(map(_gpu, _rows("gpu_prices.csv")))
API_PRICES: tuple[APIPrice, ...] = tuple(map(_api, _rows("api_prices.csv")))
