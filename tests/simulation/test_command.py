"""`kuberoll bench`, as it is typed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kuberoll_api.removed_options import REMOVED
from kuberoll_workers.commands.bench import _DRAWN, _REPLAYED, bench
from kuberoll_workers.data.record import encode_line
from kuberoll_workers.output.run_files import RunFiles
from kuberoll_workers.simulation import virtual_loop
from kuberoll_workers.simulation.trace import read_trace
from tests.classifier import TINY
from tests.simulation.test_trace import record


def typed(*arguments: object) -> Result:
    return CliRunner().invoke(bench, [str(argument) for argument in arguments], catch_exceptions=False)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    assert typed("synthesize", "--trajectories", 16, "--set", "response=lognormal:30:1", "-o", path).exit_code == 0
    return path


def test_a_recorded_run_is_replayed(tmp_path: Path) -> None:
    run, path = tmp_path / "run", tmp_path / "trace.jsonl.zst"
    run.mkdir()
    (run / "shard-0.jsonl").write_bytes(b"".join(encode_line(record(sample)) for sample in range(3)))
    assert len(list(RunFiles(str(run)).trajectories())) == 3
    recorded = typed("record", run, "-o", path)
    assert (recorded.exit_code, recorded.output) == (0, f"{path}: 3 trajectories, 6 turns\n")
    played = typed("replay", path, "--json")
    assert played.exit_code == 0, played.output
    report = json.loads(played.stdout)
    assert (report["trajectories"], report["turns"], report["generated_tokens"]) == (3, 6, 9)


def test_the_report_has_the_same_bytes_twice(trace: Path) -> None:
    first, second = (typed("replay", trace, "--replicas", 2, "--workers", 2, "--json") for _ in range(2))
    assert first.stdout == second.stdout
    assert json.loads(first.stdout)["trajectories"] == 16


def test_the_table_names_bound_and_causes(trace: Path) -> None:
    shown = typed("replay", trace, "--replicas", 2)
    assert shown.exit_code == 0
    for text in ("makespan over bound", "best hit rate", "cold start", "preemptions"):
        assert text in shown.stdout


def test_nothing_is_overwritten(trace: Path) -> None:
    before = trace.read_bytes()
    refused = typed("synthesize", "--trajectories", 3, "-o", trace)
    assert refused.exit_code == 2
    assert "exists" in refused.output
    assert trace.read_bytes() == before
    assert len(read_trace(trace).trajectories) == 16


def test_mistakes_are_named(trace: Path, tmp_path: Path) -> None:
    for arguments, message in (
        (("record", tmp_path / "none"), "none"),
        (("replay", tmp_path / "none.jsonl"), "none.jsonl: No such file or directory\n"),
        (("replay", tmp_path), f"{tmp_path}: Is a directory\n"),
        (("replay", trace, "--replicas", 0), "replicas: found 0"),
        (("replay", trace, "--set", "kv-cache-tokens=64"), "do not fit into kv_cache_tokens"),
        (("replay", trace, "--set", "max-num-batched-tokens=100"), "it is at least max_num_seqs (256)"),
        (("replay", trace, "--set", "step-ms=inf"), "--set step-ms"),
        (("replay", trace, "--set", "prefill-us=1e30"), "--set prefill-us"),
        (("replay", trace, "--set", "cold-start=nan"), "--set cold-start"),
        (("replay", trace, "--set", "deaths-per-hour=nan"), "--set deaths-per-hour"),
        (("replay", trace, "--set", "windows=3"), "found 'windows=3'; it is NAME=VALUE, with one of window,"),
        (("replay", trace, "--set", "routing=Nearest"), "--set routing"),
        (("synthesize", "--trajectories", 3, "--set", "turns=normal:3"), "--set turns"),
    ):
        refused = typed(*arguments)
        assert refused.exit_code == 2, refused.output
        assert message in refused.output


@pytest.mark.parametrize(("command", "known"), [("replay", _REPLAYED), ("synthesize", _DRAWN)])
def test_each_setting_was_an_option(command: str, known: Mapping[str, Any]) -> None:
    said = [said for (of, _), said in REMOVED.items() if of == f"bench {command}"]
    assert {words.removeprefix("write --set ").partition("=")[0] for words in said} == set(known)


def test_a_replay_beyond_the_end_of_time_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Replicas are looked for every second until then.
    monkeypatch.setattr(virtual_loop, "LONGEST_SECONDS", 1e4)
    path = tmp_path / "trace.jsonl"
    line = '{"group":0,"sample":0,"environment":"math","prompt":10,"turns":[[5,0,0.5,9999999]]}'
    path.write_text(f'{{"kuberoll_trace":1,"trajectories":1}}\n{line}\n')
    refused = typed("replay", path)
    assert refused.exit_code == 2
    assert "virtual time" in refused.output


def test_an_engine_argument_has_a_name() -> None:
    refused = typed("fit", "model", "-a", "max_model_len")
    assert refused.exit_code == 2
    assert "NAME=VALUE" in refused.output


@pytest.mark.engine
def test_an_engine_says_what_its_steps_cost(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    assert typed("synthesize", "--trajectories", 16, "--set", "most-tokens=256", "-o", trace).exit_code == 0
    # A process of its own: vLLM stays in the one that loads it.
    command = [str(Path(sys.executable).with_name("kuberoll")), "bench", "fit", str(TINY), "-a", "max_model_len=256"]
    command += ["-a", "dtype=float32", "-a", "kv_cache_memory_bytes=67108864"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    costs, limits = [line for line in done.stdout.splitlines() if line.startswith("--")]
    assert costs.startswith("--set step-ms=")
    # 64 MiB are 512 blocks, one of which holds nothing.
    assert (
        "--set kv-cache-tokens=16352 --set block-tokens=32 --set prefix-caching=true --set chunked-prefill=false"
        in limits
    )
    shown = typed("replay", trace, *costs.split(), *limits.split())
    assert shown.exit_code == 0, shown.output
