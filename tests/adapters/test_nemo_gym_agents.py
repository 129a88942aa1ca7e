"""The way to NeMo Gym's agent servers, and failures that the real ones cannot be made to have, over real HTTP."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from kuberoll_api.model.environments import Environment
from kuberoll_workers.adapters.http import ServerError
from kuberoll_workers.adapters.nemo_gym_agents import agents_of, chosen_agent
from kuberoll_workers.adapters.nemo_gym_player import player_of
from kuberoll_workers.data.prompts import AgentRow
from kuberoll_workers.data.record import FailureRecord, TrajectoryRecord
from kuberoll_workers.environments import UnusableRow, create
from kuberoll_workers.rollouts.scheduling import run_rollout
from tests.rollouts import fakes
from tests.rollouts.test_gym_agents import LINEAR, ROW, answer_of

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def agent(host: str, port: int) -> dict[str, Any]:
    return {"responses_api_agents": {"simple_agent": {"host": host, "port": port}}}


@pytest.mark.parametrize(
    ("host", "head", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:11000", "http://127.0.0.1:8000"),
        ("127.0.0.1", "http://gym.other:11000", "http://gym.other:8000"),
        ("localhost", "http://10.0.0.7:11000", "http://10.0.0.7:8000"),
        ("0.0.0.0", "http://localhost:11000", "http://localhost:8000"),
        ("0.0.0.0", "http://gym:11000", "http://gym:8000"),
        ("10.0.0.9", "http://gym:11000", "http://10.0.0.9:8000"),
        ("10.0.0.9", "http://127.0.0.1:11000", "http://10.0.0.9:8000"),
        ("::1", "http://[::1]:11000", "http://[::1]:8000"),
        ("agents.example", "http://gym:11000", "http://agents.example:8000"),
    ],
)
def test_agents_are_where_the_head_server_says(host: str, head: str, url: str) -> None:
    config = {"head_server": {"host": "127.0.0.1"}, "mine": agent(host, 8000), "seed": 1, "of": "${oc.env:HOME}"}
    assert agents_of(json.dumps(config), head) == {"mine": url}


@pytest.mark.parametrize(
    ("config", "cause"),
    [
        ("a: [", "is no YAML"),
        ("- a", "is no configuration of NeMo Gym's"),
        ('{"mine": {"responses_api_agents": {"a": {"host": "x"}}}}', "the agent mine has no host and port"),
    ],
)
def test_a_configuration_that_cannot_be_read_says_why(config: str, cause: str) -> None:
    with pytest.raises(ServerError, match=cause):
        agents_of(config, "http://gym")


def test_a_row_goes_to_the_agent_that_it_names() -> None:
    found = {"a": "http://gym:1", "b": "http://gym:2"}
    assert chosen_agent("b", found, "http://gym", named=True) == ("b", "http://gym:2")
    # The environment has the name of an agent.
    assert chosen_agent("a", found, "http://gym", named=False) == ("a", "http://gym:1")
    assert chosen_agent("env", {"a": "http://gym:1"}, "http://gym", named=False) == ("a", "http://gym:1")
    assert chosen_agent("env", None, "http://agent", named=False) == ("env", "http://agent")
    with pytest.raises(UnusableRow, match=r"^agent_ref\.name: found 'c'; the agents that http://gym knows are a, b$"):
        chosen_agent("c", found, "http://gym", named=True)
    with pytest.raises(UnusableRow, match=r"^agent_ref: the row names no agent, and those .* are a, b: name one"):
        chosen_agent("env", found, "http://gym", named=False)


@asynccontextmanager
async def serving(
    run: Handler, *, config: Callable[[str], Any] | None = None, aggregate: Handler | None = None
) -> AsyncIterator[str]:
    """A server with `/run`, which is a head server, too, if it has a configuration."""

    async def tell(request: web.Request) -> web.Response:
        assert config is not None
        return web.json_response(json.dumps(config(str(request.url.origin()))))

    app = web.Application()
    app.router.add_post("/run", run)
    if aggregate is not None:
        app.router.add_post("/aggregate_metrics", aggregate)
    if config is not None:
        app.router.add_get("/global_config_dict_yaml", tell)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def roll(url: str, count: int = 1, *, named: bool = True, **settings: Any) -> list[Any]:
    """Results of samples of one row."""
    fields = {"url": url, **settings.pop("servers", {})}
    given = {"nemoGym": fields, "timeouts": {"runSeconds": settings.pop("seconds", 60.0)}}
    spec = Environment.model_validate({"name": "env", "agent": given})
    samples = [fakes.sample(0, index, prompt="hi", metadata={"expected": 4}) for index in range(count)]
    request = AgentRow(fields=ROW, number=None, named=named)
    samples = [dataclasses.replace(item, prompt=dataclasses.replace(item.prompt, request=request)) for item in samples]
    results: list[Any] = []

    async def sink(result: Any) -> None:
        results.append(result)

    async with fakes.runners({"env": create(spec)}, step_seconds=spec.call_seconds) as made:
        await run_rollout(fakes.rollout_of(made, players={"env": player_of(spec)}, **settings), samples, sink)
    return results


def answering(*answers: Any) -> tuple[Handler, list[web.Request]]:
    """A handler that gives these answers, and then a rollout: a status, or a result."""
    left, asked = list(answers), []

    async def run(request: web.Request) -> web.StreamResponse:
        # Kept for the test.
        await request.read()
        asked.append(request)
        answer = left.pop(0) if left else answer_of(LINEAR)
        return web.Response(status=answer, text="why") if isinstance(answer, int) else web.json_response(answer)

    return run, asked


async def test_an_episode_is_one_request_without_cookies() -> None:
    run, asked = answering()
    async with serving(run) as url:
        results = await roll(url, 8)
    assert len(asked) == 8
    assert all(isinstance(result, TrajectoryRecord) and result.turn_count == 3 for result in results)
    assert not any(request.cookies for request in asked)
    bodies = [json.loads(await request.text()) for request in asked]
    assert sorted(body["_ng_rollout_index"] for body in bodies) == list(range(8))
    assert {body["agent_ref"]["name"] for body in bodies} == {"agent"}


async def test_episodes_run_side_by_side() -> None:
    waiting = 0
    every = asyncio.Event()

    async def run(_: web.Request) -> web.StreamResponse:
        nonlocal waiting
        waiting += 1
        if waiting == 16:
            every.set()
        await every.wait()
        return web.json_response(answer_of(LINEAR))

    async with serving(run) as url:
        results = await roll(url, 16, concurrency=16)
    assert all(isinstance(result, TrajectoryRecord) for result in results)


@pytest.mark.parametrize("answer", [500, 503, 429, {"reward": 1.0, "_ng_failure_class": "oom"}, {"reward": None}, []])
async def test_a_failure_of_the_server_is_retried(answer: Any) -> None:
    run, asked = answering(answer)
    async with serving(run) as url:
        (result,) = await roll(url)
    assert isinstance(result, TrajectoryRecord)
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("answer", "kind", "cause"),
    [
        (422, "data", "/run answered 422: why"),
        (404, "data", "/run answered 404: there is no agent server"),
        ({"reward": 0, "_ng_failure_class": "x", "_ng_failure_terminal": True}, "data", "reports a failed rollout: x"),
        ({"reward": 1, "response": {"output": []}}, "environment", "set return_token_id_information: true"),
    ],
)
async def test_a_refusal_is_not_retried(answer: Any, kind: str, cause: str) -> None:
    run, asked = answering(answer)
    async with serving(run) as url:
        (result,) = await roll(url)
    assert isinstance(result, FailureRecord)
    assert (result.kind, result.stage, result.tries) == (kind, "environment", 1)
    assert cause in result.cause
    assert len(asked) == 1


async def test_a_server_that_goes_on_failing_fails_the_trajectory() -> None:
    run, asked = answering(*[500] * 9)
    async with serving(run) as url:
        (result,) = await roll(url)
    assert isinstance(result, FailureRecord)
    assert (result.kind, result.tries, len(asked)) == ("environment", 2, 2)
    assert "/run answered 500: why" in result.cause


async def test_a_rollout_has_a_time_limit() -> None:
    async def run(_: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    async with serving(run) as url:
        (result,) = await roll(url, seconds=0.2)
    assert isinstance(result, FailureRecord)
    assert "run took longer than agent.timeouts.runSeconds (0.2 s)" in result.cause


def at(name: str) -> Callable[[str], Any]:
    """A configuration with one agent, at the address by which the head server was asked."""

    def config(origin: str) -> Any:
        host, _, port = origin.removeprefix("http://").partition(":")
        return {name: agent(host, int(port))}

    return config


async def test_an_agent_that_the_head_server_does_not_know_costs_nothing() -> None:
    run, asked = answering()
    async with serving(run, config=at("other")) as url:
        (result,) = await roll(url)
        assert isinstance(result, FailureRecord)
        assert (result.kind, asked) == ("data", [])
        assert "agent_ref.name: found 'agent'" in result.cause
        # Named in the job, it is found.
        (result,) = await roll(url, servers={"agents": {"agent": url}})
        assert isinstance(result, TrajectoryRecord)
        # A row that names none goes to the only one, and says so.
        (result,) = await roll(url, named=False)
    assert isinstance(result, TrajectoryRecord)
    assert [json.loads(await request.text())["agent_ref"]["name"] for request in asked] == ["agent", "other"]


async def test_agents_that_have_moved_are_found_again() -> None:
    run, asked = answering()
    places = ["http://127.0.0.1:9", ""]

    def config(origin: str) -> Any:
        # Nothing listens at port 9.
        return at("agent")(places.pop(0) or origin)

    async with serving(run, config=config) as url:
        (result,) = await roll(url)
    assert isinstance(result, TrajectoryRecord)
    assert (places, len(asked)) == ([], 1)


def batch_of(records: list[TrajectoryRecord]) -> dict[str, Any]:
    """Columns of trajectories that an environment's own metrics are of."""
    return {
        "extra_env_info": [record.metadata for record in records],
        "task_index": [record.task_index for record in records],
        "rollout_index": [record.rollout_index for record in records],
    }


async def test_aggregate_metrics_are_of_all_results_of_an_agent() -> None:
    run, _ = answering()
    sent: list[Any] = []

    async def aggregate(request: web.Request) -> web.Response:
        sent.append(await request.json())
        found = {"mean/reward": 0.5, "by_option": {"a": [1]}}
        return web.json_response({"agent_metrics": found, "key_metrics": {"mean/reward": 0.5}})

    async with serving(run, aggregate=aggregate) as url:
        records = await roll(url, 3)
        environment = create(Environment.model_validate({"name": "env", "agent": {"nemoGym": {"url": url}}}))
        _, metrics = await asyncio.to_thread(environment.global_post_process_and_metrics, batch_of(records))
    assert metrics == {
        "agent/mean/reward": 0.5,
        "agent/by_option": {"a": [1]},
        "key_metrics/agent/mean/reward": 0.5,
    }
    (request,) = sent
    assert [result["_ng_rollout_index"] for result in request["verify_responses"]] == [0, 1, 2]
    assert request["verify_responses"][0] == {
        "expected": 4,
        "extracted": "4",
        "reward": 0.1,
        "response": {"usage": {"total_tokens": 3}},
        "_ng_task_index": 0,
        "_ng_rollout_index": 0,
        "agent_ref": {"type": "responses_api_agents", "name": "agent"},
    }


async def test_a_server_without_aggregate_metrics_says_so() -> None:
    run, _ = answering()
    async with serving(run) as url:
        records = await roll(url)
        environment = create(Environment.model_validate({"name": "env", "agent": {"nemoGym": {"url": url}}}))
        with pytest.raises(ServerError, match=r"/aggregate_metrics answered 404"):
            await asyncio.to_thread(environment.global_post_process_and_metrics, batch_of(records))
