"""Replays: the same bytes twice, nothing lost, no better than the bounds, and idle time by its cause."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kuberoll_workers.data.shards import shard_of
from kuberoll_workers.policy.interface import GenerationRequest, SamplingParameters
from kuberoll_workers.simulation.engine_model import PICOSECONDS, EngineLimits
from kuberoll_workers.simulation.fleet import ModelledReplica, Task, Waits, tokens_of_length
from kuberoll_workers.simulation.idle import IdleLedger, cause_of_idleness
from kuberoll_workers.simulation.replay import ReplayRefused, ReplaySettings, replay
from kuberoll_workers.simulation.report import longest_seconds, report_of
from kuberoll_workers.simulation.synthesis import Distribution, Recipe, synthesize
from kuberoll_workers.simulation.trace import TraceTrajectory, Turn
from kuberoll_workers.simulation.virtual_loop import run_virtually
from tests.examples import examples


def synthetic(trajectories: int = 48, **changes: Any) -> list[TraceTrajectory]:
    values: dict[str, Any] = {
        "group_size": 4,
        "turns": Distribution.parse("lognormal:3:0.8"),
        "prompt": Distribution.parse("lognormal:200:0.5"),
        "generated": Distribution.parse("lognormal:100:1"),
        "observed": Distribution.parse("lognormal:40:1"),
        "environment_seconds": Distribution.parse("lognormal:0.3:1"),
        "most_tokens": 4000,
    }
    return synthesize(Recipe(trajectories=trajectories, **{**values, **changes}))


def report(
    trajectories: list[TraceTrajectory], *, engine: EngineLimits | None = None, **changes: Any
) -> dict[str, Any]:
    values: dict[str, Any] = {"replicas": 2, "workers": 2, "concurrency": 8, **changes}
    chosen = ReplaySettings(engine=engine or EngineLimits(max_num_seqs=16, kv_cache_tokens=16_384), **values)
    return report_of(trajectories, chosen, replay(trajectories, chosen))


FLEETS: list[dict[str, Any]] = [
    {},
    {"routing": "LeastLoaded"},
    {"scheduling": "Lockstep"},
    {"window": 3, "concurrency": 12},
    {"replicas": 3, "deaths_per_hour": 250.0, "cold_start_seconds": 5.0, "seed": 7},
    {"weights_every": 10.0, "weights_seconds": 2.0},
    {"engine": EngineLimits(max_num_seqs=16, kv_cache_tokens=4096), "workers": 4},
    {"routing": "Hash"},
    {"routing": "Margin", "margin": 2},
    *({"admission": way, "concurrency": 24} for way in ("Unlimited", "Resident", "Reserve")),
    {"request_seconds": 0.01},
    {"engine": EngineLimits(attention_seconds=1e-6, chunked_prefill=False)},
]


@pytest.mark.parametrize("fleet", FLEETS, ids=lambda fleet: "-".join(fleet) or "usual")
def test_every_trajectory_ends_no_sooner_than_possible(fleet: dict[str, Any]) -> None:
    trajectories = synthetic()
    found = report(trajectories, **fleet)
    assert found["trajectories"] == 48
    assert found["failures"] == {}
    assert found["turns"] == sum(len(item.turns) for item in trajectories)
    assert found["generated_tokens"] == sum(item.generated for item in trajectories)
    assert found["makespan_over_bound"] >= 1
    assert found["busy_share"] + sum(found["idle_share"].values()) == pytest.approx(1, abs=1e-4)
    # A request that died with its replica may find more there the second time.
    assert found["deaths"] or found["hit_rate"] <= found["best_hit_rate"]


@pytest.mark.parametrize("fleet", [FLEETS[0], FLEETS[3], FLEETS[4]], ids=["usual", "overload", "deaths"])
def test_a_replay_gives_the_same_bytes_in_every_process(fleet: dict[str, Any]) -> None:
    code = f"from tests.simulation.test_replay import *; print(json.dumps(report(synthetic(), **{fleet!r})))"
    printed = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            check=True,
            # The order of sets of texts is another one.
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert printed == {json.dumps(report(synthetic(), **fleet)).encode() + b"\n"}


@settings(max_examples=examples(40))
@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(1, 3), st.integers(1, 20))
def test_any_fleet_plays_any_trace(seed: int, replicas: int, workers: int, concurrency: int) -> None:
    trajectories = synthetic(12, seed=seed)
    found = report(trajectories, replicas=replicas, workers=workers, concurrency=concurrency)
    assert found["makespan_over_bound"] >= 1
    assert found["hit_rate"] <= found["best_hit_rate"]
    assert found == report(trajectories, replicas=replicas, workers=workers, concurrency=concurrency)


@st.composite
def traces(draw: st.DrawFn) -> list[TraceTrajectory]:
    """Short trajectories, also with turns that generate or observe nothing."""
    turns = st.builds(Turn, st.integers(0, 40), st.integers(0, 60), st.just(0.0), st.sampled_from([0.0, 0.3]))
    return [
        TraceTrajectory(group=group, sample=sample, environment="math", prompt=prompt, turns=tuple(played))
        for group, prompt in enumerate(draw(st.lists(st.integers(1, 90), min_size=1, max_size=4)))
        for sample, played in enumerate(draw(st.lists(st.lists(turns, min_size=1, max_size=4), min_size=1, max_size=4)))
    ]


@st.composite
def engines(draw: st.DrawFn) -> EngineLimits:
    return EngineLimits(
        max_num_seqs=draw(st.integers(1, 8)),
        max_num_batched_tokens=draw(st.integers(8, 64)),
        kv_cache_tokens=draw(st.sampled_from([640, 4096])),
        block_tokens=draw(st.sampled_from([1, 8, 16])),
        prefix_caching=draw(st.booleans()),
        step_seconds=draw(st.floats(1e-4, 0.1)),
        decode_seconds=draw(st.floats(0, 1e-2)),
        prefill_seconds=draw(st.floats(0, 1e-2)),
        attention_seconds=draw(st.sampled_from([0.0, 4e-10, 3.3e-9, 1e-4])),
    )


@settings(max_examples=examples(100))
@given(traces(), engines(), st.integers(1, 3), st.integers(1, 2), st.sampled_from([0.0, 0.05]))
def test_no_engine_is_faster_than_its_bounds_or_finds_more_than_there_is(
    trajectories: list[TraceTrajectory], engine: EngineLimits, replicas: int, workers: int, request_seconds: float
) -> None:
    found = report(trajectories, engine=engine, replicas=replicas, workers=workers, request_seconds=request_seconds)
    assert found["makespan_over_bound"] >= 1
    assert found["hit_rate"] <= found["best_hit_rate"]
    assert found["generated_tokens"] == sum(item.generated for item in trajectories)
    shares = found["busy_share"] + sum(found["idle_share"].values())
    assert shares == pytest.approx(1, abs=1e-4)


@settings(max_examples=examples(60))
@given(traces(), engines(), st.integers(1, 3), st.integers(1, 2), st.sampled_from([0.0, 0.7]))
def test_seconds_and_tokens_are_counted_once(
    trajectories: list[TraceTrajectory], engine: EngineLimits, replicas: int, workers: int, cold: float
) -> None:
    chosen = ReplaySettings(engine=engine, replicas=replicas, workers=workers, cold_start_seconds=cold)
    found = replay(trajectories, chosen)
    ledger = found.ledger
    assert ledger.busy_seconds + sum(ledger.idle_seconds.values()) == pytest.approx(replicas * found.makespan)
    # Events come at whole nanoseconds.
    steps = sum(tally.steps for tally in found.tallies)
    assert ledger.busy_seconds * PICOSECONDS == pytest.approx(
        sum(tally.busy_ps for tally in found.tallies), rel=1e-9, abs=2000 * steps
    )
    # An engine that is asked for nothing samples one token.
    turns = [turn for item in trajectories for turn in item.turns]
    assert sum(tally.generated for tally in found.tallies) == sum(max(1, turn.generated) for turn in turns)
    prompts = sum(
        item.prompt + sum(before.generated + before.observed for before in item.turns[:number])
        for item in trajectories
        for number in range(len(item.turns))
    )
    assert sum(tally.prompted for tally in found.tallies) == prompts
    assert (ledger.waiting, ledger.stepping, ledger.unbegun) == (0, 0, 0)


def test_a_bound_has_all_that_a_trajectory_alone_takes() -> None:
    trajectories = alone((11, 200, 3.0), (6, 0, 1.0))
    limits = EngineLimits(
        block_tokens=1, max_num_batched_tokens=64, max_num_seqs=1, attention_seconds=1e-5, prefill_seconds=0.0
    )
    found = report(trajectories, engine=limits, replicas=1, workers=1, request_seconds=0.5)
    assert found["makespan_over_bound"] == 1
    # 64 tokens and one more for each step, and after the observation 275.
    read = sum(range(64, 74)) + sum(range(275, 280))
    assert found["longest_trajectory_seconds"] == pytest.approx(
        1.0 + (1 + 4) * 0.006 + 15 * (0.006 + 0.000_08) + read * 1e-5 + 4.0, abs=1e-6
    )
    assert found["work_seconds"] == pytest.approx(15 * (0.006 + 0.000_08) + read * 1e-5, abs=1e-6)


def alone(*turns: tuple[int, int, float]) -> list[TraceTrajectory]:
    recorded = tuple(Turn(generated, observed, 0.0, seconds) for generated, observed, seconds in turns)
    return [TraceTrajectory(group=0, sample=0, environment="math", prompt=64, turns=recorded)]


def test_a_trajectory_alone_takes_the_time_of_its_equations() -> None:
    limits = EngineLimits(step_seconds=0.01, decode_seconds=0.001, prefill_seconds=0.0001, block_tokens=16)
    found = report(alone((11, 20, 3.0), (6, 0, 1.0)), engine=limits, replicas=1, workers=1)
    # 74 tokens of the first turn are computed, of which 64 are whole blocks; 95 - 64 are left for the second one.
    first = 0.01 + 64 * 0.0001 + 10 * 0.011
    second = 0.01 + (95 - 64) * 0.0001 + 5 * 0.011
    assert found["makespan_seconds"] == pytest.approx(first + 3.0 + second + 1.0, abs=1e-5)
    assert found["cached_tokens"] == 64
    assert found["best_hit_rate"] == found["hit_rate"]
    assert found["generation_seconds"]["max"] == pytest.approx(max(first, second), abs=1e-5)


def test_what_is_cached_shortens_no_bound_too_much() -> None:
    trajectories = alone((11, 20, 3.0), (6, 0, 1.0))
    limits = EngineLimits(block_tokens=1)
    whole = report(trajectories, engine=limits, replicas=1, workers=1)
    # All but the first prompt itself, which only another member of its group could have computed.
    assert whole["makespan_seconds"] - longest_seconds(trajectories, limits) == pytest.approx(
        64 * limits.prefill_seconds, abs=1e-5
    )


def test_after_a_response_without_tokens_the_whole_prompt_before_is_cached() -> None:
    limits = EngineLimits(block_tokens=1)
    found = report(alone((0, 20, 0.0), (0, 20, 0.0), (5, 0, 0.0)), engine=limits, replicas=1, workers=1)
    assert found["cached_tokens"] == 64 + 84
    assert found["best_hit_rate"] == found["hit_rate"]
    assert found["longest_trajectory_seconds"] == pytest.approx(
        3 * 0.006 + 40 * limits.prefill_seconds + 4 * (0.006 + 0.000_08), abs=1e-6
    )


def test_idle_time_has_the_cause_that_was_made() -> None:
    trajectories = synthetic()
    late = report(trajectories, cold_start_seconds=20.0)
    assert late["idle_share"]["cold start"] == pytest.approx(20 / late["makespan_seconds"], rel=1e-3)
    paused = report(trajectories, weights_every=10.0, weights_seconds=2.0)
    assert paused["idle_share"]["weights"] > 0
    assert paused["makespan_seconds"] > report(trajectories)["makespan_seconds"]
    slow = report(synthetic(environment_seconds=Distribution.parse("30")), concurrency=1)
    assert slow["idle_share"]["environment"] > 0.5
    died = report(trajectories, replicas=3, deaths_per_hour=250.0, cold_start_seconds=5.0, seed=7)
    assert died["deaths"] > 0
    # Each is dead until another one has replaced it.
    dead_seconds = died["idle_share"]["dead"] * 3 * died["makespan_seconds"]
    assert 0 < dead_seconds <= died["deaths"] * 5.0 + 0.01


def test_refused_requests_wait_in_their_workers() -> None:
    turns = (Turn(100, 0, 0.0, 0.0),)
    groups = {shard_of(group, 2): group for group in range(20)}
    trajectories = [
        TraceTrajectory(group=group, sample=0, environment="math", prompt=64, turns=turns) for group in groups.values()
    ]
    # The replica refuses one worker's request, and is idle until that is sent again.
    found = report(trajectories, replicas=1, workers=2, window=1)
    assert found["busy_share"] < 1
    assert found["idle_share"]["admission"] == pytest.approx(1 - found["busy_share"], abs=1e-5)


def test_a_replica_takes_no_more_than_its_window_of_what_was_on_its_way() -> None:
    request = GenerationRequest(
        request_id="0-0-0-1-0",
        session_id="0-0-0",
        token_ids=tokens_of_length(64),
        sampling=SamplingParameters(max_tokens=5),
    )

    async def main() -> list[str]:
        replica = ModelledReplica(
            "replica-0",
            EngineLimits(),
            window=2,
            request_seconds=0.01,
            lookup=lambda _: Task(trajectory=0, group=0, common=0, generated=5, first=True, possible=0),
            ledger=IdleLedger(unbegun=0),
            waits=Waits(),
        )
        replica.start()
        answers = await asyncio.gather(*(replica.generate(request) for _ in range(5)), return_exceptions=True)
        return [type(answer).__name__ for answer in answers]

    assert run_virtually(main()) == ["GenerationResult"] * 2 + ["Overloaded"] * 3


def test_replicas_that_leave_before_their_probe_raise_no_error(caplog: pytest.LogCaptureFixture) -> None:
    found = report(synthetic(200), replicas=3, concurrency=40, deaths_per_hour=400.0, cold_start_seconds=20.0)
    gc.collect()
    assert found["deaths"] > 5
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


def test_failed_trajectories_are_counted_with_their_cause() -> None:
    # So many die that the router takes a long trajectory for the cause.
    found = report(synthetic(), replicas=3, deaths_per_hour=600.0, cold_start_seconds=5.0)
    assert found["failures"] == {"generation: data": sum(found["failures"].values())}
    assert "in flight when the engine died" in found["first_failure"]


@pytest.mark.parametrize(
    ("waiting", "stepping", "unbegun", "cause"),
    [(1, 1, 1, "admission"), (0, 1, 1, "environment"), (0, 0, 1, "no work"), (0, 1, 0, "tail"), (0, 0, 0, "tail")],
)
def test_the_cause_of_idleness(waiting: int, stepping: int, unbegun: int, cause: str) -> None:
    assert cause_of_idleness(waiting=waiting, stepping=stepping, unbegun=unbegun) == cause


def test_room_for_what_contexts_become_keeps_their_prefixes() -> None:
    engine = EngineLimits(max_num_seqs=64, kv_cache_tokens=8192, prefill_seconds=0.0003)
    plays = [
        report(synthetic(256), engine=engine, replicas=1, workers=1, concurrency=64, admission=way)
        for way in ("Resident", "Reserve")
    ]
    assert plays[1]["hit_rate"] > plays[0]["hit_rate"]


def test_sessions_find_more_of_their_prefixes_than_the_least_loaded_replicas() -> None:
    trajectories = synthetic(96)
    sticky, spread = (report(trajectories, routing=routing, replicas=4) for routing in ("Session", "LeastLoaded"))
    assert sticky["hit_rate"] > spread["hit_rate"]


def test_what_waits_at_the_start_goes_to_all_replicas() -> None:
    chosen = ReplaySettings(engine=EngineLimits(), replicas=8, workers=4, concurrency=64)
    shares = [tally.generated for tally in replay(synthetic(256), chosen).tallies]
    # Heavy tails make some difference. The replica that answered first had a third of all.
    assert max(shares) < 2 * sum(shares) / len(shares)


def test_a_trajectory_that_fits_no_cache_is_an_error() -> None:
    with pytest.raises(ReplayRefused, match="do not fit into kv_cache_tokens"):
        report(alone((900, 0, 0.0)), engine=EngineLimits(kv_cache_tokens=512))


def test_weights_that_come_before_the_longest_context_is_computed_are_refused() -> None:
    # Three chunks of 8,192 tokens; the last one is completed after new weights have come.
    trajectories = [
        TraceTrajectory(group=0, sample=0, environment="math", prompt=20_000, turns=(Turn(3, 0, 0.0, 0.0),))
    ]
    chunk = 0.006 + 8192 * 0.000_025
    with pytest.raises(ReplayRefused, match=r"weights_every: found 0\.\d+; the longest trajectory has 20003 tokens"):
        report(trajectories, engine=EngineLimits(), weights_every=1.99 * chunk, weights_seconds=0.0)
    played = report(trajectories, engine=EngineLimits(), weights_every=2.01 * chunk, weights_seconds=0.0)
    assert played["turns"] == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("replicas", 0),
        ("workers", 0),
        ("deaths_per_hour", -1.0),
        ("deaths_per_hour", float("nan")),
        ("cold_start_seconds", float("inf")),
        ("weights_seconds", 60.0),
        ("weights_seconds", 59.995),
    ],
)
def test_settings_that_make_no_fleet_are_named(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        ReplaySettings(engine=EngineLimits(), **{"weights_every": 60.0, name: value})  # type: ignore[arg-type]
