"""Programs of agents: what one episode, and one phase of it, can do to the next."""

from __future__ import annotations

import asyncio
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kuberoll_workers.environments import landlock
from kuberoll_workers.environments.agents.proxies import without_proxy
from kuberoll_workers.environments.outcome import EnvironmentFault, StepOutcome
from kuberoll_workers.environments.process_access import ProcessAccess
from tests.environments.agents_here import play, request
from tests.rollouts.fakes import until

needs_landlock = pytest.mark.skipif(landlock.abi() == 0, reason="this kernel has no Landlock")
PYTHON = sys.executable

# A daemon in a session of its own that writes a reward wherever an episode's programs may look for one.
FORGER = """
import glob, os, pathlib, time
if os.fork():
    os._exit(0)
os.setsid()
if os.fork():
    os._exit(0)
here = os.getcwd()
for _ in range(100000):
    for found in [here, *glob.glob(os.path.dirname(here) + "/kuberoll-*"), *glob.glob("/tmp/*/kuberoll-*")]:
        for name in ("result.json", "episode.json"):
            try:
                pathlib.Path(found, name).write_text('{"reward": 1.0, "metadata": {"answer": "forged"}}')
            except OSError:
                pass
    time.sleep(0.001)
"""
# Takes its time, prints the reward, and leaves no file.
SCORE = """
import json, os, time
assert json.load(open(os.environ["KUBEROLL_EPISODE"]))["metadata"] == {"answer": "mine"}, "forged"
time.sleep(0.3)
print(0.0)
"""


def marked(mark: str) -> list[int]:
    """Processes with a word of a test among their variables or arguments."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and mark in " ".join(
                [*process.cmdline(), *process.environ().values()]
            ):
                found.append(process.pid)
        except (psutil.Error, OSError):
            continue
    return [pid for pid in found if pid != os.getpid()]


def rewards(found: list[StepOutcome | EnvironmentFault]) -> list[Any]:
    return [item.reward if isinstance(item, StepOutcome) else str(item) for item in found]


@pytest.fixture
def mark() -> Iterator[str]:
    """A word for the arguments of an episode's processes, of which none is left."""
    word = f"mark-{random.getrandbits(64):x}"
    yield word
    assert marked(word) == [], "processes of an episode are left"


@needs_landlock
@pytest.mark.parametrize("isolation", ["Inline", "Process"])
async def test_a_daemon_of_one_episode_sets_no_reward(mark: str, isolation: str) -> None:
    agent = {"command": [PYTHON, "-c", FORGER, mark], "score": [PYTHON, "-c", SCORE]}
    states = [request(f"e{n}", {"answer": "mine"}) for n in range(3)]
    # With unlimited access, those that are played at the same time can reach one another.
    turns = [states] if isolation == "Process" else [[state] for state in states]
    assert [reward for turn in turns for reward in rewards(await play(agent, turn, isolation=isolation))] == [0.0] * 3


# A process that makes more of its kind, in all the ways to leave one's parent, session and group.
GROVE = """
import os, random, signal, sys, time
seed, depth = int(sys.argv[1]), int(sys.argv[2])
chance = random.Random(seed)

def grow(level):
    for number in range(chance.randint(1, 3)):
        way = chance.choice(["fork", "setsid", "double", "deaf", "respawn", "exec", "stopped", "chain"])
        if os.fork():
            continue
        if way in ("setsid", "double"):
            os.setsid()
        if way == "double" and os.fork():
            os._exit(0)
        if way == "deaf":
            for signum in range(1, 64):
                try:
                    signal.signal(signum, signal.SIG_IGN)
                except (OSError, ValueError):
                    pass
        if way == "respawn":
            for _ in range(200):
                if os.fork() == 0:
                    time.sleep(0.002)
                    os._exit(0)
                os.wait()
        if way == "chain":
            # Its parent is gone before anyone looks.
            for _ in range(5000):
                if os.fork():
                    os._exit(0)
        if way == "exec":
            os.setsid()
            os.execve("/bin/sleep", ["sleep", "1000"], {"GROVE": sys.argv[3]})
        if way == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        if level:
            grow(level - 1)
        while True:
            time.sleep(1)

grow(depth)
time.sleep(chance.random() / 20)
os._exit(0)
"""


@needs_landlock
@pytest.mark.slow
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 32), isolation=st.sampled_from(["Inline", "Process"]))
async def test_no_process_of_a_command_is_left_when_it_is_scored(seed: int, isolation: str) -> None:
    """The invariant: while the score program runs, nothing that descends from the command is alive."""
    mark = f"mark-{seed}-{random.getrandbits(64):x}"
    with tempfile.TemporaryDirectory(prefix="grove-", dir="/var/tmp") as place:
        agent = {
            "command": [PYTHON, "-c", GROVE, str(seed), "2", mark],
            "score": ["sh", "-c", f"touch {place}/scoring; until test -e {place}/seen; do sleep 0.02; done; echo 1"],
        }
        playing = asyncio.create_task(
            play(agent, [request("e0")], isolation=isolation, files=ProcessAccess(writable=[place]))
        )
        await until(lambda: playing.done() or os.path.exists(f"{place}/scoring"))
        left = marked(mark)
        await asyncio.to_thread(Path(place, "seen").touch)
        assert rewards(await playing) == [1.0]
    assert left == []


@needs_landlock
async def test_programs_reach_nothing_of_other_episodes(tmp_path: Path) -> None:
    """Each tries to read and write what another one's programs have, and what is hidden from it."""
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "test.txt").write_text("the hidden test")
    look = f"""
import glob, json, os, pathlib, sys
here = os.getcwd()
places = [os.path.dirname(here), os.path.dirname(os.path.dirname(here)), "/dev/shm", "/var/tmp", {str(tmp_path)!r}]
def tried(place):
    try:
        pathlib.Path(place, "mine").write_text("x")
        return not place.startswith("/dev/shm") or len(os.listdir(place)) > 1
    except OSError:
        return False
wrote = [place for place in places if tried(place)]
others = [place for place in glob.glob(os.path.dirname(here) + "/*") if os.path.isdir(place) and os.listdir(place)]
seen = [path for path in glob.glob({str(hidden)!r} + "/*") if os.access(path, os.R_OK)]
try:
    read = open({str(hidden / "test.txt")!r}).read()
except OSError:
    read = None
metadata = json.load(open(os.environ["KUBEROLL_EPISODE"]))["metadata"]
own = json.load(sys.stdin)["metadata"]
"""
    agent = {
        "setup": [PYTHON, "-c", look + "assert (wrote, read, metadata, own) == ([], None, {'x': 1}, {'x': 1})"],
        "command": [
            PYTHON, "-c", look + "assert (wrote, read, metadata) == ([], None, {'x': 1}); assert others in ([], [here])"
        ],
        "score": [PYTHON, "-c", look + "assert (read, metadata['answer']) == ('the hidden test', 42), read; print(1)"],
        "hidden": {"paths": [str(hidden)], "metadata": ["answer"]},
    }  # fmt: skip
    found = await play(agent, [request(f"e{n}", {"x": 1, "answer": 42}) for n in range(2)], processes=2)
    assert rewards(found) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("left", "cause"),
    [
        ("ln -s /etc/hostname $KUBEROLL_RESULT", "result.json cannot be read"),
        ("mkfifo $KUBEROLL_RESULT", "result.json cannot be read"),
        ("ln -s /dev/zero $KUBEROLL_RESULT", "result.json cannot be read"),
        ("mkdir $KUBEROLL_RESULT", "result.json cannot be read"),
        ("truncate -s 1G $KUBEROLL_RESULT", "result.json has more than 16 MiB"),
    ],
)
async def test_a_result_is_an_ordinary_file(left: str, cause: str) -> None:
    (found,) = await play({"command": ["sh", "-c", left]}, [request("e")], isolation="Inline")
    assert cause in str(found)


async def test_a_program_whose_keeper_is_killed_is_a_failure() -> None:
    (found,) = await play({"command": ["sh", "-c", "kill -9 $PPID; echo 1"]}, [request("e")], isolation="Inline")
    assert "its keeper was killed" in str(found)


async def test_a_failure_begins_with_the_last_line_of_the_program_s_errors() -> None:
    program = "import sys; sys.stderr.write('x' * 5000 + '\\n'); raise KeyError('the cause')"
    (found,) = await play({"command": [PYTHON, "-c", program]}, [request("e")], isolation="Inline")
    assert str(found).startswith(f"agent.command: {PYTHON} ended with exit code 1: KeyError: 'the cause'\n")
    # And has the others after it, if there are any.
    assert "its standard error ends with\nxxx" in str(found)
    for errors, words in (
        ("echo one >&2; echo two >&2", ": two\nits standard error ends with\none\ntwo"),
        ("echo one >&2", ": one"),
        (":", ""),
    ):
        (found,) = await play({"command": ["sh", "-c", f"{errors}; exit 1"]}, [request("e")], isolation="Inline")
        assert str(found) == f"agent.command: sh ended with exit code 1{words}"
    assert isinstance(found, EnvironmentFault)
    assert found.traceback is None


def test_a_proxy_is_not_used_for_the_session() -> None:
    found = without_proxy({"NO_PROXY": "a.example, 10.0.0.1"}, "http://10.0.0.1:80/v1")
    assert found == {"NO_PROXY": "a.example,10.0.0.1", "no_proxy": "a.example,10.0.0.1"}
    assert without_proxy(found, "http://b:80/v1") == dict.fromkeys(("NO_PROXY", "no_proxy"), "a.example,10.0.0.1,b")


async def test_a_function_reaches_its_session_past_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "elsewhere")
    (found,) = await play({"entrypoint": "tests.environments.agents_here:proxied"}, [request("e")], isolation="Inline")
    assert rewards([found]) == [0.0], "requests of the session would go to the proxy"


@pytest.mark.parametrize("isolation", ["Inline", "Process"])
async def test_programs_beside_the_manifest_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isolation: str
) -> None:
    (tmp_path / "agent").mkdir()
    (tmp_path / "setup.py").write_text("open('made', 'w').write('0.5')")
    (tmp_path / "agent" / "score.py").write_text("print(open('made').read())")
    monkeypatch.syspath_prepend(str(tmp_path))
    # What the episode has of its own is not replaced.
    (tmp_path / "made").write_text("1.0")
    agent = {"setup": [PYTHON, "setup.py"], "command": ["cat", "made"], "score": [PYTHON, "agent/score.py"]}
    assert rewards(await play(agent, [request("e")], isolation=isolation)) == [0.5]
