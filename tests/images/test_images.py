"""The Dockerfile: what it says, and, where a rootless builder and a Python image are at hand, what it makes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

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
    for name in ("base", "serve-gpu"):
        assert re.findall(r"^USER (\S+)$", STAGES[name], re.MULTILINE)[-1] == "65532:65532"
    for name in ("operator", "worker", "serve", "serve-cpu"):
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


def buildah(*arguments: str, timeout: float = 900) -> str:
    """Runs buildah without privileges of its own."""
    environment = {**os.environ, "STORAGE_DRIVER": "vfs", "BUILDAH_ISOLATION": "chroot"}
    command = ["buildah", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
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


@pytest.fixture(scope="module", params=["operator", "worker"])
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
        "--build-arg", f"PYTHON_IMAGE={python_image}", "--target", target, "--tag", image, str(ROOT),
    )  # fmt: skip
    made = buildah("from", image).strip()
    try:
        yield target, image, made
    finally:
        buildah("rm", made)


@pytest.mark.timeout(1800)
def test_an_image_runs_as_nobody_and_holds_no_tools(container: tuple[str, str, str]) -> None:
    target, image, made = container
    module = {"operator": "kuberoll_operator", "worker": "kuberoll_workers.pod"}[target]
    assert "--" in buildah("run", made, "--", "python", "-m", module, "--help")
    assert buildah("run", made, "--", "id", "-u").strip() == "65532"
    for tool in ("gcc", "cc", "make", "git"):
        with pytest.raises(RuntimeError):
            buildah("run", made, "--", "sh", "-c", f"command -v {tool}")
    for module in ("torch", "vllm", *(["pip", "ray"] if target == "operator" else [])):
        with pytest.raises(RuntimeError):
            buildah("run", made, "--", "python", "-c", f"import {module}")
    with pytest.raises(RuntimeError):
        buildah("run", made, "--", "touch", "/opt/kuberoll/written")
    labels = json.loads(buildah("inspect", "--type", "image", image))["OCIv1"]["config"]["Labels"]
    assert labels["org.opencontainers.image.version"] == PROJECT["version"]
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
