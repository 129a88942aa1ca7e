"""Agents: programs with a loop of their own, which call the policy by themselves."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, StringConstraints, model_validator

from kuberoll_api.model.contradictions import contradiction
from kuberoll_api.model.traits import IDENTITY, OPERATION
from kuberoll_api.model.types import ENTRYPOINT_PATTERN, Model, Seconds

Argument = Annotated[str, StringConstraints(max_length=4096)]
"""One argument of a program, or its name."""

_Command = Annotated[list[Argument], Field(min_length=1, max_length=256)]


class AgentTimeouts(Model):
    """Time limits of the phases of an agent's episode, in seconds."""

    setup_seconds: Seconds = Field(default=300.0, description="Maximum duration of setup.")
    run_seconds: Seconds = Field(default=1800.0, description="Maximum duration of the agent itself.")
    score_seconds: Seconds = Field(default=300.0, description="Maximum duration of score.")
    close_seconds: Seconds = Field(default=30.0, description="Maximum duration of close.")

    @property
    def total(self) -> float:
        """Maximum duration of an episode, in seconds."""
        return self.setup_seconds + self.run_seconds + self.score_seconds + self.close_seconds


class Agent(Model):
    """An agent: it is given a row and the URL of a session of its own, and returns rewards."""

    entrypoint: Annotated[
        Annotated[str, StringConstraints(pattern=ENTRYPOINT_PATTERN, max_length=512)] | None, IDENTITY
    ] = Field(
        default=None,
        description="Your own coroutine function, `package.module:function`, or a class with `run`, and optionally "
        "`setup`, `score` and `close`.",
    )
    command: Annotated[_Command | None, IDENTITY] = Field(
        default=None,
        description="A program and its arguments, started for each trajectory in a directory of its own.",
    )
    setup: Annotated[_Command | None, IDENTITY] = Field(
        default=None, description="With command: a program that is run before it, in the same directory."
    )
    score: Annotated[_Command | None, IDENTITY] = Field(
        default=None,
        description="With command: a program that is run after it, in the same directory, and returns the reward.",
    )
    timeouts: Annotated[AgentTimeouts, OPERATION] = Field(
        default_factory=AgentTimeouts, description="Time limits of the phases of an episode."
    )

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if (self.entrypoint is None) == (self.command is None):
            found = "neither" if self.entrypoint is None else "both"
            raise contradiction(f"set one of entrypoint (package.module:function) and command; found {found}")
        for name in ("setup", "score"):
            if self.command is None and getattr(self, name) is not None:
                raise contradiction("is for command; a class at entrypoint has methods of this name", name)
        return self
