"""Attempts to start Ray: with a Ray whose agent is stopped, and with the logs that such a Ray leaves."""

from __future__ import annotations

import threading
from pathlib import Path

import psutil
import pytest

from kuberoll_workers.local.watchdog import processes_of
from kuberoll_workers.serving.ray_start import ATTEMPTS, fatal_line, start_in_attempts
from tests.serving.hosts import StartingHost, starting, until_ready

RAYLET_LOG = """\
[2026-11-22 09:07:38,600 W 24002 24002] (raylet) agent_manager.cc:42: the agent is slow
[2026-11-22 09:07:38,696 C 24002 24002] (raylet) node_manager.cc:3576:  An unexpected system state has occurred. You \
have likely discovered a bug in Ray. Check failed: status3576.has_value() Timed out waiting for file /tmp/s/port_62
*** StackTrace Information ***
/lib/libc.so.6(+0x2724a) [0x7fb06e04524a]
"""


def session(sessions: Path, name: str, **logs: str) -> None:
    folder = sessions / name / "logs"
    folder.mkdir(parents=True)
    for part, text in logs.items():
        (folder / f"{part}.err").write_text(text)


class Ray:
    """A start that fails so many times."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.calls: list[str] = []

    def start(self) -> None:
        self.calls.append("start")
        if self.calls.count("start") <= self.failures:
            raise TimeoutError("the node timed out")

    def clear(self) -> None:
        self.calls.append("clear")


def test_the_newest_session_says_what_ended_it(tmp_path: Path) -> None:
    assert fatal_line(tmp_path / "none") is None
    session(tmp_path, "session_2026-01-01_00-00-00", raylet=RAYLET_LOG.replace("port_62", "old"))
    session(tmp_path, "session_2026-01-02_00-00-00", gcs_server="", raylet=RAYLET_LOG)
    (tmp_path / "session_latest").symlink_to(tmp_path / "session_2026-01-02_00-00-00")
    assert fatal_line(tmp_path) == "raylet: Timed out waiting for file /tmp/s/port_62"
    session(tmp_path, "session_2026-01-03_00-00-00", raylet="")
    assert fatal_line(tmp_path) is None


@pytest.mark.parametrize("failures", range(ATTEMPTS))
def test_what_a_failed_start_left_is_ended_before_the_next(tmp_path: Path, failures: int) -> None:
    ray = Ray(failures)
    start_in_attempts(ray.start, ray.clear, tmp_path)
    assert ray.calls == ["start", "clear"] * failures + ["start"]


def test_the_last_failure_is_told_with_rays_own_words(tmp_path: Path) -> None:
    ray = Ray(ATTEMPTS)
    with pytest.raises(RuntimeError, match=r"^Ray did not start in 3 attempts: TimeoutError: the node timed out$"):
        start_in_attempts(ray.start, ray.clear, tmp_path)
    assert ray.calls == ["start", "clear"] * ATTEMPTS
    session(tmp_path, "session_2026-01-01_00-00-00", raylet=RAYLET_LOG)
    with pytest.raises(RuntimeError, match=r"3 attempts: raylet: Timed out waiting for file /tmp/s/port_62$") as error:
        start_in_attempts(Ray(ATTEMPTS).start, ray.clear, tmp_path)
    assert isinstance(error.value.__cause__, TimeoutError)


def stop_first_agent(host: StartingHost, done: threading.Event) -> None:
    """Stop the raylet's agent once, as a busy machine does."""
    while not done.is_set():
        for process in processes_of(host.run_id):
            try:
                # The raylet is given the agent's command as an argument.
                if process.cmdline()[2:3] and process.cmdline()[2].endswith("dashboard/agent.py"):
                    process.suspend()
                    return
            except psutil.Error:
                continue


@pytest.mark.long
@pytest.mark.ray
def test_a_ray_whose_agent_comes_too_late_is_started_again() -> None:
    done = threading.Event()
    with starting() as host:
        thread = threading.Thread(target=stop_first_agent, args=(host, done))
        thread.start()
        try:
            until_ready(host)
        finally:
            done.set()
            thread.join()
        (log,) = host.scratch.glob("log")
        assert "Ray did not start, attempt 1 of 3: raylet: Timed out waiting for file" in log.read_text()
