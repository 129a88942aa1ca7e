"""The modules that a run imports before its first trajectory."""

from __future__ import annotations

import subprocess
import sys

import pytest

AT_THE_END = (
    "kuberoll_workers.analysis.aggregation.aggregates",
    "kuberoll_workers.analysis.report.make",
    "kuberoll_workers.run_end",
)
HEAVY = ("aiohttp", "ray", "starlette", "torch", "transformers", "vllm")


@pytest.mark.parametrize("module", ["kuberoll_workers.worker.__main__", "kuberoll_workers.local.run"])
def test_a_simulated_run_imports_neither_an_engine_nor_an_http_client(module: str) -> None:
    code = f"import sys, {module}; print([name for name in {HEAVY} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


@pytest.mark.parametrize("module", ["kuberoll_workers.commands.console", "kuberoll_workers.local.run"])
def test_what_is_made_at_the_end_of_a_run_is_imported_at_its_end(module: str) -> None:
    code = f"import sys, {module}; print([name for name in sys.modules if name in {AT_THE_END}])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
