"""Dollars per million tokens."""

import pytest
from decodelab.predict import HARDWARE, SHAPES, decode_step, usd_per_million_tokens
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(
    ("tokens_per_second", "utilization", "usd"),
    [(125, 1.0, 4.44), (2690, 1.0, 0.207), (2690, 0.3, 0.688)],
)
def test_two_dollars_an_hour_buy_tokens_at(tokens_per_second, utilization, usd):
    assert usd_per_million_tokens(2, tokens_per_second, utilization) == pytest.approx(
        usd, rel=2.5e-3
    )


@given(price=st.floats(0.01, 1000), speed=st.floats(1, 1e6), utilization=st.floats(0.01, 1))
def test_an_hour_s_tokens_at_that_price_cost_an_hour(price, speed, utilization):
    tokens = 3600 * speed * utilization
    assert usd_per_million_tokens(price, speed, utilization) * tokens / 1e6 == pytest.approx(price)


def test_a_batch_of_64_divides_the_cost_by_twenty():
    """Not by 64: the KV of the other 63 sequences has to be read too."""
    alone, together = (
        decode_step(SHAPES["Llama-2-13B"], HARDWARE["NVIDIA H100 SXM"], batch, 1024)
        for batch in (1, 64)
    )
    costs = [usd_per_million_tokens(2, step.tokens_per_second) for step in (alone, together)]
    assert costs[0] / costs[1] == pytest.approx(21.4, abs=0.1)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((0, 100), "usd_per_hour"),
        ((-2, 100), "usd_per_hour"),
        ((2, 0), "tokens_per_second"),
        ((2, float("nan")), "tokens_per_second"),
        ((2, 100, 0), "utilization"),
        ((2, 100, 30), "30% is 0.3"),
    ],
)
def test_senseless_figures_are_refused_by_name(arguments, named):
    with pytest.raises(ValueError, match=named):
        usd_per_million_tokens(*arguments)
