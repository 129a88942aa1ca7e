"""Incidents: similar ones are one, nothing that they cost is lost, and turns that are journaled bring them back."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.data.causes import REASONS, Cause
from kuberoll_workers.data.incidents import MAX_INCIDENTS, RESENT, Incident, IncidentLog, note_resent, united

NOTES = st.lists(
    st.tuples(
        st.sampled_from(["PolicyFailed", "EpisodeLost", "EnvironmentRaised"]),
        st.sampled_from(["sent again", "tried again", "started over"]),
        st.integers(0, 40),
        st.integers(0, 1000),
        # Whether a turn is journaled after it.
        st.booleans(),
    ),
    max_size=150,
)


def noted(log: IncidentLog, note: Any, at: float) -> None:
    reason, sequel, turn, tokens, _ = note
    log.note(
        Cause(reason), "it broke", stage="environment", sequel=sequel, turn=turn, at=at, seconds=1.0, tokens=tokens
    )


@given(NOTES)
def test_costs_are_kept_however_many_there_are(notes: list[Any]) -> None:
    counted: list[Incident] = []
    log = IncidentLog(noted=counted.append)
    for number, note in enumerate(notes):
        noted(log, note, float(number))
    listed = log.all
    assert len(listed) <= MAX_INCIDENTS
    assert sum(one.count for one in listed) == len(notes) == len(counted)
    assert sum(one.tokens for one in listed) == sum(note[3] for note in notes)
    assert sum(one.seconds for one in listed) == len(notes)
    assert all(not before.is_like(after) for before, after in itertools.pairwise(listed))


@given(NOTES)
def test_what_is_journaled_with_turns_is_all(notes: list[Any]) -> None:
    log = IncidentLog()
    journaled: list[list[Incident] | None] = []
    for number, note in enumerate(notes):
        noted(log, note, float(number))
        if note[4]:
            journaled.append(log.to_journal())
    journaled.append(log.to_journal())
    assert united(journaled) == log.all
    # A resumed trajectory goes on with them.
    assert IncidentLog(united(journaled)).all == log.all
    log.forget_journal()
    assert (log.to_journal() or []) == log.all


def test_reasons_are_of_the_five_kinds_and_their_words_are_parts_of_sentences() -> None:
    assert {reason.kind for reason in REASONS.values()} == {
        "policy",
        "environment",
        "infrastructure",
        "data",
        "operator",
    }
    assert not [name for name, reason in REASONS.items() if reason.words.endswith(".") or (reason.words[0].isupper()
                and not reason.words.startswith("KubeRoll"))]  # fmt: skip


def test_what_is_sent_again_outside_of_a_trajectory_is_not_noted() -> None:
    note_resent(Cause("PolicyFailed"), "it broke", 1.0)
    seen: list[str] = []
    token = RESENT.set(lambda cause, text, seconds: seen.append(f"{cause.reason} {text} {seconds}"))
    try:
        note_resent(Cause("PolicyFailed"), "it broke", 1.0)
    finally:
        RESENT.reset(token)
    assert seen == ["PolicyFailed it broke 1.0"]
