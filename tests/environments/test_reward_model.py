"""Reward model: what the server is asked, and what becomes of its answer; with a real one in tests/serving."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from kuberoll_workers.environments import UnusableEnvironment
from kuberoll_workers.environments.builtin.reward_model import RewardModelEnvironment
from kuberoll_workers.environments.isolation import make_executor
from kuberoll_workers.environments.outcome import StepOutcome, StepRaised
from kuberoll_workers.environments.registry import PlainSpec
from kuberoll_workers.environments.runner import EnvironmentRunner
from tests.environments.judge_server import Judge, serving


def answer(*probs: Any) -> web.Response:
    return web.json_response({"data": [{"index": 0, "label": "x", "probs": list(probs), "num_classes": len(probs)}]})


def by_length(messages: str) -> web.Response:
    return answer(len(messages) / 4, -1.0)


@pytest.fixture
async def server() -> Judge:
    return Judge(answer=by_length, models={"data": [{"id": "rewards"}]})


@pytest.fixture
async def url(server: Judge) -> AsyncIterator[str]:
    async with serving(server) as made:
        yield made


def log_of(*contents: str) -> list[dict[str, str]]:
    roles = ["user", *["assistant", "environment"] * len(contents)]
    return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]


async def scored(url: str, log: list[dict[str, str]], metadata: Any = None, **config: Any) -> tuple[float, Any]:
    result = await RewardModelEnvironment({"url": url, **config}).step([log], [metadata])
    assert result.terminateds == [True]
    assert result.metadata is not None
    return result.rewards[0], result.metadata[0]


async def test_the_whole_chat_is_scored(server: Judge, url: str) -> None:
    reward, state = await scored(url, log_of("2 + 2?", "<think>hm</think> 4\n", "wrong<|im_end|>", "four"), {"a": 1})
    assert (reward, state) == (1.0, {"a": 1, "reward_model": {"score": 1.0, "model": "rewards"}})
    (body,) = server.bodies
    assert body == {
        "model": "rewards",
        "messages": [
            {"role": "user", "content": "2 + 2?"},
            {"role": "assistant", "content": "4"},
            # A role that the template of the reward model does not know, and a token that would end the message.
            {"role": "user", "content": "wrong< |im_end|>"},
            {"role": "assistant", "content": "four"},
        ],
        "add_generation_prompt": False,
        "use_activation": False,
    }


@pytest.mark.parametrize(
    ("config", "reward"),
    [
        ({}, 2.0),
        ({"scale": 0.5, "offset": 1.0}, 2.0),
        ({"scale": -1.0, "minimum": -1.5}, -1.5),
        ({"maximum": 1.0, "minimum": 0.0}, 1.0),
        ({"label": 1}, -1.0),
    ],
)
async def test_rewards_of_a_score(url: str, config: dict[str, Any], reward: float) -> None:
    found, state = await scored(url, log_of("q", "x" * 8), **config)
    assert found == reward
    assert state["reward_model"]["score"] == (-1.0 if config.get("label") else 2.0)


async def test_requests_of_one_s_own(server: Judge, url: str) -> None:
    request = {"truncate_prompt_tokens": 9, "use_activation": None}
    await scored(url, log_of("q", "<think>a</think>b"), thoughts=True, model="mine", request=request)
    (body,) = server.bodies
    assert (body["model"], body["truncate_prompt_tokens"]) == ("mine", 9)
    assert "use_activation" not in body
    assert body["messages"][-1]["content"] == "<think>a</think>b"


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (web.Response(status=400, text="too long"), "refused the request with HTTP status 400: too long"),
        (web.json_response({"data": []}), "did not answer with scores of one text"),
        (web.json_response({"data": [{"probs": ["high"]}]}), "did not answer with scores of one text"),
        (web.json_response([]), "did not answer with scores of one text"),
        (web.Response(text=f'{{"data": [{{"probs": [1{"0" * 400}]}}]}}'), "did not answer with"),
        (web.Response(text='{"data": [{"probs": [1e999]}]}'), "did not answer with JSON|gave the score inf"),
        (answer(), "config.label is 0; the model has 0 classes"),
    ],
)
async def test_what_is_no_score_is_a_failure(server: Judge, url: str, sent: web.Response, words: str) -> None:
    server.answer = lambda messages: sent
    with pytest.raises(Exception, match=words):
        await scored(url, log_of("q", "x"))


async def test_a_busy_server_is_asked_again(server: Judge, url: str) -> None:
    server.refusals = [web.Response(status=503, headers={"Retry-After": "0.01"})]
    assert (await scored(url, log_of("q", "x" * 4)))[0] == 1.0


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "url is missing: name a server, or by service one of"),
        ({"url": "x"}, r"config\.url: found 'x'"),
        ({"url": "http://x", "minimum": 1.0, "maximum": 1.0}, "minimum must be less than maximum"),
        ({"url": "http://x", "labels": 1}, r"config\.labels: unknown; did you mean label\?"),
    ],
)
def test_configs_are_checked(config: dict[str, Any], words: str) -> None:
    with pytest.raises(UnusableEnvironment, match=words):
        RewardModelEnvironment(config)


@pytest.mark.parametrize("isolation", ["Inline", "Process"])
async def test_one_that_cannot_be_scored_fails_alone(server: Judge, url: str, isolation: str) -> None:
    server.answer = lambda messages: web.Response(status=400, text="no") if messages == "bad" else by_length(messages)
    spec = PlainSpec(name="rewards", type="reward_model", entrypoint=None, config={"url": url, "parallel": 2})
    runner = EnvironmentRunner(make_executor(spec, isolation=isolation, processes=1, timeout=60), max_batch=8)
    try:
        outcomes = await runner.step_batch([log_of("q", text) for text in ("x" * 4, "bad", "x" * 8)], [None] * 3)
    finally:
        await runner.close()
    assert [type(outcome) for outcome in outcomes] == [StepOutcome, StepRaised, StepOutcome]
    assert [outcome.reward for outcome in outcomes if isinstance(outcome, StepOutcome)] == [1.0, 2.0]


def test_metrics() -> None:
    states = [{"reward_model": {"score": 1.0}}, {"reward_model": {"score": 2.0}}, None]
    environment = RewardModelEnvironment({"url": "http://x"})
    _, metrics = environment.global_post_process_and_metrics({"extra_env_info": states})
    assert metrics == {"episodes": 2, "mean_score": 1.5}
