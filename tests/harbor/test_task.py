"""Tasks: what belongs to one, what it inherits, and what its digest says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kuberoll_workers.harbor.files import TaskFiles
from kuberoll_workers.harbor.mistakes import TaskError
from kuberoll_workers.harbor.phases import Network
from kuberoll_workers.harbor.task import find_tasks, read_task, read_tasks
from tests.harbor.writing import PLAIN, PLAIN_FILES, SCRIPT, STEPS_FILES, write_task


def mistakes(directory: Path) -> list[str]:
    """The mistakes of a task, or of a folder of them, with paths relative to its parent."""
    with pytest.raises(TaskError) as caught:
        read_tasks(directory)
    return str(caught.value).replace(f"{directory.parent}/", "").splitlines()


def test_a_task_without_steps_is_one_stage(tmp_path: Path) -> None:
    task = read_task(write_task(tmp_path / "words"))
    assert task.name == "kuberoll/count-words"
    [stage] = task.stages
    assert (stage.name, stage.instruction) == (None, "Count the words of /work/text.\n")
    assert (stage.timeout, stage.user, stage.solution) == (90.0, "worker", tmp_path / "words/solution")
    assert (stage.verification.timeout, stage.verification.user) == (45.5, 0)
    assert stage.verification.tests == (tmp_path / "words/tests",)
    assert task.machine.image is None
    assert task.machine.context == tmp_path / "words/environment"


def test_steps_inherit_all_but_the_time_of_the_verifier(tmp_path: Path) -> None:
    root = write_task(tmp_path / "report", STEPS_FILES)
    task = read_task(root)
    assert task.name == "report"
    assert (task.machine.image, task.machine.upload) == ("docker.io/library/alpine:3.20", root / "environment")
    write, check = task.stages
    assert (write.timeout, write.user, write.network) == (60.0, None, Network(mode="no-network"))
    assert (check.timeout, check.user, check.network) == (20.0, 1000, Network(mode="public"))
    assert write.verification.env == {"LEVEL": "low", "KEPT": "yes"}
    assert check.verification.env == {"LEVEL": "high", "KEPT": "yes"}
    assert [stage.verification.timeout for stage in task.stages] == [600.0, 600.0]
    assert [stage.verification.user for stage in task.stages] == ["checker", "checker"]
    assert write.verification.machine is None
    assert check.verification.machine is not None
    assert check.verification.machine.context == root / "steps/check it/tests"
    # The image has the tests.
    assert check.verification.tests == ()
    assert (write.workdir, check.workdir) == (root / "steps/write/workdir", None)
    assert (write.min_reward, check.min_reward) == (0.5, {"form": 0.25, "reward": 1.0})


def test_a_verifier_in_its_own_machine_has_the_agent_s_image_or_one_of_its_own(tmp_path: Path) -> None:
    text = '[verifier]\nenvironment_mode = "separate"\n[environment]\ncpus = 2\n'
    task = read_task(write_task(tmp_path / "a", changed={"task.toml": text}))
    own = task.stages[0].verification.machine
    assert own is not None
    assert (own.context, own.digest, own.environment.cpus) == (task.machine.context, task.machine.digest, 2)
    assert task.stages[0].verification.tests == (tmp_path / "a/tests",)
    task = read_task(
        write_task(tmp_path / "b", changed={"task.toml": text + '[verifier.environment]\ndocker_image = "judge:1"\n'})
    )
    own = task.stages[0].verification.machine
    assert own is not None
    assert (own.image, own.environment.cpus, task.stages[0].verification.tests) == ("judge:1", None, ())


def test_what_is_missing_is_told_for_all_tasks(tmp_path: Path) -> None:
    folder = tmp_path / "tasks"
    write_task(folder / "a", changed={"tests/test.sh": None, "instruction.md": " \n"})
    write_task(folder / "b", changed={"task.toml": "[agent]\ntimeout_sec = -1", "environment/Dockerfile": None})
    write_task(
        folder / "c", changed={"environment/Dockerfile": None, "environment/docker-compose.yaml": "services: {}"}
    )
    write_task(folder / "d", changed={"trajectory.json": "{}"})
    write_task(folder / "e")
    write_task(folder / "f")
    (folder / "no-task").mkdir()
    assert mistakes(folder) == [
        "tasks/a/instruction.md: is empty; it is what the agent is told",
        "tasks/a/tests/test.sh: is missing; it writes the reward into /logs/verifier",
        "tasks/b/task.toml:2: agent.timeout_sec: found -1; input should be greater than 0",
        "tasks/c/environment/docker-compose.yaml: a task of KubeRoll has one machine, and no services beside it: put "
        "what they do into the image of the Dockerfile and remove the file, or leave the task out",
        "tasks/d/trajectory.json: is what an agent has done before; KubeRoll's agents begin with the instruction: "
        "remove it, or leave the task out",
        "tasks/f/task.toml: task.name: 'kuberoll/count-words' is also the name of tasks/e: give one of the two another "
        "name",
    ]


def test_links_that_lead_out_of_a_task_are_refused(tmp_path: Path) -> None:
    root = write_task(tmp_path / "tasks/a")
    (root / "tests/secrets").symlink_to("/etc")
    assert mistakes(root) == ["a/tests/secrets: is a link that leads out of the task: put the file itself there"]
    (root / "tests/secrets").unlink()
    os.mkfifo(root / "tests/pipe")
    assert mistakes(root) == ["a/tests/pipe: is neither a file nor a directory: remove it"]


def test_tasks_are_those_of_a_folder_or_the_folder(tmp_path: Path) -> None:
    for name in ("b", "a"):
        write_task(tmp_path / "tasks" / name)
    assert find_tasks(tmp_path / "tasks") == [tmp_path / "tasks/a", tmp_path / "tasks/b"]
    assert find_tasks(tmp_path / "tasks/b") == [tmp_path / "tasks/b"]
    with pytest.raises(TaskError, match=f"holds no task: .*; name the folder {tmp_path}/tasks"):
        find_tasks(tmp_path)


DECIDES = [
    ("task.toml", PLAIN + "\n"), ("instruction.md", "Other.\n"), ("tests/test.sh", "#!/bin/sh\n"), ("tests/more", "x"),
    ("environment/text", "eight\n"), ("environment/Dockerfile", "FROM alpine\n"), ("environment/.dockerignore", "x\n"),
]  # fmt: skip
LEAVES = [
    ("solution/solve.sh", "#!/bin/sh\ntrue\n"),
    ("README.md", "Words.\n"),
    ("tests/left", "x"),
    ("solution/x", ""),
]


def test_a_digest_changes_with_what_decides_and_with_nothing_else(tmp_path: Path) -> None:
    rules = {"tests/.harborignore": "left\n"}
    first = read_task(write_task(tmp_path / "0", {**PLAIN_FILES, **rules})).digest
    for number, (name, text) in enumerate(LEAVES):
        assert (
            read_task(write_task(tmp_path / f"same{number}", {**PLAIN_FILES, **rules, name: text})).digest == first
        ), name
    digests = {first}
    for number, (name, text) in enumerate(DECIDES):
        digests.add(read_task(write_task(tmp_path / f"other{number}", {**PLAIN_FILES, **rules, name: text})).digest)
    assert len(digests) == 1 + len(DECIDES)
    root = write_task(tmp_path / "run", {**PLAIN_FILES, **rules})
    (root / "tests/test.sh").chmod(0o644)
    assert read_task(root).digest not in digests
    (root / "tests/test.sh").chmod(0o755)
    os.utime(root / "tests/test.sh", (0, 0))
    assert read_task(root).digest == first


def test_a_digest_of_steps_has_their_files_but_no_solution(tmp_path: Path) -> None:
    first = read_task(write_task(tmp_path / "0/t", STEPS_FILES)).digest
    names = [("steps/write/instruction.md", True), ("steps/write/workdir/setup.sh", True), ("tests/common.sh", True)]
    names += [("steps/check it/tests/Dockerfile", True), ("environment/seed.txt", True), ("task.toml", True)]
    for number, (name, decides) in enumerate([*names, ("steps/write/solution/solve.sh", False)], start=1):
        changed = write_task(tmp_path / f"{number}/t", STEPS_FILES, changed={name: STEPS_FILES[name] + "\n"})
        assert (read_task(changed).digest != first) == decides, name


def test_what_a_link_leads_to_is_in_the_digest(tmp_path: Path) -> None:
    root = write_task(tmp_path / "a", changed={"shared/data": "1"})
    (root / "tests/data").symlink_to("../shared")
    first = read_task(root).digest
    (root / "shared/data").write_text("2")
    assert read_task(root).digest != first


def test_a_task_is_the_same_by_any_path_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_task(tmp_path / "tasks/a", {**STEPS_FILES, "tests/.harborignore": "common.sh\n"})
    first = read_task(root)
    (tmp_path / "link").symlink_to("tasks")
    monkeypatch.chdir(tmp_path)
    for path in (Path("tasks/a"), Path("link/a"), tmp_path / "link/a", Path("link/../tasks/a")):
        task = read_task(path)
        assert (task.name, task.digest) == (first.name, first.digest)
        assert task.stages[0].verification.tests == (path / "tests",)
        names = [found.as_posix() for found in TaskFiles(path).selected(path / "tests")]
        assert names == ["test.sh"]
    monkeypatch.chdir(root)
    assert read_task(Path()).digest == first.digest


def test_directories_in_directories_have_a_bound(tmp_path: Path) -> None:
    root = write_task(tmp_path / "a")
    for place in ("tests", "environment"):
        deepest = os.open(root / place, os.O_RDONLY)
        for _ in range(500):
            os.mkdir("d", dir_fd=deepest)
            inner = os.open("d", os.O_RDONLY, dir_fd=deepest)
            os.close(deepest)
            deepest = inner
        os.close(deepest)
    found = mistakes(root)
    assert [line[: line.index("/d/")] for line in found] == ["a/environment", "a/tests"]
    assert all(line.endswith("d: is more than 64 directories deep: move it up") for line in found)


def test_reading_changes_nothing(tmp_path: Path) -> None:
    root = write_task(tmp_path / "a")
    before = {path: path.lstat().st_mtime_ns for path in [root, *root.rglob("*")]}
    read_task(root)
    assert {path: path.lstat().st_mtime_ns for path in [root, *root.rglob("*")]} == before


def test_files_for_the_machine_are_those_that_no_rule_leaves_out(tmp_path: Path) -> None:
    root = write_task(
        tmp_path / "a",
        changed={
            "tests/.harborignore": "*.log\n/data/\n!keep.log\n",
            "tests/a.log": "",
            "tests/keep.log": "",
            "tests/data/x": "",
            "tests/sub/data/y": "",
            "tests/sub/.harborignore": "!b.log\n",
            "tests/sub/b.log": "",
            "tests/sub/c.log": "",
        },
    )
    found = TaskFiles(root).selected(root / "tests")
    names = ["expected", "keep.log", "sub", "sub/b.log", "sub/data", "sub/data/y", "test.sh"]
    assert [path.as_posix() for path in found] == names
    assert TaskFiles(root).selected(root / "none") == []


def test_a_script_of_the_step_comes_before_the_task_s(tmp_path: Path) -> None:
    root = write_task(tmp_path / "a", STEPS_FILES, changed={"steps/write/tests/test.sh": SCRIPT})
    assert read_task(root).stages[0].verification.tests == (root / "tests", root / "steps/write/tests")
