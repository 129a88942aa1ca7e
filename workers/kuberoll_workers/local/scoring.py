"""Scores of what a run left unscored, from what it has stored: nothing is generated."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_workers.data.record import FailureRecord, TrajectoryRecord
from kuberoll_workers.data.tokenizer import HuggingFaceTokenizer
from kuberoll_workers.dataset.inputs import scan
from kuberoll_workers.local.options import RunOptions, import_directories
from kuberoll_workers.local.preflight import JobRefused, Preflight, check_model
from kuberoll_workers.local.run_output import check_output, open_run, storage_of
from kuberoll_workers.output.manifest import RunManifest, RunRefused
from kuberoll_workers.output.run_directory import RunDirectory
from kuberoll_workers.policy.interface import GenerationRequest, GenerationResult, PolicyRefused
from kuberoll_workers.rollouts.admission import Drain
from kuberoll_workers.rollouts.failure_log import FailureLog
from kuberoll_workers.rollouts.groups import Result
from kuberoll_workers.telemetry import RolloutMetrics
from kuberoll_workers.worker.config import Progress, WorkerConfig
from kuberoll_workers.worker.environments import isolated_environment_factory
from kuberoll_workers.worker.run import play_shards
from kuberoll_workers.worker.settings import job_tokenizer

# Of a run whose window is the engine's alone: no observation is cut.
_UNBOUNDED = 1 << 31


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """What became of the trajectories that only lacked a score, by environment.

    Attributes:
        scored: Now finished; dropped ones, whose groups were complete without them, are not counted.
        reward: Sum of their total rewards.
        continuing: Left as they were: their environment took the response, and the policy has to go on.
        left: Left as they were: they could not be scored now either.
        failures: Why.
    """

    scored: Counter[str] = field(default_factory=Counter)
    reward: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    continuing: Counter[str] = field(default_factory=Counter)
    left: Counter[str] = field(default_factory=Counter)
    failures: FailureLog = field(default_factory=FailureLog)


class _NoPolicy:
    """Stands where the policy would: whoever asks it is left as it was."""

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        raise PolicyRefused(f"{request.request_id}: the policy has to go on; resume the run")


def score_unscored(job: RolloutJob, *, base: Path, output: str, force: bool = False) -> Scores:
    """Score what a run left unscored, in the run itself: what has a reward keeps it.

    Args:
        base: The manifest's directory, where its relative paths start.
        output: The run's directory or URI.
        force: Accept differences between the job and the run's.

    Raises:
        JobRefused: The run cannot be continued with this job; nothing was changed.
    """
    sys.path[:0] = import_directories(base)
    options = RunOptions(base=base, output=output, resume=True, force=force)
    storage = storage_of(output)
    if (earlier := check_output(storage, options)) is None:
        raise JobRefused(f"{output} contains no run")
    try:
        source = check_model(job, base=base, earlier=earlier, generates=False)
        environment = isolated_environment_factory(job, protected=())
        inputs = scan(job, base=base, environment=environment, shards=earlier.shards)
        preflight = Preflight(source=source, inputs=inputs, notes=())
        directory = RunDirectory(storage)
        try:
            open_run(directory, job, options, preflight, earlier.shards)
            return asyncio.run(_score(job, options, preflight, directory.manifest))
        finally:
            directory.close()
    except RunRefused as error:
        raise JobRefused(str(error)) from error


async def _score(job: RolloutJob, options: RunOptions, preflight: Preflight, manifest: RunManifest) -> Scores:
    scores = Scores()

    def stores(result: Result) -> bool:
        if isinstance(result, TrajectoryRecord):
            scores.scored[result.task_name] += 1
            scores.reward[result.task_name] += result.total_reward
        elif isinstance(result, FailureRecord):
            if result.stage == "generation":
                scores.continuing[result.task_name] += 1
            else:
                scores.left[result.task_name] += 1
                scores.failures.log(result)
            # The line that the run has of it counts on.
            return False
        return True

    source, shards = preflight.source, manifest.shards
    tokenizer = await asyncio.to_thread(HuggingFaceTokenizer.load, source.tokenizer, revision=source.tokenizer_revision)
    await play_shards(
        WorkerConfig(
            job=job,
            base=str(options.base.resolve()),
            tokenizer=source.tokenizer,
            tokenizer_revision=source.tokenizer_revision,
            clock=manifest.created,
            sources=manifest.sources,
            sampling=manifest.sampling,
            endpoint=None,
            max_model_len=job.spec.rollout.max_sequence_length or _UNBOUNDED,
            output=options.output,
            turns=None,
            shards=list(range(shards)),
            shard_count=shards,
            blocks=list(preflight.inputs.blocks),
        ),
        metrics=RolloutMetrics(job.metadata.name),
        drain=Drain(),
        progress=Progress(),
        policy=_NoPolicy(),
        tokenizer=job_tokenizer(job, tokenizer, clock=manifest.created),
        failures=scores.failures,
        lacking="score",
        stores=stores,
    )
    return scores
