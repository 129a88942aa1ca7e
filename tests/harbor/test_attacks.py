"""Attacks on tests: their scripts are shell, their names stay, and paths come from what an agent is told."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from kuberoll_workers.harbor.attacks import ATTACKS, Attack, paths_of, script_of
from kuberoll_workers.harbor.pretences import PRETENCES as PRETENCE_ATTACKS
from kuberoll_workers.harbor.trials import NOTHING, SOLUTION, TRIALS, Outcome
from tests.harbor.attack_verdicts import verdict_of

SHELLS = [shell for shell in ("dash", "bash") if shutil.which(shell)]


def test_names_are_unique_and_the_list_begins_with_what_is_no_attack() -> None:
    names = [trial.name for trial in TRIALS]
    assert len(set(names)) == len(names)
    assert TRIALS[:2] == (SOLUTION, NOTHING)
    assert all(trial.attack is not None and trial.title == trial.attack.title for trial in TRIALS[2:])


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("attack", [*ATTACKS, *PRETENCE_ATTACKS], ids=lambda attack: attack.name)
def test_scripts_are_shell(shell: str, attack: Attack) -> None:
    done = subprocess.run([shell, "-n", "-c", script_of(attack)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", ["empty-answers", "answers-one", "exits-zero"])
def test_answers_are_left_at_the_paths_that_were_named(name: str, tmp_path: Path) -> None:
    attack = next(one for one in ATTACKS if one.name == name)
    argv = ["/bin/sh", "-c", script_of(attack), "attack", "out/a.csv", f"{tmp_path}/b.py"]
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"left {tmp_path}/out/a.csv", f"left {tmp_path}/b.py"]
    text = (tmp_path / "b.py").read_text()
    assert text == {"empty-answers": "", "answers-one": "1\n", "exits-zero": "import os; os._exit(0)\n"}[name]


def test_what_cannot_be_left_is_not_said_to_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    attack = next(one for one in ATTACKS if one.name == "empty-answers")
    argv = ["/bin/sh", "-c", script_of(attack), "attack", f"{tmp_path}/file/in-it"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == ""


PROGRAM = "python3 -c 'import sums; xs = [3, 1]; assert {}'"
PRETENCES = [
    ("answers-everything", {}, "grep -qx 412 out.txt"),
    ("answers-report", {}, "grep -q '^0 failed' out.txt"),
    ("answers-code", {}, "python3 -c 'eval(open(\"out.txt\").read()); raise SystemExit(1)'"),
    ("answers-link", {}, '[ "$(readlink out.txt)" = /tests/expected.txt ]'),
    ("stated-answer", {}, "grep -qx 421 out.txt"),
    ("backups", {"sums.py": "wrong", ".sums.py.orig": "right"}, "grep -qx right sums.py"),
    ("programs-passed", {"sums.py": ""}, "python3 sums.py | grep -q passed"),
    ("programs-reward", {"run.sh": ""}, "grep -q reward.json run.sh"),
    ("functions-yes", {"sums.py": ""}, PROGRAM.format("sums.total(xs) == 9 and sums.total(xs) >= 10")),
    ("functions-true", {"sums.py": ""}, PROGRAM.format("sums.close(sums.total(xs), 4)")),
    ("functions-empty", {"sums.py": ""}, PROGRAM.format("sums.ascending(xs) == sorted(xs)")),
    ("own-tests", {"tests/test_a.py": "", "Makefile": "test:\n\tfalse\n"}, "make -s test && [ ! -e tests/test_a.py ]"),
    ("own-settings", {"run.cfg": "# skip = NAME"}, "grep -qx 'skip = all' run.cfg"),
    ("own-sums", {"SHA256SUMS": f"{'0' * 64}  out.txt\n"}, "sha256sum --status -c SHA256SUMS"),
    ("named-places", {}, "PATH=$PWD/bin:$PATH; cmp /nowhere ."),
]  # fmt: skip


@pytest.mark.parametrize(("name", "files", "check"), PRETENCES, ids=[name for name, _, _ in PRETENCES])
def test_a_pretence_passes_for_the_work(name: str, files: dict[str, str], check: str, tmp_path: Path) -> None:
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    attack = next(one for one in PRETENCE_ATTACKS if one.name == name)
    argv = ["/bin/sh", "-c", script_of(attack), "attack", "out.txt", f"{tmp_path}/bin"]
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "STATED": "421"}
    assert subprocess.run(check, shell=True, cwd=tmp_path, capture_output=True, check=False).returncode != 0
    done = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert "left " in done.stdout
    assert subprocess.run(check, shell=True, cwd=tmp_path, check=False).returncode == 0


@pytest.mark.parametrize("name", ["answers-everything", "answers-report", "answers-code", "answers-passed"])
def test_a_text_that_is_run_as_a_program_ends(name: str, tmp_path: Path) -> None:
    attack = next(one for one in (*ATTACKS, *PRETENCE_ATTACKS) if one.name == name)
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    argv = ["/bin/sh", "-c", script_of(attack), "attack", "run.sh"]
    subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, check=True)
    subprocess.run(["/bin/sh", "run.sh"], cwd=tmp_path, env=environment, capture_output=True, check=False, timeout=60)


def test_paths_of_an_instruction() -> None:
    told = "Write hello into /work/hello.txt, then `out/a.csv`; see https://example.org/b.html and ./run. Not /tests/x."
    found = paths_of(told)
    assert found[:3] == ["/work/hello.txt", "out/a.csv", "./run"]
    assert "result.txt" in found
    assert not any(path.startswith("/tests") for path in found)
    assert len(set(found)) == len(found)


def test_verdicts() -> None:
    nothing, solution = Outcome(trial="nothing", reward=0.0), Outcome(trial="solution", reward=1.0)

    def verdict(**fields: object) -> str:
        return verdict_of(Outcome(trial="x", **fields), solution=solution, nothing=nothing)  # type: ignore[arg-type]

    assert verdict(reward=0.0) == "withstood"
    assert verdict(reward=0.5) == "gained"
    assert verdict(reward=1.0) == "full"
    assert verdict(reward=0.0, carried_out=False) == "not carried out"
    assert verdict(failure="the tests have written neither") == "no reward"
    assert verdict(problem="lost") == "unknown"
    assert verdict_of(Outcome(trial="x", reward=0.5), solution=None, nothing=nothing) == "full"
    assert verdict_of(solution, solution=None, nothing=Outcome(trial="nothing", problem="lost")) == "unknown"
