"""Prices are exact: no float reaches a bill."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batch_pipeline.models import Model, Prices
from batch_pipeline.settings import Settings, check

PRICES = st.decimals(min_value=0, max_value=999_999, places=6)
TOKENS = st.integers(min_value=0, max_value=10**15)


@given(PRICES, PRICES, st.decimals(min_value=0, max_value=1, places=6), TOKENS, TOKENS)
def test_cost_is_the_exact_product_and_fits_the_reports(
    into: Decimal, out: Decimal, discount: Decimal, input_tokens: int, output_tokens: int
) -> None:
    prices = Prices(input_per_million=float(into), output_per_million=float(out), batch_discount=float(discount))
    cost = prices.cost(input_tokens, output_tokens)
    online = input_tokens * Fraction(into) + output_tokens * Fraction(out)
    assert Fraction(cost) == online / 1_000_000 * (1 - Fraction(discount))
    assert isinstance(cost.as_tuple().exponent, int)
    assert -18 <= cost.as_tuple().exponent <= 0
    assert "E" not in f"{cost:f}"


@pytest.mark.parametrize("prices", [Prices(input_per_million=0.0000001), Prices(batch_discount=1 / 3)])
def test_price_with_more_decimals_than_a_report_holds_is_refused(prices: Prices) -> None:
    model = Model(source="weights", context_length=1, prices=prices)
    [problem] = check(msgspec.structs.replace(Settings(), models={"m": model}))
    assert "at most 6 decimals" in problem


def test_price_that_is_no_price_is_refused_whatever_it_is() -> None:
    for price in (-1.0, float("nan"), float("inf"), 1e6):
        model = Model(source="weights", context_length=1, prices=Prices(input_per_million=price))
        assert len(check(msgspec.structs.replace(Settings(), models={"m": model}))) == 1
