"""Figures of the benchmarks: a name, a value, and what it is compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured number.

    Attributes:
        baseline: The same of what one would use instead, measured in the same run; None: there is none.
        bound: What no program could better; None: unknown.
        goal: The value from which it is good enough; None: there is none.
        better: Which values are better.
    """

    name: str
    value: float
    unit: str
    baseline: float | None = None
    bound: float | None = None
    goal: float | None = None
    better: Literal["lower", "higher"] = "lower"

    @property
    def is_reached(self) -> bool | None:
        """Whether the goal is reached; None: there is none."""
        if self.goal is None:
            return None
        return self.value <= self.goal if self.better == "lower" else self.value >= self.goal

    def __str__(self) -> str:
        compared = [
            f"{name} {number:.4g}"
            for name, number in (("baseline", self.baseline), ("bound", self.bound), ("goal", self.goal))
            if number is not None
        ]
        return f"{self.name}: {self.value:.4g} {self.unit}" + (f" ({', '.join(compared)})" if compared else "")
