"""What Harbor's own package reads, and what we do: the same, but for differences that are named.

They run where `KUBEROLL_HARBOR_PYTHON` is a Python that has `harbor` 0.26; `KUBEROLL_HARBOR_TASKS` may name folders
with further tasks, such as Harbor's examples, with colons between them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from kuberoll_workers.harbor.configuration import FILE, Healthcheck
from kuberoll_workers.harbor.mistakes import TaskError
from kuberoll_workers.harbor.phases import Network
from kuberoll_workers.harbor.rewards import RewardError, combine, read_reward
from kuberoll_workers.harbor.task import Machine, Stage, Task, find_tasks, read_task
from tests.harbor.mutations import mutations
from tests.harbor.writing import PLAIN, PLAIN_FILES, SCRIPT, STEPS, STEPS_FILES, write_task

PYTHON = os.environ.get("KUBEROLL_HARBOR_PYTHON", "")
EXAMPLES = [Path(path) for path in os.environ.get("KUBEROLL_HARBOR_TASKS", "").split(":") if path]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="KUBEROLL_HARBOR_PYTHON names no Python that has harbor"),
]

# What Harbor accepts and we refuse, by our words.
DELIBERATE = {
    "machines run Linux": "Windows",
    "has no TPUs": "TPUs",
    "no services": "services of docker compose",
    "a task of KubeRoll has one machine": "services of docker compose",
    "reads format 1": "a format that is not out yet",
    "input should be a finite number": "no time is NaN or endless",
    "must be a finite number": "no reward is NaN or endless",
    "input should be (greater than|less than)": "times, sizes and user numbers that no machine can have",
    "there is nothing to which": "working directories that are relative",
    "is no variable of a process": "variables that no process can have",
    "have the character NUL": "commands that no process can have",
    "is empty; it is what the agent is told": "instructions without a word",
    "write organization/name": "a newline at the end of a name",
    "is no host": "a newline in a host",
}

WITHOUT_IMAGE = "tasks without an image"


class Harbor:
    """Harbor's reader, in a process of its own Python."""

    def __init__(self) -> None:
        script = Path(__file__).with_name("theirs.py")
        self._process = subprocess.Popen(
            [PYTHON, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={"PATH": os.environ["PATH"]},
        )

    def ask(self, **question: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture(scope="module")
def harbor() -> Iterator[Harbor]:
    made = Harbor()
    yield made
    made.close()


def values_of(task: Task) -> dict[str, Any]:
    """Values of a task, by the names of theirs.py."""
    return {
        "name": task.name,
        "schema": task.configuration.schema_version,
        "machine": machine_values(task.machine, task.directory),
        "stages": [stage_values(stage, task.directory) for stage in task.stages],
        "strategy": task.configuration.multi_step_reward_strategy or "mean",
        "solution": task.configuration.solution.env,
    }


def network(found: Network) -> dict[str, Any]:
    return {"mode": found.mode, "hosts": found.hosts}


def check(found: Healthcheck | None) -> dict[str, Any] | None:
    return None if found is None else found.model_dump()


def machine_values(machine: Machine, root: Path) -> dict[str, Any]:
    environment = machine.environment
    servers = [server.model_dump() for server in environment.mcp_servers]
    return {
        **environment.model_dump(include={"cpus", "memory_mb", "storage_mb", "gpus", "gpu_types", "env"}),
        "image": machine.image,
        "context": None if machine.context is None else str(machine.context.relative_to(root)),
        "upload": machine.upload is not None,
        "start": environment.build_timeout_sec,
        "workdir": environment.workdir,
        "skills": environment.skills_dir,
        "network": network(environment.network),
        "healthcheck": check(environment.healthcheck),
        # They leave out headers when there are none.
        "servers": [{key: value for key, value in one.items() if key != "headers" or value} for one in servers],
    }


def stage_values(stage: Stage, root: Path) -> dict[str, Any]:
    verification = stage.verification
    return {
        "name": stage.name,
        "instruction": stage.instruction,
        "timeout": stage.timeout,
        "user": stage.user,
        "network": network(stage.network),
        "verifier": None if verification.machine is None else machine_values(verification.machine, root),
        "bundled": verification.machine is not None and not verification.tests,
        "verifier_timeout": verification.timeout,
        "verifier_user": verification.user,
        "verifier_env": verification.env,
        "verifier_network": network(verification.network),
        "collect": [one.model_dump(exclude={"service"}) for one in verification.collect],
        "healthcheck": check(stage.healthcheck),
        "least": stage.min_reward,
        "artifacts": [one.model_dump(exclude={"service"}) for one in stage.artifacts],
    }


def difference(harbor: Harbor, directory: Path) -> str | None:
    """Hold a task to Harbor: None if both agree, else which deliberate difference it is.

    Raises:
        AssertionError: They do not agree.
    """
    theirs = harbor.ask(directory=str(directory))
    try:
        read = read_task(directory)
        ours = values_of(read)
    except TaskError as error:
        if "refused" in theirs:
            return None
        for words, difference in DELIBERATE.items():
            if all(re.search(words, str(mistake)) for mistake in error.mistakes):
                return difference
        unknown = [m for m in error.mistakes if not any(re.search(words, str(m)) for words in DELIBERATE)]
        assert not unknown, f"{unknown[0]}\nHarbor: {theirs}\n{(directory / FILE).read_text()}"
        return "several"
    if "refused" in theirs and read.machine.image is None and read.machine.context is None:
        return WITHOUT_IMAGE
    assert theirs == {"values": json.loads(json.dumps(ours))}, (directory / FILE).read_text()
    return None


@pytest.mark.parametrize(
    ("text", "files", "seed"), [(PLAIN, PLAIN_FILES, 1), (STEPS, STEPS_FILES, 2)], ids=["plain", "steps"]
)
def test_changed_configurations_are_read_and_refused_as_by_harbor(
    text: str, files: Mapping[str, str], seed: int, harbor: Harbor, tmp_path: Path
) -> None:
    count = int(os.environ.get("KUBEROLL_HARBOR_CHANGES", "400"))
    agreed, refused = 0, 0
    for number, changed in enumerate(mutations(text, count, seed)):
        directory = write_task(tmp_path / str(number), files, changed={FILE: changed})
        agreed += difference(harbor, directory) is None
        refused += "refused" in harbor.ask(directory=str(directory))
        shutil.rmtree(directory)
    assert agreed > count * 0.8
    assert count * 0.2 < refused < count * 0.9


def test_our_tasks_and_further_ones_are_read_as_by_harbor(harbor: Harbor, tmp_path: Path) -> None:
    write_task(tmp_path / "plain")
    write_task(tmp_path / "steps", STEPS_FILES)
    found = [path for folder in [tmp_path, *EXAMPLES] for path in find_tasks(folder)]
    assert len(found) >= 2
    # A template's instruction is yet to be written.
    known = {None, "services of docker compose", "Windows", "instructions without a word"}
    assert {difference(harbor, path) for path in found} <= known


def linked(target: str, name: str) -> Callable[[Path], None]:
    def link(directory: Path) -> None:
        (directory / name).symlink_to(target)

    return link


FILES: dict[str, Mapping[str, str | None] | Callable[[Path], None]] = {
    "no script": {"tests/test.sh": None},
    "no tests": {"tests/test.sh": None, "tests/expected": None},
    "no instruction": {"instruction.md": None},
    "no Dockerfile": {"environment/Dockerfile": None},
    "no environment": {"environment/Dockerfile": None, "environment/text": None},
    "script for Windows": {"tests/test.sh": None, "tests/test.bat": "exit"},
    "a rule leaves the script out": {"tests/.harborignore": "*.sh\n"},
    "a rule leaves it out and takes it in": {"tests/.harborignore": "*\n!test.sh\n"},
    "a rule for the directory": {"tests/.harborignore": "/test.sh/\n"},
    "a rule elsewhere": {".harborignore": "*\n", "environment/.harborignore": "*\n"},
    "a directory as rules": {"tests/.harborignore/x": ""},
    "instruction of several marks": {"instruction.md": "# Canary a\n  <!-- canary -->  \n\n\n# Title\n# canary\n"},
    "instruction that is not UTF-8": {"instruction.md": "\udcff"},
    "carriage returns": {"instruction.md": "a\r\nb\rc", "task.toml": PLAIN.replace("\n", "\r\n")},
    "an empty configuration": {"task.toml": ""},
    "a link out of the task": linked("/etc/hostname", "tests/link"),
    "a link that is left out": linked("/etc", "tests/left"),
    "a link within": linked("../environment/text", "tests/link"),
    "a link to nothing": linked("nothing", "tests/link"),
    "a link in a circle": linked("..", "tests/link"),
    "a link to itself": linked("link", "tests/link"),
    "a link out of the solution": linked("/etc", "solution/link"),
    "a link out of the context": linked("/etc", "environment/link"),
    "a directory of one's own": {"tests/test.sh": None, "tests/test.sh/x": ""},
}


@pytest.mark.parametrize("case", FILES)
def test_files_are_found_and_refused_as_by_harbor(case: str, harbor: Harbor, tmp_path: Path) -> None:
    changed = FILES[case]
    directory = write_task(tmp_path / "task", {**PLAIN_FILES, **({} if callable(changed) else changed)})
    if callable(changed):
        changed(directory)
    if case == "a link that is left out":
        write_task(directory, {"tests/.harborignore": "left\n"})
    assert difference(harbor, directory) == (WITHOUT_IMAGE if case in ("no Dockerfile", "no environment") else None)


STEP_FILES: dict[str, Mapping[str, str | None]] = {
    "no script of the step": {"steps/check it/tests/test.sh": None},
    "no script at all": {"tests/test.sh": None},
    "no Dockerfile of the verifier": {"steps/check it/tests/Dockerfile": None},
    "a Dockerfile of the task's verifier": {"tests/Dockerfile": "FROM scratch\n"},
    "no instruction": {"steps/write/instruction.md": None},
    "no workdir": {"steps/write/workdir/setup.sh": None},
    "rules of a step": {"steps/write/tests/test.sh": SCRIPT, "steps/write/tests/.harborignore": "test.*\n"},
    "rules of the task and of a step": {
        "steps/write/tests/test.sh": SCRIPT,
        "steps/write/tests/sub/.harborignore": "x\n",
        "tests/.harborignore": "common.sh\n",
    },
    "an instruction of the task": {"instruction.md": "Never read.\n"},
    "nothing to put into the working directory": {"environment/seed.txt": None},
}


@pytest.mark.parametrize("case", STEP_FILES)
def test_files_of_steps_are_found_and_refused_as_by_harbor(case: str, harbor: Harbor, tmp_path: Path) -> None:
    directory = write_task(tmp_path / "task", {**STEPS_FILES, **STEP_FILES[case]})
    assert difference(harbor, directory) is None


REWARDS = [
    "", "1", "0.5\n", " 1 ", "nan", "inf", "-1", "1e400", "one", "1_0", "0x1", "true", "[1]", "{}", '{"a": 1}',
    '{"a": NaN}', '{"a": 1e400}', '{"a": "1"}', '{"a": null}', '{"a": true, "b": 0.5}', '{"a": [1]}', '{"a": 1',
    '{"a": 1, "a": 2}', "[", '{"a": {"b": 1}}', "1 2", "\ufeff1", '{"": 1}', "9" * 300, '{"a": -0.0}',
]  # fmt: skip


def test_rewards_are_read_as_by_harbor(harbor: Harbor, tmp_path: Path) -> None:
    pairs: list[tuple[str | None, str | None]] = [(text, None) for text in REWARDS]
    pairs += [(None, text) for text in REWARDS] + [("1", text) for text in REWARDS] + [(None, None)]
    for text, json_text in pairs:
        try:
            ours = read_reward(text, json_text)
        except RewardError:
            ours = None
        assert ours == harbor.ask(text=text, json=json_text, folder=str(tmp_path)), (text, json_text)


def test_rewards_of_steps_are_combined_as_by_harbor(harbor: Harbor) -> None:
    steps: list[list[dict[str, float] | None]] = [
        [],
        [None],
        [{}],
        [{"reward": 1.0}],
        [{"reward": 1.0}, None],
        [{"reward": 1.0}, {"reward": 0.0}, {"form": 0.5}],
        [None, {"reward": 1.0, "form": 0.25}],
        [{"reward": 1.0}, {}],
    ]
    for rewards in steps:
        for strategy in (None, "mean", "final"):
            ours = combine(rewards, strategy)
            assert ours == harbor.ask(steps=rewards, strategy=strategy), (rewards, strategy)
