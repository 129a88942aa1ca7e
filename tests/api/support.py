"""A valid manifest to break, and what is said about the broken ones."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from kuberoll_api.manifest.loading import ManifestError, Mistake, load_jobs

VALID = """\
# A comment, so that line 1 is not special.
apiVersion: kuberoll.io/v1alpha1
kind: RolloutJob
metadata:
  name: puzzles
  labels: {team: "7"}
spec:
  generation:
    engine: VLLM
    model:
      source: org/model
    engineArgs:
      max_model_len: 1024
    sampling:
      temperature: 1
      topP: 0.9
      stop: ["</answer>"]
    resources:
      limits: {nvidia.com/gpu: 1}
  environments:
    - name: sliding_puzzle
      type: sliding_puzzle
      config:
        size: 2
    - name: mine
      entrypoint: package.module:Class
  dataset:
    source:
      generator:
        count: 8
        environments: [mine]
  rollout:
    maxTurns: 20
"""

HERE = "# here"


def mistakes_of(text: str | bytes, overrides: Sequence[str] = ()) -> list[Mistake]:
    """The mistakes of a manifest; none where it is in order."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "job.yaml"
        file.write_bytes(text.encode() if isinstance(text, str) else text)
        try:
            load_jobs(file, overrides)
        except ManifestError as error:
            mistakes = error.mistakes
        else:
            return []
    assert {mistake.file for mistake in mistakes} == {str(file)}
    return mistakes


def only_mistake(text: str | bytes, overrides: Sequence[str] = ()) -> Mistake:
    """The mistake of a manifest that has one."""
    mistakes = mistakes_of(text, overrides)
    assert len(mistakes) == 1, [str(mistake) for mistake in mistakes]
    return mistakes[0]


def edited(old: str, new: str) -> str:
    """The valid manifest with a part replaced that it has once."""
    assert VALID.count(old) == 1
    return VALID.replace(old, new)


def line_of_here(text: str) -> int:
    """The line, counted from 1, that the comment `# here` marks."""
    lines = [number for number, line in enumerate(text.splitlines(), start=1) if HERE in line]
    if len(lines) != 1:
        pytest.fail(f"{len(lines)} lines are marked")
    return lines[0]
