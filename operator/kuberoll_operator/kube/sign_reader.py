"""Reads what says why jobs wait: events about their objects, and claims; less often the longer they wait."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from kuberoll_operator.kube.client import Client
from kuberoll_operator.kube.errors import ApiError, Forbidden
from kuberoll_operator.kube.resources import CLUSTER_EVENTS, PERSISTENT_VOLUME_CLAIMS
from kuberoll_operator.model import Key, Object
from kuberoll_operator.signs import ClusterEvent, Signs, Subject, read_event
from kuberoll_operator.waiting.questions import GRACE_SECONDS, Question

FIRST_SECONDS: Final = 10.0
LAST_SECONDS: Final = 25.0
"""Between two reads about one object. A cause is told within 30 seconds."""

UNKNOWN_SECONDS: Final = 5.0
"""Seconds in which what nobody dates must have waited."""

PATIENT_FIRST_SECONDS: Final = 30.0
PATIENT_LAST_SECONDS: Final = 300.0
"""The same about one whose status already has a cause."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Answer:
    read: datetime
    seconds: float
    events: Sequence[ClusterEvent] = ()
    claim: Object | None = None
    claim_is_known: bool = False


class SignReader:
    """Reads and remembers the signs of all jobs."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._answers: dict[Key, dict[Subject, _Answer]] = {}
        self._first: dict[Key, dict[Subject, datetime]] = {}
        self._refused: set[str] = set()

    async def read(self, key: Key, asked: Sequence[Question], now: datetime) -> tuple[Signs, float | None]:
        """The signs that questions ask for.

        Returns:
            The signs, and the seconds until one of them is to be read again; None: never.
        """
        before = self._answers.pop(key, {})
        known = self._first.pop(key, {})
        # What began long ago may wait only since a moment: a Job whose last pod has just ended.
        first_asked = {question.subject: known.get(question.subject, now) for question in asked}
        if first_asked:
            self._first[key] = first_asked
        answers: dict[Subject, _Answer] = {}
        due = []
        for question in asked:
            answer = before.get(question.subject)
            first = PATIENT_FIRST_SECONDS if question.patient else FIRST_SECONDS
            last = PATIENT_LAST_SECONDS if question.patient else LAST_SECONDS
            grace = PATIENT_FIRST_SECONDS if question.patient else GRACE_SECONDS
            wait = grace - (now - question.since).total_seconds()
            if not question.subject.uid or question.subject.kind == "Job":
                wait = max(wait, UNKNOWN_SECONDS - (now - first_asked[question.subject]).total_seconds())
            if answer is None and wait > 0:
                due.append(wait)
                continue
            elapsed = 0.0 if answer is None else (now - answer.read).total_seconds()
            if answer is None or elapsed >= min(answer.seconds, last):
                seconds = first if answer is None else min(last, 2 * answer.seconds)
                answer = await self._ask(key, question.subject, _Answer(now, seconds))
                elapsed = 0.0
            answers[question.subject] = answer
            due.append(max(0.0, min(answer.seconds, last) - elapsed))
        if answers:
            self._answers[key] = answers
        signs = Signs(
            events={(subject.kind, subject.name): answer.events for subject, answer in answers.items()},
            claims={subject.name: answer.claim for subject, answer in answers.items() if answer.claim_is_known},
            time=now,
        )
        return signs, min(due, default=None)

    def forget(self, key: Key) -> None:
        """Forget a job that waits for nothing any more."""
        self._answers.pop(key, None)
        self._first.pop(key, None)

    async def _ask(self, key: Key, subject: Subject, answer: _Answer) -> _Answer:
        fields = {"involvedObject.kind": subject.kind, "involvedObject.name": subject.name}
        if subject.uid:
            fields["involvedObject.uid"] = subject.uid
        selector = ",".join(f"{name}={value}" for name, value in fields.items())
        try:
            if subject.kind == PERSISTENT_VOLUME_CLAIMS.kind:
                answer.claim = await self._client.get(PERSISTENT_VOLUME_CLAIMS, key.namespace, subject.name)
                answer.claim_is_known = True
        except ApiError as error:
            self._log_failure(PERSISTENT_VOLUME_CLAIMS.kind, error)
        try:
            items = self._client.items(CLUSTER_EVENTS, key.namespace, fields=selector)
            answer.events = [read_event(item) async for item in items]
        except ApiError as error:
            self._log_failure(CLUSTER_EVENTS.kind, error)
        return answer

    def _log_failure(self, kind: str, error: ApiError) -> None:
        """Note that something cannot be read: a job without an explanation still goes on."""
        if isinstance(error, Forbidden):
            if kind not in self._refused:
                _log.warning("%ss cannot be read, so that jobs do not say why they wait for them: %s", kind, error)
            self._refused.add(kind)
        else:
            _log.info("%ss were not read: %s", kind, error)
