"""The multi-turn loop: its limits, retries, deadlines and prompt groups."""

from __future__ import annotations

from typing import Annotated, Final, Literal, Self

from pydantic import Field, model_validator

from kuberoll_api.model.contradictions import contradiction
from kuberoll_api.model.traits import IDENTITY, OPERATION
from kuberoll_api.model.types import (
    MAX_COUNT,
    Model,
    Seconds,
)

MAX_VERSIONS: Final = 65536
"""Greatest `maxLag`."""


class Retries(Model):
    """Retries of a failed step within its turn."""

    generation_attempts: int = Field(
        default=30,
        ge=1,
        le=1000,
        description="Attempts of one generation request if the endpoint is at fault; the default outlasts a "
        "replica that takes ten minutes to restart. An endpoint that answers nothing for so many times "
        "timeouts.generationSeconds ends the run, which can be continued.",
    )
    environment_attempts: int = Field(default=2, ge=1, le=1000, description="Attempts of one environment step.")
    backoff_seconds: float = Field(
        default=0.5,
        ge=0,
        le=600,
        description="Seconds before the second attempt; doubled for each further one, to 30.",
    )


class Timeouts(Model):
    """Time limits. Whatever exceeds one is stopped, its request is aborted, and it is recorded as failed."""

    generation_seconds: Seconds = Field(
        default=600.0, description="Time limit of one generation request, including waiting."
    )
    turn_seconds: Seconds | None = Field(
        default=None,
        description="Time limit of one turn, including all retries of generation and environment; absent: none.",
    )
    trajectory_seconds: Seconds | None = Field(default=None, description="Time limit of one trajectory; absent: none.")


class Groups(Model):
    """Rules for prompt groups, the samples of one prompt."""

    oversample: int = Field(
        default=0,
        ge=0,
        le=65536,
        description="Samples started per prompt in addition to dataset.repeats. The first to finish are kept, "
        "the others are stopped and go to dropped.jsonl: faster, but biased towards short trajectories.",
    )
    atomic: bool = Field(
        default=False,
        description="Keep all samples of a prompt or none: if one fails permanently, its group fails with it.",
    )
    drop_equal_rewards: bool = Field(
        default=False,
        description="Drop groups whose rewards are all equal: they have no advantage to learn from. They go to "
        "dropped.jsonl.",
    )
    drop_budget: int | None = Field(
        default=None,
        ge=0,
        le=MAX_COUNT,
        description="Maximum number of groups that dropEqualRewards may drop; absent: no limit.",
    )
    wanted: int | None = Field(
        default=None,
        ge=1,
        le=MAX_COUNT,
        description="Number of kept groups at which to stop; each dropped group is replaced by the dataset's next. "
        "Absent: the whole dataset. Not with onPolicy, whose trainer decides when it has enough.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.drop_budget is not None and not self.drop_equal_rewards:
            raise contradiction(
                "is the budget of dropEqualRewards; set dropEqualRewards: true, or remove it", "dropBudget"
            )
        return self


class OnPolicy(Model):
    """How far the loop may be ahead of the trainer that consumes the run; a version is one publication of weights."""

    max_lag: int | None = Field(
        default=None,
        ge=0,
        le=MAX_VERSIONS,
        description="Maximum number of versions between a trajectory's oldest token and the newest weights when the "
        "trajectory is delivered; 0 is strictly on-policy. Absent: any.",
    )
    on_stale: Literal["Drop", "Finish"] = Field(
        default="Drop",
        description="Drop: groups are delivered as they end, and those that are too old are stopped and go to "
        "dropped.jsonl. Finish: groups are delivered in the dataset's order, so the trainer waits for slow ones and "
        "none becomes too old.",
    )
    max_ahead: int | None = Field(
        default=None,
        ge=1,
        le=MAX_COUNT,
        description="Maximum number of prompt groups that have begun and that no consumer has taken. Absent: any.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.max_lag is None and self.max_ahead is None:
            raise contradiction("set maxLag, maxAhead or both; found neither")
        if self.on_stale == "Finish" and self.max_lag is None:
            raise contradiction(
                "Finish is for maxLag, without which nothing is too old; set it, or remove this", "onStale"
            )
        return self


class Rollout(Model):
    """The loop: generate, step the environments, reward, repeat."""

    scheduling: Annotated[Literal["Concurrent", "Lockstep"], OPERATION] = Field(
        default="Concurrent",
        description="Concurrent: every trajectory at its own pace. Lockstep: batches of `concurrency`, turn by turn.",
    )
    max_turns: Annotated[int, IDENTITY] = Field(
        default=20, ge=1, le=1_000_000, description="Maximum turns per trajectory."
    )
    max_sequence_length: Annotated[int | None, IDENTITY] = Field(
        default=None, ge=2, le=100_000_000, description="Maximum tokens per trajectory; absent: the engine's window."
    )
    concurrency: Annotated[int, OPERATION] = Field(
        default=256, ge=1, le=100_000, description="Trajectories in flight per worker."
    )
    observation_template: Annotated[Literal["Raw", "ChatTemplate"], IDENTITY] = Field(
        default="Raw",
        description="Raw: an observation's tokens are appended unchanged. ChatTemplate: with the role "
        "boundaries of the model's chat template.",
    )
    groups: Annotated[Groups, IDENTITY] = Field(
        default_factory=Groups, description="Rules for the samples of a prompt."
    )
    on_policy: Annotated[OnPolicy | None, IDENTITY] = Field(
        default=None, description="Bounds for a run that a trainer consumes while it goes on; absent: none."
    )
    journal_turns: Annotated[bool, OPERATION] = Field(
        default=True,
        description="Write every turn to disk, so that an interrupted trajectory resumes after its last complete turn.",
    )
    retries: Annotated[Retries, OPERATION] = Field(default_factory=Retries, description="Retries of failed steps.")
    timeouts: Annotated[Timeouts, OPERATION] = Field(default_factory=Timeouts, description="Time limits.")
    max_failed_fraction: Annotated[float, OPERATION] = Field(
        default=0.0, ge=0, le=1, description="Failure budget: the fraction of trajectories that may fail permanently."
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for given, name in ((self.groups.atomic, "atomic"), (self.groups.drop_equal_rewards, "dropEqualRewards")):
            if given and not self.journal_turns:
                message = (
                    f"groups.{name} needs it: results that wait for their group are stored there; remove one of the two"
                )
                raise contradiction(message, "journalTurns")
        if self.on_policy is not None and self.groups.wanted is not None:
            raise contradiction(
                "the trainer of a run with rollout.onPolicy decides when it has enough, with Rollouts.stop(); remove "
                "one of the two",
                *("groups", "wanted"),
            )
        return self
