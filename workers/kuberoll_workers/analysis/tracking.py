"""Logging of a finished run to experiment trackers: numbers, settings and files. Best effort."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import orjson

from kuberoll_api.model.output import MlflowTracking, Tracking, WandbTracking
from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_workers.analysis.aggregation.aggregates import Aggregates
from kuberoll_workers.analysis.endings import EndedRun, EndingRefused, EndingResult
from kuberoll_workers.analysis.export.nemo_gym import rollout_of_record
from kuberoll_workers.analysis.export.nemo_gym_metrics import GymMetrics, logged
from kuberoll_workers.analysis.export.samplings import with_sampling
from kuberoll_workers.analysis.export.writers import json_line
from kuberoll_workers.analysis.report.make import PAGE
from kuberoll_workers.data.extras import installation
from kuberoll_workers.data.plain import is_finite
from kuberoll_workers.data.sampling import Distribution
from kuberoll_workers.output.precedence import EndedRecord
from kuberoll_workers.output.run_directory import AGGREGATES, MANIFEST, MODEL, RunManifest
from kuberoll_workers.output.run_files import RunFiles

_log = logging.getLogger(__name__)

ARTIFACTS = (AGGREGATES, PAGE, MANIFEST)
"""Files of a run that are uploaded if they exist."""

RUN_ID_TAG = "kuberoll.run_id"
"""Tag by which a resumed run finds its earlier part in MLflow, which chooses run ids itself."""

_DEADLINE_SECONDS = 120.0
_DEADLINE_WITH_SHARDS_SECONDS = 3600.0

# Mappings with arbitrary texts as names: causes of failures.
_NOT_NUMBERS = {"failures"}
_ODD_CHARACTERS = re.compile(r"[^\w\-. /]+")
_PARAMETER_LENGTH = 6000
_PARAMETERS_AT_ONCE = 100
_METRICS_AT_ONCE = 1000

_Item = TypeVar("_Item")


class TrackingEnding:
    """Logs a run to the job's trackers; see `analysis.endings.Ending`."""

    # It uploads the report.
    after: ClassVar[Sequence[str]] = ("report",)

    def __init__(self, run: EndedRun) -> None:
        self._run = run

    @staticmethod
    def is_wanted(job: RolloutJob) -> bool:
        """A job that names a tracker has it."""
        return job.spec.output.tracking is not None

    @staticmethod
    def check(job: RolloutJob) -> None:
        """See `analysis.endings.Ending`."""
        check_tracking(job)

    def offer(self, record: EndedRecord) -> None:
        """See `analysis.endings.Ending`; the files have all that is logged."""

    def make(self, _: Aggregates) -> EndingResult:
        """See `analysis.endings.Ending`."""
        log_run(self._run.job, self._run.files, note=self._run.note)
        return EndingResult()


def check_tracking(job: RolloutJob) -> None:
    """Check, before anything is started, that the job's trackers can be used; sends nothing.

    Raises:
        EndingRefused: A package or the login is missing.
    """
    tracking = job.spec.output.tracking
    if tracking is None:
        return
    if tracking.wandb is not None:
        _require_module("wandb", installation("wandb"), "spec.output.tracking.wandb")
        _check_login()
    if tracking.mlflow is not None:
        _require_module("mlflow", installation("mlflow"), "spec.output.tracking.mlflow")
        _check_store(tracking.mlflow.tracking_uri)


def _require_module(module: str, remedy: str, field: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise EndingRefused(f"{field}: {module} is not installed: {remedy}; or remove the field")


def _check_login() -> None:
    if _offline():
        return
    import wandb

    if not wandb.login(prompt=False):
        raise EndingRefused(
            "spec.output.tracking.wandb: not logged in: run `wandb login`, set WANDB_API_KEY, or set "
            "WANDB_MODE=offline and upload the run later with `wandb sync`"
        )


def _offline() -> bool:
    return os.environ.get("WANDB_MODE", "online") != "online"


def _check_store(uri: str) -> None:
    field = "spec.output.tracking.mlflow.trackingUri"
    scheme = uri.partition(":")[0].partition("+")[0]
    if scheme in ("sqlite", "mysql", "postgresql", "mssql"):
        for module in ("sqlalchemy", "alembic"):
            # The extra has the small distribution, which does without databases.
            _require_module(module, "pip install mlflow", field)
    elif scheme not in ("http", "https", "databricks", "databricks-uc", "uc"):
        # A directory: whether that is still supported depends on MLflow's version.
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        try:
            MlflowClient(tracking_uri=uri).search_experiments(max_results=1)
        except MlflowException as error:
            raise EndingRefused(f"{field}: {uri}: {error.message}") from error


def log_run(job: RolloutJob, files: RunFiles, *, note: Callable[[str], None]) -> None:
    """Log a run to the job's trackers; a resumed run continues the same tracked run. Never raises.

    A tracker that does not answer is abandoned after two minutes, or after an hour if trajectories are uploaded.

    Args:
        files: The run's output, including its aggregates.
        note: Prints a line for the user: the location of the tracked run, or a warning. Warnings are also logged.
    """
    tracking = job.spec.output.tracking
    if tracking is None:
        return
    everything = tracking.trajectories or (tracking.wandb is not None and tracking.wandb.nemo_gym_rollouts)
    seconds = _DEADLINE_WITH_SHARDS_SECONDS if everything else _DEADLINE_SECONDS
    for name, settings, log in (("wandb", tracking.wandb, _log_to_wandb), ("mlflow", tracking.mlflow, _log_to_mlflow)):
        if settings is None:
            continue
        try:
            where = _call_within(seconds, partial(log, job, tracking, files))
        except Exception as error:
            text = " ".join(str(error).split())[:300]
            _log.warning("could not log the run to %s", name, exc_info=error)
            note(f"warning: could not log the run to {name}: {type(error).__name__}: {text}")
        else:
            note(f"{name}: {where}")


def _call_within(seconds: float, call: Callable[[], str]) -> str:
    """Call in a thread, with a time limit: clients may wait for servers indefinitely."""
    answer: Future[str] = Future()

    def wait() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            # A client's SystemExit must end its thread, not the run.
            answer.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))

    threading.Thread(target=wait, name="kuberoll-tracking", daemon=True).start()
    try:
        return answer.result(seconds)
    except TimeoutError as error:
        raise error if answer.done() else TimeoutError(f"no answer within {seconds:.0f} s") from error


def run_id(manifest: RunManifest) -> str:
    """Id of a tracked run: equal for all parts of a run, unique among runs."""
    parts = (manifest.job, manifest.created, manifest.inputs)
    return "kr-" + hashlib.blake2b(orjson.dumps(parts, option=orjson.OPT_SORT_KEYS), digest_size=10).hexdigest()


def scalars(document: Mapping[str, Any]) -> dict[str, float]:
    """Numbers of `aggregate_metrics.json`: `environment/name` for those of an environment, `name` for the run's."""
    document = {key: value for key, value in document.items() if key != "format"}
    environments = document.pop("environments", None) or {}
    return dict(_numbers({**document, **environments}, ""))


def _numbers(value: Any, path: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            if key not in _NOT_NUMBERS or not isinstance(item, Mapping):
                yield from _numbers(item, f"{path}/{_name(key)}" if path else _name(key))
    elif not isinstance(value, bool) and is_finite(value):
        yield path, float(value)


def _name(text: str) -> str:
    """A name that every tracker accepts."""
    return _ODD_CHARACTERS.sub("_", text)


def parameters(manifest: RunManifest) -> dict[str, str]:
    """A run's settings as MLflow parameters: names without brackets, values as text."""
    given: dict[str, Any] = {
        **manifest.identity,
        **{f"dataset.{key}": value for key, value in manifest.inputs.items()},
        **{f"versions.{key}": value for key, value in manifest.versions.items()},
    }
    return {
        _name(re.sub(r"\[(\d+)\]", r".\1", key)): (value if isinstance(value, str) else orjson.dumps(value).decode())[
            :_PARAMETER_LENGTH
        ]
        for key, value in given.items()
    }


def _manifest(files: RunFiles) -> RunManifest:
    manifest = files.manifest()
    if manifest is None:
        raise ValueError(f"{files.location} has no {MANIFEST}")
    return manifest


def _metrics(files: RunFiles) -> dict[str, float]:
    contents = files.storage.read(AGGREGATES)
    return {} if contents is None else scalars(orjson.loads(contents))


def _artifacts(files: RunFiles, directory: Path, *, shards: bool) -> Iterator[Path]:
    """The run's files as local files; each is removed when the next one is requested."""
    for name in ARTIFACTS:
        contents = files.storage.read(name)
        if contents is not None:
            path = directory / name
            path.write_bytes(contents)
            yield path
            path.unlink()
    for shard in files.storage.shards() if shards else ():
        path = directory / f"{shard}.parquet"
        if files.storage.fetch(path.name, path):
            yield path
            path.unlink()
        path = directory / f"{shard}.jsonl"
        with path.open("wb") as copy:
            copy.writelines(line for _, line in files.storage.lines(shard))
        if path.stat().st_size:
            yield path
        path.unlink()


def _log_to_wandb(job: RolloutJob, tracking: Tracking, files: RunFiles) -> str:
    import wandb

    settings: WandbTracking | None = tracking.wandb
    assert settings is not None
    manifest = _manifest(files)
    name = run_id(manifest)
    run = wandb.init(
        project=settings.project,
        entity=settings.entity,
        group=settings.group,
        name=settings.name or job.metadata.name,
        tags=settings.tags or None,
        job_type="rollouts",
        id=name,
        resume="allow",
        config={**manifest.identity, "dataset": manifest.inputs, "versions": manifest.versions},
        # The run's output is in its logs, and this machine's statistics are not those of the run.
        settings=wandb.Settings(
            silent=True, console="off", disable_git=True, disable_code=True, x_disable_stats=True, login_timeout=10
        ),
    )
    try:
        run.log(_metrics(files))
        if settings.nemo_gym_rollouts:
            _log_rollouts(run, files, model=manifest.identity.get(MODEL) or "policy", usual=manifest.sampling)
        artifact = wandb.Artifact(_name(f"{job.metadata.name}-{name}"), type="rollouts")
        with tempfile.TemporaryDirectory(prefix="kuberoll-") as directory:
            for path in _artifacts(files, Path(directory), shards=tracking.trajectories):
                # Copied immediately, so that at most one file exists twice.
                artifact.add_file(str(path.resolve()), name=path.name, policy="mutable")
        run.log_artifact(artifact)
        where = run.url or f"offline run in {Path(run.dir).parent}; upload it with `wandb sync`"
    except BaseException:
        run.finish(exit_code=1)
        raise
    run.finish()
    return where


def _log_rollouts(run: Any, files: RunFiles, *, model: str, usual: Distribution | None) -> None:
    """Log the finished trajectories under the names that NeMo Gym logs its own by; those of the table are in memory."""
    from wandb import Table

    metrics = GymMetrics()
    rows: list[list[str]] = []
    for record in files.trajectories():
        result = rollout_of_record(with_sampling(record, usual), model=model)
        metrics.add(result)
        # It logs no more of a table.
        if len(rows) < Table.MAX_ROWS:
            rows.append([json_line(result).decode().rstrip("\n")])
    run.log({"Rollouts": Table(data=rows, columns=["Rollout"])})
    run.log(logged(metrics.entries()))


def _log_to_mlflow(job: RolloutJob, tracking: Tracking, files: RunFiles) -> str:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param

    settings: MlflowTracking | None = tracking.mlflow
    assert settings is not None
    manifest = _manifest(files)
    client = MlflowClient(tracking_uri=settings.tracking_uri)
    found = client.get_experiment_by_name(settings.experiment)
    experiment = client.create_experiment(settings.experiment) if found is None else found.experiment_id
    name = run_id(manifest)
    earlier = client.search_runs([experiment], f"tags.`{RUN_ID_TAG}` = '{name}'", max_results=1)
    run = earlier[0] if earlier else client.create_run(experiment, run_name=job.metadata.name, tags={RUN_ID_TAG: name})
    this = run.info.run_id
    try:
        client.update_run(this, status="RUNNING")
        # A parameter cannot be changed; the manifest records forced changes.
        params = [Param(key, value) for key, value in parameters(manifest).items() if key not in run.data.params]
        now = int(time.time() * 1000)
        metrics = [Metric(key, value, now, 0) for key, value in _metrics(files).items()]
        for batch in _batches(params, _PARAMETERS_AT_ONCE):
            client.log_batch(this, params=batch)
        for numbers in _batches(metrics, _METRICS_AT_ONCE):
            client.log_batch(this, metrics=numbers)
        with tempfile.TemporaryDirectory(prefix="kuberoll-") as directory:
            for path in _artifacts(files, Path(directory), shards=tracking.trajectories):
                client.log_artifact(this, str(path))
    except BaseException:
        client.set_terminated(this, status="FAILED")
        raise
    client.set_terminated(this)
    return f"run {this} of experiment {settings.experiment} in {settings.tracking_uri}"


def _batches(items: list[_Item], size: int) -> Iterator[list[_Item]]:
    rest = iter(items)
    while some := list(islice(rest, size)):
        yield some
