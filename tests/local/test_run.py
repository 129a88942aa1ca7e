"""`kuberoll run` with real processes; the engine is simulated, in the workers or, with --serve, behind Ray Serve."""

from __future__ import annotations

import json
import math
import shutil
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kuberoll_api import plugins
from kuberoll_api.manifest.loading import load_job
from kuberoll_workers.data.record import TrajectoryRecord
from kuberoll_workers.data.tokenizer import HuggingFaceTokenizer
from kuberoll_workers.local.preflight import JobRefused, check
from kuberoll_workers.output.run_files import RunFiles
from kuberoll_workers.output.storage import open_storage
from kuberoll_workers.serving.engines import vllm_engine
from tests.local.support import (
    EXAMPLES,
    TINY,
    external_generation,
    manifest,
    run_to_end,
    running,
    trajectories,
    wait_for_metric,
    wait_for_trajectories,
    wait_until_none_is_left,
)
from tests.output.s3 import S3Server, s3, s3_server

__all__ = ["s3", "s3_server"]


def _contents(records: list[TrajectoryRecord]) -> dict[tuple[int, int], list[list[int]]]:
    return {record.key: [list(message.token_ids) for message in record.messages] for record in records}


def slow_down(job: Path, seconds: float = 0.1) -> None:
    """Make the simulated engine take its time, so that there is a middle of the run to look at."""
    document = json.loads(job.read_text())
    document["spec"]["generation"]["simulated"]["firstTokenSeconds"] = seconds
    job.write_text(json.dumps(document))


LEAVING_LATER = """
import sys
class Leaving:
    def __init__(self, config): pass
    def step(self, logs, metadata): raise NotImplementedError
    def global_post_process_and_metrics(self, batch): return batch, {}
    def generate_dataset(self, count, seed): sys.exit(5)
"""


@pytest.fixture
def slow_generation() -> Iterator[dict[str, Any]]:
    """Another engine, which takes 0.1 s for a response."""
    with external_generation(0.1) as generation:
        yield generation


@pytest.mark.ray
@pytest.mark.parametrize("options", [[], ["--serve"]], ids=["simulated in the workers", "behind Serve"])
def test_a_run_from_start_to_end(options: list[str], tmp_path: Path) -> None:
    job = manifest(tmp_path / "job.yaml", workers={"replicas": 2, "shards": 3}, rollout={"concurrency": 2})
    slow_down(job)
    output = tmp_path / "out"
    with running(job, "--output", output, "--metrics-port", "0", *options) as run:
        url = run.until(r"metrics: (http://\S+)")[1]
        wait_for_trajectories(run, output, 2)
        metrics = urllib.request.urlopen(url, timeout=240).read().decode()
        assert run.finish() == 0, run.lines
    records = trajectories(output)
    assert len({record.key for record in records}) == len(records) == 32
    assert all(record.stop_reason == "terminated" for record in records)
    assert {path.name for path in output.iterdir()} == {
        ".lock", ".shards.lock", "aggregate_metrics.json", "logs", "manifest.json", "report.html", "task_metrics.jsonl",
        "shard-00000.jsonl", "shard-00001.jsonl", "shard-00002.jsonl",
    }  # fmt: skip
    aggregates = json.loads((output / "aggregate_metrics.json").read_text())["environments"]["puzzle"]
    assert aggregates["trajectories"] == 32
    mean = math.fsum(record.total_reward for record in records) / 32
    assert aggregates["fields"]["total_reward"]["mean"] == mean
    text = "\n".join(run.lines)
    assert "puzzle" in text
    assert str(output / "shard-00002.jsonl") in text
    assert 'kuberoll_turn_generation_seconds_bucket{environment="puzzle",le="0.005",rolloutjob="test"' in metrics
    assert "# HELP kuberoll_turns_total Turns finished." in metrics
    assert 'kuberoll_journal_errors_total{rolloutjob="test"} 0.0' in metrics
    if (promtool := shutil.which("promtool")) is not None:
        checked = subprocess.run([promtool, "check", "metrics"], input=metrics, capture_output=True, text=True)
        assert checked.returncode == 0, checked.stdout + checked.stderr


def test_interrupted_then_killed_then_resumed_is_the_same_as_uninterrupted(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    with external_generation() as generation:
        uninterrupted = manifest(tmp_path / "whole.yaml", rollout={"concurrency": 4}, generation=generation)
        assert run_to_end(uninterrupted, "--output", whole, "--metrics-port", "0")[0] == 0
    expected = _contents(trajectories(whole))

    output = tmp_path / "out"
    job = manifest(tmp_path / "job.yaml", rollout={"concurrency": 4})
    slow_down(job)
    arguments = (job, "--output", output, "--metrics-port", "0")

    with running(*arguments) as run:
        wait_for_trajectories(run, output, 0)
        run_id = run.run_id()
        run.process.send_signal(signal.SIGINT)
        assert run.finish() == 130, run.lines
        assert any("interrupted:" in line and "--resume" in line for line in run.lines)
    wait_until_none_is_left(run_id)
    drained = trajectories(output)
    assert 0 < len(drained) < 32
    assert all(record.stop_reason == "terminated" for record in drained)

    with running(*arguments, "--resume") as run:
        wait_for_trajectories(run, output, len(drained))
        run_id = run.run_id()
        run.process.send_signal(signal.SIGKILL)
    wait_until_none_is_left(run_id)
    killed = trajectories(output)
    assert len(drained) < len(killed) < 32

    code, text = run_to_end(*arguments, "--resume")
    assert code == 0, text
    records = trajectories(output)
    assert len(records) == 32
    assert _contents(records) == expected
    assert records[: len(drained)] == drained


def test_an_object_store_as_output(
    s3: tuple[S3Server, str], slow_generation: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    job = manifest(
        tmp_path / "job.yaml",
        workers={"replicas": 2, "shards": 3},
        rollout={"concurrency": 2},
        output={"uri": f"{s3[1]}/run", "format": "Parquet", "parts": {"maxSeconds": 0.2}},
        generation=slow_generation,
    )
    arguments = (job, "--metrics-port", "0")
    storage = open_storage(f"{s3[1]}/run")
    with running(*arguments) as run:
        url = run.until(r"metrics: (http://\S+)")[1]
        wait_for_metric(run, url, 'kuberoll_trajectories_total{environment="puzzle"')
        run.process.send_signal(signal.SIGINT)
        assert run.finish() == 130, run.lines
    stored = list(RunFiles(f"{s3[1]}/run").trajectories())
    assert 0 < len(stored) < 32

    document = json.loads(job.read_text())
    document["spec"]["rollout"]["maxTurns"] = 19
    job.write_text(json.dumps(document))
    code, text = run_to_end(*arguments, "--resume")
    assert code == 2
    assert "spec.rollout.maxTurns: was 20, is 19" in text
    assert "--force" in text

    code, text = run_to_end(*arguments, "--resume", "--force")
    assert code == 0, text
    records = list(RunFiles(f"{s3[1]}/run").trajectories())
    assert len(records) == 32
    assert {record.key for record in stored} <= {record.key for record in records}
    files = [Path(file).name for file in storage.files()]
    shards = [f"shard-0000{number}.parquet" for number in range(3)]
    assert files == ["aggregate_metrics.json", "manifest.json", "report.html", *shards, "task_metrics.jsonl"]
    assert f"{s3[1]}/run/shard-00000.parquet" in text
    manifested = json.loads(storage.read("manifest.json") or b"")
    assert manifested["forced"] == ["spec.rollout.maxTurns: was 20, is 19"]
    (logs,) = (tmp_path / "runs").glob("test-*/logs")
    assert str(logs.relative_to(tmp_path)) in text


def test_a_second_interrupt_does_not_wait_for_what_is_in_flight(tmp_path: Path) -> None:
    job = manifest(tmp_path / "job.yaml")
    slow_down(job, seconds=600)
    with running(job, "--output", tmp_path / "out", "--metrics-port", "0") as run:
        # What is under way is counted before any turn has ended.
        run.until("0/32 trajectories, 32 generating, 0 in environments, 0.0 turns/s")
        run_id = run.run_id()
        run.process.send_signal(signal.SIGINT)
        run.until("press Ctrl-C again")
        run.process.send_signal(signal.SIGINT)
        assert run.finish() == 130, run.lines
        assert not any("Traceback" in line or "never retrieved" in line for line in run.lines), run.lines
    wait_until_none_is_left(run_id)
    assert trajectories(tmp_path / "out") == []


def test_failures_beyond_the_budget(slow_generation: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(
        "class Broken:\n"
        "    def __init__(self, config): pass\n"
        "    def step(self, logs, metadata): raise RuntimeError('judge is down')\n"
        "    def global_post_process_and_metrics(self, batch): return batch, {}\n"
    )
    job = manifest(
        tmp_path / "job.yaml",
        environments=[
            {"name": "puzzle", "type": "sliding_puzzle"},
            {"name": "broken", "entrypoint": "broken:Broken"},
        ],
        dataset={
            "source": {"rows": [{"prompt": "x", "task_name": "broken"}]},
            "repeats": 3,
        },
        rollout={"retries": {"backoffSeconds": 0}},
        generation=slow_generation,
    )
    code, text = run_to_end(job, "--output", tmp_path / "out", "--metrics-port", "0")
    assert code == 1
    assert "3 of 3 trajectories failed, more than rollout.maxFailedFraction (0) allows" in text
    assert "RuntimeError: judge is down" in text
    assert len((tmp_path / "out" / "failures.jsonl").read_text().splitlines()) == 3


def with_template(template: str) -> dict[str, Any]:
    simulated = {"responses": [f"<action>{way}</action>" for way in ("up", "down", "left", "right")]}
    model = {"source": str(TINY), "chatTemplate": template}
    return {"model": model, "engine": "Simulated", "simulated": simulated}


OWN_TEMPLATE = """
{%- for message in messages -%}
<|system|>{{ message.role }}: {{ message.content }}<|end|>
{%- endfor %}
{%- if add_generation_prompt %}<|system|>assistant: {% endif %}
"""


def test_the_job_s_chat_template_renders_prompts_and_observations(tmp_path: Path) -> None:
    job = manifest(
        tmp_path / "job.yaml",
        generation=with_template(OWN_TEMPLATE),
        dataset={"source": {"generator": {"count": 2}}},
        rollout={"observationTemplate": "ChatTemplate"},
    )
    code, text = run_to_end(job, "--output", tmp_path / "out", "--metrics-port", "0")
    assert code == 0, text
    tokenizer = HuggingFaceTokenizer.load(str(TINY))
    records = trajectories(tmp_path / "out")
    assert len(records) == 2
    for record in records:
        texts = [tokenizer.decode_with_special_tokens(message.token_ids) for message in record.messages]
        prompt = record.messages[0].content
        assert texts[0] == f"<|system|>user: {prompt}<|end|><|system|>assistant: "
        assert record.turn_count > 1
        for observation, written in zip(record.messages[2:-1:2], texts[2:-1:2], strict=True):
            says = f"<|system|>user: {observation.content}<|end|>"
            assert written == f"<|end|>{says}<|system|>assistant: "


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"environments": [{"name": "a", "type": "slding_puzzle"}]}, "sliding_puzzle"),
        ({"environments": [{"name": "a", "type": "sliding_puzzle", "config": {"sise": 3}}]}, "sise"),
        ({"environments": [{"name": "a", "entrypoint": "no.such:Thing"}]}, "no.such"),
        ({"dataset": {"source": {"rows": [{"prompt": "x", "task_name": "chess"}]}}}, "found 'chess'"),
        ({"dataset": {"source": {"uri": "missing.jsonl"}}}, "missing.jsonl: No such file"),
        ({"workers": {"replicas": 1000}}, "spec.workers.replicas: 1000 worker processes are too many"),
        (
            {"environments": [{"name": "a", "entrypoint": "leaving:Leaving"}]},
            "leaving:Leaving cannot be imported: SystemExit: 4",
        ),
        (
            {
                "environments": [{"name": "a", "entrypoint": "leaving_later:Leaving"}],
                "dataset": {"source": {"generator": {"count": 3}}},
            },
            "environment 'a': generate_dataset called sys.exit(5)",
        ),
        ({"generation": {"model": {"source": "./no/such/model"}, "engine": "Simulated"}}, "there is no directory"),
        ({"generation": {"model": {"source": "."}, "engine": "Simulated"}}, "has no config.json"),
        (
            {"generation": with_template("template.jinja")},
            "spec.generation.model.chatTemplate: has neither {{ nor {%: write the template itself",
        ),
        (
            {"generation": with_template("{{ messages[0].content }}\n{% if %}")},
            "spec.generation.model.chatTemplate: it is not Jinja: line 2: Expected an expression",
        ),
        (
            {
                "generation": with_template("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"),
                "rollout": {"observationTemplate": "ChatTemplate"},
            },
            "spec.generation.model.chatTemplate: the chat template can't render observations token-exactly",
        ),
    ],
)
def test_bad_jobs_are_refused_before_anything_starts(changes: dict[str, object], words: str, tmp_path: Path) -> None:
    (tmp_path / "leaving.py").write_text("import sys\nsys.exit(4)\n")
    (tmp_path / "leaving_later.py").write_text(LEAVING_LATER)
    job = manifest(tmp_path / "job.yaml", **changes)
    code, text = run_to_end(job, "--output", tmp_path / "out")
    assert code == 2, text
    assert words in text
    assert len(text.splitlines()) < 12
    assert "Traceback" not in text
    assert not (tmp_path / "out").exists()


@pytest.mark.ray
def test_both_places_of_a_simulated_engine_give_the_same_tokens(tmp_path: Path) -> None:
    job = manifest(tmp_path / "job.yaml", generation={"model": {"source": str(TINY)}, "engine": "Simulated"})
    contents = []
    for name, options in (("workers", []), ("serve", ["--serve"])):
        code, text = run_to_end(job, "--output", tmp_path / name, "--metrics-port", "0", *options)
        assert code == 0, text
        assert ("ray:" in text) == bool(options)
        contents.append(_contents(trajectories(tmp_path / name)))
    assert contents[0] == contents[1]


@pytest.mark.ray
@pytest.mark.parametrize(
    ("options", "words"),
    [([], "spec.generation.model: JSONDecodeError"), (["--serve"], "generation did not start: JSONDecodeError")],
)
def test_an_engine_that_does_not_start_says_why(options: list[str], words: str, tmp_path: Path) -> None:
    job = manifest(tmp_path / "job.yaml")
    # The tokenizer is there, the replica fails while it loads.
    document = json.loads(job.read_text())
    broken = tmp_path / "model"
    broken.mkdir()
    (broken / "config.json").write_text("{not json")
    document["spec"]["generation"]["model"] = {
        "source": str(broken),
        "tokenizer": document["spec"]["generation"]["model"]["source"],
    }
    job.write_text(json.dumps(document))
    code, text = run_to_end(job, "--output", tmp_path / "out", "--metrics-port", "0", *options)
    assert code == 1
    assert words in text, text


def test_a_library_that_is_not_there_is_told_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    job = load_job(EXAMPLES / "sliding-puzzle" / "rolloutjob.yaml")
    monkeypatch.setattr(vllm_engine, "is_cpu_build", lambda: True)
    monkeypatch.setattr(vllm_engine, "_CPU_LIBRARY", "libnowhere.so.1")
    with pytest.raises(
        JobRefused, match=r"spec\.generation\.engine: .* needs libnowhere\.so\.1, which is not installed: apt-get"
    ):
        check(job, base=EXAMPLES / "sliding-puzzle")


def test_an_engine_that_no_package_registers_is_told_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a checkout that was installed before its engines were plug-ins."""
    job = load_job(EXAMPLES / "sliding-puzzle" / "rolloutjob.yaml")
    monkeypatch.setattr(plugins, "ENGINES", "kuberoll.no-such-group")
    with pytest.raises(JobRefused, match=r"no installed package registers 'VLLM' .* install KubeRoll again"):
        check(job, base=EXAMPLES / "sliding-puzzle")


def test_passes_over_the_rows_are_further_groups_of_the_same_tasks(tmp_path: Path) -> None:
    dataset = {"source": {"generator": {"count": 5}}, "repeats": 2, "epochs": 3, "shuffleSeed": 1}
    job = manifest(tmp_path / "job.yaml", dataset=dataset, workers={"replicas": 2})
    code, text = run_to_end(job, "--output", tmp_path / "out")
    assert code == 0, text
    found = trajectories(tmp_path / "out")
    assert sorted((record.task_index, record.rollout_index) for record in found) == [
        (task, rollout) for task in range(5) for rollout in range(6)
    ]
    assert len({record.seed for record in found}) == len(found)
    # What a second run finds is the whole.
    code, text = run_to_end(job, "--output", tmp_path / "out", "--resume")
    assert (code, trajectories(tmp_path / "out")) == (0, found), text
