"""The rules of the house: who may import whom, and what importing costs."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HEAVY = {"ray", "torch", "vllm", "transformers"}
# What a machine must have that only validates; with what pydantic itself is made of.
API_NEEDS = {
    "click",
    "pydantic",
    "ruamel",
    "annotated_types",
    "pydantic_core",
    "typing_extensions",
    "typing_inspection",
}


def loaded_by(*modules: str) -> set[str]:
    """The top-level modules that a fresh interpreter loads for these, above what it always loads."""
    imports = "".join(f"import {module}\n" for module in modules)
    code = f"import sys\nalways = set(sys.modules)\n{imports}print(*(set(sys.modules) - always))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {module.partition(".")[0] for module in done.stdout.split()}


def modules_of(package: str) -> list[str]:
    """The package and everything in it."""
    path = importlib.import_module(package).__path__
    return [package, *(info.name for info in pkgutil.walk_packages(path, f"{package}."))]


def test_the_import_rules_hold() -> None:
    linter = "from importlinter.cli import lint_imports_command; lint_imports_command(['--no-logo'])"
    done = subprocess.run([sys.executable, "-c", linter], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("root", ["crds", "operator", "workers"])
def test_source_roots_are_no_packages(root: str) -> None:
    # A package named `operator` would shadow the standard library's.
    assert not (ROOT / root / "__init__.py").exists()


@pytest.mark.parametrize("package", ["kuberoll_api", "kuberoll_operator", "kuberoll_workers"])
def test_importing_any_module_is_cheap(package: str) -> None:
    modules = modules_of(package)
    assert not loaded_by(*modules) & HEAVY


def test_the_command_needs_little() -> None:
    foreign = {name for name in loaded_by("kuberoll_api.cli") - set(sys.stdlib_module_names) if name[0] != "_"}
    assert foreign == API_NEEDS | {"kuberoll_api"}
