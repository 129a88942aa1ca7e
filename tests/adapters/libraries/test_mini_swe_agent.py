"""mini-swe-agent's own agent and models, in real sandboxes, with a policy whose responses a test writes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from kuberoll_api.model.sandboxes import Sandbox as SandboxOptions
from kuberoll_workers.adapters.mini_swe_agent import Bridge, MiniSweAgent, SandboxEnvironment, SandboxSettings
from kuberoll_workers.environments.agents.commands import AgentFailed
from kuberoll_workers.environments.agents.episode import AgentEpisode
from kuberoll_workers.environments.registry import UnusableEnvironment
from kuberoll_workers.harbor.environment import FunctionAgent
from kuberoll_workers.harbor.playing import Player, TaskResult
from kuberoll_workers.harbor.rows import row_of
from kuberoll_workers.harbor.task import read_task
from kuberoll_workers.sandboxes.errors import SandboxLost
from kuberoll_workers.sandboxes.leases import Sandboxes
from tests.harbor.writing import write_task
from tests.sandboxes.conftest import Leasing, busybox, cache, lease, sandboxes  # noqa: F401 - fixtures
from tests.sandboxes.layouts import BUSYBOX, busybox_layout
from tests.sandboxes.test_namespaces import descendants_of_zygote, is_server

pytestmark = pytest.mark.processes

ENTRYPOINT = f"{MiniSweAgent.__module__}:{MiniSweAgent.__name__}"
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
TOML = """
schema_version = "1.4"
[task]
name = "kuberoll/hello"
[agent]
timeout_sec = {seconds}
user = "app"
[environment]
docker_image = "{image}"
network_mode = "no-network"
"""
TEST = '#!/bin/sh\n[ "$(cat /work/hello.txt)" = "hello app" ] && r=1 || r=0\necho $r > /logs/verifier/reward.txt\n'
WRITE = 'echo "hello $(id -un)" > /work/hello.txt'
# mini-swe-agent's prompts are long, and say nothing that these tests need.
SHORT = {"system_template": "Work.", "instance_template": "{{task}} ({{system}}, {{cwd}})"}


def calls(*commands: Any) -> dict[str, Any]:
    """A message that calls the tool."""
    made = [
        {
            "id": f"call-{number}",
            "type": "function",
            "function": {"name": "bash", "arguments": json.dumps({"command": command})},
        }
        for number, command in enumerate(commands)
    ]
    return {"role": "assistant", "content": None, "tool_calls": made}


def says(text: str) -> dict[str, Any]:
    """A message without a call."""
    return {"role": "assistant", "content": text}


class Policy:
    """A session of a policy whose responses are written: messages, or statuses with a text.

    Attributes:
        requests: Bodies of what it was asked.
        asked: Set when it was asked.
        hangs: Set when somebody waits for a response that never comes: the one after the last.
        left: Set when that one has left.
    """

    def __init__(self, responses: Sequence[dict[str, Any] | tuple[int, str]], name: str = "org/policy") -> None:
        self.name = name
        self.url = ""
        self.requests: list[dict[str, Any]] = []
        self.asked = asyncio.Event()
        self.hangs = asyncio.Event()
        self.left = asyncio.Event()
        self._responses = list(responses)

    async def _answer(self, request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == "Bearer secret"
        self.requests.append(await request.json())
        self.asked.set()
        if len(self.requests) > len(self._responses):
            self.hangs.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.left.set()
        response = self._responses[len(self.requests) - 1]
        if isinstance(response, tuple):
            return web.json_response({"error": {"message": response[1]}}, status=response[0])
        choice = {"index": 0, "message": response, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        answer = {"id": "1", "object": "chat.completion", "created": 1, "model": self.name, "choices": [choice]}
        return web.json_response({**answer, "usage": usage})

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Policy]:
        app = web.Application(client_max_size=1 << 24)
        app.router.add_post("/v1/chat/completions", self._answer)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/v1"  # type: ignore[attr-defined]
        try:
            yield self
        finally:
            await runner.cleanup()

    def read(self) -> list[str]:
        """What the policy has read after its first request."""
        return [
            message["content"] for message in self.requests[-1]["messages"][2:] if message["role"] in ("tool", "user")
        ]


Playing = Callable[..., Awaitable[TaskResult]]


@pytest.fixture
def play(sandboxes: Sandboxes, tmp_path: Path) -> Playing:  # noqa: F811
    """Play a task with the agent and a policy."""
    if BUSYBOX is None:
        pytest.skip("Debian's busybox-static is missing")
    image = busybox_layout(tmp_path / "image", owner=1000)

    async def played(policy: Policy, *, seconds: float = 60, **config: Any) -> TaskResult:
        config["agent"] = {**SHORT, **config.get("agent", {})}
        files = {
            "task.toml": TOML.format(seconds=seconds, image=image),
            "instruction.md": "Write hello.",
            "tests/test.sh": TEST,
        }
        folder = write_task(tmp_path / "hello", files)
        row = row_of(read_task(folder), str(folder))
        player = Player(sandboxes=sandboxes, options=SandboxOptions.model_validate({}), variables={}, agent_seconds=60)
        episode = AgentEpisode(
            id="one",
            messages=row["messages"],
            metadata=row["metadata"],
            tools=None,
            config=config,
            seed=1,
            base_url=policy.url,
            anthropic_base_url="",
            token="secret",
            model=policy.name,
        )
        return await player.play(row["metadata"]["harbor"], folder, FunctionAgent(ENTRYPOINT, config), episode)

    return played


async def test_its_own_agent_works_in_the_sandbox_by_tools(play: Playing) -> None:
    async with Policy([calls("pwd; exit 3", "cat nothing"), calls(WRITE), calls(SUBMIT)]).serving() as policy:
        found = await play(policy, environment={"env": {"LEVEL": "2"}})
    assert (found.rewards, found.agent_timeouts) == ({"reward": 1.0}, 0)
    first = policy.requests[0]
    assert [message["content"] for message in first["messages"]] == ["Work.", "Write hello. (Linux, /work)"]
    assert [tool["function"]["name"] for tool in first["tools"]] == ["bash"]
    assert first["model"] == "org/policy"
    assert not {"drop_params", "api_key", "temperature"} & first.keys()
    one, other, last = policy.requests[-1]["messages"][3:5] + policy.requests[-1]["messages"][-1:]
    assert one == {"role": "tool", "tool_call_id": "call-0", "content": one["content"]}
    assert json.loads(one["content"]) == {"returncode": 3, "output": "/work\n"}
    assert "No such file" in json.loads(other["content"])["output"]
    assert json.loads(last["content"]) == {"returncode": 0, "output": ""}
    # What the policy wrote comes back as it was, and nothing besides.
    [answered] = [message for message in policy.requests[1]["messages"] if message["role"] == "assistant"]
    written = calls("pwd; exit 3", "cat nothing")
    assert answered == {"role": "assistant", "tool_calls": written["tool_calls"]}


async def test_commands_in_blocks_of_text(play: Playing) -> None:
    def block(command: str) -> dict[str, Any]:
        return says(f"So:\n```mswea_bash_command\n{command}\n```")

    responses = [says("I do nothing."), block(f"{WRITE}; echo $LEVEL"), block(SUBMIT)]
    async with Policy(responses).serving() as policy:
        found = await play(
            policy,
            settings="mini_textbased",
            model={"model_class": "litellm_textbased", "model_kwargs": {"temperature": 0.5}},
            environment={"env": {"LEVEL": "7"}},
        )
    assert found.rewards == {"reward": 1.0}
    assert all("tools" not in request and request["temperature"] == 0.5 for request in policy.requests)
    wrong, right = policy.read()
    assert "EXACTLY ONE action" in wrong
    assert right == "<returncode>0</returncode>\n<output>\n7\n</output>"


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("echo a; sleep 1000 & sleep 1000", -1, "the command took longer than 1 s, and was killed"),
        ("kill -9 $$", 137, None),
        ("echo \0", -1, "the command could not be started: ValueError: embedded null byte"),
        ("echo \ud800", -1, "surrogates not allowed"),
        (["ls"], -1, "the command must be a text"),
        ("x" * 3_000_000, -1, "Argument list too long"),
    ],
    ids=["late", "killed", "null", "surrogate", "list", "long"],
)
async def test_whatever_the_policy_runs_is_an_observation(
    play: Playing, command: Any, code: int, said: str | None
) -> None:
    async with Policy([calls(command), calls(SUBMIT)]).serving() as policy:
        assert (await play(policy, environment={"timeout": 1})).rewards == {"reward": 0.0}
    [text] = policy.read()
    observed = json.loads(text)
    assert observed["returncode"] == code
    assert said is None or said in observed["exception_info"]


@pytest.mark.parametrize(
    ("responses", "agent"),
    [
        ([calls(WRITE)], {"step_limit": 1}),
        ([calls(WRITE), says("?"), says("?"), says("?")], {"max_consecutive_format_errors": 3}),
        ([calls(WRITE), (400, "this session has had its 1 calls (spec.rollout.maxTurns)")], {}),
        ([calls(WRITE), (400, "the maximum context length of this session is 10")], {}),
    ],
)
async def test_its_limits_and_the_jobs_end_it_and_its_work_is_scored(
    play: Playing, responses: list[Any], agent: dict[str, Any]
) -> None:
    async with Policy(responses).serving() as policy:
        found = await play(policy, agent=agent)
    assert (found.rewards, found.agent_timeouts) == ({"reward": 1.0}, 0)
    assert len(policy.requests) == len(responses)


async def test_a_limit_of_cost_ends_it_where_the_policy_has_a_price(play: Playing, tmp_path: Path) -> None:
    prices = tmp_path / "prices.json"
    price = {"input_cost_per_token": 1.0, "output_cost_per_token": 2.0, "litellm_provider": "openai", "mode": "chat"}
    # litellm keeps it as long as this process runs.
    prices.write_text(json.dumps({"org/priced": price}))
    async with Policy([calls(WRITE), calls(WRITE), calls(WRITE)], name="org/priced").serving() as policy:
        found = await play(policy, agent={"cost_limit": 5}, model={"litellm_model_registry": str(prices)})
    # Of 3 for a call.
    assert (found.rewards, len(policy.requests)) == ({"reward": 1.0}, 2)


async def test_a_policy_that_does_not_answer_is_a_failure_at_once(play: Playing) -> None:
    async with Policy([calls(WRITE), (503, "the engine is gone")]).serving() as policy:
        with pytest.raises(AgentFailed, match=r"the policy answered 503.*the engine is gone"):
            await play(policy)
        assert len(policy.requests) == 2


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "mini-swe-agent"]


@pytest.mark.parametrize("last", [[calls(f"{WRITE}; sleep 1000")], [calls(WRITE)]], ids=["command", "response"])
async def test_the_tasks_time_limit_ends_what_it_waits_for(play: Playing, last: list[dict[str, Any]]) -> None:
    async with Policy(last).serving() as policy:
        found = await play(policy, seconds=3, environment={"timeout": 1000})
        assert (found.rewards, found.agent_timeouts) == ({"reward": 1.0}, 1)
        assert policy.hangs.is_set() == policy.left.is_set()
    # It may need a moment to see that it is to end, while the machine was cleared and the tests ran.
    for thread in threads():
        await asyncio.to_thread(thread.join)


async def test_a_sandbox_that_is_lost_is_no_observation(play: Playing, sandboxes: Sandboxes) -> None:  # noqa: F811
    def kill() -> None:
        [first] = [pid for pid in descendants_of_zygote(sandboxes) if is_server(pid)]
        os.kill(first, signal.SIGKILL)

    async with Policy([calls("sleep 1000"), calls(SUBMIT)]).serving() as policy:
        playing = asyncio.ensure_future(play(policy, environment={"timeout": 1000}))
        await policy.asked.wait()
        kill()
        with pytest.raises(SandboxLost):
            await playing
        assert len(policy.requests) == 1


async def test_its_own_agent_with_its_own_deterministic_model(lease: Leasing) -> None:  # noqa: F811
    """Its environment alone, in place of DockerEnvironment."""
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.models.test_models import DeterministicModel, make_output

    async with lease() as one:
        bridge = Bridge()
        environment = await SandboxEnvironment.of(
            one.sandbox, bridge, user="app", variables={"LEVEL": "3"}, config=SandboxSettings(cwd="/tmp")
        )
        outputs = [
            make_output("look", [{"command": "id -un; pwd; echo $LEVEL"}]),
            make_output("hand in", [{"command": f"{SUBMIT}; echo done"}]),
        ]
        agent = DefaultAgent(DeterministicModel(outputs=outputs), environment, **SHORT)
        info = await bridge.thread(lambda: agent.run("task"))
        assert info == {"exit_status": "Submitted", "submission": "done\n"}
        assert agent.messages[3]["extra"]["raw_output"] == "app\n/tmp\n3\n"
        assert agent.messages[1]["content"] == "task (Linux, /tmp)"
        saved = agent.serialize()["info"]["config"]
        assert saved["environment_type"] == "kuberoll_workers.adapters.mini_swe_agent.SandboxEnvironment"
        assert saved["environment"]["interpreter"] == ["/bin/sh", "-c"]


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"settings": "no-such"}, "config.settings: Could not find config file"),
        ({"setting": "mini"}, "did you mean settings"),
        ({"agent": {"step_limits": 3}}, "config.agent: unknown: step_limits"),
        ({"agent": {"step_limit": "many"}}, "config.agent: ValidationError"),
        ({"agent": {"agent_class": "no.such"}}, "config.agent.agent_class: Unknown agent type"),
        ({"environment": {"image": "debian"}}, "config.environment.image: unknown"),
        ({"model": {"model_class": "openrouter"}}, "OpenRouterModel does not ask by OpenAI's chat API"),
        ({"model": {"model_class": "litellm_response"}}, "LitellmResponseModel does not ask by OpenAI's chat API"),
        ({"model": {"model_kwargs": {"api_base": "http://a"}}}, "api_base: the model is the job's policy"),
    ],
)
def test_a_config_that_it_refuses_is_refused_before_an_engine(config: dict[str, Any], problem: str) -> None:
    with pytest.raises(UnusableEnvironment, match=problem):
        FunctionAgent(ENTRYPOINT, config)


@pytest.mark.parametrize("settings", ["mini", "mini_textbased", "default", "swebench"])
def test_settings_that_it_brings_are_taken(settings: str) -> None:
    FunctionAgent(ENTRYPOINT, {"settings": settings})


def test_a_machine_without_it_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UnusableEnvironment, match=r"pip install 'kuberoll\[mini-swe-agent\]'"):
        MiniSweAgent.check({})


async def test_without_a_sandbox_it_says_what_is_missing() -> None:
    episode = AgentEpisode(
        id="one", messages=[], metadata={}, tools=None, config={}, seed=None, base_url="", anthropic_base_url="",
        token="", model="",
    )  # fmt: skip
    with pytest.raises(UnusableEnvironment, match=r"environments\[\]\.sandbox"):
        await MiniSweAgent().run(episode)
