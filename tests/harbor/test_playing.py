"""Tasks in real sandboxes: who earns a reward, what is a failure, and what an agent can do to its tests."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from kuberoll_api.model.sandboxes import Sandbox as SandboxOptions
from kuberoll_workers.environments.agents.commands import AgentFailed
from kuberoll_workers.environments.agents.episode import AgentEpisode
from kuberoll_workers.environments.interface import UnusableRow
from kuberoll_workers.harbor.agents import Agent, CommandAgent, NoAgent, OracleAgent, Work
from kuberoll_workers.harbor.playing import Player, TaskResult, state_of
from kuberoll_workers.harbor.rows import row_of
from kuberoll_workers.harbor.task import read_task
from kuberoll_workers.harbor.verifier import VerifierFailed
from kuberoll_workers.sandboxes.errors import SandboxLost
from kuberoll_workers.sandboxes.leases import Sandboxes
from tests.sandboxes.conftest import busybox, cache, sandboxes  # noqa: F401 - fixtures
from tests.sandboxes.layouts import busybox_layout
from tests.sandboxes.test_namespaces import descendants_of_zygote, is_server

pytestmark = pytest.mark.processes

SOLVE = "#!/bin/sh\necho hello > /work/hello.txt\n"
TEST = '#!/bin/sh\n[ "$(cat /work/hello.txt)" = hello ] && r=1 || r=0\necho $r > /logs/verifier/reward.txt\n'
TOML = """
{head}
[task]
name = "kuberoll/hello"
[agent]
timeout_sec = {seconds}
[verifier]
timeout_sec = {scoring}
{verifier}
[environment]
docker_image = "{image}"
network_mode = "{network}"
memory_mb = 256
{environment}
"""


class Script:
    """An agent that is a function of the test's."""

    def __init__(self, act: Callable[[Work], Awaitable[None]]) -> None:
        self._act = act

    async def work(self, work: Work) -> None:
        await self._act(work)


Playing = Callable[..., Awaitable[TaskResult]]


@pytest.fixture
def play(sandboxes: Sandboxes, busybox: str, tmp_path: Path) -> Playing:  # noqa: F811
    """Play a task of the test's with an agent."""

    async def played(
        agent: Agent | Callable[[Work], Awaitable[None]],
        *,
        test: str = TEST,
        solve: str = SOLVE,
        seconds: float = 60,
        scoring: float = 60,
        network: str = "no-network",
        verifier: str = "",
        environment: str = "",
        options: Mapping[str, Any] | None = None,
        files: Mapping[str, str] | None = None,
        head: str = 'schema_version = "1.4"',
    ) -> TaskResult:
        folder = tmp_path / "hello"
        texts = {
            "task.toml": TOML.format(
                seconds=seconds,
                scoring=scoring,
                image=busybox,
                network=network,
                verifier=verifier,
                environment=environment,
                head=head,
            ),
            "instruction.md": "Write hello into /work/hello.txt.\n",
            "tests/test.sh": test,
            "solution/solve.sh": solve,
            **(files or {}),
        }
        for name, text in texts.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        row = row_of(read_task(folder), str(folder))
        player = Player(
            sandboxes=sandboxes,
            options=SandboxOptions.model_validate(options or {}),
            variables={"GIVEN": "a secret"},
            agent_seconds=60,
        )
        episode = AgentEpisode(
            id="one",
            messages=row["messages"],
            metadata=row["metadata"],
            tools=None,
            config={},
            seed=1,
            base_url="http://127.0.0.1:9/v1",
            anthropic_base_url="http://127.0.0.1:9",
            token="token",
            model="policy",
        )
        agent = agent if hasattr(agent, "work") else Script(agent)
        return await player.play(row["metadata"]["harbor"], folder, agent, episode)

    return played


async def test_the_solution_is_worth_one_and_nothing_is_worth_nothing(play: Playing) -> None:
    assert (await play(OracleAgent())).rewards == {"reward": 1.0}
    assert (await play(NoAgent())).rewards == {"reward": 0.0}
    named = '#!/bin/sh\necho \'{"reward": 0.5, "style": 2}\' > /logs/verifier/reward.json\n'
    assert (await play(NoAgent(), test=named)).rewards == {"reward": 0.5, "style": 2.0}


async def test_a_program_inside_works(play: Playing) -> None:
    found = await play(CommandAgent(["sh", "-c", "echo '{instruction}' | grep -q hello && echo hello > hello.txt"]))
    assert found.rewards == {"reward": 1.0}
    with pytest.raises(AgentFailed, match="exit code 3; its output ends with\nwhy"):
        await play(CommandAgent(["sh", "-c", "echo why; exit 3"]))


async def test_the_agents_time_is_the_policys_doing(play: Playing) -> None:
    async def slow(work: Work) -> None:
        await work.sandbox.exec("echo hello > hello.txt; sleep 1000")

    found = await play(slow, seconds=2)
    assert (found.rewards, found.agent_timeouts) == ({"reward": 1.0}, 1)


@pytest.mark.parametrize(
    ("test", "reason"),
    [
        ("#!/bin/sh\necho no reward\n", "neither reward.json nor reward.txt.*their output ends with\nno reward"),
        ("#!/bin/sh\necho much > /logs/verifier/reward.txt\n", "it must be one number"),
        ("#!/bin/sh\necho nan > /logs/verifier/reward.txt\n", "finite"),
        ("#!/bin/sh\nmkfifo /logs/verifier/reward.txt\n", "cannot be read"),
    ],
)
async def test_tests_without_a_reward_are_a_failure_and_no_zero(play: Playing, test: str, reason: str) -> None:
    with pytest.raises(VerifierFailed, match=f"(?s){reason}"):
        await play(NoAgent(), test=test)


async def test_tests_that_take_too_long_are_a_failure(play: Playing) -> None:
    with pytest.raises(VerifierFailed, match=r"longer than \[verifier\] timeout_sec \(1 s\)"):
        await play(NoAgent(), test="#!/bin/sh\nsleep 1000\n", scoring=1)


async def test_what_an_agent_leaves_does_not_score(play: Playing) -> None:
    async def cheat(work: Work) -> None:
        box = work.sandbox
        # A reward that was there before, tests of its own, links in their place, and processes that wait for them.
        await box.exec(
            "mkdir -p /tests /logs/verifier; echo 1 > /logs/verifier/reward.txt;"
            "echo '{\"reward\": 1}' > /logs/verifier/reward.json;"
            "printf '#!/bin/sh\\necho 1 > /logs/verifier/reward.txt' > /tests/test.sh;"
            "(setsid sh -c 'while true; do echo 1 > /logs/verifier/reward.txt; echo 1 > /tests/test.sh; done' "
            ">/dev/null 2>&1 &)"
        )

    assert (await play(cheat)).rewards == {"reward": 0.0}

    async def link(work: Work) -> None:
        await work.sandbox.exec("rm -rf /tests /logs/verifier; ln -s /work /tests; ln -s /work /logs/verifier")

    assert (await play(link)).rewards == {"reward": 0.0}


async def test_each_machine_that_a_task_had_is_in_its_result(play: Playing, sandboxes: Sandboxes) -> None:  # noqa: F811
    own = 'environment_mode = "separate"'
    found = await play(OracleAgent(), verifier=own)
    assert sandboxes.started == len(found.sandboxes) == 2
    task, verifier = found.sandboxes
    assert found.start_seconds == task.start_seconds
    assert task.began < verifier.asked
    assert verifier.began + verifier.seconds <= task.began + task.seconds + 0.1
    assert state_of(found)["sandboxes"][0] == {
        "asked": task.asked, "start_seconds": task.start_seconds, "seconds": task.seconds,
        "ahead_seconds": 0.0, "left": False
    }  # fmt: skip


async def test_a_machine_that_is_lost_is_no_zero(play: Playing, sandboxes: Sandboxes) -> None:  # noqa: F811
    async def die(work: Work) -> None:
        [first] = [pid for pid in descendants_of_zygote(sandboxes) if is_server(pid)]
        os.kill(first, signal.SIGKILL)

    with pytest.raises(SandboxLost):
        await play(die)


async def test_a_network_that_the_job_does_not_give_is_refused_before_anything_starts(
    play: Playing,
    sandboxes: Sandboxes,  # noqa: F811
) -> None:
    with pytest.raises(UnusableRow, match="network_mode is public"):
        await play(NoAgent(), network="public")
    assert sandboxes.started == 0
    assert (await play(OracleAgent(), network="public", options={"network": {"mode": "None"}})).rewards["reward"] == 1


async def test_what_would_be_left_out_without_a_word_is_refused(play: Playing) -> None:
    with pytest.raises(UnusableRow, match=r"\[verifier\] has another network"):
        await play(OracleAgent(), verifier='network_mode = "public"', options={"network": {"mode": "All"}})
    server = '[[environment.mcp_servers]]\nname = "notes"\ntransport = "http"\nurl = "http://127.0.0.1:1/mcp"'
    with pytest.raises(UnusableRow, match="mcp_servers"):
        await play(OracleAgent(), environment=server)
    # Where the job closes all, they are the same.
    found = await play(OracleAgent(), verifier='network_mode = "public"', options={"network": {"mode": "None"}})
    assert found.rewards == {"reward": 1.0}


async def test_an_allowlist_is_a_proxy_that_refuses_others(play: Playing) -> None:
    said: list[str] = []

    async def reach(work: Work) -> None:
        for host in ("evil.example", "169.254.169.254"):
            request = f"GET http://{host}/ HTTP/1.1\\r\\nHost: {host}\\r\\n\\r\\n"
            command = f"printf '{request}' | nc -w 10 127.0.0.1 ${{http_proxy##*:}}"
            said.append((await work.sandbox.exec(command, timeout=60, merged=True)).text)
        done = await work.sandbox.exec("nslookup allowed.example", timeout=60, merged=True)
        assert not done.succeeded

    await play(reach, network="public", options={"network": {"mode": "Allowlist", "allowedHosts": ["allowed.example"]}})
    assert all("403" in text for text in said), said


async def test_tests_in_a_machine_of_their_own(play: Playing, tmp_path: Path) -> None:
    test = (
        '#!/bin/sh\n[ "$(cat /logs/artifacts/hello.txt)" = hello ] && [ ! -e /work/left ] && r=1 || r=0\n'
        "echo $r > /logs/verifier/reward.txt\n"
    )
    image = busybox_layout(tmp_path / "tests-image", files={"tests/test.sh": test})
    verifier = 'environment_mode = "separate"\n[verifier.environment]\nnetwork_mode = "no-network"\n'
    verifier += f'docker_image = "{image}"'

    async def act(work: Work) -> None:
        await work.sandbox.exec("echo hello > /logs/artifacts/hello.txt; touch /work/left")

    assert (await play(act, verifier=verifier)).rewards == {"reward": 1.0}


async def test_links_that_an_agent_leaves_keep_no_tests_from_running(play: Playing, tmp_path: Path) -> None:
    test = "#!/bin/sh\necho 0 > /logs/verifier/reward.txt\n"
    image = busybox_layout(tmp_path / "tests-image", files={"tests/test.sh": test})
    verifier = 'environment_mode = "separate"\n[verifier.environment]\nnetwork_mode = "no-network"\n'
    verifier += f'docker_image = "{image}"'

    async def act(work: Work) -> None:
        await work.sandbox.exec("cd /logs/artifacts; ln -s /etc/passwd a; ln -s ../../.. b; mkfifo c; echo d > d")

    assert (await play(act, verifier=verifier)).rewards == {"reward": 0.0}


async def test_tests_in_a_machine_of_their_own_find_artifacts_and_the_files_of_the_task(play: Playing) -> None:
    test = (
        '#!/bin/sh\n[ "$(cat /work/report.txt)$(cat /work/out/in/kept)$(cat /work/given)" = "reportkeptgiven" ] && '
        "[ -x /work/report.txt ] && [ ! -e /work/out/in/a.tmp ] && r=1 || r=0\necho $r > /logs/verifier/reward.txt\n"
    )
    artifacts = 'artifacts = ["/work/report.txt", "/work/none", { source = "/work/out", exclude = ["*.tmp"] }]\n'
    solve = "#!/bin/sh\nmkdir -p out/in; echo kept > out/in/kept; touch out/in/a.tmp; echo report > report.txt\n"
    files = {"environment/given": "given\n"}
    head = f'schema_version = "1.4"\n{artifacts}'
    found = await play(
        OracleAgent(),
        test=test,
        solve=f"{solve}chmod 755 report.txt\n",
        verifier='environment_mode = "separate"',
        files=files,
        head=head,
    )
    assert found.rewards == {"reward": 1.0}


async def test_users_may_be_numbers(play: Playing) -> None:
    test = (
        "#!/bin/sh\n[ $(id -u) = 1000 ] && [ $(stat -c %u /tmp/mine) = 1000 ] && echo 1 > /logs/verifier/reward.txt\n"
    )
    step = '\n[[steps]]\nname = "one"\nagent = { user = 1000 }\n'
    files = {
        "steps/one/instruction.md": "Do it.",
        "steps/one/workdir/setup.sh": "touch /tmp/mine",
        "steps/one/solution/solve.sh": "#!/bin/sh\n[ $(id -u) = 1000 ]\n",
    }
    collect = '[[verifier.collect]]\ncommand = "test $(id -u) = 1000 || rm /tmp/mine"\nuser = 1000\n'
    found = await play(OracleAgent(), test=test, verifier=f"user = 1000\n{collect}", environment=step, files=files)
    assert found.rewards == {"reward": 1.0}


async def test_healthchecks(play: Playing) -> None:
    check = '[environment.healthcheck]\ncommand = "{}"\ninterval_sec = 0.1\ntimeout_sec = 5\nretries = 2\n'
    ready = check.format("test -e /tmp/ready || {{ touch /tmp/ready; exit 1; }}".replace("{{", "{").replace("}}", "}"))
    assert (await play(OracleAgent(), environment=ready)).rewards == {"reward": 1.0}
    with pytest.raises(Exception, match=r"healthcheck.*exit code 1"):
        await play(OracleAgent(), environment=check.format("false"))


async def test_variables_of_the_worker_are_given_only_by_name(play: Playing) -> None:
    test = '#!/bin/sh\n[ "$KEY" = "a secret" ] && echo 1 > /logs/verifier/reward.txt\n'
    found = await play(NoAgent(), test=test, verifier='[verifier.env]\nKEY = "${GIVEN}"')
    assert found.rewards == {"reward": 1.0}
    with pytest.raises(UnusableRow, match=r"access\.variables"):
        await play(NoAgent(), verifier='[verifier.env]\nKEY = "${HOME}"')


async def test_steps_share_a_machine_and_stop_at_a_reward_too_low(play: Playing) -> None:
    steps = '\n[[steps]]\nname = "one"\nmin_reward = 1.0\n[[steps]]\nname = "two"\n'
    files = {
        "steps/one/instruction.md": "First.",
        "steps/two/instruction.md": "Then.",
        "steps/one/tests/test.sh": TEST,
        "steps/two/tests/test.sh": TEST.replace("hello.txt", "second.txt"),
    }
    seen: list[str | None] = []

    def agent(first: str) -> Callable[[Work], Awaitable[None]]:
        async def act(work: Work) -> None:
            seen.append(work.instruction)
            name = first if work.instruction is None else "second.txt"
            await work.sandbox.exec(f"echo hello > {name}")

        return act

    found = await play(agent("hello.txt"), environment=steps, files=files)
    assert (found.rewards, len(found.steps)) == ({"reward": 1.0}, 2)
    assert [text and text.strip() for text in seen] == [None, "Then."]
    found = await play(agent("other.txt"), environment=steps, files=files)
    assert [step["reward"] for step in found.steps] == [0.0]


async def test_tasks_at_once_have_machines_of_their_own(play: Playing) -> None:
    found = await asyncio.gather(*(play(OracleAgent() if number % 2 else NoAgent()) for number in range(6)))
    assert [one.rewards["reward"] for one in found] == [0.0, 1.0] * 3
