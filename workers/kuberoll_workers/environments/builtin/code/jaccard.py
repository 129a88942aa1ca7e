"""Code similarity: the words of a response compared with those of a reference, as NeMo RL's `code_jaccard`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from kuberoll_workers.environments.builtin.code.extraction import program_of
from kuberoll_workers.environments.builtin.code.tasks import generated_rows, solution_of
from kuberoll_workers.environments.builtin.config import EnvironmentConfig, parse_config
from kuberoll_workers.environments.builtin.turn import Reply, Turn, TurnEnvironment, mean
from kuberoll_workers.environments.interface import Episode, Metadata, ScoringCase, UnusableRow

GROUND_TRUTH_KEYS = ("ground_truth", "expected_answer", "canonical_solution")
ALIGNED = 0.5
"""Similarity above which a response counts as aligned."""


class CodeJaccardConfig(EnvironmentConfig):
    """What of a response is compared."""

    extract_code: bool = Field(
        default=True,
        description="Compare the response's last block of code, if it has one, with that of the reference. False: the "
        "whole response, as NeMo RL.",
    )
    max_characters: int = Field(
        default=100_000, ge=16, le=1_000_000, description="Length of what is compared; a longer response gets 0."
    )


class CodeJaccardEnvironment(TurnEnvironment):
    """Single turn: the reward is the similarity of the response's words to those of `metadata.ground_truth`.

    The share of common words among all words, times the ratio of the lengths; 1 for the same text, whatever its case.
    Similar words are no sign that a program works: `code_execution` runs it.
    """

    row_metadata: ClassVar[Mapping[str, str]] = {
        "ground_truth": "or expected_answer, canonical_solution: the text of a solution",
    }
    scoring_cases: ClassVar[Sequence[ScoringCase]] = [
        ScoringCase(row={"metadata": {"ground_truth": "return x + 1"}}, responses=[response], reward=reward)
        for response, reward in [
            ("return x + 1", (1.0, 1.0)),
            ("  RETURN X + 1\n", (1.0, 1.0)),
            ("return y + 1", (0.3, 0.9)),
            ("pass", (0.0, 0.0)),
            ("", (0.0, 0.0)),
        ]
    ]

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        """
        Raises:
            UnusableEnvironment: The config is invalid; the message names the key.
        """
        self._config = parse_config(CodeJaccardConfig, config)

    def check_row(self, metadata: Metadata) -> None:
        """See `EnvironmentInterface.check_row`."""
        _ground_truth(metadata or {})

    def turn(self, reply: Reply, state: dict[str, Any]) -> Turn:
        """See `TurnEnvironment.turn`."""
        truth = _ground_truth(state)
        text = self._compared(reply, truncated=reply.truncated)
        score = similarity(text, self._compared(truth)) if len(text) <= self._config.max_characters else 0.0
        word = "aligned" if score > ALIGNED else "misaligned"
        return Turn(
            observation=f"\nEnvironment: jaccard {word} (score: {score:.2f})\n",
            metadata={**state, "similarity": score},
            reward=score,
            terminated=True,
            answer=text.strip()[: self._config.max_characters],
        )

    def solution(self, episode: Episode) -> list[str]:
        """The reference itself."""
        return [_ground_truth(episode.metadata or {})]

    def _compared(self, text: str, *, truncated: bool = False) -> str:
        if not self._config.extract_code:
            return text
        code = program_of(text, truncated=truncated)
        return text if code is None else code

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        """Add the mean similarity, and the shares above 0.5 and above 0.8."""
        scores = [state["similarity"] for state in batch["extra_env_info"] if state and "similarity" in state]
        metrics = {
            "episodes": len(batch["extra_env_info"]),
            "preference_alignment_rate": mean([float(score > ALIGNED) for score in scores]),
            "average_preference_score": mean(scores),
            "high_alignment_rate": mean([float(score > 0.8) for score in scores]),
        }
        return batch, {name: value for name, value in metrics.items() if value is not None}

    def generate_dataset(self, count: int, seed: int) -> list[dict[str, Any]]:
        """Rows with the tasks that `code_execution` generates, and their solutions."""
        rows = generated_rows(count, seed)
        for row in rows:
            kept = row["metadata"]
            row["metadata"] = {"ground_truth": solution_of(kept["task"], kept["number"])}
        return rows


def similarity(text: str, reference: str) -> float:
    """Similarity of two texts, from 0 to 1: 1 for the same text, whatever its case and outer white space."""
    text, reference = text.strip().lower(), reference.strip().lower()
    if text == reference:
        return 1.0
    words, wanted = set(text.split()), set(reference.split())
    if not words or not wanted:
        return 0.0
    jaccard = len(words & wanted) / len(words | wanted)
    return jaccard * min(len(text), len(reference)) / max(len(text), len(reference))


def _ground_truth(state: Mapping[str, Any]) -> str:
    found = next((state[key] for key in GROUND_TRUTH_KEYS if state.get(key) is not None), None)
    if not isinstance(found, str) or not found.strip():
        row = f"row {state['idx']!r}: " if "idx" in state else ""
        raise UnusableRow(f"{row}metadata.ground_truth: found {found!r}; it must be the text of a solution")
    return found
