"""The state of a consumer as plain JSON, as checkpoints hold it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from kuberoll.trainer.groups import ClosedGroups, GroupKey
from kuberoll.trainer.journals import Hints
from kuberoll.trainer.pacing import PaceState
from kuberoll_workers.output.manifest import RunManifest

FORMAT: Final = 3


class StateRefused(ValueError):
    """A state cannot be loaded here; the message names the reason and the remedy."""


class RunIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """What a run is, wherever its files are.

    Attributes:
        created: Time of its first start.
        dataset: Digest of its rows.
    """

    job: str
    created: str
    shards: int
    dataset: str


def identity_of(manifest: RunManifest) -> RunIdentity:
    """The identity of a manifest's run."""
    return RunIdentity(
        job=manifest.job,
        created=manifest.created,
        shards=manifest.shards,
        dataset=str(manifest.inputs.get("digest", "")),
    )


class ConsumerState(msgspec.Struct, frozen=True, kw_only=True):
    """What a consumer has had of a run.

    Attributes:
        closed: As `ClosedGroups.as_json`.
        short: `[task_index, number, [rollout_index, …]]` of each group that was delivered with too few trajectories.
        leaving: The same of each group that is `GroupTracker.leaving`.
        read: As `JournalReader.hints`.
        counts: `Counts` of what was delivered and left out.
        pace: As `PaceState.as_json`, of a run that the consumer holds back.
    """

    format: int
    consumer: str
    run: RunIdentity
    closed: list[tuple[int, int, int, list[int]]]
    short: list[tuple[int, int, list[int]]]
    leaving: list[tuple[int, int, list[int]]]
    read: _Hints
    counts: dict[str, int]
    pace: dict[str, Any] | None = None

    def closed_groups(self) -> ClosedGroups:
        """The closed groups.

        Raises:
            StateRefused: They are invalid.
        """
        try:
            return ClosedGroups.from_json(self.run.shards, [list(row) for row in self.closed])
        except ValueError as error:
            raise StateRefused(f"closed: {error}; load what `state_dict` returned") from error

    def pace_state(self) -> PaceState | None:
        """What was had of a run that the consumer holds back.

        Raises:
            StateRefused: It is invalid.
        """
        try:
            return None if self.pace is None else PaceState.from_json(self.pace)
        except (KeyError, TypeError, ValueError) as error:
            raise StateRefused(f"pace: {error!r}; load what `state_dict` returned") from error

    def hints(self) -> Hints:
        """The hints for a `JournalReader`."""
        return {"files": self.read.files, "parts": self.read.parts}

    def short_groups(self) -> dict[GroupKey, tuple[int, ...]]:
        """The groups of `short`."""
        return {GroupKey(task, number): tuple(rollouts) for task, number, rollouts in self.short}

    def leaving_groups(self) -> dict[GroupKey, set[int]]:
        """The groups of `leaving`."""
        return {GroupKey(task, number): set(rollouts) for task, number, rollouts in self.leaving}


class _Hints(msgspec.Struct, frozen=True):
    files: dict[str, tuple[int, int, str]]
    parts: dict[str, int]


def encode_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a `ConsumerState` as plain data: dictionaries, lists, texts and numbers."""
    made: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(state))
    return made


def decode_state(value: Mapping[str, Any], *, consumer: str, run: RunIdentity, location: str) -> ConsumerState:
    """The state of `encode_state`, if it is this consumer's of this run.

    Raises:
        StateRefused: It is another's, or no state.
    """
    found = value.get("format") if isinstance(value, Mapping) else None
    if found != FORMAT:
        raise StateRefused(
            f"state: format {found!r}: this KubeRoll knows format {FORMAT}; load what its `state_dict` returned"
        )
    try:
        state = msgspec.convert(dict(value), ConsumerState)
    except msgspec.ValidationError as error:
        raise StateRefused(f"state: {error}; load what `state_dict` returned") from error
    if state.run != run:
        differing = ", ".join(
            f"{name}: {getattr(state.run, name)!r}, here {getattr(run, name)!r}"
            for name in run.__struct_fields__
            if getattr(state.run, name) != getattr(run, name)
        )
        raise StateRefused(
            f"state: it is of another run than {location} ({differing}): open that run, or start without a state"
        )
    if state.consumer != consumer:
        raise StateRefused(
            f"state: it is of consumer {state.consumer!r}, and this is {consumer!r}: load the state that this consumer "
            f"saved, or open the run with consumer={state.consumer!r} to go on as that one"
        )
    return state
