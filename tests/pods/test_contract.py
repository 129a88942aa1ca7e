"""What pods decide without starting anything: what fits into a message, what is tried again, what a shard comes to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_api.contract import EnvironmentResult, FinishMessage
from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_workers.data.shards import share
from kuberoll_workers.dataset.rows import DatasetError
from kuberoll_workers.environments.registry import UnusableEnvironment
from kuberoll_workers.output.run_directory import RunRefused, new_manifest, read_manifest
from kuberoll_workers.output.storage import DirectoryStorage
from kuberoll_workers.pods.exit_codes import exit_status, is_permanent
from kuberoll_workers.pods.files import ConfigRefused, clip, encode_message, read_config
from kuberoll_workers.pods.worker import check_files, claim_output, with_mounted_dataset
from kuberoll_workers.policy.interface import PolicyRefused, PolicyUnavailable
from kuberoll_workers.worker.settings import planned_trajectories


@given(cause=st.text(max_size=6000), environments=st.integers(0, 64), name=st.text(min_size=1, max_size=63))
def test_a_message_is_whole_json_of_at_most_4_kb(cause: str, environments: int, name: str) -> None:
    results = {
        f"{name}{number}": EnvironmentResult(trajectories=10**9, mean_reward=0.1 + number)
        for number in range(environments)
    }
    data = encode_message(FinishMessage(trajectories=1, environments=results, cause=cause))
    assert len(data) <= 4096
    message = json.loads(data)
    assert message["trajectories"] == 1
    assert len(message["environments"]) + message["environments_left_out"] == environments
    assert message["cause"] == clip(cause) or message["cause"].endswith("…")


@given(st.text(), st.integers(3, 50))
def test_a_text_is_clipped_between_characters(text: str, limit: int) -> None:
    short = clip(text, limit)
    assert len(short.encode()) <= limit
    assert short == text if len(text.encode()) <= limit else text.startswith(short[:-1]) and short.endswith("…")


def raised(error: Exception, cause: BaseException | None) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "refused"),
    [
        (DatasetError("rows.jsonl:3: no"), True),
        (raised(DatasetError("x"), FileNotFoundError("x")), True),
        (raised(DatasetError("x"), PermissionError("x")), True),
        (raised(DatasetError("x"), ConnectionResetError("x")), False),
        (raised(DatasetError("x"), TimeoutError("x")), False),
        (raised(DatasetError("x"), raised(DatasetError("y"), OSError("x"))), False),
        (raised(UnusableEnvironment("x"), ImportError("x")), True),
        (raised(UnusableEnvironment("x"), RuntimeError("x")), False),
        (raised(ConfigRefused("x"), PolicyRefused("x")), True),
        (raised(ConfigRefused("x"), PolicyUnavailable("x")), False),
        (RunRefused("x"), True),
        (ConfigRefused("x"), True),
        (OSError("x"), False),
        (ValueError("x"), False),
    ],
)
def test_only_what_will_be_the_same_again_is_refused(error: Exception, refused: bool) -> None:
    assert is_permanent(error) is refused
    code, cause = exit_status(error)
    assert code == (78 if refused else 1)
    assert str(error) in cause


def job(**dataset: Any) -> RolloutJob:
    return RolloutJob.model_validate(
        {
            "apiVersion": "kuberoll.io/v1alpha1",
            "kind": "RolloutJob",
            "metadata": {"name": "test"},
            "spec": {
                "generation": {"model": {"source": "m"}, "engine": "Simulated"},
                "environments": [{"name": "a", "type": "calculator", "repeats": 2}, {"name": "b", "type": "math"}],
                "dataset": {"repeats": 5, **dataset},
            },
        }
    )


@pytest.mark.parametrize(
    ("source", "uri"),
    [
        ({"configMap": {"name": "rows"}}, "dataset.jsonl"),
        ({"pvc": {"claimName": "data", "path": "/train/rows.jsonl"}}, "train/rows.jsonl"),
        ({"uri": "s3://bucket/rows.jsonl"}, "s3://bucket/rows.jsonl"),
    ],
)
def test_a_mounted_dataset_is_a_file_and_the_run_the_same(source: dict[str, Any], uri: str) -> None:
    given_job = job(source=source, limit=3)
    mounted = with_mounted_dataset(given_job)
    assert mounted.spec.dataset.source is not None
    assert mounted.spec.dataset.source.uri == uri
    assert mounted.spec.dataset.limit == 3
    inputs = {"rows": 1}
    one, two = (new_manifest(either, shards=1, inputs=inputs) for either in (given_job, mounted))
    assert one.identity == two.identity


def test_of_several_mounted_datasets_each_is_a_file_of_its_own() -> None:
    sources: list[dict[str, Any]] = [
        {"name": "a", "source": {"configMap": {"name": "rows"}}},
        {"name": "b", "source": {"pvc": {"claimName": "data", "path": "/train/rows.jsonl"}}},
        {"name": "c", "source": {"uri": "rows.jsonl"}},
    ]
    given_job = job(sources=sources)
    mounted = with_mounted_dataset(given_job)
    assert [source.uri for _, source in mounted.spec.dataset.located_sources()] == [
        "/etc/kuberoll-dataset/0/dataset.jsonl",
        "/etc/kuberoll-dataset/1/train/rows.jsonl",
        "rows.jsonl",
    ]
    one, two = (new_manifest(either, shards=1, inputs={}) for either in (given_job, mounted))
    assert one.identity == two.identity


@given(trajectories=st.integers(0, 1000), wanted=st.none() | st.integers(0, 300), shards=st.integers(1, 20))
def test_shards_come_to_no_more_than_the_job(trajectories: int, wanted: int | None, shards: int) -> None:
    whole = planned_trajectories(job(source={"uri": "x"}), trajectories, wanted=wanted) or 0
    assert whole <= trajectories
    parts = [
        planned_trajectories(
            job(source={"uri": "x"}),
            share(trajectories, shard, shards),
            wanted=None if wanted is None else share(wanted, shard, shards),
        )
        or 0
        for shard in range(shards)
    ]
    assert sum(parts) <= whole
    if wanted is None:
        assert sum(parts) == whole


def test_who_comes_first_says_what_the_run_is(tmp_path: Path) -> None:
    storage = DirectoryStorage(tmp_path)
    first = new_manifest(job(source={"uri": "x"}), shards=2, inputs={"rows": 3})
    claim_output(storage, first)
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]
    first.created = "earlier"
    claim_output(storage, first)
    found = read_manifest(storage)
    assert found is not None
    assert found.created != "earlier"
    with pytest.raises(RunRefused, match="shards: was 2, is 3"):
        claim_output(storage, new_manifest(job(source={"uri": "x"}), shards=3, inputs={"rows": 3}))


def test_a_configuration_that_is_none_is_named(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    with pytest.raises(ConfigRefused, match=r"job\.json"):
        read_config(path)
    path.write_text('{"job": {}}')
    with pytest.raises(ConfigRefused, match=r"job\.json: Object missing required field"):
        read_config(path)


GUESSING = {"name": "guess", "entrypoint": "guessing_beside:Guess"}


def job_beside(**spec: Any) -> RolloutJob:
    given = {
        "generation": {"model": {"source": "m"}},
        "environments": [{"name": "math", "type": "math"}],
        "dataset": {"source": {"uri": "data/rows.jsonl"}},
        **spec,
    }
    kind = {"apiVersion": "kuberoll.io/v1alpha1", "kind": "RolloutJob", "metadata": {"name": "beside"}}
    return RolloutJob.model_validate({**kind, "spec": given})


def test_a_module_that_was_not_shipped_is_named_with_the_way_to_ship_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigRefused, match=r"environments\[0\]\.entrypoint: .*'guessing_beside'.*kuberoll apply"):
        check_files(job_beside(environments=[GUESSING]), tmp_path)


def test_a_dataset_that_was_not_shipped_is_named_with_the_way_to_ship_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigRefused, match=r"dataset\.source\.uri: .*rows\.jsonl.*kuberoll apply"):
        check_files(job_beside(), tmp_path)


def test_what_was_shipped_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "guessing_beside.py").write_text("raise AssertionError('the check runs no code')\n")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows.jsonl").touch()
    check_files(job_beside(environments=[GUESSING]), tmp_path)


@pytest.mark.parametrize("uri", ["s3://bucket/rows.jsonl", "/data/rows.jsonl", "data/*.jsonl"])
def test_what_is_not_beside_a_manifest_is_left_to_the_dataset(uri: str, tmp_path: Path) -> None:
    check_files(job_beside(dataset={"source": {"uri": uri}}), tmp_path)


def test_passes_without_end_have_no_number_of_trajectories() -> None:
    assert planned_trajectories(job(source={"uri": "x"}), None, wanted=None) is None
    assert planned_trajectories(job(source={"uri": "x"}), None, wanted=3) == 3 * 2
