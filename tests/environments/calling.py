"""An environment with tools, for the tests and the documentation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field

from kuberoll_workers.environments import ToolEnvironment, ToolError, tool
from kuberoll_workers.environments.interface import ChatMessage


class Shop(ToolEnvironment):
    """Buy what the customer asks for; 1 if the basket is right at the end."""

    PRICES: ClassVar = {"apple": 3, "pear": 4}

    @tool
    def price(self, item: Annotated[str, Field(description="Name of the item.")]) -> int:
        """Price of an item, in cents."""
        if item not in self.PRICES:
            raise ToolError(f"no {item} here; there are {', '.join(self.PRICES)}")
        return self.PRICES[item]

    @tool
    def buy(self, state: dict[str, Any], item: str, count: Annotated[int, Field(ge=1, le=9)] = 1) -> str:
        """Put items into the basket."""
        basket = state.setdefault("basket", {})
        basket[item] = basket.get(item, 0) + count
        return f"{count} x {item}"

    def score(self, messages: Sequence[ChatMessage], state: dict[str, Any]) -> float:
        return 1.0 if state.get("basket") == state.get("wanted") else 0.0
