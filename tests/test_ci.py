"""The make targets that hosted CI calls, the files of GitHub, and what names the project's home."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import tarfile
import tomllib
from pathlib import Path

import helm_python
import pytest

from scripts import package_chart

ROOT = Path(__file__).resolve().parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MARKS = ["browser", "cluster", "engine", "images", "processes", "ray"]
PARTS = ["test-units", "test-ray", "test-processes", "test-cluster"]


def commands(*arguments: str) -> list[str]:
    """What make would run, a command an item."""
    done = subprocess.run(["make", "--dry-run", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.replace("\\\n", "").splitlines()


def test_every_test_is_in_one_part() -> None:
    selections = {}
    for target in PARTS:
        [selections[target]] = [match[1] for line in commands(target) if (match := re.search(r'-m "(.*)"', line))]
    for chosen in itertools.product([False, True], repeat=len(MARKS)):
        marks = dict(zip(MARKS, chosen, strict=True))
        parts = [name for name in PARTS if eval(selections[name], {}, marks)]
        assert len(parts) == 1, (marks, parts)


def test_hosted_ci_runs_every_part() -> None:
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    assert f"target: [{', '.join(PARTS)}]" in workflow
    assert '.ci/run "$TARGET"' in workflow


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_call_targets_that_there_are(workflow: Path) -> None:
    lines = re.findall(r"(?:(?:run:|^ {10,}) ?make|\.ci/run) ([a-z][^\n]+)", workflow.read_text(), flags=re.MULTILINE)
    called = {word for line in lines for word in line.split() if re.fullmatch(r"[a-z-]+", word)}
    assert called
    listed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert called <= set(re.findall(r"make ([a-z-]+)", listed))


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned(workflow: Path) -> None:
    used = re.findall(r"uses: (\S+)(.*)$", workflow.read_text(), flags=re.MULTILINE)
    assert used
    assert [action for action, note in used if not re.search(r"@[0-9a-f]{40}$", action) or " # v" not in note] == []


def test_a_release_pushes_the_images_that_the_chart_names() -> None:
    built = commands("images", "REGISTRY=ghcr.io", "TAG=1.0.0-arm64", "BUILDER=docker buildx", "BUILD_FLAGS=--push")
    pushed = {match[1] for line in built if (match := re.search(r"buildx build --push .* -t (\S+)", line))}
    assert pushed == {f"ghcr.io/kuberoll/{name}:1.0.0-arm64" for name in ("operator", "worker", "generation")}


def stub(directory: Path, name: str, script: str) -> None:
    path = directory / name
    path.write_text(f'#!/bin/sh\necho "{name} $*" >> {directory}/calls\n{script}\n')
    path.chmod(0o755)


@pytest.mark.parametrize("target", ["release-images", "release-chart"])
def test_a_release_signs_what_it_pushed_by_digest(target: str, tmp_path: Path) -> None:
    digest = f"sha256:{'a' * 64}"
    stub(tmp_path, "docker", f'case "$*" in *inspect*) echo {digest};; esac')
    stub(tmp_path, "helm", f"echo Digest: {digest} >&2")
    stub(tmp_path, "cosign", "")
    command = ["make", target, "REGISTRY=registry.example.com", "TAG=1.0.0"]
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=True)
    calls = (tmp_path / "calls").read_text().splitlines()
    names = ["operator", "worker", "generation"] if target == "release-images" else ["charts/kuberoll"]
    signed = [line.split()[-1] for line in calls if line.startswith("cosign sign --yes")]
    assert signed == [f"registry.example.com/kuberoll/{name}@{digest}" for name in names]


@pytest.mark.parametrize("target", ["release-images", "release-chart"])
def test_a_release_that_cannot_push_signs_nothing(target: str, tmp_path: Path) -> None:
    for name in ("docker", "helm", "cosign"):
        stub(tmp_path, name, "exit 1")
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["make", target], cwd=ROOT, env=environment, capture_output=True, check=False)
    assert done.returncode != 0
    assert "cosign" not in (tmp_path / "calls").read_text()


def test_the_chart_is_linted_and_packaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert package_chart.main(tmp_path / "dist") == 0
    package = Path(capsys.readouterr().out.strip())
    assert package == tmp_path / "dist" / f"kuberoll-{PROJECT['version']}.tgz"
    with tarfile.open(package) as archive:
        assert "kuberoll/Chart.yaml" in archive.getnames()


def test_what_lint_finds_is_told(tmp_path: Path) -> None:
    chart = tmp_path / "kuberoll"
    (chart / "templates").mkdir(parents=True)
    (chart / "Chart.yaml").write_text("apiVersion: v2\nname: kuberoll\nversion: 0.1.0\n")
    (chart / "templates" / "broken.yaml").write_text("{{ .Values.missing | required }}\n")
    found = package_chart.findings(helm_python.lint(chart, strict=True))
    assert any("broken.yaml" in line for line in found)


def test_the_project_has_one_home() -> None:
    home = PROJECT["urls"]["Homepage"]
    site = PROJECT["urls"]["Documentation"]
    assert all(url.startswith(home) for url in PROJECT["urls"].values() if url != site)
    assert f"\nsite_url: {site}\nrepo_url: {home}\n" in (ROOT / "mkdocs.yml").read_text()
    assert f"home: {home}\n" in (ROOT / "charts/kuberoll/Chart.yaml").read_text()
    sources = re.findall(r'image\.source="(.*)"', (ROOT / "Dockerfile").read_text())
    assert set(sources) == {home}


def test_every_place_names_the_version() -> None:
    chart = (ROOT / "charts/kuberoll/Chart.yaml").read_text()
    assert re.findall(r'^(?:appV|v)ersion: "?([^"\n]+)', chart, flags=re.MULTILINE) == [PROJECT["version"]] * 2
    pages = [
        ROOT / "Dockerfile",
        ROOT / "README.md",
        *(ROOT / "docs").glob("**/*.md"),
        *(ROOT / "charts").glob("**/*.md"),
    ]
    shown = {tag for page in pages for tag in re.findall(r"kuberoll/\w+:(\d+\.\d+\.\d+)", page.read_text())}
    assert shown == {PROJECT["version"]}


def test_the_changelog_s_newest_version_is_this_one() -> None:
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    assert re.fullmatch(rf"\[{re.escape(PROJECT['version'])}\] - \d{{4}}-\d\d-\d\d", headings[1])
