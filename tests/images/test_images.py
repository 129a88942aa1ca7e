"""What the Dockerfile and `make images` say; what they make is looked at in tests/containers."""

from __future__ import annotations

import itertools
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.charts.rendering import rendered

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
STAGES = {
    match["name"]: match["body"]
    for match in re.finditer(
        r"^FROM \S+ AS (?P<name>\S+)\n(?P<body>.*?)(?=^FROM |\Z)", DOCKERFILE, re.MULTILINE | re.DOTALL
    )
}


def argument(name: str) -> str:
    """The default of a build argument."""
    found = re.search(rf"^ARG {name}=(\S+)$", DOCKERFILE, re.MULTILINE)
    assert found
    return found[1]


def test_targets_are_there_and_nobody_is_root() -> None:
    assert {"operator", "worker", "serve"} <= set(STAGES)
    for name in ("base", "serve-gpu"):
        assert "USER" in STAGES[name]
    # Nothing runs in this one.
    for body in (body for name, body in STAGES.items() if name != "application"):
        assert re.findall(r"^USER (\S+)$", body, re.MULTILINE)[-1:] in ([], ["65532:65532"])
    assert "FROM application" not in DOCKERFILE


def test_everybody_has_a_name_and_a_home() -> None:
    for name in ("base", "serve-gpu"):
        assert "groupadd --gid 65532 kuberoll" in STAGES[name]
        assert "useradd --uid 65532 --gid 65532 --no-log-init --create-home" in STAGES[name]
        assert re.search(r"^ENV .*\bHOME=/tmp\b", STAGES[name], re.MULTILINE)


def test_pip_is_asked_with_the_builds_secrets() -> None:
    runs = re.findall(r"^RUN (?:.*\\\n)*.*$", DOCKERFILE, re.MULTILINE)
    asking = [run for run in runs if re.search(r"\bpip install\b|dependencies\.sh", run)]
    assert len(asking) == 6
    for run in asking:
        assert "--mount=type=secret,id=pip,target=/etc/pip.conf --mount=type=secret,id=ca " in run


def made_by(*arguments: str) -> list[list[str]]:
    """The builds of `make images`, in words."""
    command = ["make", "--dry-run", "images", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [line.split() for line in done.stdout.replace("\\\n", " ").splitlines() if " build " in line]


def tags(builds: list[list[str]]) -> set[str]:
    return {word for build in builds for option, word in itertools.pairwise(build) if option == "-t"}


@pytest.mark.parametrize(
    ("registry", "values"), [(None, {}), ("reg.example.com", {"image": {"registry": "reg.example.com"}})]
)
def test_images_are_made_under_the_names_that_the_chart_has(registry: str | None, values: dict[str, Any]) -> None:
    [deployment] = [item for item in rendered(values) if item["kind"] == "Deployment"]
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    env = {item["name"]: item.get("value") for item in container["env"]}
    wanted = {container["image"], env["KUBEROLL_GENERATION_IMAGE"], env["KUBEROLL_WORKER_IMAGE"]}
    # What a runtime makes of a name without a registry.
    full = {name if registry else f"docker.io/{name}" for name in wanted}
    given = [f"REGISTRY={registry}"] if registry else []
    assert tags(made_by(*given)) == full
    cpu = tags(made_by("ENGINE=cpu", *given))
    assert cpu > full
    assert {name.removesuffix("-cpu") for name in cpu} == full


def test_images_are_made_with_what_the_machine_needs() -> None:
    given = {
        "BUILDER": "buildah",
        "PYTHON_IMAGE": "mirror.example.com/python:3.12",
        "PIP_INDEX_URL": "https://mirror.example.com/simple",
        "PIP_CONF": "/home/me/pip.conf",
        "CA_FILE": "/etc/ssl/own.pem",
        "BUILD_FLAGS": "--network host",
    }
    builds = made_by(*(f"{name}={value}" for name, value in given.items()))
    assert len(builds) == 3
    for build in builds:
        assert build[:4] == ["buildah", "build", "--network", "host"]
        options = set(itertools.pairwise(build))
        for option in (
            ("--build-arg", "PYTHON_IMAGE=mirror.example.com/python:3.12"),
            ("--build-arg", "PIP_INDEX_URL=https://mirror.example.com/simple"),
            ("--secret", "id=pip,src=/home/me/pip.conf"),
            ("--secret", "id=ca,src=/etc/ssl/own.pem"),
        ):
            assert option in options


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
