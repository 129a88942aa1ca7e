"""The rules of the house: who may import whom, and what importing costs."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import kuberoll_workers

ROOT = Path(__file__).resolve().parent.parent
HEAVY = {"ray", "torch", "vllm", "transformers"}
LIGHT_PACKAGES = {
    "kuberoll_api.cli": HEAVY | {"kopf", "kubernetes", "kuberoll_workers", "kuberoll_operator"},
    "kuberoll_operator": HEAVY | {"kuberoll_workers"},
}


def test_import_rules() -> None:
    linter = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as main; main()"]
    done = subprocess.run(linter, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("root", ["crds", "operator", "workers"])
def test_source_roots_are_no_packages(root: str) -> None:
    # A package named `operator` would shadow the standard library's.
    assert not (ROOT / root / "__init__.py").exists()


def _loaded_by(*modules: str) -> set[str]:
    code = f"import sys, {', '.join(modules)}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("module", LIGHT_PACKAGES)
def test_packages_that_stay_small(module: str) -> None:
    assert not _loaded_by(module) & LIGHT_PACKAGES[module]


def test_importing_any_module_of_the_workers_is_cheap() -> None:
    names = [info.name for info in pkgutil.walk_packages(kuberoll_workers.__path__, "kuberoll_workers.")]
    assert len(names) > 30
    assert not _loaded_by(*names) & HEAVY
