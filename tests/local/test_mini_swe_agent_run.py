"""mini-swe-agent on five tasks with the real engine: by tools, and by blocks of text."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kuberoll_workers.adapters.mini_swe_agent import MiniSweAgent
from kuberoll_workers.data.record import TrajectoryRecord
from tests.harbor.writing import write_task
from tests.local.agent_sdks import CHAT_TEMPLATE
from tests.local.support import run_to_end, trajectories
from tests.local.test_sandbox_run import SETTINGS, TEMPERATURE, call, possible  # noqa: F401 - fixtures
from tests.local.tool_policy import Scorer, train
from tests.sandboxes.layouts import BUSYBOX, busybox_layout

pytestmark = [
    pytest.mark.engine,
    pytest.mark.long,
    # The policy is trained, and two engines are started, for the first test.
    pytest.mark.timeout(1800),
    pytest.mark.skipif(BUSYBOX is None or sys.platform != "linux", reason="needs Debian's busybox-static"),
]

REPEATS = 4
STEPS = 400
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
LIMIT = 6

# By their instructions: what the policy learns to run, with what that writes, and what the tests look for.
TASKS = {
    "Write hello into hello.txt.": ([("echo hello > hello.txt", "")], 'test "$(cat /work/hello.txt)" = hello'),
    "Write the word of word.txt into answer.txt.": (
        [("cat word.txt", "green\n"), ("echo green > answer.txt", "")],
        'test "$(cat /work/answer.txt)" = green',
    ),
    "Make the directory out.": ([("mkdir out", "")], "test -d /work/out"),
    "Remove old.txt.": ([("rm old.txt", "")], "test ! -e /work/old.txt"),
    "Copy word.txt to copy.txt.": ([("cp word.txt copy.txt", "")], "cmp /work/word.txt /work/copy.txt"),
}
# Short, so that the tiny policy learns them in seconds.
CONFIG: dict[str, Any] = {
    "agent": {"system_template": "Work.", "instance_template": "{{task}}", "step_limit": LIMIT},
    "model": {"observation_template": "{{output.output}}", "format_error_template": "Wrong."},
}
MODES: dict[str, dict[str, Any]] = {
    "tools": CONFIG,
    "text": {**CONFIG, "model": {**CONFIG["model"], "model_class": "litellm_textbased"}},
}


def written(mode: str, command: str) -> str:
    """A command as the policy writes it."""
    return call("bash", command=command) if mode == "tools" else f"```mswea_bash_command\n{command}\n```"


def transcripts() -> Iterator[list[tuple[str, bool]]]:
    """Tasks as the policy is to work on them: parts of a sequence, and whether the policy writes them."""
    for mode in MODES:
        tools, role = ("bash;", "tool") if mode == "tools" else ("", "user")
        for instruction, (commands, _) in TASKS.items():
            # As the template has it: files of instructions end with a line's end.
            parts = [(f"<|begin|>{tools}<|system|>Work.<|end|><|user|>{instruction}\n<|end|><|assistant|>", False)]
            for command, output in commands:
                parts.append((f"{written(mode, command)}<|end|>", True))
                parts.append((f"<|{role}|>{output}<|end|><|assistant|>", False))
            yield [*parts, (f"{written(mode, SUBMIT)}<|end|>", True)]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("policy") / "model", list(transcripts()), steps=STEPS)


@pytest.fixture(scope="module", params=MODES)
def played(
    request: pytest.FixtureRequest,
    possible: None,  # noqa: F811
    policy: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[str, list[TrajectoryRecord]]:
    """How commands are written, and the trajectories of a run."""
    directory = tmp_path_factory.mktemp("tasks")
    image = busybox_layout(directory / "image", files={"work/word.txt": "green\n", "work/old.txt": ""})
    for number, (instruction, (_, test)) in enumerate(TASKS.items()):
        files = {
            "task.toml": SETTINGS.format(name=f"task-{number}", image=image),
            "instruction.md": f"{instruction}\n",
            "tests/test.sh": f"#!/bin/sh\n{test} && echo 1 > /logs/verifier/reward.txt || "
            "echo 0 > /logs/verifier/reward.txt\n",
        }
        write_task(directory / "tasks" / f"task-{number}", files)
    environment = {
        "name": "harbor",
        "agent": {"entrypoint": f"{MiniSweAgent.__module__}:{MiniSweAgent.__name__}"},
        "config": MODES[request.param],
        "sandbox": {},
    }
    job = {
        "apiVersion": "kuberoll.io/v1alpha1",
        "kind": "RolloutJob",
        "metadata": {"name": "mini-swe-agent"},
        "spec": {
            "generation": {
                "model": {"source": str(policy), "chatTemplate": CHAT_TEMPLATE},
                "engineArgs": {"dtype": "float32", "max_model_len": 1024, "max_num_seqs": 32},
                "toolCallParser": "hermes",
                "sampling": {"maxTokens": 200, "temperature": TEMPERATURE, "seed": 1},
            },
            "environments": [environment],
            "dataset": {"source": {"uri": "tasks"}, "repeats": REPEATS},
            "rollout": {"maxTurns": 2 * LIMIT},
        },
    }
    (directory / "job.json").write_text(json.dumps(job))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(directory / "state"))
        code, text = run_to_end(
            directory / "job.json", "--output", directory / "out", "--metrics-port", "0", torch=True
        )
    assert code == 0, text
    return request.param, trajectories(directory / "out")


def responses(record: TrajectoryRecord) -> list[str]:
    """What the policy wrote, without the token that ends it."""
    return [message.content for message in record.messages if message.logprobs is not None]


def test_the_tests_of_each_task_say_what_it_is_worth(played: tuple[str, list[TrajectoryRecord]]) -> None:
    mode, records = played
    assert len(records) == len(TASKS) * REPEATS
    solved = set()
    for record in records:
        [instruction] = [text for text in TASKS if any(text in message.content for message in record.messages)]
        wrote = "".join(responses(record))
        done = written(mode, TASKS[instruction][0][-1][0]) in wrote
        assert record.total_reward == done, wrote
        assert record.turn_count <= LIMIT
        assert {tool["function"]["name"] for tool in record.tools or ()} == ({"bash"} if mode == "tools" else set())
        if done:
            solved.add(instruction)
    assert solved == set(TASKS)


def test_every_path_scores_as_it_was_sampled(policy: Path, played: tuple[str, list[TrajectoryRecord]]) -> None:
    scorer = Scorer(policy, temperature=TEMPERATURE)
    compared = 0
    for record in played[1]:
        for messages in (record.messages, *(branch.messages for branch in record.branches or ())):
            for message, scores in scorer.score(messages, record.tools or (), ["auto"] * 100):
                assert list(message.logprobs or ()) == pytest.approx(scores, abs=1e-3)
                compared += len(scores)
    assert compared >= sum(record.tokens.generated for record in played[1]) > 0


def test_no_id_drifts_from_turn_to_turn(played: tuple[str, list[TrajectoryRecord]]) -> None:
    """Only what mini-swe-agent leaves out of a chat, responses without a command, makes branches."""
    straight = 0
    for record in played[1]:
        assert record.continuity is not None
        assert set(record.continuity) <= {"new", "clean", "realigned", "forked"}
        assert record.continuity["new"] == 1
        assert record.continuity.get("forked", 0) == len(record.branches or ())
        straight += record.branches is None
    assert straight > len(played[1]) / 2
