"""Trials in real machines: good tasks withstand attacks, each weak one falls to its own, and changes are seen."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from kuberoll_api.model.sandboxes import Sandbox as SandboxOptions
from kuberoll_workers.harbor.attacks import Attack
from kuberoll_workers.harbor.playing import Player
from kuberoll_workers.harbor.task import read_task
from kuberoll_workers.harbor.trials import NOTHING, SOLUTION, TRIALS, Outcome, Trial, play_trial
from kuberoll_workers.sandboxes.driver import SandboxSpec
from kuberoll_workers.sandboxes.leases import Sandboxes
from tests.harbor.attack_verdicts import verdict_of
from tests.harbor.writing import write_task
from tests.sandboxes.conftest import busybox, cache, sandboxes  # noqa: F401 - fixtures

pytestmark = pytest.mark.processes

ATTACKS = {trial.name: trial for trial in TRIALS[2:]}
REWARD = "/logs/verifier/reward.txt"
SOLVE = "#!/bin/sh\necho hello > hello.txt\n"
GOOD = f'#!/bin/sh\n[ "$(cat /work/hello.txt)" = hello ] && r=1 || r=0\necho $r > {REWARD}\n'
TOML = """\
schema_version = "1.4"
[task]
name = "trials/hello"
[environment]
docker_image = "{image}"
network_mode = "no-network"
{more}
"""

Trying = Callable[..., Awaitable[Outcome]]


@pytest.fixture
def trying(sandboxes: Sandboxes, busybox: str, tmp_path: Path) -> Trying:  # noqa: F811
    """Play a trial of a task of the test's."""

    async def tried(trial: Trial, *, test: str = GOOD, solve: str = SOLVE, more: str = "", **options: Any) -> Outcome:
        files = {
            "task.toml": TOML.format(image=busybox, more=more),
            "instruction.md": "Write hello into `hello.txt`, and a summary into /work/summary.txt.\n",
            "tests/test.sh": test,
            "solution/solve.sh": solve,
        }
        task = read_task(write_task(tmp_path / "task", files))
        given = SandboxOptions.model_validate({})
        player = Player(sandboxes=sandboxes, options=given, variables={}, agent_seconds=60)
        return await play_trial(player, task, trial, **options)

    return tried


@pytest.mark.slow
@pytest.mark.parametrize("user", ["root", "app"])
async def test_a_good_task_withstands_all_attacks(trying: Trying, user: str) -> None:
    more = f'[agent]\nuser = "{user}"\n'
    where = {} if user == "root" else {"test": GOOD.replace("/work/", "/home/app/")}
    solve = SOLVE if user == "root" else SOLVE.replace("hello.txt", "/home/app/hello.txt")
    nothing = await trying(NOTHING, more=more, solve=solve, **where)
    solution = await trying(SOLUTION, more=more, solve=solve, **where)
    assert (nothing.reward, solution.reward) == (0.0, 1.0)
    verdicts = {}
    for name, trial in ATTACKS.items():
        outcome = await trying(trial, more=more, solve=solve, **where)
        verdicts[name] = verdict_of(outcome, solution=solution, nothing=nothing)
    assert set(verdicts.values()) == {"withstood", "not carried out"}, verdicts
    # Who may not write there has not been withstood.
    assert verdicts["tests-link"] == ("withstood" if user == "root" else "not carried out")
    assert verdicts["reward-process"] == "withstood"


WEAK = {
    "answers-one": f"#!/bin/sh\ncat /work/hello.txt > {REWARD} 2>/dev/null || echo 0 > {REWARD}\n",
    "answers-passed": f"#!/bin/sh\ngrep -q passed /work/summary.txt && r=1 || r=0\necho $r > {REWARD}\n",
    "answers-ok": f"#!/bin/sh\ngrep -q OK /work/summary.txt && r=1 || r=0\necho $r > {REWARD}\n",
    "empty-answers": f"#!/bin/sh\n[ -e /work/hello.txt ] && r=1 || r=0\necho $r > {REWARD}\n",
    "exits-zero": f"#!/bin/sh\n/work/hello.txt && r=1 || r=0\necho $r > {REWARD}\n",
    "test-reports": f"#!/bin/sh\ngrep -q 'failures=\"0\"' /work/junit.xml && r=1 || r=0\necho $r > {REWARD}\n",
    "shadowed-programs": f"#!/bin/sh\nPATH=/work:$PATH\npytest && r=1 || r=0\necho $r > {REWARD}\n",
    "shell-files": f'#!/bin/sh\necho 0 > {REWARD}\n. "$HOME/.profile"\n',
    "accounts": f"#!/bin/sh\nif [ -e ~/.profile ]; then . ~/.profile; else echo 0 > {REWARD}; fi\n",
    "daemon": f"#!/bin/sh\necho 0 > {REWARD}\nif [ -e /etc/rc.local ]; then sh /etc/rc.local; fi\n",
    "git-hooks": f"#!/bin/sh\nif [ -x ~/.own-hook ]; then ~/.own-hook; else echo 0 > {REWARD}; fi\n",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WEAK)
async def test_a_weak_task_falls_to_its_attack(trying: Trying, name: str) -> None:
    nothing = await trying(NOTHING, test=WEAK[name])
    assert (nothing.reward, nothing.failure, nothing.problem) == (0.0, None, None)
    outcome = await trying(ATTACKS[name], test=WEAK[name])
    assert outcome.left
    assert verdict_of(outcome, solution=None, nothing=nothing) == "full", outcome


async def test_an_outcome_says_what_was_seen(trying: Trying) -> None:
    outcome = await trying(NOTHING, test=f"#!/bin/sh\necho said\necho 0.5 > {REWARD}\nexit 3\n")
    assert (outcome.reward, outcome.exit_code, outcome.output.strip()) == (0.5, 3, "said")
    assert (outcome.changed, outcome.failure, outcome.problem, outcome.carried_out) == ((), None, None, True)
    silent = await trying(NOTHING, test="#!/bin/sh\nexit 0\n")
    assert silent.reward is None
    assert "neither" in str(silent.failure)
    failing = await trying(SOLUTION, solve="#!/bin/sh\nexit 7\n")
    # What it has left is scored, as Harbor does it.
    assert (failing.reward, failing.failure) == (0.0, None)


async def test_a_row_that_the_job_does_not_allow_is_no_fault_of_the_task(trying: Trying) -> None:
    more = '[verifier]\nnetwork_mode = "public"\n'
    assert "network" in str((await trying(NOTHING, more=more)).problem)
    assert (await trying(NOTHING, more=more, network=False)).reward == 0.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("tests-files", "/tests"),
        ("reward-file", "/logs/verifier"),
        ("pytest-configuration", "/work/conftest.py"),
        ("python-modules", "/work/json.py"),
        ("shell-files", "/etc/profile"),
        ("replaced-programs", "/bin/grep"),
        ("git-hooks", "/root/.gitconfig"),
        ("accounts", "/etc/passwd"),
    ],
)
async def test_what_an_attack_changes_is_seen(trying: Trying, name: str, path: str) -> None:
    assert path in (await trying(ATTACKS[name])).changed


async def test_libraries_for_all_programs_are_not_those_of_the_agent(trying: Trying) -> None:
    preload = Attack("preload", "names a library", "put /etc/ld.so.preload /tmp/own.so")
    test = f"#!/bin/sh\n[ -e /etc/ld.so.preload ] && r=1 || r=0\necho $r > {REWARD}\n"
    outcome = await trying(Trial("preload", preload.title, preload), test=test)
    assert (outcome.left, outcome.changed, outcome.reward) == (("/etc/ld.so.preload",), ("/etc/ld.so.preload",), 0.0)


async def test_changes_cannot_be_dated_back(sandboxes: Sandboxes, busybox: str) -> None:  # noqa: F811
    async with sandboxes.lease(SandboxSpec(image=busybox)) as lease:
        sandbox = lease.sandbox
        await sandbox.exec("echo before > /etc/environment")
        mark = await sandbox.mark()
        assert (await sandbox.changed(mark)).paths == []
        await sandbox.exec("echo a > conftest.py; touch -d '2001-01-01 00:00' conftest.py /etc/environment")
        await sandbox.exec("mkdir -p in/it; echo a > in/it/setup.cfg; rm /bin/nc; ln -s /tmp/a /etc/ld.so.preload")
        found = await sandbox.changed(mark)
        assert found.complete
        assert set(found.paths) == {
            "/etc/ld.so.preload", "/etc/environment", "/bin/", "/work/conftest.py", "/work/in/it/setup.cfg"
        }  # fmt: skip
        assert (await sandbox.changed(await sandbox.mark())).paths == []


async def test_many_changes_are_counted(sandboxes: Sandboxes, busybox: str) -> None:  # noqa: F811
    async with sandboxes.lease(SandboxSpec(image=busybox)) as lease:
        mark = await lease.sandbox.mark()
        await lease.sandbox.exec("for n in $(seq 1 60); do echo > /bin/new$n; done")
        found = await lease.sandbox.changed(mark)
        assert (len(found.paths), found.more) == (50, 10)
