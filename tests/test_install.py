"""The installation: uv with pip's settings, pip where uv fails, and the wheel without extras."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from scripts.install import Installer, pip_settings, uv_environment, uv_options

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONFIGURATION = """
[global]
index-url = https://packages.example.com/simple
extra-index-url = file:///wheels/simple
    https://more.example.com/simple
cert = /certificates.pem
timeout = 60

[install]
no-binary = numpy
"""


@pytest.fixture
def configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose pip has settings in a file and in the environment."""
    for name in ("PIP_CERT", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_DEFAULT_TIMEOUT", "SSL_CERT_FILE"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "pip.conf"
    file.write_text(CONFIGURATION)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(file))
    monkeypatch.setenv("PIP_FIND_LINKS", "/wheels /more")
    monkeypatch.setenv("PIP_TRUSTED_HOST", "more.example.com")
    monkeypatch.setenv("PIP_CONSTRAINT", "/pins.txt")


@pytest.mark.slow
@pytest.mark.usefixtures("configured")
def test_uv_asks_where_pip_would() -> None:
    settings = pip_settings()
    options = uv_options(settings)
    assert options[:2] == ["--index-strategy", "unsafe-best-match"]
    assert list(zip(options[2::2], options[3::2], strict=True)) == [
        ("--default-index", "https://packages.example.com/simple"),
        ("--index", "file:///wheels/simple"),
        ("--index", "https://more.example.com/simple"),
        ("--find-links", "/wheels"),
        ("--find-links", "/more"),
        ("--allow-insecure-host", "more.example.com"),
        ("--constraint", "/pins.txt"),
    ]
    variables = uv_environment(settings)
    assert (variables["SSL_CERT_FILE"], variables["UV_HTTP_TIMEOUT"]) == ("/certificates.pem", "60")


@pytest.mark.slow
@pytest.mark.usefixtures("configured")
def test_the_environment_prevails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "https://other.example.com/simple")
    monkeypatch.setenv("PIP_DEFAULT_TIMEOUT", "180")
    settings = pip_settings()
    assert "https://other.example.com/simple" in uv_options(settings)
    assert "https://packages.example.com/simple" not in uv_options(settings)


def test_a_machine_without_settings_needs_no_options() -> None:
    assert uv_options({}) == ["--index-strategy", "unsafe-best-match"]


@pytest.mark.slow
@pytest.mark.parametrize("uv", ["/bin/false", None])
def test_pip_installs_where_uv_fails(uv: str | None, capfd: pytest.CaptureFixture[str]) -> None:
    installer = Installer(Path(uv) if uv else None)
    assert installer.install("packaging")
    assert ("trying pip" in capfd.readouterr().out) is (uv is not None)


@pytest.mark.slow
def test_a_failure_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=rf"{sys.executable} -m pip install .* -r {tmp_path}/missing.txt failed"):
        Installer(Path("/bin/false")).install("-r", f"{tmp_path}/missing.txt")


@pytest.mark.slow
def test_what_no_directory_has_is_not_asked_for_elsewhere() -> None:
    assert not Installer(None).install("no-such-package-anywhere", local=True)


def closure(requirements: list[str]) -> set[str]:
    """Names of the distributions that these requirements install."""
    names: set[str] = set()
    for line in requirements:
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            names |= {requirement.name, *closure(importlib.metadata.requires(requirement.name) or [])}
    return names


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Directories for `sys.path` that have what the wheel without extras brings, and its metadata."""
    site = tmp_path_factory.mktemp("site")
    metadata = site / f"kuberoll-{PROJECT['version']}.dist-info"
    metadata.mkdir(parents=True)
    for name in closure(PROJECT["dependencies"]):
        installed = importlib.metadata.distribution(name)
        for top in {Path(str(file)).parts[0] for file in installed.files or ()} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(str(installed.locate_file(top)))
    lines = [f"Requires-Dist: {line}" for line in PROJECT["dependencies"]]
    for extra, requirements in PROJECT["optional-dependencies"].items():
        for line in requirements:
            needed, _, marker = line.partition(" ; ")
            condition = f"({marker}) and " if marker else ""
            lines.append(f"Requires-Dist: {needed}; {condition}extra == '{extra}'")
    head = ["Metadata-Version: 2.4", "Name: kuberoll", f"Version: {PROJECT['version']}"]
    (metadata / "METADATA").write_text("\n".join([*head, *lines, ""]))
    groups = PROJECT["entry-points"].items()
    points = [line for group, items in groups for line in (f"[{group}]", *(f"{k} = {v}" for k, v in items.items()))]
    (metadata / "entry_points.txt").write_text("\n".join([*points, ""]))
    return [site, *(ROOT / source for source in ("crds", "operator", "workers"))]


def command(bare: list[Path], *arguments: str) -> subprocess.CompletedProcess[str]:
    """`kuberoll` where only what the wheel brings is installed."""
    return subprocess.run(
        [sys.executable, "-S", "-c", "from kuberoll_api.cli import main; main(prog_name='kuberoll')", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, bare))},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_the_wheel_alone_validates(bare: list[Path]) -> None:
    file = "examples/sliding-puzzle/rolloutjob.yaml"
    done = command(bare, "validate", file)
    assert (done.returncode, done.stdout) == (0, f"{file}: ok (RolloutJob sliding-puzzle)\n"), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        (["run", "examples/sliding-puzzle/rolloutjob.yaml"], "workers"),
        (["export", "runs/first", "--to", "trl"], "workers"),
        (["env", "list"], "workers"),
        (["get", "rlj/first"], "cluster"),
        (["apply", "job.yaml"], "cluster"),
        (["render", "job.yaml"], "operator"),
    ],
)
def test_the_wheel_alone_names_the_extra_of_each_command(arguments: list[str], extra: str, bare: list[Path]) -> None:
    done = command(bare, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(
        rf"`kuberoll {arguments[0]}` needs [\w-]+, which is not installed: pip install 'kuberoll\[{extra}\]'\n",
        done.stderr,
    )


@pytest.mark.slow
def test_the_help_of_the_wheel_alone_has_the_extra_of_every_other_command(bare: list[Path]) -> None:
    done = command(bare, "--help")
    assert done.returncode == 0
    listed = dict(
        re.findall(r"^  (\w+) +\(not installed: pip install 'kuberoll\[(\w+)\]'\)$", done.stdout, re.MULTILINE)
    )
    assert set(listed) == set(PROJECT["entry-points"]["kuberoll.commands"])
    assert set(listed.values()) == {"cluster", "operator", "workers"}
