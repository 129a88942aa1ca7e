"""The verifier: tests come into the sandbox when nothing of the agent runs any more, and say what it is worth."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kuberoll_workers.environments.outcome import StepRaised
from kuberoll_workers.harbor.agents import make_executable, run_program, upload, user_of
from kuberoll_workers.harbor.files import TaskFiles
from kuberoll_workers.harbor.rewards import JSON, TEXT, RewardError, read_reward
from kuberoll_workers.sandboxes.handle import Sandbox

TESTS: Final = "/tests"
LOGS: Final = "/logs/verifier"
_REWARD_BYTES: Final = 1 << 20
_SHOWN: Final = 2000


class VerifierFailed(StepRaised):
    """The tests gave no reward: a failure, and never a reward of 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tested:
    """What a step's tests have said.

    Attributes:
        rewards: Rewards by name.
        exit_code: Of their script; None: a signal has ended it. It is no reward.
        output: What they wrote, the beginning and the end of it.
        seconds: Time that the script took.
        memory: Most memory of one of its processes, in bytes; None: unknown.
    """

    rewards: dict[str, float]
    exit_code: int | None
    output: str
    seconds: float
    memory: int | None = None


async def verify(
    sandbox: Sandbox, verifier: Mapping[str, Any], directory: Path, *, environment: Mapping[str, str]
) -> Tested:
    """Run the tests of a step (`harbor.rows`, VERIFIER) in a sandbox in which nothing else runs.

    Args:
        directory: The task's directory here.
        environment: Variables of the tests.

    Raises:
        SandboxLost: The sandbox is gone.
        VerifierFailed: The tests exceed their time, cannot be run, or write no reward.
    """
    # What the agent has left in their place, links among it, is nobody's. Without tests of the task the image has them.
    for path in (*((TESTS,) if verifier.get("tests") or verifier.get("files") else ()), LOGS):
        await sandbox.remove(path, user="0")
    await sandbox.make_directory(LOGS, mode=0o777, user="0")
    files = TaskFiles(directory)
    for tests in verifier.get("tests", ()):
        await upload(sandbox, files, directory / tests, TESTS)
    for name, text in verifier.get("files", {}).items():
        await sandbox.write(f"{TESTS}/{name}", text, user="0")
    script = verifier["script"]
    sources = [directory / tests / script for tests in verifier.get("tests", ())]
    if script in verifier.get("files", {}):
        await sandbox.write(f"{TESTS}/{script}", verifier["files"][script], mode=0o755, user="0")
    elif source := next((path for path in reversed(sources) if path.is_file()), None):
        await make_executable(sandbox, f"{TESTS}/{script}", source)
    timeout = verifier.get("timeout")
    began = time.monotonic()
    done = await run_program(
        sandbox, [f"{TESTS}/{script}"], user=user_of(verifier), environment=environment, seconds=timeout
    )
    seconds = time.monotonic() - began
    with contextlib.suppress(OSError):
        await sandbox.write(f"{LOGS}/test-stdout.txt", done.stdout, user="0")
    if done.timed_out:
        raise VerifierFailed(f"the tests took longer than [verifier] timeout_sec ({timeout:g} s){_end(done.text)}")
    try:
        rewards = read_reward(await _content(sandbox, TEXT), await _content(sandbox, JSON))
    except RewardError as error:
        raise VerifierFailed(f"{error}{_end(done.text)}") from error
    return Tested(rewards=rewards, exit_code=done.exit_code, output=done.text, seconds=seconds, memory=done.memory)


async def _content(sandbox: Sandbox, name: str) -> bytes | None:
    try:
        found = await sandbox.read(f"{LOGS}/{name}", size=_REWARD_BYTES + 1, user="0")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise VerifierFailed(f"{LOGS}/{name} cannot be read: {error.strerror}") from error
    if len(found) > _REWARD_BYTES:
        raise VerifierFailed(f"{LOGS}/{name} has more than {_REWARD_BYTES >> 20} MiB")
    return found


def _end(text: str) -> str:
    said = text.strip()[-_SHOWN:]
    return f"; their output ends with\n{said}" if said else "; they wrote nothing"
