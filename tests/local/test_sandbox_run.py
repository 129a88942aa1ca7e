"""The real engine's policy works in sandboxes: what is sampled, what it is worth, and what is left on the machine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kuberoll_workers.data.messages import Message
from kuberoll_workers.data.record import TrajectoryRecord
from kuberoll_workers.sandboxes.errors import SandboxUnavailable
from kuberoll_workers.sandboxes.leases import Sandboxes
from kuberoll_workers.sandboxes.namespaces.driver import NamespaceDriver
from tests.harbor.writing import write_task
from tests.local.agent_sdks import CHAT_TEMPLATE
from tests.local.support import PATIENCE_SECONDS, Run, running, trajectories, wait_until_none_is_left
from tests.local.tool_policy import Scorer, train
from tests.sandboxes.layouts import BUSYBOX, busybox_layout

pytestmark = [
    pytest.mark.engine,
    pytest.mark.long,
    pytest.mark.skipif(BUSYBOX is None or sys.platform != "linux", reason="needs Debian's busybox-static"),
]

REPEATS = 4
# Of the training, after which the loss is below 0.01.
STEPS = 260
# As in tests/local/test_agent_sdks.py: hotter, the tiny policy often forgets how calls are written.
TEMPERATURE = 0.5
CONTROL_GROUPS = Path("/sys/fs/cgroup")

HELLO, SWAP = "Write hello into hello.txt.", "Write the word of word.txt into answer.txt."
TASKS = {"hello": HELLO, "swap": SWAP}
TESTS = {
    "hello": 'test "$(cat /work/hello.txt)" = hello',
    "swap": f'test "$(cat /work/answer.txt)" = green && test "$SECRET" = {"s" * 20}',
}

SETTINGS = """\
schema_version = "1.4"

[task]
name = "kuberoll/{name}"

[agent]
timeout_sec = 120

[verifier]
timeout_sec = 60

[verifier.env]
SECRET = "ssssssssssssssssssss"

[environment]
docker_image = "{image}"
network_mode = "no-network"
"""


def call(name: str, **arguments: str) -> str:
    """A call of a tool as the policy writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


# What a test of the tasks wants is only in the sandbox: the second one reads it, and then writes it.
WAYS = {
    HELLO: [(call("bash", command="echo hello > /work/hello.txt"), ""), (call("submit"), None)],
    SWAP: [
        (call("bash", command="cat /work/word.txt"), "green\n"),
        (call("bash", command="echo green > answer.txt"), ""),
        (call("submit"), None),
    ],
}


def transcripts() -> Iterator[list[tuple[str, bool]]]:
    """Tasks as the policy is to work on them: parts of a sequence, and whether the policy writes them."""
    for instruction, steps in WAYS.items():
        # As the template has it: files of instructions end with a line's end.
        parts = [(f"<|begin|>bash;view;create;replace;submit;<|user|>{instruction}\n<|end|><|assistant|>", False)]
        for written, answer in steps:
            parts.append((f"{written}<|end|>", True))
            if answer is not None:
                parts.append((f"<|tool|>{answer}<|end|><|assistant|>", False))
        yield parts


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("policy") / "model", list(transcripts()), steps=STEPS)


@dataclass(frozen=True, slots=True)
class Played:
    """A run that has ended.

    Attributes:
        scratch: Directory of all that it may have left.
        owner: Name of the directory of its sandboxes there, and of their control groups.
    """

    records: list[TrajectoryRecord]
    text: str
    scratch: Path
    owner: str


@pytest.fixture(scope="module")
def possible(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skips where this machine has no sandboxes."""
    directory = tmp_path_factory.mktemp("possible")

    async def check() -> None:
        sandboxes = Sandboxes(NamespaceDriver(cache=directory, scratch=directory))
        try:
            await sandboxes.check()
        finally:
            await sandboxes.close()

    try:
        asyncio.run(check())
    except SandboxUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def played(possible: None, policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Played:
    directory, scratch = tmp_path_factory.mktemp("tasks"), tmp_path_factory.mktemp("scratch")
    image = busybox_layout(directory / "image", files={"work/word.txt": "green\n"})
    for name, instruction in TASKS.items():
        test = f"#!/bin/sh\n{TESTS[name]} && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt\n"
        files = {
            "task.toml": SETTINGS.format(name=name, image=image),
            "instruction.md": f"{instruction}\n",
            "tests/test.sh": test,
        }
        write_task(directory / "tasks" / name, files)
    job = {
        "apiVersion": "kuberoll.io/v1alpha1",
        "kind": "RolloutJob",
        "metadata": {"name": "tasks"},
        "spec": {
            "generation": {
                "model": {"source": str(policy), "chatTemplate": CHAT_TEMPLATE},
                "engineArgs": {"dtype": "float32", "max_model_len": 1024, "max_num_seqs": 32},
                "toolCallParser": "hermes",
                "sampling": {"maxTokens": 200, "temperature": TEMPERATURE, "seed": 1},
            },
            "environments": [{"name": "harbor", "agent": {"tools": {}}, "sandbox": {}}],
            "dataset": {"source": {"uri": "tasks"}, "repeats": REPEATS},
            "rollout": {"maxTurns": 8},
        },
    }
    (directory / "job.json").write_text(json.dumps(job))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(directory / "state"))
        patch.setenv("TMPDIR", str(scratch))
        arguments = (directory / "job.json", "--output", directory / "out", "--metrics-port", "0")
        with running(*arguments, torch=True) as run:
            run_id = run.run_id()
            owner = directory_of_sandboxes(run, scratch)
            code = run.finish()
            text = "\n".join(run.lines)
    assert code == 0, text
    wait_until_none_is_left(run_id)
    return Played(trajectories(directory / "out"), text, scratch, owner)


def directory_of_sandboxes(run: Run, scratch: Path) -> str:
    """Name of the directory of the run's sandboxes, and of their control groups; waits until it is there."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (found := list(scratch.glob("kuberoll-sandboxes-*"))):
        run.assert_runs()
        assert time.monotonic() < deadline, run.printed()
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.process.wait(timeout=0.05)
    [directory] = found
    return directory.name


def sampled(record: TrajectoryRecord) -> list[Message]:
    return [message for message in record.messages if message.logprobs is not None]


def made(message: Message) -> list[str]:
    """Names of the tools that it calls."""
    return [item["function"]["name"] for item in getattr(message, "fields", {}).get("tool_calls", ())]


def test_each_task_is_played_in_a_machine_of_its_own(played: Played) -> None:
    assert sorted(record.metadata["harbor"]["task"] for record in played.records if record.metadata) == sorted(
        f"kuberoll/{name}" for name in TASKS for _ in range(REPEATS)
    )
    for record in played.records:
        assert record.metadata is not None
        result = record.metadata["result"]
        assert result["agent_timeouts"] == 0
        assert result["start_seconds"] > 0
        assert result["rewards"] == result["steps"][0] == {"reward": record.total_reward}
        assert {tool["function"]["name"] for tool in record.tools or ()} >= {"bash", "submit"}


def test_what_the_tests_of_a_task_find_is_its_reward(played: Played) -> None:
    """A trajectory is worth 1 if the policy called what does the task, and else 0."""
    right = 0
    for record in played.records:
        wrote = "".join(message.content for message in sampled(record))
        done = all(written in wrote for written, answer in WAYS[record.messages[0].content.strip()] if answer == "")
        assert record.total_reward == done, wrote
        right += done
        if done:
            assert made(sampled(record)[-1]) == ["submit"]
            assert record.turn_count == len(sampled(record))
    assert {record.task_index for record in played.records if record.total_reward == 1.0} == {0, 1}
    assert right > REPEATS


def test_what_a_command_wrote_in_the_sandbox_is_read_by_the_policy(played: Played) -> None:
    looked = 0
    for record in played.records:
        for number, message in enumerate(record.messages):
            if '"cat /work/word.txt"' in message.content and made(message) == ["bash"]:
                assert record.messages[number + 1].content == "green\n"
                looked += 1
    assert looked > 0


def test_every_token_scores_as_it_was_sampled(policy: Path, played: Played) -> None:
    """In one pass over the whole trajectory: the engine has read exactly the ids that stand before each."""
    scorer = Scorer(policy, temperature=TEMPERATURE)
    compared = 0
    for record in played.records:
        for message, scores in scorer.score(record.messages, record.tools or (), ["auto"] * 100):
            assert list(message.logprobs or ()) == pytest.approx(scores, abs=1e-3)
            compared += len(scores)
    assert compared == sum(record.tokens.generated for record in played.records) > 0


def test_no_id_drifts_from_turn_to_turn(played: Played) -> None:
    for record in played.records:
        assert record.branches is None
        assert record.continuity is not None
        assert record.continuity["new"] == 1
        assert set(record.continuity) <= {"new", "clean", "realigned"}
        assert sum(record.continuity.values()) == record.turn_count


def test_nothing_is_left_on_the_machine(played: Played) -> None:
    assert list(played.scratch.glob("kuberoll-sandboxes-*")) == []
    for process in Path("/proc").glob("[0-9]*"):
        # Of whoever has ended meanwhile there is nothing to read.
        with contextlib.suppress(OSError):
            assert str(played.scratch) not in (process / "mountinfo").read_text(), process
    assert list(CONTROL_GROUPS.rglob(played.owner)) == []
