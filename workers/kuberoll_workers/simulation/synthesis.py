"""Synthetic traces: lengths and latencies with heavy tails, drawn from a seed."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Literal

from kuberoll_workers.simulation.trace import TraceTrajectory, Turn

Law = Literal["constant", "exponential", "lognormal", "pareto"]


@dataclass(frozen=True, slots=True)
class Distribution:
    """A distribution of positive numbers by its median.

    Attributes:
        shape: Of `lognormal`, the standard deviation of the logarithm; of `pareto`, the exponent of the tail, where
            smaller is heavier; others have none.
    """

    law: Law
    median: float
    shape: float = 1.0

    @classmethod
    def parse(cls, text: str) -> Distribution:
        """Read `LAW:MEDIAN[:SHAPE]`, such as `lognormal:300:1.0`, or a number.

        Raises:
            ValueError: It is none; the message says what is allowed.
        """
        law, *numbers = text.split(":") if ":" in text else ("constant", text)
        laws: dict[str, Law] = {
            "constant": "constant",
            "exponential": "exponential",
            "lognormal": "lognormal",
            "pareto": "pareto",
        }
        try:
            values = [float(number) for number in numbers]
        except ValueError:
            values = []
        shaped = law in ("lognormal", "pareto")
        if law not in laws or not 1 <= len(values) <= 1 + shaped or not all(map(math.isfinite, values)):
            raise ValueError(
                f"found {text!r}; it is a number, or LAW:MEDIAN with exponential, or LAW:MEDIAN:SHAPE with lognormal "
                "or pareto, as in lognormal:300:1.0"
            )
        if values[0] < 0 or any(value <= 0 for value in values[1:]):
            raise ValueError(f"found {text!r}; a median is not negative, and a shape is more than 0")
        return cls(laws[law], *values)

    def draw(self, draw: random.Random) -> float:
        """Draw one number; one that is too large for a float is infinite."""
        try:
            return self._draw(draw)
        except OverflowError:
            return math.inf

    def _draw(self, draw: random.Random) -> float:
        if self.law == "lognormal":
            return self.median * draw.lognormvariate(0.0, self.shape)
        if self.law == "pareto":
            # The median of a Pareto distribution that begins at 1 is 2^(1/shape).
            return self.median * draw.paretovariate(self.shape) / math.exp2(1.0 / self.shape)
        if self.law == "exponential":
            return self.median * draw.expovariate(math.log(2))
        return self.median


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What a synthetic trace is like.

    Attributes:
        group_size: Trajectories of a prompt group.
        prompt, generated, observed: Tokens of a first prompt, of a turn's response, and of its observation.
        environment_seconds: Of one step.
        most_turns: Maximum number of turns of a trajectory.
        most_tokens: Maximum length of a trajectory; it ends with the turn that would exceed it.
    """

    trajectories: int
    group_size: int
    turns: Distribution
    prompt: Distribution
    generated: Distribution
    observed: Distribution
    environment_seconds: Distribution
    most_turns: int = 256
    most_tokens: int = 32_768
    seed: int = 0


def synthesize(recipe: Recipe) -> list[TraceTrajectory]:
    """Draw a trace; the same recipe gives the same one.

    Raises:
        ValueError: The recipe gives none; the message names the field.
    """
    for name in ("trajectories", "group_size", "most_turns"):
        if getattr(recipe, name) < 1:
            raise ValueError(f"{name}: found {getattr(recipe, name)}; it is at least 1")
    if recipe.most_tokens < 2:
        raise ValueError(f"most_tokens: found {recipe.most_tokens}; it is at least 2")
    draw = random.Random(recipe.seed)
    found: list[TraceTrajectory] = []
    prompt = 1
    for number in range(recipe.trajectories):
        group, sample = divmod(number, recipe.group_size)
        if not sample:
            prompt = min(_whole(recipe.prompt, draw, least=1), recipe.most_tokens - 1)
        turns = _turns(recipe, prompt, draw)
        found.append(TraceTrajectory(group=group, sample=sample, environment="synthetic", prompt=prompt, turns=turns))
    return found


def _turns(recipe: Recipe, prompt: int, draw: random.Random) -> tuple[Turn, ...]:
    turns: list[Turn] = []
    wanted = min(_whole(recipe.turns, draw, least=1), recipe.most_turns)
    room = recipe.most_tokens - prompt
    while len(turns) < wanted and room > 0:
        generated = min(room, _whole(recipe.generated, draw, least=1))
        last = len(turns) + 1 == wanted
        observed = 0 if last else min(room - generated, _whole(recipe.observed, draw, least=0))
        turns.append(Turn(generated, observed, 0.0, round(min(1e7, recipe.environment_seconds.draw(draw)), 6)))
        room -= generated + observed
    return tuple(turns)


def _whole(distribution: Distribution, draw: random.Random, *, least: int) -> int:
    return max(least, round(min(1 << 30, distribution.draw(draw))))
