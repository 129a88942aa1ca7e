"""`kuberoll serve` and runs that use its engine: real processes, Ray Serve, a simulated engine."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import stat
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from kuberoll.trainer import PolicyEndpoint, run_endpoint
from kuberoll_workers.output.policy_file import POLICY_FILE
from tests.local.support import (
    TINY,
    Run,
    manifest,
    run_to_end,
    running,
    trajectories,
    wait_for_trajectories,
    wait_until_none_is_left,
)

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
    return json.loads(urllib.request.urlopen(request, timeout=240).read())


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


@pytest.mark.parametrize(
    "number",
    # SIGTERM takes the same way as SIGINT.
    [
        pytest.param(signal.SIGINT, marks=pytest.mark.long),
        pytest.param(signal.SIGTERM, marks=pytest.mark.long),
        signal.SIGKILL,
    ],
    ids=lambda number: number.name,
)
def test_the_end_of_the_engine_ends_runs_at_once_and_leaves_nothing_that_a_run_would_use(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    simulated = {"responses": ["<action>up</action>"], "firstTokenSeconds": 0.3}
    generation = {"model": {"source": str(TINY)}, "engine": "Simulated", "simulated": simulated}
    job = manifest(
        tmp_path / "job.yaml", generation=generation, dataset={"source": {"generator": {"count": 200}}, "repeats": 2}
    )
    output = tmp_path / "out"
    with running(job, command="serve") as engine:
        engine.until("Ctrl-C ends it")
        url = description(engine)["url"]
        run_id = engine.run_id()
        with running(job, "--output", output, "--metrics-port", "0") as run:
            wait_for_trajectories(run, output, 20)
            # A trainer of the run publishes there.
            assert run_endpoint(output) == PolicyEndpoint(url, description(engine)["tokens"]["weights"])
            assert stat.S_IMODE((output / POLICY_FILE).stat().st_mode) == 0o600
            children = psutil.Process(engine.process.pid).children(recursive=True)
            engine.process.send_signal(number)
            if number == signal.SIGKILL:
                for child in children:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        child.kill()
            assert run.finish() == 1, run.lines
        assert engine.finish() == (-number if number == signal.SIGKILL else 0)
        assert not any("Traceback" in line for line in engine.lines)
    text = "\n".join(run.lines)
    assert f"the engine at {url} (kuberoll serve, process {engine.process.pid}) has ended" in text
    assert f"see {tmp_path}/state/kuberoll/serve/test.log" in text
    assert not (output / POLICY_FILE).exists()
    stored = len(trajectories(output))
    assert 20 < stored < 400
    assert f"{stored} of 400 trajectories are stored; continue with --resume --output {output}" in text
    assert "Traceback" not in text
    wait_until_none_is_left(run_id)
    code, text = run_to_end(job, "--output", output, "--metrics-port", "0", "--resume")
    assert code == 0, text
    assert "kuberoll serve" not in text
    keys = [record.key for record in trajectories(output)]
    assert len(keys) == len(set(keys)) == 400


def test_an_interrupt_while_it_starts_is_a_sentence(job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with running(job, command="serve") as run:
        run_id = run.run_id()
        run.process.send_signal(signal.SIGINT)
        assert run.finish() == 130, run.lines
    assert run.lines[-1] == "interrupted; nothing of the engine is left"
    assert not any("Traceback" in line for line in run.lines)
    wait_until_none_is_left(run_id)
    assert [path.name for path in (tmp_path / "kuberoll" / "serve").iterdir()] == ["test.log"]


def test_the_command_that_it_prints_works_as_it_is(served: Run) -> None:
    (line,) = [line for line in served.lines if line.startswith("try: ")]
    found = shutil.which("curl")
    if found is None:
        pytest.skip("curl is missing")
    # Nothing else is on the path.
    answered = subprocess.run(
        ["/bin/sh", "-c", line.removeprefix("try: ").replace("curl", f"{found} -s", 1)],
        env={"PATH": "/none"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert json.loads(answered.stdout)["data"], answered.stdout
    assert not any(token in line for token in description(served)["tokens"].values())
