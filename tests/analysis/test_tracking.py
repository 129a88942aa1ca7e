"""Trackers are told of a run; one that cannot be told is a warning."""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_workers.analysis import tracking
from kuberoll_workers.analysis.endings import EndingRefused
from kuberoll_workers.analysis.tracking import check_tracking, log_run, run_id, scalars
from kuberoll_workers.data.extras import installation
from kuberoll_workers.output.parquet import write_parquet
from kuberoll_workers.output.run_directory import AGGREGATES, MANIFEST, RunManifest
from kuberoll_workers.output.run_files import RunFiles
from tests.analysis.test_export import run_of, trajectory

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def trackers_leave_nothing(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """wandb makes directories when it is imported, and removes them only at an orderly exit of its process."""
    if "wandb" not in sys.modules:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("trackers")))


AGGREGATED = {
    "format": 2,
    "job": "counting",
    "trajectories": 2,
    "planned": None,
    "environments": {
        "puzzle": {
            "trajectories": 2,
            "failures": {"environment (environment): it broke at 0x7f": 1},
            "fields": {"total_reward": {"mean": 0.5, "histogram": [1, 2]}},
            "environment_metrics": {"solved (all)": 0.25, "ok": True, "name": "x"},
        }
    },
}


def job(tmp_path: Path, **section: Any) -> RolloutJob:
    return RolloutJob.model_validate(
        {
            "apiVersion": "kuberoll.io/v1alpha1",
            "kind": "RolloutJob",
            "metadata": {"name": "counting"},
            "spec": {
                "generation": {"model": {"source": "none"}, "engine": "Simulated"},
                "environments": [{"name": "puzzle", "type": "sliding_puzzle"}],
                "dataset": {"source": {"generator": {"count": 1}}},
                "output": {"tracking": section},
            },
        }
    )


def finished_run(tmp_path: Path, **changes: Any) -> RunFiles:
    files = run_of(tmp_path / "run", trajectory(0), trajectory(1))
    manifest = {
        "format": 1, "job": "counting", "created": "2030-01-01T00:00:00+00:00", "shards": 2,
        "identity": {"environments[0].name": "puzzle", "generation.sampling.temperature": 1.0},
        "inputs": {"rows": 2, "digest": "d"}, "versions": {"kuberoll": "1"},
    }  # fmt: skip
    (tmp_path / "run" / MANIFEST).write_text(json.dumps({**manifest, **changes}))
    (tmp_path / "run" / AGGREGATES).write_text(json.dumps(AGGREGATED))
    return files


def sqlite(tmp_path: Path) -> dict[str, Any]:
    return {"trackingUri": f"sqlite:///{tmp_path}/mlflow.db", "experiment": "rollouts"}


def test_scalars() -> None:
    assert scalars(AGGREGATED) == {
        "trajectories": 2.0,
        "puzzle/trajectories": 2.0,
        "puzzle/fields/total_reward/mean": 0.5,
        "puzzle/environment_metrics/solved _all_": 0.25,
    }


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@given(document=st.dictionaries(st.text(), JSON))
def test_scalars_are_finite_numbers_of_acceptable_names(document: dict[str, Any]) -> None:
    for name, value in scalars({**document, "environments": {}}).items():
        assert isinstance(value, float)
        assert abs(value) < float("inf")
        assert not set(name) & set("[]():,{}'\"")


def test_a_run_that_goes_on_is_the_same_one(tmp_path: Path) -> None:
    def named(**changes: Any) -> str:
        manifest = finished_run(tmp_path, **changes).manifest()
        assert isinstance(manifest, RunManifest)
        return run_id(manifest)

    first = named()
    assert named(forced=["spec.x: was 1, is 2"]) == first
    assert named(created="2030-01-01T00:00:01+00:00") != first
    assert named(job="other") != first


def test_mlflow_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    monkeypatch.chdir(tmp_path)
    settings = sqlite(tmp_path)
    wanted = job(tmp_path, mlflow=settings, trajectories=True)
    check_tracking(wanted)
    files, notes = finished_run(tmp_path), list[str]()
    log_run(wanted, files, note=notes.append)
    assert "of experiment rollouts" in notes[0]
    # Resumed: the same run, with its newest numbers.
    (tmp_path / "run" / AGGREGATES).write_text(json.dumps({**AGGREGATED, "trajectories": 3}))
    log_run(wanted, files, note=notes.append)
    assert notes[0] == notes[1]
    client = mlflow.MlflowClient(tracking_uri=settings["trackingUri"])
    (run,) = client.search_runs([client.get_experiment_by_name("rollouts").experiment_id])
    assert (run.info.run_name, run.info.status) == ("counting", "FINISHED")
    assert run.data.metrics["puzzle/fields/total_reward/mean"] == 0.5
    assert run.data.metrics["trajectories"] == 3
    assert run.data.params["environments.0.name"] == "puzzle"
    assert run.data.params["dataset.digest"] == "d"
    names = {file.path for file in client.list_artifacts(run.info.run_id)}
    assert names == {AGGREGATES, MANIFEST, "shard-00000.jsonl", "shard-00001.jsonl"}
    copy = client.download_artifacts(run.info.run_id, "shard-00001.jsonl", str(tmp_path))
    assert Path(copy).read_bytes() == (tmp_path / "run" / "shard-00001.jsonl").read_bytes()


def test_wandb_is_told_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for variable in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(variable, str(tmp_path))
    given: dict[str, Any] = {}
    init = wandb.init

    def watched(**options: Any) -> Any:
        given.update(options)
        return init(**options)

    monkeypatch.setattr(wandb, "init", watched)
    settings = {"project": "rollouts", "tags": ["test"], "entity": "team", "group": "sweep"}
    wanted = job(tmp_path, wandb=settings, trajectories=True)
    check_tracking(wanted)
    files, notes = finished_run(tmp_path), list[str]()
    try:
        log_run(wanted, files, note=notes.append)
    finally:
        wandb.teardown()
    assert notes[0].startswith("wandb: offline run in ")
    manifest = files.manifest()
    assert manifest is not None
    told = ("project", "entity", "group", "name", "tags", "job_type", "id", "resume")
    assert [given[name] for name in told] == [
        "rollouts", "team", "sweep", "counting", ["test"], "rollouts", run_id(manifest), "allow",
    ]  # fmt: skip
    assert given["config"] == {**manifest.identity, "dataset": manifest.inputs, "versions": {"kuberoll": "1"}}
    (stored,) = (tmp_path / "wandb").glob(f"offline-run-*-{run_id(manifest)}/*.wandb")
    contents = stored.read_bytes()
    # What a run is looked for by.
    for words in (b"dataset", b'"rows"', b"versions", b'"kuberoll"'):
        assert words in contents
    for words in (b"puzzle/fields/total_reward/mean", b"generation.sampling.temperature", b"shard-00001.jsonl"):
        assert words in contents


def test_wandb_has_the_table_that_nemo_gym_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for variable in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(variable, str(tmp_path))
    notes = list[str]()
    try:
        wanted = job(tmp_path, wandb={"project": "rollouts", "nemoGymRollouts": True})
        log_run(wanted, finished_run(tmp_path), note=notes.append)
    finally:
        wandb.teardown()
    assert notes[0].startswith("wandb: offline run in ")
    (table,) = (tmp_path / "wandb").glob("offline-run-*/files/media/table/Rollouts_*.table.json")
    stored = json.loads(table.read_text())
    assert stored["columns"] == ["Rollout"]
    rollouts = [json.loads(text) for (text,) in stored["data"]]
    assert [(row["_ng_task_index"], row["reward"], row["agent_ref"]["name"]) for row in rollouts] == [
        (0, 1.0, "puzzle"), (1, 1.0, "puzzle"),
    ]  # fmt: skip
    assert rollouts[0]["response"]["output"][-1]["generation_token_ids"] == [12, 20]
    (run,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    for name in (b"puzzle/mean/reward", b"key_metrics/puzzle/mean/reward", b"Rollouts"):
        assert name in run.read_bytes()


def test_wandb_without_anybody_logged_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    for variable in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    with pytest.raises(EndingRefused, match="wandb login"):
        check_tracking(job(tmp_path, wandb={"project": "rollouts"}))


def test_a_tracker_that_cannot_be_told_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "shard-00000.jsonl").touch()
    notes: list[str] = []
    with caplog.at_level(logging.WARNING):
        log_run(job(tmp_path, mlflow=sqlite(tmp_path)), RunFiles(str(tmp_path / "run")), note=notes.append)
    assert notes == [
        f"warning: could not log the run to mlflow: ValueError: {tmp_path}/run has no manifest.json"
    ]  # fmt: skip
    (warning,) = [record for record in caplog.records if "could not log the run to mlflow" in record.getMessage()]
    assert warning.exc_info is not None
    assert isinstance(warning.exc_info[1], ValueError)


def test_a_tracker_that_never_answers_is_given_up() -> None:
    import threading

    end = threading.Event()

    def hang() -> str:
        end.wait()
        return ""

    with pytest.raises(TimeoutError, match="no answer within 0 s"):
        tracking._call_within(0.01, hang)
    end.set()

    def leave() -> str:
        raise SystemExit(3)

    with pytest.raises(RuntimeError, match="SystemExit"):
        tracking._call_within(30, leave)


def test_a_missing_package_is_found_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(EndingRefused) as raised:
        tracking._require_module("no_such_tracker", installation("wandb"), "spec.output.tracking.wandb")
    assert str(raised.value) == (
        "spec.output.tracking.wandb: no_such_tracker is not installed: pip install 'kuberoll[tracking]'; or remove the "
        "field"
    )
    untracked = job(tmp_path, wandb={"project": "p"}).model_copy(deep=True)
    spec = untracked.spec.model_copy(update={"output": untracked.spec.output.model_copy(update={"tracking": None})})
    check_tracking(untracked.model_copy(update={"spec": spec}))


def test_a_directory_that_mlflow_refuses_is_found_before_the_run(tmp_path: Path) -> None:
    pytest.importorskip("mlflow", minversion="3.7")
    settings = {"trackingUri": str(tmp_path / "mlruns"), "experiment": "rollouts"}
    with pytest.raises(EndingRefused, match=r"trackingUri: .*maintenance mode"):
        check_tracking(job(tmp_path, mlflow=settings))


def test_tracking_without_a_tracker_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="set wandb or mlflow"):
        job(tmp_path, trajectories=True)


def test_a_run_that_mlflow_was_told_half_of_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    monkeypatch.chdir(tmp_path)
    settings = sqlite(tmp_path)

    def broken(*_: Any, **__: Any) -> Any:
        raise OSError("the disk is full")

    monkeypatch.setattr(tracking, "_artifacts", broken)
    notes: list[str] = []
    log_run(job(tmp_path, mlflow=settings), finished_run(tmp_path), note=notes.append)
    assert notes == ["warning: could not log the run to mlflow: OSError: the disk is full"]
    client = mlflow.MlflowClient(tracking_uri=settings["trackingUri"])
    (run,) = client.search_runs([client.get_experiment_by_name("rollouts").experiment_id])
    assert run.info.status == "FAILED"
    # Told again, it is the same run, and is finished.
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    log_run(job(tmp_path, mlflow=settings), finished_run(tmp_path), note=notes.append)
    (again,) = client.search_runs([client.get_experiment_by_name("rollouts").experiment_id])
    assert (again.info.run_id, again.info.status) == (run.info.run_id, "FINISHED")


@pytest.mark.parametrize("scheme", ["sqlite", "mysql", "postgresql+psycopg2", "mssql"])
def test_databases_of_mlflow_need_their_packages(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    needed: list[tuple[str, ...]] = []
    monkeypatch.setattr(tracking, "_require_module", lambda *given: needed.append(given))
    tracking._check_store(f"{scheme}://host/database")
    field = "spec.output.tracking.mlflow.trackingUri"
    assert needed == [("sqlalchemy", "pip install mlflow", field), ("alembic", "pip install mlflow", field)]


def test_a_run_that_wandb_was_told_half_of_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for variable in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(variable, str(tmp_path))
    ended: list[int | None] = []
    finish = wandb.Run.finish

    def watched(run: Any, exit_code: int | None = None, **more: Any) -> None:
        ended.append(exit_code)
        finish(run, exit_code=exit_code, **more)

    def broken(*_: Any, **__: Any) -> Any:
        raise OSError("the disk is full")

    monkeypatch.setattr(wandb.Run, "finish", watched)
    # Of another test's session, which had other settings.
    wandb.teardown()
    notes: list[str] = []
    wanted, files = job(tmp_path, wandb={"project": "rollouts"}), finished_run(tmp_path)
    try:
        with monkeypatch.context() as full:
            full.setattr(tracking, "_artifacts", broken)
            log_run(wanted, files, note=notes.append)
        log_run(wanted, files, note=notes.append)
    finally:
        wandb.teardown()
    assert notes[0] == "warning: could not log the run to wandb: OSError: the disk is full"
    assert notes[1].startswith("wandb: offline run in ")
    assert ended == [1, None]


def test_what_is_uploaded_is_made_one_file_at_a_time(tmp_path: Path) -> None:
    files, place = finished_run(tmp_path), tmp_path / "place"
    place.mkdir()
    write_parquet(tmp_path / "run" / "shard-00001.parquet", [trajectory(1)])
    (tmp_path / "run" / "shard-00001.jsonl").unlink()
    whole = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}

    def uploaded(*, shards: bool) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        for path in tracking._artifacts(files, place, shards=shards):
            assert list(place.iterdir()) == [path]
            found[path.name] = path.read_bytes()
        assert list(place.iterdir()) == []
        return found

    assert uploaded(shards=False) == {name: whole[name] for name in (AGGREGATES, MANIFEST)}
    assert uploaded(shards=True) == {
        name: whole[name] for name in (AGGREGATES, MANIFEST, "shard-00000.jsonl", "shard-00001.parquet")
    }


@pytest.mark.parametrize(("shards", "seconds"), [(False, 120), (True, 3600)])
def test_who_uploads_shards_has_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards: bool, seconds: float
) -> None:
    given: list[float] = []
    monkeypatch.setattr(tracking, "_call_within", lambda limit, call: given.append(limit))
    section = {"mlflow": sqlite(tmp_path), "wandb": {"project": "p"}, "trajectories": shards}
    log_run(job(tmp_path, **section), finished_run(tmp_path), note=lambda text: None)
    assert given == [seconds, seconds]


@pytest.mark.parametrize(
    "uri", ["http://host", "https://host", "databricks", "databricks-uc", "databricks://a", "uc:a"]
)
def test_servers_of_mlflow_need_nothing_here(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def needed(*given: Any) -> None:
        raise AssertionError(given)

    monkeypatch.setattr(tracking, "_require_module", needed)
    tracking._check_store(uri)


def test_settings_become_parameters_that_trackers_take(tmp_path: Path) -> None:
    identity = {"environments[0].name": "puzzle", "long": "x" * 7000, "none": None, "list": [1, "a"]}
    manifest = finished_run(tmp_path, identity=identity).manifest()
    assert manifest is not None
    found = tracking.parameters(manifest)
    assert found["environments.0.name"] == "puzzle"
    assert (len(found["long"]), found["dataset.rows"], found["versions.kuberoll"]) == (6000, "2", "1")
