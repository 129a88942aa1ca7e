"""Tasks that are played in machines as subjects: their solution, nothing, and attacks on their tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from kuberoll_workers.certification.subjects import Answers
from kuberoll_workers.certification.trials import NOTHING, PROMPT, Outcome, Trial, TrialKind
from kuberoll_workers.dataset.certificates import place_of
from kuberoll_workers.dataset.rows import Row
from kuberoll_workers.dataset.sources import resolve_path
from kuberoll_workers.environments.interface import UnusableRow
from kuberoll_workers.harbor.given import NOWHERE
from kuberoll_workers.harbor.playing import Player
from kuberoll_workers.harbor.rows import FIELD
from kuberoll_workers.harbor.trials import SOLUTION, TOGETHER, has_network, play_fields

_LEAKS: Final = {"stated-answer": f"{PROMPT}'s stated answer", "backups": f"{PROMPT}'s machine, copies in it"}
"""Attacks that answer with what the policy is given."""


class TaskSubject:
    """A task in a directory, and the machines that it is played in."""

    def __init__(self, row: Row, player: Player, base: Path, *, digest: str) -> None:
        """
        Args:
            base: Directory of relative paths: the manifest's.
        """
        self._player = player
        self._messages = row.messages
        self._fields: Mapping[str, Any] | None = (row.metadata or {}).get(FIELD)
        self._directory = directory_of(row, base)
        self.label = place_of(row, base)
        self.digest = digest
        self.environment = row.task_name
        self.idx: object = row.idx
        self.image: str | None = _image_of(row.metadata or {})

    async def answers(self) -> Answers:
        """See `Subject.answers`."""
        if self._fields is None:
            return Answers(trials=(), unproven=["the row has no task"])
        trials = [Trial(kind=_kind(one.name), name=_LEAKS.get(one.name, one.name)) for one in TOGETHER]
        solved = all(step.get("solution") for step in self._fields["steps"])
        try:
            network = has_network(self._player, self._fields)
        except UnusableRow as error:
            return Answers(trials=(), unproven=[str(error)])
        if not solved:
            trials = [trial for trial in trials if trial.kind != "solution"]
        elif network or self._player.allows_network:
            trials.append(Trial(kind="solution", name=SOLUTION.name, network=not network))
        # Each has a machine of its own, in which no other has left anything.
        return Answers(trials=trials, attack_rounds=1, network=network)

    async def play(self, trial: Trial, repetition: int) -> Outcome:  # noqa: ARG002 - each has a machine of its own
        """See `Subject.play`."""
        assert self._fields is not None
        played = await play_fields(
            self._player,
            self._fields,
            self._directory,
            next(one for one in TOGETHER if _LEAKS.get(one.name, one.name) == trial.name),
            messages=self._messages,
            network=trial.network,
        )
        said = [played.output.strip()[-300:], *(f"changed {path}" for path in played.changed[:3])]
        if not played.carried_out:
            # It could leave nothing, so that it passes says nothing of the tests.
            return Outcome(reward=None, seconds=played.verifier_seconds, detail="the attack could leave nothing")
        if played.problem is not None:
            return Outcome(reward=None, trouble=played.problem, seconds=played.verifier_seconds)
        return Outcome(
            reward=played.reward,
            problem=None if played.reward is not None else played.failure or "there was no reward",
            seconds=played.verifier_seconds,
            memory=played.memory,
            detail="; ".join(filter(None, said)),
        )


def directory_of(row: Row, base: Path) -> Path:
    """The directory of a row's task; that of none, if it has none."""
    named = ((row.metadata or {}).get(FIELD) or {}).get("directory")
    return resolve_path(named, base).resolve() if isinstance(named, str) and named else NOWHERE


def _kind(name: str) -> TrialKind:
    if name == SOLUTION.name:
        return "solution"
    return "nothing" if name == NOTHING else "attack"


def _image_of(metadata: Mapping[str, Any]) -> str | None:
    image = (metadata.get(FIELD) or {}).get("image")
    return image if isinstance(image, str) else None
