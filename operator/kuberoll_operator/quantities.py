"""Kubernetes' quantities as numbers."""

from __future__ import annotations

import decimal
from decimal import Decimal
from typing import Any


def number_of(quantity: Any) -> Decimal:
    """The number that a quantity is, exactly.

    Raises:
        ValueError: It is no quantity.
    """
    from kubernetes.utils.quantity import parse_quantity

    # Libraries change the precision of a thread's decimals for themselves.
    with decimal.localcontext(decimal.DefaultContext):
        number: Decimal = parse_quantity(quantity)  # type: ignore[no-untyped-call]
    return number
