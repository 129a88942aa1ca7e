"""An external endpoint that vanishes, hangs or refuses in mid-run: the terminal says so, and nothing is lost."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from kuberoll_workers.serving.ray_settings import free_ports
from tests.local.endpoint_process import endpoint_process
from tests.local.support import TINY, manifest, run_to_end, running, trajectories, wait_for_trajectories

COUNT = 150


def external_job(path: Path, port: int, *, attempts: int, seconds: float) -> Path:
    return manifest(
        path,
        generation={
            "backend": "External",
            "external": {"url": f"http://127.0.0.1:{port}"},
            "model": {"source": str(TINY)},
        },
        dataset={"source": {"generator": {"count": COUNT}}},
        workers={"replicas": 2},
        rollout={
            "concurrency": 4,
            "retries": {"generationAttempts": attempts},
            "timeouts": {"generationSeconds": seconds},
        },
    )


@pytest.mark.parametrize(
    "trouble",
    [pytest.param("killed", marks=pytest.mark.long), "hung", pytest.param("refusing", marks=pytest.mark.long)],
)
def test_a_run_says_what_it_waits_for_and_goes_on_when_the_endpoint_is_back(trouble: str, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    url, refusals, output = f"http://127.0.0.1:{port}", tmp_path / "refuse", tmp_path / "out"
    job = external_job(tmp_path / "job.yaml", port, attempts=30, seconds=40)
    with (
        endpoint_process(port, refusals=refusals) as process,
        running(job, "--output", output, "--metrics-port", "0") as run,
    ):
        wait_for_trajectories(run, output, 10)
        if trouble == "killed":
            process.kill()
            process.wait()
            run.until(rf"^waiting for the endpoint, (20:00|1\d:\d\d) left: {url}: connection refused$")
            # And again while it lasts.
            run.until(rf"^waiting for the endpoint, 1\d:\d\d left: {url}: connection refused$")
            with endpoint_process(port, refusals=refusals):
                assert run.finish() == 0, run.lines
        elif trouble == "hung":
            process.send_signal(signal.SIGSTOP)
            run.until(rf"^waiting for the endpoint, \d\d:\d\d left: {url}: no answer")
            process.send_signal(signal.SIGCONT)
            assert run.finish() == 0, run.lines
        else:
            refusals.touch()
            run.until(rf"^waiting for the endpoint, \d\d:\d\d left: {url} answered 503: the engine is gone$")
            refusals.unlink()
            assert run.finish() == 0, run.lines
    assert any(line.startswith("the endpoint answers again, after ") for line in run.lines)
    # The logs of the workers have it too.
    assert "waiting for the endpoint, " in "".join(log.read_text() for log in output.glob("logs/worker-*.log"))
    assert len({record.key for record in trajectories(output)}) == COUNT
    assert not (output / "failures.jsonl").exists()


def test_a_run_ends_when_the_endpoint_does_not_come_back_in_time(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    url, refusals, output = f"http://127.0.0.1:{port}", tmp_path / "refuse", tmp_path / "out"
    job = external_job(tmp_path / "job.yaml", port, attempts=2, seconds=5)
    with endpoint_process(port, refusals=refusals) as process:
        with running(job, "--output", output, "--metrics-port", "0") as run:
            wait_for_trajectories(run, output, 10)
            process.kill()
            assert run.finish() == 1, run.lines
        text = "\n".join(run.lines)
    assert (
        "the endpoint did not answer for 10 s (spec.rollout: retries.generationAttempts times "
        f"timeouts.generationSeconds): {url}: connection refused"
    ) in text
    stored = len(trajectories(output))
    assert f"{stored} of {COUNT} trajectories are stored; continue with --resume --output {output}" in text
    assert "Traceback" not in text
    with endpoint_process(port, refusals=refusals):
        code, text = run_to_end(job, "--output", output, "--metrics-port", "0", "--resume")
    assert code == 0, text
    assert len({record.key for record in trajectories(output)}) == COUNT
