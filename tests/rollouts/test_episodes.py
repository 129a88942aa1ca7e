"""Episodes: their beginning, their end however a trajectory ends, and their recovery."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kuberoll_workers.data.record import FailureRecord, Partial, TrajectoryRecord, TurnRecord
from kuberoll_workers.environments.isolation import Servers, make_executor
from kuberoll_workers.environments.process_access import ProcessAccess
from kuberoll_workers.environments.registry import PlainSpec
from kuberoll_workers.environments.runner import EnvironmentRunner
from kuberoll_workers.rollouts.scheduling import run_rollout
from kuberoll_workers.rollouts.settings import RetryPolicy
from kuberoll_workers.telemetry import RolloutMetrics
from tests.environments.episodic import events_in, unclosed
from tests.environments.remote.servers import rooms
from tests.rollouts.fakes import ScriptedPolicy, rollout_of, sample

ISOLATIONS = ("Inline", "Process", "Remote")


def spec_of(name: str, directory: Path) -> PlainSpec:
    entrypoint = f"tests.environments.episodic:{name}"
    return PlainSpec(name="env", type=None, entrypoint=entrypoint, config={"directory": str(directory)})


@asynccontextmanager
async def runner_of(
    name: str,
    directory: Path,
    *,
    isolation: str = "Inline",
    processes: int = 2,
    seconds: float = 60.0,
    spare: int = 0,
    urls: Sequence[str] = (),
) -> Any:
    runner = EnvironmentRunner(
        make_executor(
            spec_of(name, directory),
            isolation=isolation,
            processes=processes,
            timeout=seconds,
            spare=spare,
            access=ProcessAccess(writable=[str(directory)]),
            servers=Servers(urls=urls) if urls else None,
        ),
        max_batch=64,
    )
    try:
        yield runner
    finally:
        await runner.close()


async def play(
    name: str,
    directory: Path,
    samples: Sequence[Any],
    *,
    reply: Callable[[Any], str] = lambda request: "go",
    isolation: str = "Inline",
    processes: int = 2,
    seconds: float = 60.0,
    urls: Sequence[str] = (),
    metrics: RolloutMetrics | None = None,
    turns: list[TurnRecord] | None = None,
    **changes: Any,
) -> dict[Any, Any]:
    """Results of the samples by key."""
    results: dict[Any, Any] = {}

    async def sink(result: Any) -> None:
        assert result.key not in results
        results[result.key] = result

    async def journal(turn: TurnRecord) -> None:
        assert turns is not None
        turns.append(turn)

    async with runner_of(
        name, directory, isolation=isolation, processes=processes, seconds=seconds, urls=urls
    ) as runner:
        rollout = rollout_of(
            {"env": runner},
            policy=ScriptedPolicy(reply),
            metrics=metrics or RolloutMetrics("test"),
            turn_sink=None if turns is None else journal,
            **changes,
        )
        await run_rollout(rollout, samples, sink)
    return results


def row(task: int = 0, rollout: int = 0, **changes: Any) -> Any:
    made = sample(task, rollout, metadata=changes.pop("metadata", {"row": task}))
    return replace(made, prompt=replace(made.prompt, seed=100 + task), **changes)


def counts(metrics: RolloutMetrics, name: str) -> float:
    return sum(
        item.value for family in metrics.registry.collect() for item in family.samples if item.name == f"{name}_total"
    )


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ISOLATIONS)
@pytest.mark.parametrize("name", ["Rooms", "RestartedRooms", "PlainRooms", "CoroutineRooms"])
async def test_a_reset_begins_the_prompt_and_each_episode_is_closed_once(
    tmp_path: Path, name: str, isolation: str
) -> None:
    metrics = RolloutMetrics("test")
    results = await play(name, tmp_path, [row(n) for n in range(4)], isolation=isolation, metrics=metrics)

    for record in results.values():
        assert isinstance(record, TrajectoryRecord)
        assert record.stop_reason == "terminated"
        assert [message.content for message in record.messages[:2]] == ["prompt", f"room {100 + record.task_index}"]
        assert "".join(map(chr, record.messages[1].token_ids)) == f"user:prompt\nuser:room {100 + record.task_index}\n"
        assert record.metadata is not None
        assert record.metadata["row"] == record.task_index
        assert [message.content for message in record.messages[3::2]] == ["step 1", "step 2", "step 3"]
    events = events_in(tmp_path)
    assert unclosed(events, anywhere=name == "PlainRooms") == []
    assert sorted(event.episode for event in events if event.method == "close") == [f"{n}-0-0" for n in range(4)]
    assert {event.detail for event in events if event.method == "close"} == {"terminated"}
    processes = {event.process for event in events}
    assert sorted(event.process for event in events if event.method == "shutdown") == sorted(processes)
    assert counts(metrics, "kuberoll_episodes") == 4
    assert counts(metrics, "kuberoll_episodes_closed") == 4


async def test_stop_strings_of_a_reset_are_those_of_the_first_turn(tmp_path: Path) -> None:
    stops = []

    def reply(request: Any) -> str:
        stops.append(request.sampling.stop)
        return "end"

    metrics = RolloutMetrics("test")
    await play("Rooms", tmp_path, [row()], reply=reply, metrics=metrics)
    assert stops == [("!",)]
    assert counts(metrics, "kuberoll_episodes") == 1


async def test_a_prompt_group_begins_with_one_seed(tmp_path: Path) -> None:
    await play("Rooms", tmp_path, [row(1, 0), row(1, 1), row(2, 0)])
    seeds = {event.episode: event.detail for event in events_in(tmp_path) if event.method == "reset"}
    assert seeds == {"1-0-0": "101", "1-1-0": "101", "2-0-0": "102"}


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ISOLATIONS)
@pytest.mark.parametrize(
    ("reply", "reason", "changes"),
    [
        ("go", "max_turns", {"max_turns": 2}),
        ("x" * 60, "truncated", {}),
        ("end", "terminated", {}),
        ("raise", "failed", {"retries": RetryPolicy(environment_attempts=1, backoff_seconds=0.0)}),
    ],
)
async def test_an_episode_is_closed_however_it_ends(
    tmp_path: Path, isolation: str, reply: str, reason: str, changes: dict[str, Any]
) -> None:
    await play("Rooms", tmp_path, [row()], reply=lambda _: reply, isolation=isolation, **changes)
    events = events_in(tmp_path)
    assert unclosed(events) == []
    assert [event.detail for event in events if event.method == "close"] == [reason]


@pytest.mark.slow
async def test_an_episode_whose_trajectory_exceeds_its_time_is_closed_after_its_step(tmp_path: Path) -> None:
    results: list[Any] = []

    async def sink(result: Any) -> None:
        results.append(result)

    async with runner_of("Rooms", tmp_path, isolation="Process", processes=1, seconds=8.0) as runner:
        # Its process is there before the time of the trajectory begins.
        await runner.find_hooks()
        rollout = rollout_of({"env": runner}, policy=ScriptedPolicy(lambda _: "hang"), trajectory_seconds=4.0)
        await run_rollout(rollout, [row()], sink)
    assert [type(result) for result in results] == [FailureRecord]
    events = events_in(tmp_path)
    # The process of the hanging step is killed, and its successor has nothing to close.
    assert [event.method for event in events] == ["reset", "step", "hang"]


@pytest.mark.parametrize("name", ["Rooms", "PlainRooms"])
@pytest.mark.parametrize("journaled", [False, True])
async def test_an_interrupted_episode_stays_open_only_if_it_goes_on(tmp_path: Path, name: str, journaled: bool) -> None:
    turns: list[TurnRecord] = []
    reached = asyncio.Event()
    blocked = asyncio.Event()

    class Blocking(ScriptedPolicy):
        async def generate(self, request: Any) -> Any:
            if len(self.requests) == 1:
                reached.set()
                await blocked.wait()
            return await super().generate(request)

    async def sink(turn: TurnRecord) -> None:
        turns.append(turn)

    async def ignore(_: Any) -> None:
        pytest.fail("nothing has ended")

    async with runner_of(name, tmp_path) as runner:
        rollout = rollout_of({"env": runner}, policy=Blocking(), turn_sink=sink if journaled else None)
        run = asyncio.create_task(run_rollout(rollout, [row()], ignore))
        await reached.wait()
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
    closes = [event.detail for event in events_in(tmp_path) if event.method == "close"]
    assert closes == ([] if journaled and name == "PlainRooms" else ["interrupted"])


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ISOLATIONS)
async def test_a_reset_that_raises_fails_its_own_trajectory_and_is_closed(tmp_path: Path, isolation: str) -> None:
    rows = [row(0, metadata={"reset": "raise"}), row(1), row(2, metadata={"reset": "unusable"})]
    results = await play(
        "PlainRooms",
        tmp_path,
        rows,
        isolation=isolation,
        retries=RetryPolicy(environment_attempts=3, backoff_seconds=0.0),
    )
    assert isinstance(results[(1, 0)], TrajectoryRecord)
    failed, unusable = results[(0, 0)], results[(2, 0)]
    assert (failed.kind, failed.stage, failed.tries) == ("environment", "environment", 3)
    assert failed.cause == "reset raised ValueError: told to"
    assert failed.frames
    assert (unusable.kind, unusable.tries) == ("data", 1)
    assert unclosed(events_in(tmp_path), anywhere=True) == []


@pytest.mark.parametrize("isolation", ISOLATIONS)
async def test_a_close_that_raises_harms_nothing(tmp_path: Path, isolation: str, caplog: Any) -> None:
    metrics = RolloutMetrics("test")
    rows = [row(0, metadata={"close": "raise"}), row(1)]
    results = await play("PlainRooms", tmp_path, rows, isolation=isolation, metrics=metrics)
    assert all(isinstance(record, TrajectoryRecord) for record in results.values())
    assert "close raised ValueError: told to" in caplog.text
    assert unclosed(events_in(tmp_path), anywhere=True) == []
    assert counts(metrics, "kuberoll_episodes_closed") == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Rooms", "RestartedRooms"])
@pytest.mark.parametrize("fault", ["crash-once", "hang-once", "raise-once"])
async def test_a_fault_costs_no_trajectory(tmp_path: Path, name: str, fault: str) -> None:
    """One process holds all episodes; the fault of one of them ends it."""
    metrics = RolloutMetrics("test")

    def reply(request: Any) -> str:
        task, _, _, turn, _ = request.request_id.split("-")
        return fault if (task, turn) == ("1", "2") else "go"

    results = await play(
        name,
        tmp_path,
        [row(n) for n in range(4)],
        reply=reply,
        isolation="Process",
        processes=1,
        seconds=5.0 if fault == "hang-once" else 60.0,
        metrics=metrics,
    )
    for record in results.values():
        assert isinstance(record, TrajectoryRecord), record
        assert record.turn_count == 3
        assert [message.content for message in record.messages[3::2]] == ["step 1", "step 2", "step 3"]
    events = events_in(tmp_path)
    dead = [event.process for event in events if event.method in ("crash", "hang")]
    assert unclosed(events, dead=dead) == []
    assert counts(metrics, "kuberoll_episode_recoveries") >= 1


@pytest.mark.slow
async def test_an_own_fault_that_repeats_fails_the_trajectory_alone(tmp_path: Path) -> None:
    def reply(request: Any) -> str:
        return "crash" if request.request_id.startswith("1-") else "go"

    for name in ("Rooms", "RestartedRooms"):
        directory = tmp_path / name
        directory.mkdir()
        results = await play(name, directory, [row(n) for n in range(3)], reply=reply, isolation="Process", processes=1)
        assert [type(results[(n, 0)]) for n in range(3)] == [TrajectoryRecord, FailureRecord, TrajectoryRecord]
        assert (results[(1, 0)].kind, results[(1, 0)].tries) == ("environment", 2)
        assert "exit code 3" in results[(1, 0)].cause


@pytest.mark.parametrize("name", ["ShakyRooms", "RestartedShakyRooms"])
async def test_a_reset_that_fails_while_an_episode_is_recovered_is_tried_again(tmp_path: Path, name: str) -> None:
    def reply(request: Any) -> str:
        return "crash-once" if request.request_id.split("-")[3] == "2" else "go"

    retries = RetryPolicy(environment_attempts=3, backoff_seconds=0.0)
    results = await play(name, tmp_path, [row()], reply=reply, isolation="Process", processes=1, retries=retries)
    (record,) = results.values()
    assert isinstance(record, TrajectoryRecord), record
    assert [message.content for message in record.messages[3::2]] == ["step 1", "step 2", "step 3"]
    events = events_in(tmp_path)
    assert sum(event.method == "reset" for event in events) == 3
    assert unclosed(events, dead=[event.process for event in events if event.method == "crash"]) == []


async def test_an_environment_that_cannot_be_replayed_says_so(tmp_path: Path) -> None:
    def reply(request: Any) -> str:
        return "crash-once" if request.request_id.split("-")[3] == "2" else "go"

    results = await play("ForgetfulRooms", tmp_path, [row()], reply=reply, isolation="Process", processes=1)
    failure = results[(0, 0)]
    assert failure.kind == "environment"
    assert "could not be replayed: turn 1 now has another observation" in failure.cause
    assert '"restart"' in failure.cause


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ISOLATIONS)
@pytest.mark.parametrize(
    ("name", "methods"),
    [
        ("Rooms", ["reset", "step", "step", "step", "close"]),
        ("RestartedRooms", ["reset", "step", "step", "step", "close"]),
        ("PlainRooms", ["step", "close"]),
    ],
)
async def test_a_killed_run_resumes_its_episodes(tmp_path: Path, isolation: str, name: str, methods: list[str]) -> None:
    """The worker was killed after two turns: nothing has closed the episode."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    turns: list[TurnRecord] = []
    whole = await play(name, first, [row()], isolation=isolation, turns=turns)
    partial = Partial(turns[:2])

    results = await play(name, second, [row(partial=partial)], isolation=isolation)
    assert [event.method for event in events_in(second) if event.method != "shutdown"] == methods
    record, before = results[(0, 0)], whole[(0, 0)]
    assert [message.content for message in record.messages] == [message.content for message in before.messages]
    assert [list(message.token_ids) for message in record.messages] == [
        list(message.token_ids) for message in before.messages
    ]
    assert record.metadata == before.metadata


async def test_a_failed_attempt_whose_episode_was_closed_starts_over(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    turns: list[TurnRecord] = []
    await play("PlainRooms", first, [row()], turns=turns)
    results = await play("PlainRooms", second, [row(partial=Partial(turns[:2]), attempt=1)])
    assert [event.method for event in events_in(second)] == ["reset", "step", "step", "step", "close", "shutdown"]
    assert results[(0, 0)].turn_count == 3


async def test_lockstep_begins_episodes_too(tmp_path: Path) -> None:
    def reply(request: Any) -> str:
        return "crash-once" if request.request_id.startswith("2-") else "go"

    results = await play(
        "RestartedRooms", tmp_path, [row(n) for n in range(6)], reply=reply, isolation="Process", scheduling="Lockstep"
    )
    assert all(isinstance(record, TrajectoryRecord) for record in results.values())
    assert len(results) == 6


@pytest.mark.slow
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(["Rooms", "RestartedRooms", "PlainRooms"]),
    processes=st.integers(1, 3),
    faults=st.dictionaries(
        st.tuples(st.integers(0, 5), st.integers(1, 3)), st.sampled_from(["crash-once", "raise-once"]), max_size=3
    ),
)
def test_faults_change_no_trajectory(
    tmp_path_factory: pytest.TempPathFactory,
    name: str,
    processes: int,
    faults: dict[tuple[int, int], str],
) -> None:
    """Whatever fails when: the trajectories are those of a run without faults, and every reset has its close."""
    directory = tmp_path_factory.mktemp("rooms")

    def reply(request: Any) -> str:
        task, _, _, turn, _ = request.request_id.split("-")
        fault = faults.get((int(task), int(turn)))
        return "go" if fault is None else f"{fault.removesuffix('-once')}{task}{turn}-once"

    def faultless(message: str) -> str:
        return "go" if message.endswith("-once") else message

    results = asyncio.run(
        play(name, directory, [row(n) for n in range(6)], reply=reply, isolation="Process", processes=processes)
    )
    assert len(results) == 6
    for record in results.values():
        assert isinstance(record, TrajectoryRecord), record
        assert [faultless(message.content) for message in record.messages[2:]] == [
            text for step in (1, 2, 3) for text in ("go", f"step {step}")
        ]
    events = events_in(directory)
    dead = [event.process for event in events if event.method == "crash"]
    assert unclosed(events, dead=dead, anywhere=name == "PlainRooms") == []


@pytest.mark.slow
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(["Rooms", "RestartedRooms", "PlainRooms"]),
    kills=st.sets(st.tuples(st.integers(0, 5), st.integers(1, 3)), min_size=1, max_size=3),
    fault=st.sampled_from(["go", "crash-once", "raise-once"]),
)
def test_killed_servers_change_no_trajectory(
    tmp_path_factory: pytest.TempPathFactory, name: str, kills: set[tuple[int, int]], fault: str
) -> None:
    """Two servers, killed while a turn is generated and started again: the trajectories are those of a quiet run."""
    directory = tmp_path_factory.mktemp("rooms")
    servers = [rooms(name, directory) for _ in range(2)]
    dead: set[int] = set()

    def reply(request: Any) -> str:
        task, _, _, turn, _ = request.request_id.split("-")
        place = (int(task), int(turn))
        if place in kills:
            # A trajectory that starts over comes to the same turn again.
            kills.discard(place)
            server = servers[sum(place) % 2]
            dead.update(one.pid for one in psutil.Process(server.process.pid).children(recursive=True))
            server.restart()
        return fault if place == (2, 2) else "go"

    try:
        for server in servers:
            server.ready()
        urls = [server.url for server in servers]
        results = asyncio.run(
            play(name, directory, [row(n) for n in range(6)], reply=reply, isolation="Remote", urls=urls)
        )
    finally:
        for server in servers:
            server.close()
    assert len(results) == 6
    for record in results.values():
        assert isinstance(record, TrajectoryRecord), record
        assert [message.content for message in record.messages[3::2]] == ["step 1", "step 2", "step 3"]
    events = events_in(directory)
    if name == "PlainRooms":
        # Any server closes what any has reset; a call that was lost with its server is made again.
        resets, closes = ({event.episode for event in events if event.method == it} for it in ("reset", "close"))
        assert resets == closes
    else:
        crashed = [event.process for event in events if event.method == "crash"]
        assert unclosed(events, dead=[*dead, *crashed]) == []


async def test_steps_go_where_the_episode_is(tmp_path: Path) -> None:
    await play("Rooms", tmp_path, [row(n) for n in range(12)], isolation="Process", processes=3, concurrency=12)
    homes: dict[str, set[int]] = {}
    for event in events_in(tmp_path):
        if event.episode:
            homes.setdefault(event.episode, set()).add(event.process)
    assert all(len(processes) == 1 for processes in homes.values())
    # Episodes are spread over the processes.
    used = [next(iter(processes)) for processes in homes.values()]
    assert sorted(used.count(process) for process in set(used)) == [4, 4, 4]
