"""What incidents and failures cost: each second that a trajectory throws away is counted once."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.data.causes import Cause
from kuberoll_workers.data.incidents import note_resent
from kuberoll_workers.data.record import DroppedRecord, FailureRecord, Partial, TurnRecord
from kuberoll_workers.rollouts.failures import TrajectoryFailed
from kuberoll_workers.rollouts.in_flight import InFlight
from kuberoll_workers.rollouts.trajectory import Trajectory
from kuberoll_workers.simulation.virtual_loop import run_virtually
from kuberoll_workers.telemetry import RolloutMetrics
from tests.rollouts.fakes import ScriptedPolicy, roll, sample, settings

SECONDS = st.integers(0, 50).map(float)
EVENTS = st.lists(st.tuples(st.sampled_from(["resent", "tried", "restart", "work"]), SECONDS, SECONDS), max_size=30)


def flight_of(sample_: Any) -> InFlight:
    trajectory = Trajectory(dataclasses.replace(sample_, partial=None), settings())
    metrics = RolloutMetrics("job").environment("env")
    return InFlight(sample_, trajectory, metrics=metrics, seconds=None, deferred=False, ended=lambda *_: None)


@given(EVENTS)
def test_each_second_of_a_failure_is_thrown_away_once(events: list[tuple[str, float, float]]) -> None:
    async def played() -> tuple[float, FailureRecord]:
        flight = flight_of(sample())
        now = asyncio.get_running_loop().time
        began = now()
        async with flight:
            for kind, before, pause in events:
                await asyncio.sleep(before)
                if kind == "resent":
                    # It may say that its request began before something else that was noted meanwhile.
                    note_resent(Cause("PolicyFailed"), "it broke", before + pause)
                elif kind == "tried":
                    flight.note_incident(
                        Cause("EnvironmentRaised"), "it broke", stage="environment", sequel="tried again", pause=pause
                    )
                    await asyncio.sleep(pause)
                elif kind == "restart":
                    flight.note_restart(Cause("EpisodeLost"), "it is gone", stage="environment")
                else:
                    flight.waiting_since = now()
            raise TrajectoryFailed("it failed", reason="EnvironmentRaised", stage="environment")
        record = flight.result()
        assert isinstance(record, FailureRecord)
        return now() - began, record

    took, record = run_virtually(played())
    assert record.seconds is not None
    costs = [one.seconds for one in record.incidents or ()]
    assert min([*costs, record.seconds]) >= 0
    assert sum(costs) + record.seconds == pytest.approx(took, abs=0.01)


async def test_what_is_not_wanted_has_its_incidents_too() -> None:
    flight = flight_of(sample())
    flight.note_restart(Cause("EpisodeLost"), "it is gone", stage="environment")
    record = flight.dropped("oversampled")
    assert isinstance(record, DroppedRecord)
    assert [one.reason for one in record.incidents or ()] == ["EpisodeLost"]


async def test_a_retry_was_not_interrupted() -> None:
    turns: list[TurnRecord] = []

    async def keep(turn: TurnRecord) -> None:
        turns.append(turn)

    await roll([sample(metadata={"turns": 3})], policy=ScriptedPolicy(lambda _: "x"), max_turns=3, turn_sink=keep)
    partial = Partial(turns[:1])
    resumed = dataclasses.replace(sample(metadata={"turns": 3}), partial=partial)
    for again, expected in ((resumed, ["Interrupted"]), (dataclasses.replace(resumed, attempt=1), [])):
        (record,) = await roll([again], policy=ScriptedPolicy(lambda _: "x"), max_turns=3)
        assert [one.reason for one in record.incidents or ()] == expected
