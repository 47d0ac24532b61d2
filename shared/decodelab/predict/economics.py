"""What a token costs. Prices are dated facts: `Hardware.price_source` says whose and of when."""

from __future__ import annotations

from .checks import positive_number


def usd_per_million_tokens(
    usd_per_hour: float, tokens_per_second: float, utilization: float = 1.0
) -> float:
    """Dollars per 10^6 tokens of a machine at `usd_per_hour` that makes `tokens_per_second`.

    tokens_per_second is the aggregate at full load, not one user's; `utilization` is the fraction
    of it that is really produced, over 0 and up to 1. Peak tokens are not billed tokens.
    """
    positive_number("usd_per_hour", usd_per_hour)
    positive_number("tokens_per_second", tokens_per_second)
    if positive_number("utilization", utilization) > 1:
        raise ValueError(f"utilization is a fraction up to 1, not {utilization!r}: 30% is 0.3.")
    return usd_per_hour * 1e6 / (3600 * tokens_per_second * utilization)
