"""Rows of a batch as prompt and completion, the form in which most trainers take samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kuberoll.trainer.batch import NO_VERSION, Batch, is_number
from kuberoll_workers.data.sampling import unlike

Integers = npt.NDArray[np.int64]


class BatchUnfit(ValueError):
    """A batch has what a trainer cannot take; the message names it and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    """One row of a batch, divided before its first token that was sampled.

    A row without sampled tokens is divided before its last token, because trainers need at least one.

    Attributes:
        number: Of the row in its batch.
        prompt_ids: Tokens before the first sampled one, [prompt].
        completion_ids: The others, with those of later observations, [completion], at least one.
        sampled: True for those of `completion_ids` that were sampled and count in this row, [completion].
        logprobs: Their log-probabilities, 0 elsewhere, float32, [completion].
        oldest_version: Of the weights that sampled them; -1 if it is unknown.
    """

    number: int
    prompt_ids: Integers
    completion_ids: Integers
    sampled: npt.NDArray[np.bool_]
    logprobs: npt.NDArray[np.float32]
    oldest_version: int


def rows_of(batch: Batch) -> Iterator[Row]:
    """The rows of a batch, in its order, without padding.

    Raises:
        BatchUnfit: Versions of weights are names and not whole numbers.
    """
    if batch.policy_version.dtype.kind == "U":
        named = next(text for text in map(str, batch.policy_version.flat) if text and not is_number(text))
        raise BatchUnfit(
            f"version {named!r} of the weights is not a whole number, so that nobody knows how old a token is: publish "
            "weights with whole numbers that grow"
        )
    for number, length in enumerate(batch.lengths):
        ids, sampled = batch.input_ids[number, :length], batch.loss_mask[number, :length]
        first = int(sampled.argmax()) if sampled.any() else max(0, int(length) - 1)
        versions = batch.policy_version[number, :length][sampled]
        known = versions[versions != NO_VERSION]
        yield Row(
            number=number,
            prompt_ids=ids[:first],
            completion_ids=ids[first:],
            sampled=sampled[first:],
            logprobs=batch.logprobs[number, first:length],
            oldest_version=int(known.min()) if len(known) else NO_VERSION,
        )


def require_sampling(batch: Batch, *, temperature: float) -> None:
    """Check that the log-probabilities in a batch are of the distribution of which a trainer computes its own.

    Args:
        temperature: By which the trainer divides logits.

    Raises:
        BatchUnfit: Some are not; the message names the trajectory and the setting.
    """
    for row, distributions in enumerate(batch.sampling):
        for distribution in distributions:
            if (problem := next(unlike(distribution, temperature=temperature), None)) is not None:
                raise BatchUnfit(
                    f"{batch.name(row)} was sampled with {problem}: set both the same in spec.generation.sampling and "
                    "in the trainer; where rows bring sampling of their own, override it with "
                    "spec.generation.sampling.override: true"
                )


def require_sampled_logprobs(identity: Mapping[str, Any]) -> None:
    """Check that a run stores log-probabilities of the distributions that it samples from.

    Args:
        identity: Of its manifest.

    Raises:
        BatchUnfit: Its engine is set to give others.
    """
    mode = identity.get("generation.engineArgs.logprobs_mode", "processed_logprobs")
    if mode != "processed_logprobs":
        raise BatchUnfit(
            f"the run's spec.generation.engineArgs.logprobs_mode is {mode}, so its log-probabilities are not of the "
            "distribution that its tokens were sampled from: remove it"
        )


def common_temperature(batch: Batch) -> float:
    """The temperature of all sampled tokens of a batch, by which a trainer is to divide logits; 1 without any.

    Raises:
        BatchUnfit: There are several, or tokens of a distribution that a temperature does not describe.
    """
    found = [distribution for row in batch.sampling for distribution in row if distribution is not None]
    temperature = float(found[0]["temperature"]) if found else 1.0
    require_sampling(batch, temperature=temperature)
    if temperature == 0:
        raise BatchUnfit("the run is greedy (temperature 0): there is no distribution to learn from")
    return temperature


def require_one_path(batch: Batch, remedy: str) -> None:
    """Check that each trajectory is one row, for trainers that take one row for each.

    Raises:
        BatchUnfit: A trajectory of an agent has branches.
    """
    if len(branches := np.flatnonzero(batch.path)):
        row = branches[0]
        raise BatchUnfit(
            f"task {batch.task_index[row]}, rollout {batch.rollout_index[row]} has branches: more rows than one for "
            f"one reward. {remedy}"
        )
