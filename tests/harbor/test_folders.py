"""Tasks without an image, in directories and in rows: how they are read, set up and scored, and what stays hidden."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import zipfile
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_api.cli import main
from kuberoll_api.model.sandboxes import Sandbox as SandboxOptions
from kuberoll_workers.dataset.rows import DatasetError
from kuberoll_workers.environments.agents.episode import AgentEpisode
from kuberoll_workers.environments.interface import UnusableRow
from kuberoll_workers.harbor.agents import Agent, NoAgent, OracleAgent, Work
from kuberoll_workers.harbor.checking import Checked, check_tasks
from kuberoll_workers.harbor.dataset import TASKS
from kuberoll_workers.harbor.environment import directory_of
from kuberoll_workers.harbor.machines import Reach, check_task, setup_reach, spec_of
from kuberoll_workers.harbor.mistakes import TaskError
from kuberoll_workers.harbor.playing import Player, TaskResult
from kuberoll_workers.harbor.rows import FIELD, row_of
from kuberoll_workers.harbor.setting_up import SetUpFailed
from kuberoll_workers.harbor.setup import bad_requirements, needs_index
from kuberoll_workers.harbor.task import find_tasks, read_task, read_tasks
from kuberoll_workers.sandboxes.images.references import HOST
from kuberoll_workers.sandboxes.leases import Sandboxes
from kuberoll_workers.sandboxes.namespaces.host import problem
from tests.harbor.writing import PLAIN_FILES, write_task
from tests.sandboxes.conftest import busybox, cache, sandboxes  # noqa: F401 - fixtures

SCRIPT = '[ "$(cat answer.txt)" = 42 ] && r=1 || r=0\necho $r > /logs/verifier/reward.txt\n'
NO_NETWORK = '[environment]\nnetwork_mode = "no-network"\n'
FILES: Mapping[str, str | None] = {
    "instruction.md": "Write the answer to answer.txt.\n",
    "files/question.txt": "six by seven\n",
    "tests/test.sh": SCRIPT,
    "tests/hidden.txt": "the word of the tests\n",
    "solution/solve.sh": "echo 42 > answer.txt\n",
}


def machine_of(directory: Path | None, row: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """MACHINE of a task, as a row of a file describes it; of a directory without a row."""
    if row is None:
        assert directory is not None
        found = row_of(read_task(directory), str(directory))
    else:
        found = TASKS.complete({"prompt": "Do it.", "metadata": {"task": row}}, row, directory or Path("/"))
    machine: dict[str, Any] = found["metadata"][FIELD]["machine"]
    return machine


def test_a_directory_without_a_task_toml_is_a_task(tmp_path: Path) -> None:
    write_task(tmp_path / "tasks" / "one", FILES, {"setup.sh": "true\n", "requirements.txt": "numpy\n"})
    (tmp_path / "tasks" / "notes").mkdir()
    assert TASKS.holds(tmp_path / "tasks")
    assert find_tasks(tmp_path / "tasks") == [tmp_path / "tasks" / "one"]
    [(_, row)] = TASKS.rows(tmp_path / "tasks", "tasks")
    assert isinstance(row, dict)
    assert row["messages"] == [{"role": "user", "content": "Write the answer to answer.txt.\n"}]
    task = row["metadata"][FIELD]
    assert (task["task"], task["directory"]) == ("one", "tasks/one")
    assert task["machine"] == {
        "start_timeout": 600.0,
        "network": {"mode": "no-network"},
        "upload": "files",
        "setup": {"requirements": "requirements.txt", "indexed": True, "script": "setup.sh", "timeout": 600.0},
    }


def test_its_digest_is_of_all_that_sets_it_up(tmp_path: Path) -> None:
    digests = set()
    for number, changed in enumerate(
        (
            {},
            {"files/question.txt": "seven by six\n"},
            {"setup.sh": "true\n"},
            {"requirements.txt": "numpy\n"},
            {"wheels/a.whl": ""},
            {"tests/hidden.txt": ""},
            {"solution/solve.sh": "true\n"},
        )
    ):
        digests.add(read_task(write_task(tmp_path / str(number), FILES, changed)).digest)
    # Solutions do not count.
    assert len(digests) == 6


def test_a_task_of_harbor_is_set_up_by_its_image_alone(tmp_path: Path) -> None:
    own = {"setup.sh": "true\n", "requirements.txt": "-r nonsense\n", "files/a": "a\n"}
    task = read_task(write_task(tmp_path / "harbor", PLAIN_FILES, own))
    assert task.digest == read_task(write_task(tmp_path / "plain", PLAIN_FILES)).digest
    assert (task.machine.setup, task.machine.upload) == (None, None)
    # Who writes the table has read KubeRoll's pages.
    toml = f"{PLAIN_FILES['task.toml']}\n[setup]\ntimeout_sec = 5\n"
    changed = {**own, "task.toml": toml, "requirements.txt": None}
    setup = read_task(write_task(tmp_path / "ours", PLAIN_FILES, changed)).machine.setup
    assert setup is not None
    assert setup.options.timeout_sec == 5


@pytest.mark.parametrize(
    ("changed", "mistake"),
    [
        ({"tests/test.sh": None}, "tests/test.sh: is missing; it writes the reward"),
        ({"instruction.md": None}, "instruction.md: is missing"),
        ({"requirements.txt": "numpy\n-r more.txt\n"}, "requirements.txt:2: found '-r more.txt'; the machine gets"),
        ({"requirements.txt": "num py\n"}, "requirements.txt:1: found 'num py'; write the name of a distribution"),
        ({"setup.sh/file": ""}, "setup.sh: is no file"),
        ({"environment/data.txt": ""}, "files: and environment both have files"),
    ],
)
def test_what_is_wrong_with_one_is_told(tmp_path: Path, changed: dict[str, str | None], mistake: str) -> None:
    write_task(tmp_path / "task", FILES, changed)
    with pytest.raises(TaskError) as raised:
        read_tasks(tmp_path / "task")
    assert mistake in str(raised.value)


def test_a_row_says_what_its_directory_does_not(tmp_path: Path) -> None:
    write_task(tmp_path / "task", FILES)
    row = {
        "directory": "task",
        "environment": {"docker_image": "debian:12", "cpus": 2, "workdir": "/app", "network_mode": "no-network"},
        "agent": {"user": "app", "timeout_sec": 9},
        "files": {"data/more.txt": "more\n"},
        "tests": {"expected.txt": "42\n"},
        "setup": {"script": "make", "timeout_sec": 7, "env": {"CC": "cc"}},
        "requirements": ["numpy==2.2.1", "rich"],
    }
    given = {"task_id": "t", "prompt": "Go.", "metadata": {"task": row, "level": 3}}
    found = TASKS.complete(given, row, tmp_path)
    assert found["metadata"]["level"] == 3
    assert "task" not in found["metadata"]
    assert found["prompt"] == "Go."
    task = found["metadata"][FIELD]
    assert (task["task"], task["directory"]) == ("t", "task")
    assert task["machine"] == {
        "image": "debian:12",
        "cpus": 2,
        "workdir": "/app",
        "start_timeout": 600.0,
        "network": {"mode": "no-network"},
        "upload": "files",
        "setup": {
            "files": {"data/more.txt": "more\n"},
            "packages": "numpy==2.2.1\nrich",
            "indexed": True,
            "commands": "make",
            "timeout": 7.0,
            "env": {"CC": "cc"},
        },
    }
    [step] = task["steps"]
    assert step["agent"] == {"timeout": 9.0, "user": "app", "network": {"mode": "no-network"}}
    assert (step["verifier"]["tests"], step["verifier"]["files"]) == (["tests"], {"expected.txt": "42\n"})
    # What a row says is part of what decides.
    other = {**row, "files": {}}
    assert TASKS.complete(given, other, tmp_path)["metadata"][FIELD]["digest"] != task["digest"]
    # Without a prompt it is the directory's.
    bare = {"metadata": {"task": {"directory": "task"}}}
    assert TASKS.complete(bare, bare["metadata"]["task"], tmp_path)["messages"][0]["content"] == FILES["instruction.md"]


@pytest.mark.parametrize(
    ("row", "mistake"),
    [
        ({}, "has neither a directory nor tests"),
        ({"directory": "none"}, "none: is no directory"),
        ({"tests": {"other.sh": ""}}, "tests/test.sh is missing"),
        ({"tests": {"/test.sh": ""}}, "tests: '/test.sh' is absolute"),
        ({"tests": {"test.sh": ""}, "files": {"../up": ""}}, "files: '../up' is no path of a file"),
        ({"tests": {"test.sh": ""}, "image": "debian"}, "image: is no field of a task; these are: directory"),
        ({"tests": {"test.sh": ""}, "environment": {"image": "debian"}}, "environment.image: is no field of the table"),
        ({"tests": {"test.sh": ""}, "environment": {"cpus": "two"}}, 'environment.cpus: found "two"'),
        ({"tests": {"test.sh": ""}, "requirements": "num py"}, "requirements: found 'num py'"),
        ({"tests": {"test.sh": ""}, "setup": {"script": 1}}, "setup: script must be a text"),
    ],
)
def test_what_is_wrong_with_a_row_is_told(tmp_path: Path, row: dict[str, Any], mistake: str) -> None:
    with pytest.raises(DatasetError) as raised:
        TASKS.complete({"prompt": "Do it.", "metadata": {"task": row}}, row, tmp_path)
    assert mistake in str(raised.value)
    assert "metadata.task" in str(raised.value) or "none" in mistake


def test_validate_reads_the_tasks_of_rows(tmp_path: Path) -> None:
    write_task(tmp_path / "tasks" / "one", FILES)
    rows: list[dict[str, Any]] = [
        {"prompt": "Do it.", "metadata": {"task": {"directory": "tasks/one"}}},
        {"metadata": {"task": {"directory": "tasks/one"}}},
        {"prompt": "Do it.", "metadata": {"task": {"directory": "tasks/two"}}},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "job.yaml").write_text(
        "apiVersion: kuberoll.io/v1alpha1\nkind: RolloutJob\nmetadata: {name: rows}\nspec:\n"
        "  generation: {model: {source: Qwen/Qwen3-1.7B}, toolCallParser: hermes}\n"
        "  environments: [{name: tasks, agent: {command: [solve]}, sandbox: {}}]\n"
        "  dataset: {source: {uri: rows.jsonl}}\n"
    )
    command = ["validate", "--dataset", str(tmp_path / "job.yaml")]
    result = CliRunner().invoke(main, command, env={"KUBEROLL_SANDBOX_DRIVER": "namespaces"})
    if "sandbox:" in result.output:
        pytest.skip(result.output)
    assert f"rows.jsonl:3: {tmp_path}/tasks/two: is no directory" in result.output
    assert "rows.jsonl:1" not in result.output
    assert "rows.jsonl:2" not in result.output


def test_without_an_image_it_is_the_jobs_or_the_hosts_root() -> None:
    machine = machine_of(None, {"tests": {"test.sh": ""}})
    nothing = Reach("None")
    assert spec_of(machine, SandboxOptions(), {}, network=nothing).image == HOST
    assert spec_of(machine, SandboxOptions(image="debian:12"), {}, network=nothing).image == "debian:12"
    with pytest.raises(UnusableRow, match="kuberoll images build"):
        spec_of({"build": {"digest": "0" * 64}}, SandboxOptions(), {}, network=nothing)


def options(mode: str, *hosts: str) -> SandboxOptions:
    return SandboxOptions.model_validate({"network": {"mode": mode, "allowedHosts": list(hosts)}})


def test_a_set_up_may_reach_what_the_agent_may_not() -> None:
    row: dict[str, Any] = {
        "tests": {"test.sh": ""},
        "requirements": "numpy",
        "setup": {"network_mode": "allowlist", "allowed_hosts": ["pypi.org"]},
    }
    machine, usual = machine_of(None, row), Reach("None")
    given = options("Allowlist", "pypi.org", "example.org").network
    assert setup_reach(machine, usual, given) == Reach("Allowlist", ("pypi.org",))
    with pytest.raises(UnusableRow, match="allowedHosts does not have"):
        setup_reach(machine, usual, options("Allowlist", "example.org").network)
    with pytest.raises(UnusableRow, match="its set-up reaches none: put the distributions"):
        setup_reach(machine, usual, options("None").network)
    public = machine_of(None, {**row, "setup": {"network_mode": "public"}})
    assert setup_reach(public, usual, given) == Reach("Allowlist", ("pypi.org", "example.org"))
    with pytest.raises(UnusableRow, match="name the hosts that it needs"):
        setup_reach(public, usual, options("All").network)


def test_requirements_that_cannot_be_had_are_refused_before_anything_starts(tmp_path: Path) -> None:
    write_task(tmp_path / "task", FILES, {"requirements.txt": "numpy\n"})
    task = row_of(read_task(tmp_path / "task"), "task")["metadata"][FIELD]
    with pytest.raises(UnusableRow, match="wheels/"):
        check_task(task, None)
    (tmp_path / "task" / "wheels").mkdir()
    check_task(row_of(read_task(tmp_path / "task"), "task")["metadata"][FIELD], None)


NAMES = st.from_regex(r"[a-z][a-z0-9]{0,8}", fullmatch=True)


@given(st.lists(st.tuples(NAMES, st.sampled_from(["", "==1.0", ">=2,<3", "[all]", " @ https://example.org/x.zip"]))))
def test_usual_requirements_are_good(parts: list[tuple[str, str]]) -> None:
    text = "# comment\n\n" + "\n".join(name + rest for name, rest in parts)
    assert list(bad_requirements(text)) == []
    assert needs_index(text) == bool(parts)


# In machines.

Playing = Callable[..., Awaitable[TaskResult]]


class Script:
    """An agent that is a function of the test's."""

    def __init__(self, act: Callable[[Work], Awaitable[None]]) -> None:
        self._act = act

    async def work(self, work: Work) -> None:
        await self._act(work)


@pytest.fixture
def play(sandboxes: Sandboxes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Playing:  # noqa: F811
    """Play a folder of the test's, or a row, on the host's own root."""
    # Where a job's own modules are, its tasks are.
    monkeypatch.syspath_prepend(tmp_path)
    if (reason := problem()) is not None:
        pytest.skip(reason)

    async def played(
        agent: Agent | Callable[[Work], Awaitable[None]] | None = None,
        *,
        changed: Mapping[str, str | None] | None = None,
        row: Mapping[str, Any] | None = None,
        job: SandboxOptions | None = None,
    ) -> TaskResult:
        folder = tmp_path / "folder"
        if row is None:
            write_task(folder, FILES, changed or {})
            made = row_of(read_task(folder), str(folder))
        else:
            made = TASKS.complete({"prompt": "Do it.", "metadata": {"task": row}}, row, tmp_path)
        task = made["metadata"][FIELD]
        player = Player(sandboxes=sandboxes, options=job or SandboxOptions(), variables={}, agent_seconds=60)
        episode = AgentEpisode(
            id="one",
            messages=[],
            metadata={},
            tools=None,
            config={},
            seed=1,
            base_url="",
            anthropic_base_url="",
            token="",
            model="",
        )
        chosen = NoAgent() if agent is None else agent if hasattr(agent, "work") else Script(agent)
        return await player.play(task, directory_of(task), chosen, episode)

    return played


@pytest.mark.processes
@pytest.mark.slow
async def test_a_folder_is_played_without_an_image(play: Playing) -> None:
    seen: list[str] = []

    async def look(work: Work) -> None:
        seen.append((await work.sandbox.exec("pwd; ls; cat made.txt; ls -A / | grep setup", merged=True)).text)

    changed = {"setup.sh": "cat question.txt > made.txt\n"}
    assert (await play(look, changed=changed)).rewards == {"reward": 0.0}
    assert seen == ["/work\nmade.txt\nquestion.txt\nsix by seven\n"]
    assert (await play(OracleAgent(), changed=changed)).rewards == {"reward": 1.0}


@pytest.mark.processes
@pytest.mark.slow
async def test_no_command_of_the_policy_reads_the_tests(play: Playing, tmp_path: Path) -> None:
    """Hidden tests come when nothing of the policy runs any more, and are nowhere before."""
    found: list[str] = []
    search = (
        f"ls -a /tests /.setup {tmp_path} 2>&1; cat /tests/hidden.txt {tmp_path}/folder/tests/hidden.txt 2>&1;"
        "grep -rsl 'w[o]rd of the tests' / --exclude-dir=proc --exclude-dir=sys --exclude-dir=usr;"
        "for p in /proc/[0-9]*; do cat $p/environ $p/cmdline; ls -l $p/root/tests $p/fd; done 2>/dev/null"
    )
    # One that goes on, in a session of its own, and writes what it finds where later commands would find it.
    waiting = (
        "setsid sh -c 'while true; do cat /tests/* > /work/stolen.txt 2>/dev/null && cp /work/stolen.txt /tmp; "
        "ln -s /tests/hidden.txt /work/answer.txt; done' >/dev/null 2>&1 &"
    )

    async def attack(work: Work) -> None:
        found.append((await work.sandbox.exec(search, merged=True, timeout=120)).text)
        await work.sandbox.exec(waiting)

    # The tests say whether somebody has read them.
    script = (
        "i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done\n"
        "{ [ -e /work/stolen.txt ] && [ -s /work/stolen.txt ]; } && r=1 || r=0\n"
        "pgrep -f setsid && r=1\necho $r > /logs/verifier/reward.txt\n"
    )
    row = {"directory": "folder", "tests": {"test.sh": script, "inline.txt": "the word of the tests, too\n"}}
    write_task(tmp_path / "folder", FILES)
    assert (await play(attack, row=row)).rewards == {"reward": 0.0}
    [text] = found
    assert "word of the tests" not in text
    assert f"ls: cannot access '{tmp_path}': No such file or directory" in text
    assert "ls: cannot access '/tests': No such file or directory" in text


@pytest.mark.processes
@pytest.mark.slow
async def test_a_row_without_a_directory(play: Playing, sandboxes: Sandboxes) -> None:  # noqa: F811
    row = {
        "files": {"question.txt": "?\n", "/etc/motd": "hello\n"},
        "tests": {"test.sh": f"grep -q hello /etc/motd && {SCRIPT}"},
        "setup": "cat question.txt > /opt/copied\nfalse || echo $LEVEL > answer.txt",
        "environment": {"env": {"LEVEL": "42"}},
    }
    assert (await play(row=row)).rewards == {"reward": 1.0}


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"setup.sh": "echo why; exit 3\n"}, "setup.sh ended with exit code 3; its output ends with\nwhy"),
        (
            {
                "setup.sh": "sleep 1000\n",
                "task.toml": '[environment]\nnetwork_mode="no-network"\n[setup]\ntimeout_sec=1\n',
            },
            r"longer than \[setup\] timeout_sec \(1 s\), and was at its scripts",
        ),
        (
            {"requirements.txt": "kuberoll-has-none\n", "wheels/README": ""},
            "the installation of the task's requirements ended with exit code 1.*No matching distribution",
        ),
    ],
)
async def test_a_set_up_that_fails_is_no_zero(play: Playing, changed: dict[str, str | None], reason: str) -> None:
    with pytest.raises(SetUpFailed, match=f"(?s){reason}"):
        await play(changed=changed)


def wheel(directory: Path, name: str, version: str) -> None:
    """Write a distribution of one module, which says its version."""
    directory.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": f"VERSION = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = []
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record.append(f"{path},sha256={digest},{len(text.encode())}")
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,", ""])
    with zipfile.ZipFile(directory / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)


@pytest.mark.processes
@pytest.mark.slow
async def test_two_tasks_pin_two_versions_of_a_package(play: Playing, tmp_path: Path) -> None:
    """As a reviewer tried, for whom both had the host's."""
    if shutil.which("python3", path="/usr/local/bin:/usr/bin") is None:
        pytest.skip("needs a python3 of the host")
    script = 'python3 -c "import pinned; print(pinned.VERSION)" > /logs/verifier/reward.txt\n'
    for version in ("1.5", "2.5"):
        wheel(tmp_path / "folder" / "wheels", "pinned", version)
    for version in ("1.5", "2.5"):
        changed = {"requirements.txt": f"pinned=={version}\n", "tests/test.sh": script}
        changed["setup.sh"] = f"python3 -c \"import pinned; assert pinned.VERSION == '{version}'\"\n"
        assert (await play(changed=changed)).rewards == {"reward": float(version)}


@pytest.mark.processes
@pytest.mark.slow
async def test_they_have_images_too(play: Playing, busybox: str) -> None:  # noqa: F811
    job = SandboxOptions(image=busybox)
    assert (await play(OracleAgent(), changed={"setup.sh": "busybox true\n"}, job=job)).rewards == {"reward": 1.0}
    with pytest.raises(SetUpFailed, match="the machine has no python3"):
        await play(changed={"requirements.txt": "pinned\n", "wheels/README": ""}, job=job)


@pytest.mark.processes
@pytest.mark.slow
async def test_tasks_without_an_image_are_checked(play: Playing, sandboxes: Sandboxes, tmp_path: Path) -> None:  # noqa: F811
    write_task(tmp_path / "tasks" / "good", FILES)
    write_task(tmp_path / "tasks" / "blind", FILES, {"tests/test.sh": "echo 1 > /logs/verifier/reward.txt\n"})
    found: list[Checked] = []
    await check_tasks(read_tasks(tmp_path / "tasks"), SandboxOptions(), sandboxes, parallel=2, done=found.append)
    assert {one.task: one.problem for one in found} == {
        "good": None,
        "blind": "the solution is worth no more than doing nothing: the tests do not see the difference",
    }


@pytest.mark.processes
@pytest.mark.slow
async def test_a_fault_of_ours_with_one_task_leaves_the_others(
    play: Playing,
    sandboxes: Sandboxes,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work(self: NoAgent, work: Work) -> None:
        if work.directory.name == "odd":
            raise AttributeError("nobody has thought of it")

    monkeypatch.setattr(NoAgent, "work", work)
    for name in ("good", "odd"):
        write_task(tmp_path / "tasks" / name, FILES)
    found: list[Checked] = []
    await check_tasks(read_tasks(tmp_path / "tasks"), SandboxOptions(), sandboxes, parallel=2, done=found.append)
    problems = {one.task: one.problem for one in found}
    assert problems["good"] is None
    assert "KubeRoll has failed, not the task: AttributeError: nobody has thought of it" in str(problems["odd"])


EXAMPLE = Path(__file__).parents[2] / "examples" / "folders"


@pytest.mark.processes
@pytest.mark.slow
async def test_the_example_s_tasks_can_be_solved(play: Playing, sandboxes: Sandboxes) -> None:  # noqa: F811
    found: list[Checked] = []
    await check_tasks(read_tasks(EXAMPLE), SandboxOptions(), sandboxes, parallel=1, done=found.append)
    assert [(one.task, one.problem, one.solution.reward, one.nothing.reward) for one in found] == [
        ("sums", None, 1.0, 0.0)
    ]
    rows = [json.loads(line) for line in (EXAMPLE / "rows.jsonl").read_text().splitlines()]
    assert [row["metadata"]["task"].get("directory") for row in rows] == ["sums", None]

    async def solve(work: Work) -> None:
        await work.sandbox.exec("sort lines.txt | grep six > longest.txt")

    inline = rows[1]["metadata"]["task"]
    assert (await play(solve, row=inline)).rewards == {"reward": 1.0}
    assert (await play(row=inline)).rewards == {"reward": 0.0}
