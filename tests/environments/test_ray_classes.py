"""Classes that are decorated with `@ray.remote`, as NeMo RL's are, by their name in a job."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kuberoll_workers.environments.isolation import make_executor
from kuberoll_workers.environments.outcome import StepOutcome
from kuberoll_workers.environments.process_access import ProcessAccess
from kuberoll_workers.environments.ray_classes import authentication, is_ray_class, plain_class, uses_ray
from kuberoll_workers.environments.registry import PlainSpec, resolve
from kuberoll_workers.environments.runner import EnvironmentRunner
from tests.environments import misbehaving

NEMO_RL = os.environ.get("KUBEROLL_TEST_NEMO_RL", "")
"""Directories with NeMo RL and what its environments import, as in PYTHONPATH; no registry has its source."""


def log_of(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": "question"}, {"role": "assistant", "content": text}]


async def step(
    entrypoint: str, config: dict[str, Any], texts: list[str], metadata: dict[str, Any], *, isolation: str
) -> list[StepOutcome | BaseException]:
    spec = PlainSpec(name="env", type=None, entrypoint=entrypoint, config=config)
    executor = make_executor(
        spec, isolation=isolation, processes=1, timeout=240, access=ProcessAccess(readable=NEMO_RL.split(":"))
    )
    runner = EnvironmentRunner(executor, max_batch=8)
    try:
        return await runner.step_batch([log_of(text) for text in texts], [metadata] * len(texts))
    finally:
        await runner.close()


def rewards(outcomes: list[StepOutcome | BaseException]) -> list[float]:
    return [outcome.reward if isinstance(outcome, StepOutcome) else pytest.fail(str(outcome)) for outcome in outcomes]


def test_the_class_behind_the_decorator_is_found() -> None:
    alone = resolve(entrypoint="tests.environments.ray_alone:Alone")
    assert is_ray_class(alone)
    assert not uses_ray(alone)
    counting = resolve(entrypoint="tests.environments.ray_counting:CountingWords")
    assert uses_ray(counting)
    assert not is_ray_class(misbehaving.Misbehaving)
    assert plain_class(misbehaving.Misbehaving) is misbehaving.Misbehaving


@pytest.mark.parametrize("isolation", ["Inline", "Process"])
async def test_a_class_without_workers_needs_no_ray(isolation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    # Another test of this process may have one.
    monkeypatch.setattr(ray, "init", lambda *_, **__: pytest.fail("Ray was started"))
    before = ray.is_initialized()
    outcomes = await step("tests.environments.ray_alone:Alone", {"reward": 0.5}, ["a", "b"], {}, isolation=isolation)
    assert rewards(outcomes) == [0.5, 0.5]
    assert ray.is_initialized() == before


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory in which Ray has never been."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.mark.ray
@pytest.mark.usefixtures("home")
async def test_a_class_with_workers_gets_a_ray_of_its_own() -> None:
    outcomes = await step(
        "tests.environments.ray_counting:CountingWords", {"num_workers": 2}, ["a", "b c", "d e f"], {},
        isolation="Process",
    )  # fmt: skip
    assert rewards(outcomes) == [1.0, 2.0, 3.0]


@pytest.mark.ray
def test_a_worker_with_such_a_class_still_drains_on_sigterm_and_leaves_the_home_alone(home: Path) -> None:
    """Ray's own handler would end it at once, and its token would stay in `~/.ray`."""
    program = """
import asyncio, os, signal
from kuberoll_workers.environments.registry import PlainSpec, create

async def main():
    drained = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, drained.set)
    create(PlainSpec(name="env", type=None, entrypoint="tests.environments.ray_counting:CountingWords",
        config={"num_workers": 1}))
    os.kill(os.getpid(), signal.SIGTERM)
    await drained.wait()
    print("drained", flush=True)

asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode in (0, -signal.SIGTERM), done.stderr
    assert "drained" in done.stdout, done.stderr
    assert list(home.iterdir()) == []


def test_a_token_of_ray_that_the_job_names_is_left() -> None:
    assert authentication({"RAY_AUTH_TOKEN": "of-the-job"}) == authentication({"RAY_AUTH_TOKEN_PATH": "/token"}) == {}
    assert authentication({})["RAY_AUTH_TOKEN"] != authentication({})["RAY_AUTH_TOKEN"]


@pytest.fixture
def _nemo_rl(monkeypatch: pytest.MonkeyPatch) -> None:
    if not NEMO_RL:
        pytest.skip("KUBEROLL_TEST_NEMO_RL names no directory with NeMo RL's source")
    for directory in NEMO_RL.split(":"):
        monkeypatch.syspath_prepend(directory)


_PUZZLE = {
    "game_state": {
        "size": 2,
        "grid": [[1, 2], [0, 3]],
        "solution": [[1, 2], [3, 0]],
        "empty_pos": [1, 0],
        "commands": {"up": "", "down": "", "left": "", "right": "", "view": ""},
    },
    "num_moves": 0,
    "max_moves": 4,
}


@pytest.mark.ray
@pytest.mark.usefixtures("_nemo_rl")
@pytest.mark.parametrize(
    ("name", "config", "metadata", "cases"),
    [
        (
            "math_environment:MathEnvironment",
            {"num_workers": 2},
            {"ground_truth": "\\frac{1}{2}"},
            {"\\boxed{0.5}": 1.0, "\\boxed{2}": 0.0},
        ),
        (
            "code_jaccard_environment:CodeJaccardEnvironment",
            {"num_workers": 2},
            {"ground_truth": "def f(): return 1"},
            {"def f(): return 1": 1.0, "x": 0.0},
        ),
        (
            "code_environment:CodeEnvironment",
            {"num_workers": 2, "terminate_on_evaluation": True},
            {"context": {}, "working_dir": "/tmp"},
            {"<code>1+1</code>": 0.0},
        ),
        (
            "games.sliding_puzzle:SlidingPuzzleEnv",
            {"cfg": {}},
            _PUZZLE,
            {"<action>left</action>": 1.0, "<action>up</action>": 0.0},
        ),
    ],
)
async def test_nemo_rl_s_own(name: str, config: Any, metadata: Any, cases: dict[str, float]) -> None:
    outcomes = await step(f"nemo_rl.environments.{name}", config, list(cases), metadata, isolation="Process")
    assert rewards(outcomes) == list(cases.values())
