"""An environment worker pod: it runs one shard of a job and reports to the operator and Prometheus.

    JOB_COMPLETION_INDEX=3 POD_IP=10.0.0.7 python -m kuberoll_workers.pods.worker --config FILE
    python -m kuberoll_workers.pods.worker --config FILE --check

With `--check` it checks what the workers of a job need, before an engine is started, and ends.

FILE is a `contract.PodConfig`. It serves `/metrics`, `/progress` and `/healthz`, drains on SIGTERM, and reports
its result by its exit code and its termination message: see docs/reference/worker-pods.md.
"""

from __future__ import annotations

import argparse
import asyncio
import atexit
import importlib.util
import logging
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import orjson

from kuberoll_api.contract import (
    DATASET_DIRECTORY,
    EXIT_DRAINED,
    EXIT_FAILED,
    FAILURE_CHARACTERS,
    MOST_UNANSWERING,
    PROBLEM_CHARACTERS,
    PROGRESS_PORT,
    PodConfig,
    PodProgress,
    UnansweringReplica,
    WorkerMessage,
)
from kuberoll_api.http_server import metrics_route, serving
from kuberoll_api.logs import log_to_stderr
from kuberoll_api.model.dataset import DatasetSource
from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_api.model.types import COMMIT_PATTERN
from kuberoll_api.paths import format_path
from kuberoll_workers.data.model_cache.bucket import copy_tokenizer, in_bucket
from kuberoll_workers.data.model_cache.source import ModelRefused
from kuberoll_workers.data.provenance import MODEL, TOKENIZER, hub_commit, model_commit, model_source, tokenizer_sources
from kuberoll_workers.data.record import FailureRecord
from kuberoll_workers.data.shards import shard_of, share
from kuberoll_workers.data.tokenizer import check_compiles
from kuberoll_workers.data.tokenizer_files import model_directory, tokenizer_directory
from kuberoll_workers.data.tracebacks import attached_traceback
from kuberoll_workers.dataset.certificates import coverage
from kuberoll_workers.dataset.inputs import InputSummary, prompt_groups, scan
from kuberoll_workers.dataset.rows import DatasetError
from kuberoll_workers.environments.interface import EnvironmentInterface
from kuberoll_workers.output import records
from kuberoll_workers.output.feed_server import feed_routes
from kuberoll_workers.output.journal import write_atomically
from kuberoll_workers.output.part_feed import PartFeed
from kuberoll_workers.output.plan_follower import PaceReport
from kuberoll_workers.output.run_directory import (
    MANIFEST,
    RunManifest,
    RunRefused,
    differences,
    new_manifest,
    pinned_revision,
    read_manifest,
)
from kuberoll_workers.output.storage import DirectoryStorage, Storage, open_storage
from kuberoll_workers.output.trajectories import Trajectories
from kuberoll_workers.pods.exit_codes import exit_status
from kuberoll_workers.pods.files import (
    ConfigRefused,
    add_modules,
    encode_message,
    job_of,
    read_config,
    write_termination_message,
)
from kuberoll_workers.pods.http import health_route, json_route
from kuberoll_workers.policy.auth import take_further_tokens, take_token
from kuberoll_workers.policy.client import ServeClient
from kuberoll_workers.policy.endpoints import external_client
from kuberoll_workers.policy.interface import PolicyRefused
from kuberoll_workers.policy.readiness import answering_text, waiting_text
from kuberoll_workers.rollouts.admission import Drain
from kuberoll_workers.rollouts.failure_log import FailureLog
from kuberoll_workers.telemetry import RolloutMetrics
from kuberoll_workers.worker.config import Progress, WorkerConfig
from kuberoll_workers.worker.environments import (
    check_environment,
    is_elsewhere,
    isolated_environment_factory,
    local_paths,
    remote_digests,
)
from kuberoll_workers.worker.garbage import tune_garbage_collector
from kuberoll_workers.worker.run import run_worker
from kuberoll_workers.worker.settings import check_tools, part_limits, planned_trajectories

DRAIN_SECONDS_VARIABLE = "KUBEROLL_DRAIN_SECONDS"

# Less than the pod's terminationGracePeriodSeconds (120), to leave time for storing finished trajectories.
_DRAIN_SECONDS = 90.0
_LOG_SECONDS = 60.0
_SHIP = "apply the job with `kuberoll apply`, which ships what lies beside the manifest"

_log = logging.getLogger(__name__)
_Value = TypeVar("_Value")


class Drained(Exception):
    """Stopped before any trajectory was started."""


class ShardPod:
    """One pod's work on one shard."""

    def __init__(
        self, config: PodConfig, shard: int, *, token: str | None = None, direct_tokens: Sequence[str] = ()
    ) -> None:
        """Validate the job.

        Args:
            token: Bearer token for the policy; None: none.
            direct_tokens: Bearer tokens of consumers on the direct path; empty: there is none.

        Raises:
            ConfigRefused: The job has no such shard.
            ValidationError: The job is invalid.
        """
        if not 0 <= shard < config.shard_count:
            raise ConfigRefused(f"shard {shard} is not among the job's {config.shard_count}")
        self.shard = shard
        self.done = False
        self._config = config
        self._token = token
        self._direct_tokens = direct_tokens
        self._job = with_mounted_dataset(job_of(config))
        self._base = Path(config.base)
        self._planned: int | None = None
        self._inputs: InputSummary | None = None
        self._manifest: RunManifest | None = None
        self._tokenizer_revision: str | None = None
        self._copied_tokenizer: str | None = None
        self._earlier = Progress()
        self._progress = Progress()
        self._failures = FailureLog()
        self._drain = Drain()
        self._give_up = asyncio.Event()
        self._waiting = ""
        self._pace = PaceReport()
        self._metrics = RolloutMetrics(self._job.metadata.name)

    def progress(self) -> PodProgress:
        """The present counts."""
        earlier, now, failure = self._earlier, self._progress, self._failures.causes.earliest
        return PodProgress(
            shard=self.shard,
            planned=self._planned or 0,
            trajectories=earlier.trajectories + now.trajectories,
            failed=now.failed,
            turns=earlier.turns + now.turns,
            generated_tokens=earlier.generated_tokens + now.generated_tokens,
            reward_sum=earlier.reward_sum + now.reward_sum,
            generating=self._metrics.generating,
            policy_version=self._metrics.routing.policy_version,
            failure="" if failure is None else failure.headline(FAILURE_CHARACTERS),
            waiting=self._waiting[:FAILURE_CHARACTERS],
            held=self._pace.held[:FAILURE_CHARACTERS],
            starved=self._pace.starved[:FAILURE_CHARACTERS],
            **self._replicas(),
        )

    def _replicas(self) -> dict[str, Any]:
        """What the worker knows of the policy's replicas."""
        if self.done or self._metrics.routing.read_state is None:
            return {}
        state = self._metrics.routing.read_state()
        silent = [
            UnansweringReplica(
                url=item.url,
                since=datetime.fromtimestamp(item.since, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
                problem=item.problem[:PROBLEM_CHARACTERS],
                requests=item.requests,
            )
            for item in state.unanswering[:MOST_UNANSWERING]
        ]
        return {"answering": state.usable, "unanswering": tuple(silent)}

    def message(self, cause: str) -> bytes:
        """The termination message."""
        counts = self.progress()
        commit = None if self._manifest is None else model_commit(self._manifest.sources)
        return encode_message(
            WorkerMessage(
                shard=counts.shard,
                planned=counts.planned,
                trajectories=counts.trajectories,
                failed=counts.failed,
                dropped=self._earlier.dropped + self._progress.dropped,
                turns=counts.turns,
                generated_tokens=counts.generated_tokens,
                reward_sum=counts.reward_sum,
                # A cache that somebody else made may have directories of other names.
                commit=commit if commit is not None and re.match(COMMIT_PATTERN, commit) else None,
                done=self.done,
                cause=cause,
            )
        )

    def stop(self) -> None:
        """Finish the trajectories in flight and end; a second call ends at once."""
        if self._drain.is_set():
            self._give_up.set()
        else:
            _log.info("stopping: finishing the trajectories in flight")
            self._drain.set()
            seconds = float(os.environ.get(DRAIN_SECONDS_VARIABLE) or _DRAIN_SECONDS)
            asyncio.get_running_loop().call_later(seconds, self._give_up.set)

    async def check(self) -> None:
        """Check what all workers of the job need, and write the run's manifest.

        Raises:
            Drained: Stopped before the end.
        """
        await self._unless_stopped(_in_thread(self._check))
        self.done = True

    def _check(self) -> None:
        self._inspect()
        by_shard = self._planned_by_shard()
        self._planned = None if None in by_shard else sum(filter(None, by_shard))

    async def run(self, host: str) -> None:
        """Work until the shard is done or `stop` was called.

        Args:
            host: The address to serve HTTP at.

        Raises:
            Drained: Stopped before the work began.
        """
        feed = self._feed()
        routes = [
            metrics_route(self._metrics.registry, before=self._metrics.flush),
            json_route("/progress", self.progress),
            health_route(_healthy),
            *([] if feed is None else feed_routes(feed, self._direct_tokens, self._metrics.direct)),
        ]
        async with serving(routes, host=host, port=PROGRESS_PORT):
            background = [
                asyncio.create_task(self._metrics.watch_event_loop()),
                asyncio.create_task(self._log_progress()),
            ]
            try:
                self._planned, self._earlier = await self._unless_stopped(_in_thread(self._prepare))
                self._log_stored()
                max_model_len = await self._unless_stopped(self._endpoint_ready())
                self.done = await self._work(max_model_len, feed)
            finally:
                if feed is not None:
                    # The server's end waits for those who wait.
                    feed.end()
                for task in background:
                    task.cancel()
                await asyncio.gather(*background, return_exceptions=True)

    def _feed(self) -> PartFeed | None:
        """The direct path, if consumers may use it and need it: a directory's journals are read as they are written."""
        remote = not isinstance(open_storage(self._config.output), DirectoryStorage)
        return PartFeed() if self._direct_tokens and remote else None

    @property
    def _stored(self) -> int:
        return self.progress().trajectories

    async def _unless_stopped(self, work: Awaitable[_Value]) -> _Value:
        task = asyncio.ensure_future(work)
        stopped = asyncio.create_task(self._drain.wait())
        try:
            await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise Drained
            return task.result()
        finally:
            task.cancel()
            stopped.cancel()

    def _log_stored(self) -> None:
        of = "" if self._planned is None else f" of {self._planned}"
        _log.info("shard %d: %d%s trajectories are stored", self.shard, self._stored, of)

    def _prepare(self) -> tuple[int | None, Progress]:
        """Check the inputs; return the number of planned trajectories and the counts of earlier pods."""
        storage = self._inspect()
        planned = self._planned_by_shard()[self.shard]
        return planned, count_stored(storage, self.shard, self._config.shard_count)

    def _inspect(self) -> Storage:
        """Check the environments, the model's path, the dataset and the output; raises if one cannot be used."""
        job, config = self._job, self._config
        check_files(job, self._base)
        with_tools = None
        for spec in job.spec.environments:
            if check_environment(job, spec.name, protected=self._protected).declares_tools:
                with_tools = with_tools or f"spec.environments ({spec.name}) declares tools"
        check_model_path(self._tokenizer)
        self._copy_tokenizer()
        if (template := job.spec.generation.model.chat_template) is not None:
            check_compiles(template)
        storage = open_storage(config.output, parts=part_limits(job))
        if isinstance(storage, DirectoryStorage):
            storage.path.mkdir(parents=True, exist_ok=True)
        sources = self._find_sources(read_manifest(storage))
        inputs = scan(job, base=self._base, environment=self._environments(), shards=config.shard_count)
        check_tools(job, self._tokenizer, with_tools or inputs.tools_at)
        self._check_certificates()
        self._manifest = claim_output(
            storage,
            new_manifest(
                job, shards=config.shard_count, inputs=inputs.as_json(), code=remote_digests(job), sources=sources
            ),
        )
        self._inputs = inputs
        return storage

    def _check_certificates(self) -> None:
        """Log what the certificates of the job's rows say.

        Raises:
            DatasetError: The job requires them, and rows have none that is valid and good.
        """
        job = self._job
        found = coverage(job, base=self._base, environment=self._environments(), remote=lambda: remote_digests(job))
        if found is None:
            return
        if found.wrong and job.spec.dataset.certify.mode == "Require":
            raise DatasetError(found.refusal())
        _log.log(logging.WARNING if found.wrong else logging.INFO, "certificates: %s", found)
        for text in found.named:
            _log.warning("%s", text)

    def _find_sources(self, earlier: RunManifest | None) -> dict[str, str]:
        """Digests of the tokenizer, and the model's commit at the hub: its files are in other pods."""
        generation = self._job.spec.generation
        sources: dict[str, str] = {}
        if (files := tokenizer_directory(self._tokenizer, pinned_revision(self._job, earlier, TOKENIZER))) is not None:
            self._tokenizer_revision = hub_commit(files)
            sources = tokenizer_sources(files, own_template=generation.model.chat_template is not None)
        if generation.external is not None:
            return sources
        own = files
        if self._tokenizer != generation.model.source:
            own = model_directory(generation.model.source, pinned_revision(self._job, earlier, MODEL))
        if own is not None and hub_commit(own) is not None:
            sources[MODEL] = model_source(own)
        return sources

    def _environments(self) -> Callable[[str], EnvironmentInterface]:
        return isolated_environment_factory(self._job, protected=self._protected)

    @property
    def _protected(self) -> list[str]:
        return local_paths(self._config.output, self._config.turns)

    def _planned_by_shard(self) -> list[int | None]:
        """Number of planned trajectories of each shard; None: it has no end."""
        job, count = self._job, self._config.shard_count
        epochs = job.spec.dataset.epochs
        counts = [0] * count
        groups = prompt_groups(job, base=self._base, environment=self._environments(), blocks=self._blocks(), epochs=1)
        for group in groups:
            counts[shard_of(group.task_index, count)] += group.keep * (epochs or 1)
        wanted = job.spec.rollout.groups.wanted
        return [
            planned_trajectories(
                job,
                None if epochs is None and mine else mine,
                wanted=None if wanted is None else share(wanted, shard, count),
            )
            for shard, mine in enumerate(counts)
        ]

    def _blocks(self) -> list[str] | None:
        return None if self._inputs is None else list(self._inputs.blocks)

    async def _endpoint_ready(self) -> int:
        # The operator starts workers when generation is ready, but its pods may be replaced at any time.
        patience = float(self._job.spec.startup_deadline_seconds)
        external, token = self._job.spec.generation.external, self._token
        if external is not None:
            window = self._job.spec.rollout.max_sequence_length
            try:
                async with external_client(external, external.url, limit=1, token=token, window=window) as foreign:
                    return (await foreign.wait_ready(patience, trouble=_waiting)).max_model_len
            except (PolicyRefused, ValueError) as error:
                raise ConfigRefused(f"spec.generation.external: {error}") from error
        commit = None if self._manifest is None else model_commit(self._manifest.sources)
        async with ServeClient(self._config.endpoint, limit=1, token=token, commit=commit) as client:
            return (await client.wait_ready(patience, trouble=_waiting)).max_model_len

    async def _work(self, max_model_len: int, feed: PartFeed | None) -> bool:
        config = self._config
        settings = WorkerConfig(
            job=self._job,
            base=config.base,
            tokenizer=self._tokenizer,
            tokenizer_revision=self._tokenizer_revision,
            clock=None if self._manifest is None else self._manifest.created,
            sources={} if self._manifest is None else self._manifest.sources,
            sampling=None if self._manifest is None else self._manifest.sampling,
            endpoint=config.endpoint,
            max_model_len=max_model_len,
            output=config.output,
            turns=config.turns if self._job.spec.rollout.journal_turns else None,
            shards=[self.shard],
            shard_count=config.shard_count,
            tasks=None if self._inputs is None else self._inputs.tasks,
            rollouts=None if self._inputs is None else self._inputs.rollouts,
            blocks=self._blocks(),
            planned=self._planned,
            token=self._token,
            discovery=config.discovery,
            replicas=config.replicas,
            replicas_host=config.replicas_host,
            lock_patience=None,
        )
        working = asyncio.create_task(
            run_worker(
                settings,
                metrics=self._metrics,
                drain=self._drain,
                progress=self._progress,
                failures=self._failures,
                trouble=self._note_outage,
                pace_report=self._note_pace,
                lock_report=self._note_lock,
                feed=feed,
            )
        )
        giving_up = asyncio.create_task(self._give_up.wait())
        await asyncio.wait({working, giving_up}, return_when=asyncio.FIRST_COMPLETED)
        giving_up.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait({working})
        return not working.cancelled() and working.result()

    def _note_pace(self, report: PaceReport) -> None:
        self._pace = report
        _log.info("%s", report.held or report.starved or "the trainer and this worker go on")

    def _note_outage(self, reason: str | None, seconds: float) -> None:
        self._waiting = "" if reason is None else f"its policy: {reason}"
        _log.warning("%s", answering_text(seconds) if reason is None else waiting_text(reason, seconds))

    def _note_lock(self, reason: str | None) -> None:
        self._waiting = reason or ""
        _log.warning("%s", "the lock is free" if reason is None else f"waiting for {reason}")

    @property
    def _tokenizer(self) -> str:
        model = self._job.spec.generation.model
        return self._copied_tokenizer or model.tokenizer or model.source

    def _copy_tokenizer(self) -> None:
        """Copy the tokenizer to this machine, if it is in an object store."""
        if not in_bucket(self._tokenizer):
            return
        directory = tempfile.mkdtemp(prefix="kuberoll-tokenizer-")
        atexit.register(shutil.rmtree, directory, ignore_errors=True)
        try:
            copy_tokenizer(self._tokenizer, Path(directory))
        except ModelRefused as error:
            raise ConfigRefused(f"spec.generation.model: {error}") from None
        self._copied_tokenizer = directory

    async def _log_progress(self) -> None:
        while True:
            await asyncio.sleep(_LOG_SECONDS)
            self._log_stored()


def _waiting(trouble: str) -> None:
    _log.warning("waiting for the policy: %s", trouble)


async def _healthy() -> str | None:
    return None


def _in_thread(call: Callable[[], _Value]) -> asyncio.Future[_Value]:
    """Call in a daemon thread, which does not delay the exit: reading from a network may take long."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[_Value] = loop.create_future()

    def give(error: BaseException | None, value: _Value | None) -> None:
        if not answer.done():
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(value)  # type: ignore[arg-type]  # a _Value that may be None

    def run() -> None:
        error, value = None, None
        try:
            value = call()
        except Exception as raised:
            error = raised
        if not loop.is_closed():
            loop.call_soon_threadsafe(give, error, value)

    threading.Thread(target=run, name="kuberoll-prepare", daemon=True).start()
    return answer


def with_mounted_dataset(job: RolloutJob) -> RolloutJob:
    """The job with datasets in ConfigMaps or on volumes read as files, from where they are mounted."""
    dataset = job.spec.dataset
    if dataset.source is not None:
        changed = dataset.model_copy(update={"source": _mounted(dataset.source)})
    else:
        # Absolute paths, because other sources may be files beside the manifest.
        parts = [
            part.model_copy(update={"source": _mounted(part.source, f"{DATASET_DIRECTORY}/{number}/")})
            for number, part in enumerate(dataset.sources)
        ]
        changed = dataset.model_copy(update={"sources": parts})
    return job.model_copy(update={"spec": job.spec.model_copy(update={"dataset": changed})})


def _mounted(source: DatasetSource, directory: str = "") -> DatasetSource:
    if source.config_map is not None:
        return DatasetSource(uri=directory + source.config_map.key)
    if source.pvc is not None:
        return DatasetSource(uri=directory + source.pvc.path.lstrip("/"))
    return source


def check_files(job: RolloutJob, base: Path) -> None:
    """Check that this pod has what may lie beside the manifest: modules of entrypoints, and a dataset's relative path.

    Args:
        base: Directory where relative paths of the dataset start.

    Raises:
        ConfigRefused: It has not; the message says how it gets there.
    """
    for number, spec in enumerate(job.spec.environments):
        if is_elsewhere(spec):
            continue
        module = (spec.own_entrypoint or "").partition(":")[0].partition(".")[0]
        if module and importlib.util.find_spec(module) is None:
            raise ConfigRefused(
                f"spec.environments[{number}].entrypoint: {spec.own_entrypoint}: there is no module {module!r} in this "
                f"pod: {_SHIP} (spec.workers.files), or install it in the workers' image (spec.workers.image)"
            )
    for path, source in job.spec.dataset.located_sources():
        uri = source.uri
        if uri is None or "://" in uri or uri.startswith(("/", "~")) or any(letter in uri for letter in "*?["):
            continue
        if not (base / uri).exists():
            raise ConfigRefused(
                f"{format_path(path)}.uri: there is no {base / uri} in this pod: {_SHIP} (spec.workers.files), or name "
                "an object store (s3://bucket/rows.jsonl), a ConfigMap or a volume"
            )


def check_model_path(source: str) -> None:
    """Check that a tokenizer's directory is mounted.

    Raises:
        ConfigRefused: It is not, or tokenizers cannot be loaded from there.
    """
    if "://" in source and not in_bucket(source):
        raise ConfigRefused(
            f"spec.generation.model: {source}: workers load tokenizers from directories, the hub, s3:// or gs://"
        )
    if source.startswith((".", "/", "~")) and not Path(source).expanduser().is_dir():
        raise ConfigRefused(
            f"spec.generation.model: there is no directory {source} in this pod: mount it with "
            "spec.workers.podTemplate, or use a model of the hub"
        )


def claim_output(storage: Storage, manifest: RunManifest) -> RunManifest:
    """Check that the output belongs to this run; the first pod writes the manifest.

    The output is not locked. A shard has one writer at a time: the Job has one pod per index, and creates another one
    only after that has ended (podReplacementPolicy Failed). Pods that write the manifest concurrently write the same
    one, except for its creation time: the last one's is the run's.

    Returns:
        The run's manifest.

    Raises:
        RunRefused: It belongs to another run.
    """
    old = read_manifest(storage)
    if old is None:
        shards = storage.shards()
        # Another pod may have started since the first read.
        old = read_manifest(storage)
        if old is None and shards:
            raise RunRefused(
                f"{storage.location} has trajectories but no {MANIFEST}, so it is unknown which run they belong to: "
                "restore that file, or choose another spec.output.uri"
            )
    if old is None:
        _write_manifest(storage, orjson.dumps(manifest, option=orjson.OPT_INDENT_2))
        return read_manifest(storage) or manifest
    if changed := differences(old, manifest):
        lines = "\n  ".join(changed)
        raise RunRefused(
            f"{storage.location} contains a different run; mixing their trajectories is not allowed: undo the "
            f"change, or choose another spec.output.uri\n  {lines}"
        )
    return old


def _write_manifest(storage: Storage, data: bytes) -> None:
    if isinstance(storage, DirectoryStorage):
        # Pods that write concurrently need separate temporary files.
        mine = storage.path / f".{MANIFEST}.{uuid.uuid4().hex}"
        write_atomically(mine, data)
        mine.replace(storage.path / MANIFEST)
    else:
        storage.write(MANIFEST, data)


def count_stored(storage: Storage, shard: int, shard_count: int) -> Progress:
    """Count the trajectories of a shard that earlier pods stored.

    Raises:
        RecordError: A line is invalid; the message has file and line.
    """
    progress = Progress()
    for record in Trajectories([storage], shards=[records.shard_name(shard)]):
        if not isinstance(record, FailureRecord) and shard_of(record.task_index, shard_count) == shard:
            progress.add(record)
    return progress


def _drain_on_signals(pod: ShardPod) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, pod.stop)


async def _check(pod: ShardPod) -> None:
    _drain_on_signals(pod)
    await pod.check()
    _log.info("workers have what they need: %d trajectories are planned", pod.progress().planned)


async def _run(pod: ShardPod) -> None:
    _drain_on_signals(pod)
    await pod.run(os.environ.get("POD_IP") or "0.0.0.0")


def _shard() -> int:
    index = os.environ.get("JOB_COMPLETION_INDEX", "")
    if not index.isdecimal():
        raise ConfigRefused(f"JOB_COMPLETION_INDEX: found {index!r}; it is the number of the shard")
    return int(index)


def _direct_tokens() -> list[str]:
    try:
        return take_further_tokens(os.environ, "read")
    except ValueError as error:
        raise ConfigRefused(str(error)) from error


def main() -> None:
    """The process's entry point."""
    parser = argparse.ArgumentParser(prog="kuberoll_workers.pods.worker", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="JSON file of a PodConfig")
    parser.add_argument("--check", action="store_true", help="check what workers need, and exit")
    arguments = parser.parse_args()
    log_to_stderr()
    pod: ShardPod | None = None
    code, cause = 0, ""
    try:
        # Before any user code runs.
        token, direct_tokens = take_token(os.environ, "generate"), _direct_tokens()
        config, shard = read_config(arguments.config), 0 if arguments.check else _shard()
        log_to_stderr(job=config.job.get("metadata", {}).get("name"), shard=shard)
        add_modules(config)
        pod = ShardPod(config, shard, token=token, direct_tokens=direct_tokens)
        tune_garbage_collector()
        asyncio.run(_check(pod) if arguments.check else _run(pod))
        if not pod.done:
            code, cause = EXIT_DRAINED, "stopped before the shard was done"
    except Drained:
        code, cause = EXIT_DRAINED, "stopped before the work began"
    except Exception as error:
        code, cause = exit_status(error)
        _log.error(cause, exc_info=code == EXIT_FAILED)
        if (found := attached_traceback(error)) is not None:
            _log.error("the environment's own traceback:\n%s", found.text)
    write_termination_message(encode_message(WorkerMessage(cause=cause)) if pod is None else pod.message(cause))
    logging.shutdown()
    # Prints of environments.
    sys.stdout.flush()
    # A thread may still be reading the dataset, and a regular shutdown of the interpreter would crash.
    os._exit(code)


if __name__ == "__main__":
    main()
