"""The worker processes of a run: their shards, their environment and their configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kuberoll_api.contract import ServeArgs
from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_workers.environments.served_models import ServedModel
from kuberoll_workers.local.early_start import EarlyStart, start_worker
from kuberoll_workers.local.generation import PolicyEndpoint, literal_variables
from kuberoll_workers.local.options import RunOptions
from kuberoll_workers.local.preflight import Preflight
from kuberoll_workers.local.processes import Child
from kuberoll_workers.output.manifest import RunManifest
from kuberoll_workers.output.storage import DirectoryStorage, Storage
from kuberoll_workers.worker.config import WorkerConfig, WorkerStart


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSetup:
    """Everything that the worker processes of a run are started with.

    Attributes:
        shards: Number of shards of the run.
        manifest: The run's.
        directory: Local directory of the run, for turn journals and, in `logs`, its logs.
        endpoint: False if the workers simulate the engine.
    """

    job: RolloutJob
    options: RunOptions
    storage: Storage
    preflight: Preflight
    shards: int
    manifest: RunManifest
    directory: Path
    early: EarlyStart
    endpoint: bool

    async def start(self, number: int) -> Child:
        """Start a worker without its configuration: it initializes while the engine starts."""
        log = self.directory / "logs" / f"worker-{number}.log"
        early, literals = self.early, literal_variables(self.job.spec.workers.env)
        if number == 0 and not literals and early.worker.returncode is None:
            worker = early.worker
            worker.log = log
        else:
            if number == 0:
                await early.worker.stop(0.0)
            variables = {**early.variables, **literals}
            worker = await start_worker(early.base, early.metrics, log=log, variables=variables)
        start = WorkerStart(
            tokenizer=self.preflight.source.tokenizer,
            revision=self.preflight.source.tokenizer_revision,
            log=str(log),
            endpoint=self.endpoint,
        )
        await worker.send_line(msgspec.json.encode(start))
        return worker

    def assignment(self) -> list[list[int]]:
        """Shards by worker process; a shard's results do not depend on its process."""
        workers = max(1, min(self.job.spec.workers.replicas, self.shards))
        return [list(range(number, self.shards, workers)) for number in range(workers)]

    def config(
        self,
        endpoint: PolicyEndpoint,
        shards: list[int],
        planned: int | None,
        engine: ServeArgs | None,
        services: Mapping[str, ServedModel],
        direct_token: str | None = None,
    ) -> WorkerConfig:
        """The configuration of a worker.

        Args:
            endpoint: Where it generates.
            shards: Its shards.
            planned: Its trajectories, for the metrics; None: unknown.
            engine: Arguments of the engine that it simulates; None: there is an endpoint.
            services: Endpoints of the job's services, by name.
            direct_token: Bearer token of consumers on the direct path; None: there is none.
        """
        return WorkerConfig(
            job=self.job,
            base=str(self.options.base.resolve()),
            tokenizer=self.preflight.source.tokenizer,
            tokenizer_revision=self.preflight.source.tokenizer_revision,
            clock=self.manifest.created,
            sources=self.manifest.sources,
            sampling=self.manifest.sampling,
            endpoint=endpoint.url,
            max_model_len=endpoint.max_model_len,
            output=self._output_location(),
            turns=str(self.directory.resolve()) if self.job.spec.rollout.journal_turns else None,
            shards=shards,
            shard_count=self.shards,
            # With --force, stored trajectories may be from a longer dataset.
            tasks=None if self.options.force else self.preflight.inputs.tasks,
            rollouts=None if self.options.force else self.preflight.inputs.rollouts,
            blocks=list(self.preflight.inputs.blocks),
            planned=planned,
            token=endpoint.token,
            simulated=engine,
            services=dict(services),
            direct_token=direct_token,
        )

    def _output_location(self) -> str:
        # Workers may have another working directory.
        return str(self.storage.path.resolve()) if isinstance(self.storage, DirectoryStorage) else self.options.output
