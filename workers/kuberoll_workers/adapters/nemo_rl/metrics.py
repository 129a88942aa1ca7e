"""Metrics of a batch for NeMo RL's trainers: numbers, and lists for histograms where their loggers take them."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from kuberoll_workers.adapters.nemo_rl.conversion import Result
from kuberoll_workers.data.record import TrajectoryRecord
from kuberoll_workers.rollouts.summary import nearest_rank, responses, summarize


class TurnLengths(NamedTuple):
    """Numbers of tokens of a trajectory by turn: of each response, of its prompt, and of both."""

    generated: list[int]
    inputs: list[int]
    totals: list[int]


def lengths_of(record: TrajectoryRecord) -> TurnLengths:
    """Measure the turns of a trajectory."""
    before = list(accumulate((len(message.token_ids) for message in record.messages), initial=0))
    turns = {id(response) for response in responses(record.messages)}
    found = [at for at, message in enumerate(record.messages) if id(message) in turns]
    inputs, totals = [before[at] for at in found], [before[at + 1] for at in found]
    return TurnLengths([total - start for start, total in zip(inputs, totals, strict=True)], inputs, totals)


def metrics_of(results: Sequence[Result], *, histograms: bool) -> dict[str, Any]:
    """Compute the metrics of a batch: the numbers of `summarize`, `turn_metrics`, and `histograms` if requested."""
    lengths = [lengths_of(result) for result in results if isinstance(result, TrajectoryRecord)]
    # Without histograms, trainers pass all metrics to loggers of scalars.
    numbers = {name: value for name, value in summarize(results).items() if isinstance(value, int | float)}
    return numbers | turn_metrics(lengths) | (_histograms(lengths) if histograms else {})


def turn_metrics(lengths: Sequence[TurnLengths]) -> dict[str, float]:
    """The longest response of each sample: `max_gen_tokens_per_turn/max`, `/mean` and `/p95` (nearest rank).

    A sample without turns counts as 0. Without samples the maximum is 0, the others are NaN.
    """
    longest = [max(turns.generated, default=0) for turns in lengths]
    return {
        "max_gen_tokens_per_turn/max": max(longest, default=0),
        "max_gen_tokens_per_turn/mean": sum(longest) / len(longest) if longest else math.nan,
        "max_gen_tokens_per_turn/p95": nearest_rank(longest, 95),
    }


def loggers_take_histograms() -> bool:
    """True if NeMo RL is loaded, in a version whose loggers have `log_histogram`."""
    logger = getattr(sys.modules.get("nemo_rl.utils.logger"), "Logger", None)
    return hasattr(logger, "log_histogram")


def _histograms(lengths: Sequence[TurnLengths]) -> dict[str, list[int]]:
    """Tokens of all turns of all samples: `histogram/gen_tokens_length`, and those of the prompts and of both."""
    return {
        "histogram/gen_tokens_length": [length for turns in lengths for length in turns.generated],
        "histogram/input_tokens_length": [length for turns in lengths for length in turns.inputs],
        "histogram/total_tokens_length": [length for turns in lengths for length in turns.totals],
    }
