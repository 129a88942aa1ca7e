"""Agents: programs with a loop of their own, which call the policy by themselves."""

from __future__ import annotations

from typing import Annotated, Final, Self

from pydantic import Field, StringConstraints, model_validator

from kuberoll_api.model.contradictions import contradiction
from kuberoll_api.model.traits import IDENTITY, OPERATION
from kuberoll_api.model.types import ENTRYPOINT_PATTERN, AccessPath, Model, Seconds, Url

Argument = Annotated[str, StringConstraints(max_length=4096)]
"""One argument of a program, or its name."""

_Command = Annotated[list[Argument], Field(min_length=1, max_length=256)]


CLOSE_SECONDS: Final = 30.0
"""Maximum duration of close."""

_LEAST_SECONDS: Final = 300.0
"""Least time limit of setup and score."""


class AgentTimeouts(Model):
    """Time limits of the phases of an agent's episode, in seconds."""

    run_seconds: Seconds = Field(
        default=1800.0,
        description="Maximum duration of the agent itself; setup and score may take as long, and 300 seconds in any "
        "case.",
    )

    @property
    def around_seconds(self) -> float:
        """Maximum duration of setup, and of score."""
        return max(self.run_seconds, _LEAST_SECONDS)

    @property
    def total(self) -> float:
        """Maximum duration of an episode, in seconds."""
        return self.run_seconds + 2 * self.around_seconds + CLOSE_SECONDS


class GymAgents(Model):
    """Agent servers of NeMo Gym, which call the policy through a model server of their own."""

    url: Url = Field(
        description="Base URL of an agent server, to which all rows go; or of NeMo Gym's head server: then each row "
        "goes to the agent that its agent_ref names.",
    )
    agents: dict[str, Url] = Field(
        default_factory=dict,
        max_length=256,
        description="Base URLs of agents by name, which rows that name them go to in place of url.",
    )


class ToolsAgent(Model):
    """The agent that KubeRoll brings: a loop of calls of tools, `bash` and an editor of files, in the sandbox."""

    command_seconds: Annotated[Seconds, IDENTITY] = Field(
        default=120.0, description="Time limit of one command, which ends with everything that it has started."
    )


class HiddenFromAgent(Model):
    """What the program that scores is given, and setup and command are not."""

    paths: list[AccessPath] = Field(
        default_factory=list,
        max_length=64,
        description="Files and directories, e.g. hidden tests, that only score can read. For isolation Process and "
        "Remote, on kernels with Landlock.",
    )
    metadata: list[Argument] = Field(
        default_factory=list,
        max_length=64,
        description="Fields of the rows' metadata, e.g. the answer, that only score finds in its episode.",
    )


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
    tools: Annotated[ToolsAgent | None, IDENTITY] = Field(
        default=None, description="The agent that KubeRoll brings, which calls tools in the environment's sandbox."
    )
    setup: Annotated[_Command | None, IDENTITY] = Field(
        default=None, description="With command: a program that is run before it, in the same directory."
    )
    score: Annotated[_Command | None, IDENTITY] = Field(
        default=None,
        description="With command: a program that is run after it, in the same directory, and returns the reward.",
    )
    hidden: Annotated[HiddenFromAgent | None, IDENTITY] = Field(
        default=None, description="With score: what score is given, and setup and command are not."
    )
    nemo_gym: Annotated[GymAgents | None, OPERATION] = Field(
        default=None,
        description="Agent servers of NeMo Gym: each trajectory is one request to /run. They call the policy at the "
        "URL and with the token of their own configuration, not in a session.",
    )
    timeouts: Annotated[AgentTimeouts, OPERATION] = Field(
        default_factory=AgentTimeouts, description="Time limits of the phases of an episode."
    )

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        kinds = {
            "entrypoint": self.entrypoint,
            "command": self.command,
            "nemoGym": self.nemo_gym,
            "tools": self.tools,
        }
        given = [name for name, kind in kinds.items() if kind is not None]
        if len(given) != 1:
            raise contradiction(
                "set one of entrypoint (package.module:function), command, nemoGym and tools; found "
                f"{' and '.join(given) or 'none'}"
            )
        for name in ("setup", "score"):
            if self.command is None and getattr(self, name) is not None:
                raise contradiction("is for command; a class at entrypoint has methods of this name", name)
        if self.hidden is not None and self.score is None:
            raise contradiction("is what only score is given; found no score", "hidden")
        return self
