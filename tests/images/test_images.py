"""The Dockerfile: what it says, and, where a rootless builder and a Python image are at hand, what it makes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import tomllib
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from kuberoll_workers.data.messages import token_array
from kuberoll_workers.local.watchdog import RUN_ID_VARIABLE, end_processes
from kuberoll_workers.policy.client import ServeClient
from kuberoll_workers.policy.interface import GenerationRequest, SamplingParameters
from tests.pods.support import address
from tests.pods.test_generation_pod import config

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
STAGES = {
    match["name"]: match["body"]
    for match in re.finditer(
        r"^FROM \S+ AS (?P<name>\S+)\n(?P<body>.*?)(?=^FROM |\Z)", DOCKERFILE, re.MULTILINE | re.DOTALL
    )
}
BASE_VARIABLE = "KUBEROLL_PYTHON_IMAGE"
"""Environment variable: a Python image that the builder has already, in place of the Dockerfile's."""


def argument(name: str) -> str:
    """The default of a build argument."""
    found = re.search(rf"^ARG {name}=(\S+)$", DOCKERFILE, re.MULTILINE)
    assert found
    return found[1]


def test_targets_are_there_and_nobody_is_root() -> None:
    assert {"operator", "worker", "serve"} <= set(STAGES)
    for name in ("base", "serve-gpu", "serve-cpu"):
        assert re.findall(r"^USER (\S+)$", STAGES[name], re.MULTILINE)[-1] == "65532:65532"
    for name in ("operator", "worker", "serve"):
        assert "USER" not in STAGES[name]


def test_versions_are_those_of_the_distribution() -> None:
    assert argument("VERSION") == PROJECT["version"]
    [engine] = PROJECT["optional-dependencies"]["gpu"]
    assert argument("GPU_IMAGE").rpartition(":v")[2] == engine.partition("==")[2].partition(" ")[0]
    for image in ("PYTHON_IMAGE", "GPU_IMAGE"):
        assert not argument(image).endswith(":latest")


def test_the_context_has_what_is_copied() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert {path.partition("/")[0] for path in wheel["packages"]} <= kept
    assert {"pyproject.toml", "README.md", "LICENSE", "scripts", "examples/models"} <= kept
    for name in kept:
        assert (ROOT / name).exists()


ENVIRONMENT = {**os.environ, "STORAGE_DRIVER": "vfs", "BUILDAH_ISOLATION": "chroot"}


def buildah(*arguments: str, timeout: float = 900) -> str:
    """Runs buildah without privileges of its own."""
    command = ["buildah", *arguments]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=timeout, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


@pytest.fixture(scope="module")
def python_image() -> str:
    if shutil.which("buildah") is None:
        pytest.skip("no buildah")
    image = os.environ.get(BASE_VARIABLE) or argument("PYTHON_IMAGE")
    try:
        buildah("pull", "--policy", "missing", image, timeout=120)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"{image} is not at hand; {BASE_VARIABLE} may name another: {error}")
    return image


@pytest.fixture(scope="module", params=["operator", "worker", pytest.param("serve", marks=pytest.mark.long)])
def container(request: pytest.FixtureRequest, python_image: str) -> Iterator[tuple[str, str, str]]:
    """Target, image and a container of it."""
    target = str(request.param)
    image = f"localhost/kuberoll-test/{target}"
    # What pip is told on this machine is what it must be told in the build.
    settings = [f"--env={name}" for name in os.environ if name.startswith("PIP_") or name.lower().endswith("_proxy")]
    folders = [f"--volume={path}:{path}:ro" for path in ("/etc/pip.conf", "/etc/ssl/certs") if Path(path).exists()]
    more = os.environ.get("KUBEROLL_BUILD_ARGUMENTS", "").split()
    buildah(
        "bud", "--layers", "--network", "host", *settings, *folders, *more,
        "--build-arg", f"PYTHON_IMAGE={python_image}", "--build-arg", "ENGINE=cpu", "--target", target, "--tag", image,
        str(ROOT), timeout=1700,
    )  # fmt: skip
    made = buildah("from", image).strip()
    try:
        yield target, image, made
    finally:
        buildah("rm", made)


@pytest.mark.timeout(1800)
def test_an_image_runs_as_nobody_and_holds_no_tools(container: tuple[str, str, str]) -> None:
    target, image, made = container
    module = {
        "operator": "kuberoll_operator",
        "worker": "kuberoll_workers.pod",
        "serve": "kuberoll_workers.policy.pod",
    }[target]
    assert "--" in buildah("run", made, "--", "python", "-m", module, "--help")
    assert buildah("run", made, "--", "id", "-u").strip() == "65532"
    for tool in ("gcc", "cc", "make", "git"):
        with pytest.raises(RuntimeError):
            buildah("run", made, "--", "sh", "-c", f"command -v {tool}")
    for module in {"operator": ("torch", "vllm", "pip", "ray"), "worker": ("torch", "vllm"), "serve": ("pip",)}[target]:
        with pytest.raises(RuntimeError):
            buildah("run", made, "--", "python", "-c", f"import {module}")
    with pytest.raises(RuntimeError):
        buildah("run", made, "--", "touch", "/opt/kuberoll/written")
    labels = json.loads(buildah("inspect", "--type", "image", image))["OCIv1"]["config"]["Labels"]
    assert labels["org.opencontainers.image.version"] == PROJECT["version"]
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"


def write_job(directory: Path) -> None:
    """The file of a job with the tiny policy that is in the image."""
    told = config({})
    generation = told["job"]["spec"]["generation"]
    generation |= {"engine": "VLLM", "replicas": 1, "model": {"source": "/opt/kuberoll/models/tiny-policy"}}
    del generation["simulated"]
    (directory / "job.json").write_text(json.dumps(told))
    # The user in the image is another one.
    directory.chmod(0o755)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("container", ["serve"], indirect=True)
@pytest.mark.engine
@pytest.mark.long
async def test_the_generation_image_generates(container: tuple[str, str, str], tmp_path: Path) -> None:
    """With vLLM for CPUs; no more than 1,024 open files are allowed in buildah's container, so without HAProxy."""
    _, _, made = container
    write_job(tmp_path)
    run_id, ip = uuid.uuid4().hex, address()
    command = [
        "buildah", "run", "--network", "host", "--env", f"POD_IP={ip}", "--env", f"{RUN_ID_VARIABLE}={run_id}",
        "--env", "KUBEROLL_TERMINATION_LOG=/tmp/termination", "--volume", f"{tmp_path}:/etc/kuberoll:ro", made, "--",
        "python3", "-m", "kuberoll_workers.policy.pod", "--config", "/etc/kuberoll/job.json",
    ]  # fmt: skip
    log = tmp_path / "log"
    with log.open("wb") as words:
        process = await asyncio.create_subprocess_exec(*command, stdout=words, stderr=words, env=ENVIRONMENT)
    try:
        async with asyncio.timeout(300), ServeClient(f"http://{ip}:8000", limit=2) as client:
            ready = asyncio.create_task(client.wait_ready(290))
            ended = asyncio.create_task(process.wait())
            await asyncio.wait([ready, ended], return_when=asyncio.FIRST_COMPLETED)
            assert not ended.done(), log.read_text()[-4000:]
            assert (await ready).max_model_len == 512
            request = GenerationRequest(
                request_id="1", session_id="1", token_ids=token_array([1, 2]), sampling=SamplingParameters(max_tokens=5)
            )
            result = await client.generate(request)
            assert 0 < len(result.token_ids) == len(result.logprobs) <= 5
            ended.cancel()
    finally:
        end_processes(run_id)
        await process.wait()
