"""The installation: uv with pip's settings, and pip where uv fails."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from scripts.install import Installer, pip_settings, uv_environment, uv_options

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
