"""The environments, and the resources that their processes may use."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from kuberoll_api.model.contradictions import contradiction
from kuberoll_api.model.traits import IDENTITY, OPERATION
from kuberoll_api.model.types import (
    ENTRYPOINT_PATTERN,
    JsonObject,
    Model,
    Name,
    Seconds,
)

_SandboxPath = Annotated[str, StringConstraints(min_length=1, max_length=1024, pattern=r"^(/|~|\.)")]


class EnvironmentAccess(Model):
    """Additional variables and paths for the processes of an environment, with isolation Process."""

    variables: list[Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=256)]] = Field(
        default_factory=list,
        max_length=64,
        description="Environment variables that the processes inherit from the worker.",
    )
    readable_paths: list[_SandboxPath] = Field(
        default_factory=list,
        max_length=64,
        description="Additional files and directories that the processes may read, e.g. below /tmp or in the "
        "home directory.",
    )
    writable_paths: list[_SandboxPath] = Field(
        default_factory=list,
        max_length=64,
        description="Files and directories that the processes may change, in addition to their temporary directory.",
    )


BuiltInEnvironment = Literal["calculator", "math", "sliding_puzzle"]


class Environment(Model):
    """An environment, and the dataset rows that it answers (by `task_name`)."""

    name: Annotated[Name, IDENTITY] = Field(
        description="The `task_name` of the dataset rows that this environment answers."
    )
    type: Annotated[BuiltInEnvironment | None, IDENTITY] = Field(default=None, description="A built-in environment.")
    entrypoint: Annotated[
        Annotated[str, StringConstraints(pattern=ENTRYPOINT_PATTERN, max_length=512)] | None, IDENTITY
    ] = Field(default=None, description="Your own environment class, `package.module:Class`.")
    config: Annotated[JsonObject, IDENTITY] = Field(
        default_factory=dict, description="Argument of the environment's constructor."
    )
    isolation: Annotated[Literal["Inline", "Process"], OPERATION] = Field(
        default="Inline",
        description="Inline: a thread of the worker. Process: child processes, killed when a step times out.",
    )
    processes: Annotated[int, OPERATION] = Field(
        default=1, ge=1, le=256, description="Child processes per worker, with isolation Process."
    )
    spare_processes: Annotated[int, OPERATION] = Field(
        default=3,
        ge=0,
        le=64,
        description="Further child processes per worker while a step takes unusually long, so that other trajectories "
        "do not wait for one that hangs; 0: none. Each is one more instance of the environment in memory.",
    )
    access: Annotated[EnvironmentAccess, OPERATION] = Field(
        default_factory=EnvironmentAccess,
        description="Variables and paths that child processes may use in addition to the usual ones.",
    )
    max_batch: Annotated[int, OPERATION] = Field(
        default=256, ge=1, le=65536, description="Maximum number of trajectories in one call of step."
    )
    step_timeout_seconds: Annotated[Seconds, OPERATION] = Field(
        default=30.0, description="Maximum duration of one call of step."
    )
    repeats: Annotated[int | None, IDENTITY] = Field(
        default=None, ge=1, le=65536, description="Samples per prompt of this environment; absent: dataset.repeats."
    )

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if (self.type is None) == (self.entrypoint is None):
            found = "neither" if self.type is None else "both"
            raise contradiction(f"set one of type (a built-in) and entrypoint (package.module:Class); found {found}")
        return self
