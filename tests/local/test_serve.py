"""`kuberoll serve` and runs that use its engine: real processes, Ray Serve, a simulated engine."""

from __future__ import annotations

import json
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.local.support import Run, manifest, run_to_end, running, trajectories, wait_until_none_is_left

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return manifest(tmp_path_factory.mktemp("serve") / "job.yaml")


@pytest.fixture(scope="module")
def served(job: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A served engine; runs of this module find it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        with running(job, command="serve") as run:
            run.until("Ctrl-C ends it")
            yield run


def description(served: Run) -> dict[str, Any]:
    (line,) = [line for line in served.lines if line.startswith("tokens: ")]
    found: dict[str, Any] = json.loads(Path(line.removeprefix("tokens: ")).read_text())
    return found


def call(served: Run, path: str, scope: str, body: object = None) -> Any:
    engine = description(served)
    request = urllib.request.Request(
        engine["url"] + path,
        data=None if body is None else json.dumps(body).encode(),
        headers={"authorization": f"Bearer {engine['tokens'][scope]}"},
    )
    return json.loads(urllib.request.urlopen(request, timeout=30).read())


def test_a_run_uses_the_engine_of_its_name_and_starts_no_other(served: Run, job: Path, tmp_path: Path) -> None:
    for name, options in (("name", []), ("url", ["--endpoint", description(served)["url"] + "/v1"])):
        code, text = run_to_end(job, "--output", tmp_path / name, "--metrics-port", "0", *options)
        assert code == 0, text
        assert f"engine: {description(served)['url']} (kuberoll serve, process {served.process.pid})" in text
        assert "ray:" not in text
    first, second = (trajectories(tmp_path / name) for name in ("name", "url"))
    assert {record.key for record in first} == {record.key for record in second}
    assert len(first) == 32


def test_an_engine_with_other_settings_is_refused_by_their_names(served: Run, job: Path, tmp_path: Path) -> None:
    changed = ("--set", "spec.generation.simulated.maxBatch=3")
    code, text = run_to_end(job, "--output", tmp_path / "out", "--metrics-port", "0", *changed)
    assert code == 2
    assert "spec.generation.simulated.maxBatch: there 256, here 3" in text
    assert "--endpoint none" in text
    assert not (tmp_path / "out").exists()
    code, text = run_to_end(job, "--output", tmp_path / "out", "--metrics-port", "0", *changed, "--endpoint", "none")
    assert code == 0, text


def test_a_name_has_one_engine(served: Run, job: Path) -> None:
    with running(job, command="serve") as second:
        assert second.finish() == 2
    assert any("an engine for the job 'test' is starting or serving already" in line for line in second.lines)


def test_weights_that_are_published_are_those_of_the_next_run(served: Run, job: Path, tmp_path: Path) -> None:
    with pytest.raises(urllib.error.HTTPError, match="403"):
        call(served, "/v1/weights", "generate", {"uri": "/none", "version": "2"})
    assert call(served, "/v1/weights", "weights", {"uri": "/none", "version": "2"}) == {"version": "2"}
    # The engine loads them at its own pace.
    while {*call(served, "/v1/weights", "read")["replicas"].values()} != {"2"}:
        served.assert_runs()
    code, text = run_to_end(job, "--output", tmp_path / "out", "--metrics-port", "0")
    assert code == 0, text
    versions = {
        version
        for record in trajectories(tmp_path / "out")
        for message in record.messages
        for version, _, _ in message.policy_versions or ()
    }
    assert versions == {"2"}
    wanted = ("--set", "spec.weights={uri: /none, version: next}")
    code, text = run_to_end(job, "--output", tmp_path / "other", "--metrics-port", "0", *wanted)
    assert code == 1
    assert "serves the weights '2', and spec.weights.version is 'next'" in text


def test_ctrl_c_ends_it_and_a_kill_leaves_nothing_that_a_run_would_use(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for number in (signal.SIGINT, signal.SIGKILL):
        with running(job, command="serve") as run:
            run.until("Ctrl-C ends it")
            run_id = run.run_id()
            run.process.send_signal(number)
            assert run.finish() == (0 if number == signal.SIGINT else -number)
            assert not any("Traceback" in line for line in run.lines)
        wait_until_none_is_left(run_id)
        code, text = run_to_end(job, "--output", tmp_path / str(number), "--metrics-port", "0")
        assert code == 0, text
        assert "kuberoll serve" not in text
