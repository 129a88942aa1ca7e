"""Setting machines up: files, requirements of Python and scripts, before the agent has them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final

from kuberoll_workers.environments.outcome import StepRaised
from kuberoll_workers.harbor.agents import ending, make_executable, run_program
from kuberoll_workers.harbor.setup import REQUIREMENTS, SCRIPT, WHEELS
from kuberoll_workers.sandboxes.handle import Sandbox

VENV: Final = "/opt/venv"
"""Virtual environment of a machine with requirements; its programs come first in PATH."""

_PLACE: Final = "/.setup"
_NO_PYTHON: Final = 78
# A machine's Python may lack ensurepip (Debian's python3-venv has it); then its own pip installs into the environment.
_INSTALL: Final = f"""
command -v python3 >/dev/null || exit {_NO_PYTHON}
if said=$(python3 -m venv {VENV} 2>&1); then
  set -- {VENV}/bin/python -m pip "$@"
elif python3 -m pip --version >/dev/null 2>&1 && python3 -m venv --without-pip {VENV}; then
  set -- python3 -m pip --python {VENV}/bin/python "$@"
else
  echo "$said"; exit 1
fi
exec "$@"
"""
_PIP: Final = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", "PIP_ROOT_USER_ACTION": "ignore"}


class SetUpFailed(StepRaised):
    """A machine could not be set up, through no doing of the policy."""


async def set_up(
    sandbox: Sandbox, setup: Mapping[str, Any], directory: Path, *, environment: Mapping[str, str]
) -> None:
    """Set a machine up (`harbor.rows`, SETUP); what was installed comes first in the path of all later commands.

    Args:
        directory: The task's directory here.
        environment: Variables of what is run.

    Raises:
        SetUpFailed: Something failed, or it took too long.
        SandboxLost: The sandbox is gone.
    """
    await put_files(sandbox, setup.get("files", {}))
    limit = setup["timeout"]
    began: dict[str, str] = {}
    try:
        async with asyncio.timeout(limit):
            for what, act in (("requirements", _install), ("scripts", _run_scripts)):
                began["what"] = what
                await act(sandbox, setup, directory, environment)
    except TimeoutError as error:
        raise SetUpFailed(
            f"the set-up took longer than [setup] timeout_sec ({limit:g} s), and was at its {began['what']}"
        ) from error
    finally:
        await sandbox.remove(_PLACE, user="0")


async def put_files(sandbox: Sandbox, files: Mapping[str, str]) -> None:
    """Write a row's files; paths that are not absolute are below the working directory."""
    workdir = (await sandbox.workdir()).rstrip("/") if files else ""
    for name, text in files.items():
        await sandbox.write(name if name.startswith("/") else f"{workdir}/{name}", text, user="0")


_Act = Callable[[Sandbox, Mapping[str, Any], Path, Mapping[str, str]], Awaitable[None]]


async def _install(sandbox: Sandbox, setup: Mapping[str, Any], directory: Path, environment: Mapping[str, str]) -> None:
    words = ["install"]
    if (name := setup.get("wheels")) is not None:
        await sandbox.upload(directory / name, f"{_PLACE}/{WHEELS}", user="0")
        words += ["--no-index", "--find-links", f"{_PLACE}/{WHEELS}"]
    texts = []
    if (name := setup.get("requirements")) is not None:
        texts.append(await asyncio.to_thread((directory / name).read_bytes))
    if "packages" in setup:
        texts.append(setup["packages"].encode())
    if not texts:
        return
    for number, text in enumerate(texts):
        await sandbox.write(f"{_PLACE}/{number}-{REQUIREMENTS}", text, user="0")
        words += ["-r", f"{_PLACE}/{number}-{REQUIREMENTS}"]
    argv = ["/bin/sh", "-c", _INSTALL, "install", *words]
    done = await run_program(sandbox, argv, user="0", environment={**_PIP, **environment}, seconds=None)
    if done.exit_code == _NO_PYTHON:
        raise SetUpFailed(
            "the machine has no python3, which the task's requirements need: take an image with Python, or install "
            f"what is needed in {SCRIPT}"
        )
    if not done.succeeded:
        raise SetUpFailed(f"the installation of the task's requirements ended with {ending(done)}")
    path = (await sandbox.exec('printf %s "$PATH"', user="0", timeout=60)).text
    sandbox.environment.update({"PATH": f"{VENV}/bin:{path}", "VIRTUAL_ENV": VENV})


async def _run_scripts(
    sandbox: Sandbox, setup: Mapping[str, Any], directory: Path, environment: Mapping[str, str]
) -> None:
    path = f"{_PLACE}/{SCRIPT}"
    if (name := setup.get("script")) is not None:
        await make_executable(sandbox, path, directory / name)
        await _run(sandbox, [path], name, setup, environment)
    if (text := setup.get("commands")) is not None:
        await sandbox.write(path, text, mode=0o755, user="0")
        await _run(sandbox, [path], "setup", setup, environment)


async def _run(
    sandbox: Sandbox, argv: list[str], name: str, setup: Mapping[str, Any], environment: Mapping[str, str]
) -> None:
    user = setup.get("user")
    done = await run_program(
        sandbox, argv, user=None if user is None else str(user), environment=environment, seconds=None
    )
    if not done.succeeded:
        raise SetUpFailed(f"{name} ended with {ending(done)}")
