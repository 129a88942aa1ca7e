"""Exported rows say what their tokens were sampled from, and no file mixes what its trainer takes for one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pyarrow.parquet
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.analysis.export.exporting import export_run
from kuberoll_workers.analysis.export.formats import FORMATS, ExportError
from kuberoll_workers.analysis.export.samplings import Samplings, with_sampling
from kuberoll_workers.analysis.export.selection import Selection
from kuberoll_workers.analysis.paths import paths
from kuberoll_workers.commands.export import export as command
from kuberoll_workers.data.record import TrajectoryRecord
from kuberoll_workers.data.sampling import resolved
from kuberoll_workers.output.run_directory import RunManifest
from kuberoll_workers.output.run_files import RunFiles
from tests.analysis.test_export import run_of, trajectory
from tests.analysis.test_paths import FORKED, played

Distribution = Mapping[str, Any]
PLAIN = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
COLD = {**PLAIN, "temperature": 0.5}
# OpenAI's service refuses rows with other keys than its own.
SAYING_FORMATS = [name for name in FORMATS if name != "openai-chat"]

distributions = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.0, 0.5, 1.0]), "top_p": st.sampled_from([0.9, 1.0]), "top_k": st.just(-1)},
    optional={"min_p": st.just(0.1), "constraints": st.just(["logit_bias"])},
)
stored = st.one_of(st.none(), st.lists(st.one_of(st.none(), distributions), min_size=2, max_size=2))


def sampling_of(to: str, row: Mapping[str, Any]) -> Any:
    """What a row says of its responses."""
    place = {"verl": "extra_fields", "slime": "metadata", "nemo-gym": "kuberoll"}.get(to)
    found = (row if place is None else row[place])["sampling"]
    return json.loads(found) if isinstance(found, str) else found


@pytest.mark.parametrize("to", SAYING_FORMATS)
@given(found=stored, usual=st.one_of(st.none(), distributions))
def test_every_row_says_of_each_response_what_it_was_sampled_from(
    to: str, found: list[dict[str, Any] | None] | None, usual: Distribution | None
) -> None:
    record = with_sampling(replace(trajectory(), sampling=found), usual)
    row = FORMATS[to].row(record, "user", 0)
    expected = resolved(found, 2, usual)
    assert sampling_of(to, row) == (None if expected == [None, None] else expected)
    if to == "prime-rl":
        known = [one["temperature"] for one in expected if one is not None and one["temperature"] > 0]
        # Two tokens of each response, with three of an observation between them, after a prompt of four.
        assert (row["temperatures"] is None) == (len(known) < 2)
        assert row["temperatures"] is None or list(row["temperatures"]) == [
            *[1.0] * 4, known[0], known[0], *[1.0] * 3, known[1], known[1],
        ]  # fmt: skip


@given(rows=st.lists(st.lists(st.one_of(st.none(), distributions), min_size=1, max_size=2), min_size=1, max_size=4))
def test_a_mixture_is_found_in_any_order(rows: list[list[dict[str, Any] | None]]) -> None:
    for to, without in (("trl", ()), ("prime-rl", ("temperature",)), ("sharegpt", None)):
        samplings = Samplings(FORMATS[to].assumption)
        problem = None
        for row in rows:
            problem = problem or samplings.add(replace(trajectory(), sampling=row))
        different: list[Any] = []
        for one in [one for row in rows for one in row]:
            assumed = one and {
                **{name: value for name, value in one.items() if name not in (without or ())},
                "greedy": one["temperature"] == 0,
            }
            if assumed not in different:
                different.append(assumed)
        assert (problem is None) == (without is None or len(different) == 1)


def run(directory: Path, usual: Distribution | None, *records: TrajectoryRecord) -> RunFiles:
    files = run_of(directory, *records)
    manifest = RunManifest(
        format=1, job="dry", created="", shards=2, identity={}, inputs={}, versions={},
        sampling=None if usual is None else dict(usual),
    )  # fmt: skip
    (directory / "manifest.json").write_bytes(orjson.dumps(manifest))
    return files


def named(count: int, sampling: Sequence[dict[str, Any] | None] | None = None) -> TrajectoryRecord:
    return replace(trajectory(count), sampling=None if sampling is None else list(sampling))


@pytest.mark.parametrize("to", FORMATS)
def test_a_file_of_one_distribution_is_never_mixed_unasked(tmp_path: Path, to: str) -> None:
    files = run(tmp_path / "run", PLAIN, named(0), named(1, [None, COLD]), named(2), named(3, [COLD, COLD]))

    def export(**options: Any) -> int:
        return export_run(files, to=to, output=tmp_path / "out", force=True, **options).counts.selected

    if FORMATS[to].assumption is None or to == "prime-rl":
        assert export() == 4
    else:
        words = r"task 1, rollout 0 has responses with temperature 0.5, and others have temperature 1, .*--temperature"
        with pytest.raises(ExportError, match=words):
            export()
        assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())
    assert export(allow_mixed_sampling=True) == 4
    assert export(selection=Selection(temperature=1.0)) == 2
    assert export(selection=Selection(temperature=0.5)) == 1
    with pytest.raises(ExportError, match="4 sampled otherwise"):
        export(selection=Selection(temperature=0.7))


def test_what_no_manifest_says_is_neither_of_a_temperature_nor_mixed(tmp_path: Path) -> None:
    files = run(tmp_path / "run", None, named(0), named(2))
    exported = export_run(files, to="trl", output=tmp_path / "out.parquet")
    assert exported.sampling == (None,)
    assert pyarrow.parquet.read_table(exported.path)["sampling"].to_pylist() == [None, None]
    with pytest.raises(ExportError, match="2 sampled otherwise"):
        export_run(files, to="trl", output=tmp_path / "more", selection=Selection(temperature=1.0))
    # A part that is known makes the file one of two kinds.
    files = run(tmp_path / "more", None, named(0), named(2, [PLAIN, PLAIN]))
    with pytest.raises(ExportError, match="sampling that is unknown"):
        export_run(files, to="trl", output=tmp_path / "mixed.parquet")


def test_paths_have_the_sampling_of_their_own_responses(tmp_path: Path) -> None:
    record = played(FORKED)
    assert record.branches is not None
    own = sum(message.sampled for message in record.messages)
    (branch,) = record.branches
    count = sum(message.sampled for message in branch.messages)
    record = replace(
        record,
        sampling=[{**PLAIN, "temperature": 1.0 + number} for number in range(own)],
        branches=[replace(branch, sampling=[{**PLAIN, "temperature": 0.25 * (1 + number)} for number in range(count)])],
    )
    files = run(tmp_path / "run", PLAIN, record)
    exported = export_run(files, to="trl", output=tmp_path / "o.jsonl", allow_mixed_sampling=True)
    rows = [json.loads(line) for line in exported.path.read_text().splitlines()]
    for (_, path), row in zip(paths(with_sampling(record, PLAIN)), rows, strict=True):
        found = json.loads(row["sampling"])
        assert found == path.sampling
        assert len(found) == sum(message.sampled for message in path.messages)
    # The branch alone is of another temperature.
    cold = replace(record, sampling=None, branches=[replace(branch, sampling=[COLD] * count)])
    files = run(tmp_path / "cold", PLAIN, cold)
    selection = Selection(temperature=1.0)
    assert export_run(files, to="trl", output=tmp_path / "own", branches=False, selection=selection).counts.selected
    with pytest.raises(ExportError, match="1 sampled otherwise"):
        export_run(files, to="trl", output=tmp_path / "all", selection=selection)


def test_the_command_says_what_a_trainer_is_to_be_told(tmp_path: Path) -> None:
    def typed(usual: Distribution | None, *more: str) -> str:
        run(tmp_path / "run", usual, named(0), named(2, [COLD, COLD]))
        arguments = [str(tmp_path / "run"), "--to", "trl", "--output", str(tmp_path / "o.jsonl"), "--force", *more]
        result = CliRunner().invoke(command, arguments)
        return str(result.output)

    assert "--allow mixed-sampling" in typed(PLAIN)
    assert "  sampled with temperature 0.5\n" in typed(PLAIN, "--temperature", "0.5")
    both = typed({**PLAIN, "top_p": 0.9}, "--allow", "mixed-sampling")
    assert "  sampled with temperature 1, top_p 0.9\n" in both
    assert "  warning: top_p: 0.9, and the trainer's log-probabilities are of the whole distribution\n" in both
    assert "  sampled with temperature 0.5\n" in both
    assert "  warning: sampling: unknown" in typed(None, "--allow", "mixed-sampling")
