"""A worker's start, its configuration, and its counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Final, Literal

import msgspec
from pydantic import JsonValue, TypeAdapter

from kuberoll_api.contract import ServeArgs
from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_workers.data.record import DroppedRecord, FailureRecord
from kuberoll_workers.data.stop_reasons import WHOLE_GROUP
from kuberoll_workers.environments.served_models import ServedModel
from kuberoll_workers.rollouts.groups import Result
from kuberoll_workers.telemetry import Activity


class WorkerStart(msgspec.Struct, kw_only=True, frozen=True):
    """What a worker can begin with before there is an engine.

    Attributes:
        tokenizer: Directory or hub id of the tokenizer.
        revision: Of the tokenizer at the hub; None: its default branch.
        log: File to which standard error is appended from now on.
        endpoint: True if it will generate at an endpoint, and not simulate its engine.
    """

    tokenizer: str
    revision: str | None = None
    log: str
    endpoint: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Configuration of a worker.

    Attributes:
        base: The directory where the job's relative paths start.
        tokenizer: Directory or hub id of the tokenizer.
        tokenizer_revision: Of the tokenizer at the hub; None: its default branch.
        clock: ISO time that the chat template reads instead of the present one, the same in all parts of a run; None:
            the present one.
        sampling: The distribution in the run's manifest; None: it has none.
        sources: What shapes tokens beside the job's settings, as in the run's manifest.
        endpoint: Base URL of the policy; None: see `simulated`.
        max_model_len: The engine's window, tokens.
        output: The run's directory, which must exist, or URI.
        turns: Directory of the turn log; None: turns are not journaled.
        shards: The shards to run, out of `shard_count`.
        tasks, rollouts: Number of tasks of the dataset, and of samples of the largest one; None: unknown.
        blocks: Digests of the dataset's rows, see `inputs.InputSummary`; None: rows are not checked.
        planned: Number of trajectories of this worker, for the metrics; None: unknown.
        token: Bearer token for the policy; None: none.
        discovery: Source of the list of replicas: the endpoint, DNS, or `replicas`.
        replicas: Base URLs of the replicas, with discovery `Static`.
        replicas_host: `host:port` whose addresses are the replicas, with discovery `DNS`.
        simulated: Arguments of an engine that this worker simulates instead of using an endpoint.
        services: Endpoints of the job's services, by name, of those that are not in this process's variables.
        direct_token: Bearer token of consumers on the direct path; None: there is none.
        lock_patience: Seconds for which another worker may hold one of the shards; None: it is waited for.
    """

    job: RolloutJob
    base: str
    tokenizer: str
    endpoint: str | None
    max_model_len: int
    output: str
    turns: str | None
    shards: list[int]
    shard_count: int
    tokenizer_revision: str | None = None
    clock: str | None = None
    sources: dict[str, str] = field(default_factory=dict)
    sampling: dict[str, JsonValue] | None = None
    tasks: int | None = None
    rollouts: int | None = None
    blocks: list[str] | None = None
    planned: int | None = None
    token: str | None = None
    discovery: Literal["Endpoint", "DNS", "Static"] = "Endpoint"
    replicas: list[str] = field(default_factory=list)
    replicas_host: str | None = None
    simulated: ServeArgs | None = None
    services: dict[str, ServedModel] = field(default_factory=dict)
    direct_token: str | None = None
    lock_patience: float | None = 20.0

    def encode(self) -> bytes:
        """The configuration as one line of JSON."""
        return _CONFIG.dump_json(self, by_alias=True, exclude_unset=True)

    @classmethod
    def decode(cls, line: bytes) -> WorkerConfig:
        """Decode the output of `encode`, and validate the job."""
        return _CONFIG.validate_json(line)


_CONFIG: Final = TypeAdapter(WorkerConfig)


@dataclass(slots=True, kw_only=True)
class Progress:
    """Counts of one worker since it started; trajectories stored earlier are counted in `resumed` only.

    Attributes:
        unscored, outages: Failed trajectories that only lack a score, and those of them that an outage left so.
        dropped: Dropped trajectories, `filtered` of them with their whole group: filtered out, or too old.
        generating, stepping: Trajectories that wait for generation, or for an environment, now.
        ended_turns, received_tokens: Turns and generated tokens, with those of unfinished trajectories.
        meters: What environments count themselves, as in `Activity`.
        done: The worker has ended in good order.
        complete: Its shards have nothing left to do.
    """

    resumed: int = 0
    trajectories: int = 0
    failed: int = 0
    unscored: int = 0
    outages: int = 0
    dropped: int = 0
    filtered: int = 0
    turns: int = 0
    generated_tokens: int = 0
    generation_seconds: float = 0.0
    environment_seconds: float = 0.0
    reward_sum: float = 0.0
    generating: int = 0
    stepping: int = 0
    ended_turns: int = 0
    received_tokens: int = 0
    meters: dict[str, float] = field(default_factory=dict)
    done: bool = False
    complete: bool = False

    @property
    def results(self) -> int:
        """Number of stored results of all kinds."""
        return self.trajectories + self.failed + self.dropped

    @classmethod
    def sum(cls, parts: Sequence[Progress]) -> Progress:
        """Counts of several workers together; they are done and complete if all are."""
        total = cls()
        for item in fields(cls):
            values = [getattr(part, item.name) for part in parts]
            if item.name == "meters":
                # No counter of collections: it leaves out what is 0.
                names = dict.fromkeys(name for meters in values for name in meters)
                total.meters = {name: sum(meters.get(name, 0) for meters in values) for name in names}
            else:
                setattr(total, item.name, all(values) if item.name in ("done", "complete") else sum(values))
        return total

    def forget_outage(self) -> None:
        """Take one that an outage left unscored from the counts: it was played again, and its new result is counted."""
        if self.outages:
            self.failed -= 1
            self.unscored -= 1
            self.outages -= 1

    def update(self, activity: Activity) -> None:
        """Take over the counts of the present work."""
        self.generating, self.stepping = activity.generating, activity.stepping
        self.ended_turns, self.received_tokens = activity.turns, activity.tokens
        self.meters = dict(activity.meters)

    def add(self, result: Result) -> None:
        """Count a stored trajectory."""
        if isinstance(result, FailureRecord):
            self.failed += 1
            self.unscored += result.unscored
            self.outages += result.outage
            return
        if isinstance(result, DroppedRecord):
            self.dropped += 1
            self.filtered += result.reason in WHOLE_GROUP
            return
        self.trajectories += 1
        self.turns += result.turn_count
        self.generated_tokens += result.tokens.generated
        self.generation_seconds += sum(result.timing.generation_seconds)
        self.environment_seconds += sum(result.timing.environment_seconds)
        self.reward_sum += result.total_reward
