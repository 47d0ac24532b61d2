"""Prices as data: every row says whose and of when, and some are repeated here by hand."""

import re
import tomllib
from pathlib import Path

import pytest
from decodelab.predict import (
    API_PRICES,
    GPU_PRICES,
    HARDWARE,
    TokenPrice,
    api_price,
    break_even,
    gpu_prices,
)

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("row", [*GPU_PRICES, *API_PRICES], ids=lambda row: row.provider)
def test_every_price_has_a_source_and_a_date(row):
    assert re.search(r"20\d\d|commit [0-9a-f]{8}|undated", row.as_of)
    address = row.source if row in GPU_PRICES else row.page
    assert address.startswith("https://")
    assert row.source


def test_every_gpu_that_is_named_exists():
    for offer in GPU_PRICES:
        assert offer.hardware in {"", *HARDWARE}
        assert offer.usd_per_gpu_hour == offer.usd_per_hour / offer.gpus


def test_a_device_s_own_price_is_one_of_its_offers():
    priced = {name: device for name, device in HARDWARE.items() if device.usd_per_hour}
    assert len(priced) > 5
    for name, device in priced.items():
        assert device.usd_per_hour in [offer.usd_per_gpu_hour for offer in gpu_prices(name)], name


def test_an_h100_costs_from_1_25_to_12_29_dollars():
    """Spot and on demand at Nebius, a3 at Google, an eighth of a p5.48xlarge at AWS."""
    offers = [(offer.provider, offer.usd_per_gpu_hour) for offer in gpu_prices("NVIDIA H100 SXM")]
    assert offers == [
        ("Nebius", 1.25),
        ("Nebius", 2.95),
        ("Google Cloud", 10.8),
        ("AWS", 12.29),
    ]
    assert gpu_prices("NVIDIA H20") == ()


def test_the_price_of_a_node_is_divided_by_its_gpus():
    """Known wrong: $53.52 an hour for one B200."""
    lambda_b200 = [o.usd_per_gpu_hour for o in gpu_prices("NVIDIA B200 SXM (HGX)")]
    assert lambda_b200 == [5.5, pytest.approx(6.69), 6.99]


def test_prices_do_not_only_fall():
    costs = [offer.usd_per_gpu_hour for offer in gpu_prices("NVIDIA RTX A6000")]
    assert costs[1] / costs[0] == pytest.approx(1.3625)


@pytest.mark.parametrize(
    ("model", "provider", "price"),
    [
        ("gpt-4o", "OpenAI", TokenPrice(input=2.5, output=10, cached=1.25)),
        ("claude-sonnet-4", "Anthropic", TokenPrice(input=3, output=15, cached=0.3)),
        ("Llama-3.1-8B", "Together", TokenPrice(input=0.18, output=0.18)),
        ("llama-3.1-8b-instant", "Groq", TokenPrice(input=0.05, output=0.08)),
        ("gpt-oss-120b", "Groq", TokenPrice(input=0.15, output=0.6, cached=0.075)),
        ("gpt-oss-120b", "Fireworks", TokenPrice(input=0.15, output=0.6, cached=0.015)),
    ],
)
def test_an_api_bills(model, provider, price):
    assert api_price(model, provider).price == price


def test_a_price_that_is_not_there_is_answered_with_those_that_are():
    with pytest.raises(ValueError, match="gpt-4o, OpenAI"):
        api_price("gpt-5", "OpenAI")


def test_a_blended_price_depends_on_the_mix():
    """10 in for each out at 2.50 and 10: (25 + 10) / 11. Known wrong: their plain mean, 6.25."""
    price = api_price("gpt-4o", "OpenAI").price
    assert price.blended(1000, 100) == pytest.approx(35 / 11)
    assert price.blended(1, 1) == 6.25


def test_an_h100_must_be_full_by_a_quarter_to_match_eighteen_cents():
    """$2.95 an hour at 18,104 tokens/s (batch 296 of an 8B) is $0.0453 per 10^6."""
    point = break_even(2.95, 18_104, api_price("Llama-3.1-8B", "Together").price.output)
    assert point.utilization == pytest.approx(0.2515, rel=1e-3)
    assert point.tokens_per_day == pytest.approx(24 * 2.95 / 0.18 * 1e6)


def test_every_table_travels_with_the_package():
    """A wheel holds what package-data names and no more: without its prices nothing imports."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["decodelab"]
    package = ROOT / "shared" / "decodelab"
    packed = {path for pattern in patterns for path in package.glob(pattern)}
    assert {path for path in package.rglob("*.csv*") if path.is_file()} <= packed
