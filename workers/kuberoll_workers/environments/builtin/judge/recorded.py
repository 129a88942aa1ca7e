"""Recorded verdicts of a judge: what it wrote about which response, and whether that response is right."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from kuberoll_workers.environments.interface import UnusableRow

FIELD: Final = "verdicts"
"""Field of a row's metadata."""


class Recorded(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a judge wrote about a response.

    Attributes:
        response: The response, without thoughts.
        said: What it wrote; with `swap` in both orders.
        right: Whether the response is right, by somebody's own judgement.
    """

    response: str
    said: str | list[str]
    right: bool

    @property
    def texts(self) -> list[str]:
        """What it wrote, in each order."""
        return [self.said] if isinstance(self.said, str) else self.said


def recorded_of(state: Mapping[str, Any], orders: int) -> dict[str, Recorded]:
    """The recorded verdicts of a row, by response.

    Args:
        orders: Number of orders in which the judge is asked.

    Raises:
        UnusableRow: They are invalid.
    """
    if (given := state.get(FIELD)) is None:
        return {}
    try:
        found = msgspec.convert(given, list[Recorded])
    except msgspec.ValidationError as error:
        raise UnusableRow(
            f"metadata.{FIELD}: {error}; it is a list of objects with response, said (what the judge wrote) and right"
        ) from error
    for number, one in enumerate(found):
        if len(one.texts) != orders or not one.response.strip():
            wanted = "a list of what the judge wrote in both orders" if orders > 1 else "what the judge wrote"
            raise UnusableRow(f"metadata.{FIELD}[{number}]: said must be {wanted}, and the response no empty text")
    return {one.response.strip(): one for one in found}
