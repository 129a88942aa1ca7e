"""What the tests of adapters share: `kuberoll run` with simulated responses, and a machine without a library."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from kuberoll_workers.data.record import TrajectoryRecord
from kuberoll_workers.environments import UnusableEnvironment, create
from kuberoll_workers.environments.registry import PlainSpec
from tests.local.support import TINY, manifest, run_to_end, trajectories

# In the worker's own process adapters are called as the other tests call them.
ISOLATIONS = (pytest.param("Inline", marks=pytest.mark.long), "Process")


def run(
    directory: Path,
    environment: dict[str, Any],
    responses: list[str],
    *,
    torch: bool = False,
    model: Path = TINY,
    **spec: Any,
) -> list[TrajectoryRecord]:
    """Trajectories of a job with this environment, whose policy draws from the responses.

    Args:
        torch: The library wants PyTorch, if it is installed.
        model: Its tokenizer and chat template.
    """
    output = directory / "out"
    fields: dict[str, Any] = {
        "dataset": {"source": {"generator": {"count": 8}}, "repeats": 4},
        "rollout": {"maxTurns": 30, "maxSequenceLength": 100_000},
        "generation": {
            "model": {"source": str(model)},
            "engine": "Simulated",
            "engineArgs": {"max_model_len": 100_000},
            "simulated": {"responses": responses},
        },
    }
    job = manifest(directory / "job.yaml", environments=[environment], **{**fields, **spec})
    code, text = run_to_end(job, "--output", output, "--metrics-port", "0", torch=torch)
    assert code == 0, text
    return list(trajectories(output))


def assert_needs_its_extra(monkeypatch: pytest.MonkeyPatch, type_: str, package: str, extra: str, config: Any) -> None:
    """The environment names the extra on a machine without the package."""
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    find_spec = __import__("importlib.util").util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == package else find_spec(name))
    with pytest.raises(UnusableEnvironment, match=rf"pip install 'kuberoll\[{extra}\]'"):
        create(PlainSpec(name="mine", type=type_, entrypoint=None, config=config))
