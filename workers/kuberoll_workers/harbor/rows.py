"""Tasks as rows of a dataset: the prompt, and in `metadata.harbor` what a worker needs to play and to score one.

The prompt is the instruction, of the first step if there are several, as the user's message. `task_id` and `idx` are
the task's name. In `metadata.harbor` a field that says nothing is absent; times are in seconds, sizes in MiB, and
paths of files are relative to `directory`, with `/`. Rows of files may describe tasks in `metadata.task`, which stands
in `harbor.given` and is read into this form:

task            name
directory       the task's directory: relative to the manifest's, or absolute, as `source.uri` is; absent: it has none
digest          SHA-256 of all that decides a trajectory or its rewards (`Task.digest`)
machine         MACHINE of the agent
steps           list of STEP, at least one; they follow each other in one machine
reward          mean or final: how the steps' rewards become the task's (`rewards.combine`)
solution_env    VARIABLES of the reference solution
about           the table [metadata], with dates, NaN and integers beyond 64 bits as text

MACHINE:

image           reference of an image that is there; or
build           {directory, digest}: the Dockerfile's directory, and what names the image (`images.image_of`); absent,
                as `image` is: the job says which, or else it is the host's own root, where the driver has that
start_timeout   limit of pulling the image and starting the machine
cpus, memory_mb, storage_mb, gpus
                limits; absent: none is set
gpu_types       any of these will do
env             VARIABLES of all its processes
workdir         absent: that of the image
network         NETWORK while neither the agent nor tests run
healthcheck     HEALTHCHECK: the machine is ready when it succeeds
mcp_servers     list of {name, transport, url or command, args, headers}: what the agent is given
skills_dir      directory in the machine with skills for the agent
upload          directory whose files go into the working directory when the machine has started
setup           SETUP: what is done then, before the healthcheck

SETUP, in this order:

files           texts by path: written below the working directory, or where the path is absolute
requirements, packages
                file, and text, of requirements of Python: installed into a virtual environment
wheels          directory of distributions, from which alone they come
indexed         true: they come from an index, which has to be reached
script, commands
                file, and text, of scripts, run in the working directory
timeout         of all of it
user            whom scripts run as
env             VARIABLES of scripts and installations
network         NETWORK meanwhile; absent: that of the machine

STEP:

name            absent in a task without steps
instruction     absent in the first step, whose instruction is the prompt
agent           {timeout, user, network}; without timeout there is no limit; without user it is the image's
verifier        VERIFIER
healthcheck     HEALTHCHECK after the step's files are in place, and before the agent
min_reward      the next step begins only with this reward (`rewards.shortfall`)
workdir         directory whose files go into the working directory before the step; `setup.sh` in it then runs, as the
                agent's user, and a failure of it is the step's
solution        directory with `solve.sh`, put into /solution when the reference solution is played
artifacts       list of {source, destination, exclude}, kept after the agent and before the tests; a verifier in its
                own machine gets them at `source`

VERIFIER:

machine         MACHINE of its own; absent: the agent's, after the agent and all of its processes are gone
tests           directories whose files go into /tests, in this order, without those that .harborignore leaves out
                (`files.TaskFiles.selected`); absent: the image has them
files           texts by path below /tests, which win over those
script          path below /tests: made executable, then run as the user; its output goes to
                /logs/verifier/test-stdout.txt, and its exit code means nothing
timeout, user, network
                as the agent's
env             VARIABLES of the script
collect         list of {command, timeout, user}: commands of bash in the agent's machine after the agent, before
                artifacts are kept; one that fails changes nothing

NETWORK is {mode, hosts}: mode is no-network, public or allowlist; hosts are names, `*.name`, addresses or ranges.

HEALTHCHECK is {command, interval, timeout, start_period, start_interval, retries}: a command of bash, or of the shell
where there is none; failures within start_period do not count, max(retries, 1) in a row after it do.

VARIABLES is an object of texts. One that is `${NAME}` or `${NAME:-default}` as a whole stands for a variable of the
worker; what the worker has is not in the row.
"""

from __future__ import annotations

import math
from datetime import date, time
from pathlib import Path
from typing import Any, Final

from kuberoll_workers.harbor.configuration import Artifact, Healthcheck
from kuberoll_workers.harbor.phases import Network
from kuberoll_workers.harbor.servers import McpServer
from kuberoll_workers.harbor.setup import setup_fields
from kuberoll_workers.harbor.task import Machine, Stage, Task, Verification

FIELD: Final = "harbor"
"""Field of a row's metadata."""

_MOST_DEPTH: Final = 32


def row_of(task: Task, directory: str | None) -> dict[str, Any]:
    """A task as a row, JSON values only.

    Args:
        directory: The task's directory as the job names it; None: it has none.
    """
    return {
        "messages": [{"role": "user", "content": task.stages[0].instruction}],
        "task_id": task.name,
        "idx": task.name,
        "metadata": {FIELD: task_fields(task, directory)},
    }


def task_fields(task: Task, directory: str | None) -> dict[str, Any]:
    """`metadata.harbor` of a task."""
    return _given(_fields(task, directory))


def _fields(task: Task, directory: str | None) -> dict[str, Any]:
    configuration = task.configuration
    return {
        "task": task.name,
        "directory": directory,
        "digest": task.digest,
        "machine": machine_fields(task.machine, task.directory),
        "steps": [_step_fields(stage, task.directory, first=stage is task.stages[0]) for stage in task.stages],
        "reward": configuration.multi_step_reward_strategy or "mean",
        "solution_env": configuration.solution.env,
        "about": _plain(configuration.metadata, 0),
    }


def machine_fields(machine: Machine, root: Path) -> dict[str, Any]:
    """MACHINE.

    Args:
        root: The task's directory.
    """
    environment = machine.environment
    build = None
    if machine.context is not None:
        build = {"directory": _relative(machine.context, root), "digest": machine.digest}
    return _given(
        {
            "image": machine.image,
            "build": build,
            "start_timeout": environment.build_timeout_sec,
            **{name: getattr(environment, name) for name in ("cpus", "memory_mb", "storage_mb", "gpus", "gpu_types")},
            "env": environment.env,
            "workdir": environment.workdir,
            "network": _network_fields(environment.network),
            "healthcheck": _healthcheck_fields(environment.healthcheck),
            "mcp_servers": [_server_fields(server) for server in environment.mcp_servers],
            "skills_dir": environment.skills_dir,
            "upload": _relative(machine.upload, root),
            "setup": _setup_fields(machine, root),
        }
    )


def _setup_fields(machine: Machine, root: Path) -> dict[str, Any] | None:
    if machine.setup is None:
        return None
    network = machine.setup.network
    wanted = None if network is None else _network_fields(network)
    return _given({**setup_fields(machine.setup, root), "network": wanted})


def _step_fields(stage: Stage, root: Path, *, first: bool) -> dict[str, Any]:
    return _given(
        {
            "name": stage.name,
            "instruction": None if first else stage.instruction,
            "agent": _given({"timeout": stage.timeout, "user": stage.user, "network": _network_fields(stage.network)}),
            "verifier": _verifier_fields(stage.verification, root),
            "healthcheck": _healthcheck_fields(stage.healthcheck),
            "min_reward": stage.min_reward,
            "workdir": _relative(stage.workdir, root),
            "solution": _relative(stage.solution, root),
            "artifacts": [_artifact_fields(artifact) for artifact in stage.artifacts],
        }
    )


def _verifier_fields(verification: Verification, root: Path) -> dict[str, Any]:
    machine = verification.machine
    return _given(
        {
            "machine": None if machine is None else machine_fields(machine, root),
            "tests": [_relative(directory, root) for directory in verification.tests],
            "files": dict(verification.files),
            "script": verification.script,
            "timeout": verification.timeout,
            "user": verification.user,
            "env": verification.env,
            "network": _network_fields(verification.network),
            "collect": [
                _given({"command": one.command, "timeout": one.timeout_sec, "user": one.user})
                for one in verification.collect
            ],
        }
    )


def _network_fields(network: Network) -> dict[str, Any]:
    return _given({"mode": network.mode, "hosts": network.hosts})


def _healthcheck_fields(check: Healthcheck | None) -> dict[str, Any] | None:
    if check is None:
        return None
    return {name.removesuffix("_sec"): value for name, value in check.model_dump().items()}


def _server_fields(server: McpServer) -> dict[str, Any]:
    return _given(server.model_dump())


def _artifact_fields(artifact: Artifact) -> dict[str, Any]:
    return _given(artifact.model_dump(exclude={"service"}))


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields that say something."""
    return {name: value for name, value in fields.items() if value is not None and value not in ([], {})}


def _relative(path: Path | None, root: Path) -> str | None:
    return None if path is None else path.relative_to(root).as_posix()


def _plain(value: Any, depth: int) -> Any:
    """A value of TOML as one of JSON."""
    if isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return value if -(1 << 63) <= value < 1 << 63 else str(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, date | time):
        return value.isoformat()
    if depth == _MOST_DEPTH:
        return "…"
    if isinstance(value, dict):
        return {key: _plain(item, depth + 1) for key, item in value.items()}
    return [_plain(item, depth + 1) for item in value]
