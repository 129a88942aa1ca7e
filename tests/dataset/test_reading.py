"""From a job's dataset to its rows: sources, limit, what all rows say together."""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

from kuberoll_api.model.dataset import Dataset
from kuberoll_api.model.generation import Sampling
from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_workers.dataset import inputs
from kuberoll_workers.dataset.inputs import prompt_groups, read_ahead, repeats_of, scan, verify_rows
from kuberoll_workers.dataset.reading import DatasetError, Row, read_rows
from kuberoll_workers.environments import BUILT_INS, UnusableRow, resolve
from kuberoll_workers.environments.batches import awaited
from kuberoll_workers.policy.interface import SamplingParameters, StructuredOutputs
from kuberoll_workers.rollouts.settings import sampling_of
from kuberoll_workers.worker.settings import rollout_settings
from tests.environments.support import SERVED
from tests.examples import examples


def dataset(source: dict[str, Any], **fields: Any) -> Dataset:
    return Dataset.model_validate({"source": source, **fields})


class Generator:
    def generate_dataset(self, count: int, seed: int) -> list[dict[str, Any]]:
        return [{"messages": [{"role": "user", "content": f"{seed}-{number}"}]} for number in range(count)]


def rows(
    given: Dataset, base: Path = Path(), names: tuple[str, ...] = ("a", "b"), environment: Any = Generator
) -> list[Row]:
    return list(read_rows(given, base=base, task_names=names, environment=lambda name: environment()))


class Undemanding:
    """An environment that says nothing about its rows."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    def step(self, logs: list[Any], metadata: list[Any]) -> Any:
        raise NotImplementedError

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        return batch, {}


class Demanding(Undemanding):
    """An environment whose rows need a word; one that is a number breaks the check."""

    def check_row(self, metadata: Any) -> None:
        word = (metadata or {}).get("word")
        if word is None:
            raise UnusableRow(f"metadata.word: missing, and {self.config['name']} asks for it")
        if word.strip() == "nothing":
            raise UnusableRow("no words are left")


def job(source: dict[str, Any], **fields: Any) -> RolloutJob:
    return RolloutJob.model_validate(
        {
            "apiVersion": "kuberoll.io/v1alpha1",
            "kind": "RolloutJob",
            "metadata": {"name": "job"},
            "spec": {
                "generation": {"model": {"source": "m"}},
                "environments": [
                    {"name": "a", "entrypoint": f"{__name__}:Undemanding"},
                    {"name": "b", "entrypoint": f"{__name__}:Undemanding", "repeats": 3},
                ],
                "dataset": {"source": source, "repeats": 2, **fields},
            },
        }
    )


def no_environment(name: str) -> Any:
    raise AssertionError("no environment is needed")


def test_inline_rows_know_their_places() -> None:
    first, second = rows(dataset({"rows": [{"prompt": "x", "task_name": "a"}, {"prompt": "y", "task_name": "b"}]}))
    assert (first.where, second.where) == ("spec.dataset.source.rows[0]", "spec.dataset.source.rows[1]")


@pytest.mark.parametrize("override", [False, True])
def test_the_job_s_sampling_overrides_its_rows_where_it_says_so(override: bool) -> None:
    row = {"prompt": "x", "task_name": "a", "stop_strings": ["</a>"], "sampling": {"temperature": 0.7, "seed": 3}}
    given_job = job({"rows": [row]})
    settings = Sampling.model_validate({"temperature": 0.1, "maxTokens": 9, "override": override})
    generation = given_job.spec.generation.model_copy(update={"sampling": settings})
    given_job = given_job.model_copy(update={"spec": given_job.spec.model_copy(update={"generation": generation})})
    [group] = prompt_groups(given_job, base=Path(), environment=no_environment)
    sampled = sampling_of(rollout_settings(given_job, 100).sampling, group.row.sampling)
    assert (sampled.temperature, sampled.max_tokens) == (0.1 if override else 0.7, 9)
    assert (group.row.seed, group.row.stop_strings) == (None if override else 3, ("</a>",))
    # It is no other dataset.
    assert (
        scan(given_job, base=Path(), environment=no_environment).digest
        == scan(job({"rows": [row]}), base=Path(), environment=no_environment).digest
    )


def test_all_settings_of_the_manifest_reach_the_request() -> None:
    document = job({"rows": [{"prompt": "x"}]}).model_dump(mode="json", by_alias=True, exclude_unset=True)
    document["spec"]["generation"]["sampling"] = {
        "stopTokenIds": [7],
        "minP": 0.1,
        "presencePenalty": 0.5,
        "frequencyPenalty": -0.5,
        "repetitionPenalty": 1.5,
        "minTokens": 3,
        "structuredOutputs": {"json": {"type": "object"}},
    }
    made = RolloutJob.model_validate(document)
    assert rollout_settings(made, 100).sampling == SamplingParameters(
        max_tokens=512,
        stop_token_ids=(7,),
        min_p=0.1,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.5,
        min_tokens=3,
        structured_outputs=StructuredOutputs(json={"type": "object"}),
    )
    row = {"min_p": 0.2, "structured_outputs": {"choice": ["a"]}, "stop_token_ids": [8]}
    of_row = sampling_of(rollout_settings(made, 100).sampling, row)
    assert (of_row.min_p, of_row.stop_token_ids) == (0.2, (8,))
    assert of_row.structured_outputs == StructuredOutputs(choice=["a"])
    assert (of_row.min_tokens, of_row.presence_penalty) == (3, 0.5)


def test_the_limit_is_the_last_row_that_is_read(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "x", "task_name": "a"}\nthis line is never read\n')
    assert len(rows(dataset({"uri": "rows.jsonl"}, limit=1), tmp_path)) == 1


def test_generated_rows_come_from_each_environment_in_order() -> None:
    made = rows(dataset({"generator": {"count": 2, "seed": 5}}))
    assert [(row.task_name, row.messages[0]["content"]) for row in made] == [
        ("a", "5-0"), ("a", "5-1"), ("b", "5-0"), ("b", "5-1"),
    ]  # fmt: skip
    assert made[3].where == "generated row 1 of environment 'b'"


def test_generated_rows_become_json() -> None:
    class Numbers:
        def generate_dataset(self, count: int, seed: int) -> Iterator[dict[str, Any]]:
            yield {"prompt": "x", "metadata": {"board": numpy.array([[1, 2]]), "size": numpy.int64(2), "at": (1, 2)}}

    (row,) = rows(dataset({"generator": {"count": 1}}), names=("a",), environment=Numbers)
    assert row.metadata == {"board": [[1, 2]], "size": 2, "at": [1, 2]}


class Nothing:
    pass


class NoGenerator:
    def generate_dataset(self, count: int, seed: int) -> list[dict[str, Any]]:
        raise NotImplementedError("NoGenerator has no generator")


class Broken:
    def generate_dataset(self, count: int, seed: int) -> list[dict[str, Any]]:
        raise KeyError("size")


class Sets:
    def generate_dataset(self, count: int, seed: int) -> list[Any]:
        return [{"prompt": "x", "metadata": {"seen": {1}}}]


class Quitting:
    def generate_dataset(self, count: int, seed: int) -> list[dict[str, Any]]:
        raise SystemExit(3)


class Texts:
    def generate_dataset(self, count: int, seed: int) -> list[Any]:
        return ["x"]


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (Nothing, "environment 'a' has no generate_dataset"),
        (NoGenerator, "environment 'a': NoGenerator has no generator"),
        (Broken, "environment 'a': generate_dataset raised KeyError: 'size'"),
        (Quitting, "environment 'a': generate_dataset called sys.exit(3)"),
        (Sets, "generated row 0 of environment 'a': metadata.seen: found a set"),
        (Texts, "generated row 0 of environment 'a': found text \"x\"; a row is a JSON object"),
    ],
)
def test_generators_that_cannot_be_used(environment: type, message: str) -> None:
    with pytest.raises(DatasetError) as caught:
        rows(dataset({"generator": {"count": 1}}), environment=environment)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("source", "field"),
    [({"configMap": {"name": "rows"}}, "configMap"), ({"pvc": {"claimName": "c", "path": "p"}}, "pvc")],
)
def test_sources_of_a_cluster(source: dict[str, Any], field: str) -> None:
    with pytest.raises(DatasetError, match=rf"source\.{field} can only be read in a cluster"):
        rows(dataset(source))


def test_a_scan_counts_rows_and_trajectories_by_environment() -> None:
    raw: list[dict[str, Any]] = [{"prompt": text, "task_name": name} for text, name in ("xa", "yb", "xa", "zb")]
    summary = scan(job({"rows": raw}), base=Path(), environment=no_environment)
    assert (summary.rows, summary.trajectories, summary.trajectories_of) == (4, 10, {"a": 4, "b": 6})


def test_repeats_are_the_environment_s_or_the_dataset_s() -> None:
    raw = [{"prompt": "x", "task_name": "a"}, {"prompt": "x", "task_name": "b"}]
    given = job({"rows": raw})
    assert repeats_of(given) == {"a": 2, "b": 3}
    groups = list(prompt_groups(given, base=Path(), environment=no_environment))
    assert [len(group.rollout_indexes) for group in groups] == [2, 3]


def test_a_dataset_without_rows_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("\n\n")
    with pytest.raises(DatasetError, match="there are no rows"):
        scan(job({"uri": "rows.jsonl"}), base=tmp_path, environment=no_environment)


def test_the_digest_is_of_what_the_rows_say_in_order(tmp_path: Path) -> None:
    raw: list[dict[str, Any]] = [
        {"prompt": "x", "task_name": "a", "sampling": {"temperature": 1}}, {"prompt": "y", "task_name": "b"},
    ]  # fmt: skip
    said_otherwise = [{"task_name": "a", "sampling": {"temperature": 1.0}, "prompt": "x", "idx": None}, raw[1]]

    def digest(name: str, given: list[dict[str, Any]], separator: str) -> str:
        (tmp_path / name).write_text(separator.join(map(json.dumps, given)))
        return scan(job({"uri": name}), base=tmp_path, environment=no_environment).digest

    plain = digest("a.jsonl", raw, "\n")
    assert digest("b.jsonl", said_otherwise, "\r\n\r\n") == plain
    assert scan(job({"rows": raw}), base=Path(), environment=no_environment).digest == plain
    assert digest("c.jsonl", raw[::-1], "\n") != plain
    assert digest("d.jsonl", raw[:1], "\n") != plain


def test_digests_are_those_that_manifests_hold() -> None:
    """Another digest of the same rows would refuse every run that an earlier version began."""
    summary = scan(job({"rows": [{"prompt": "x", "task_name": "a"}]}), base=Path(), environment=no_environment)
    assert summary.digest == "2c80212d43f28363043a6d3b2617db8a"


def test_groups_of_a_file_are_those_of_its_rows(tmp_path: Path) -> None:
    raw: list[dict[str, Any]] = [{"prompt": str(number), "task_name": "ab"[number % 2]} for number in range(1000)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, raw)))
    (tmp_path / "bad.jsonl").write_text("\n".join([*map(json.dumps, raw), "torn"]))

    def groups(source: dict[str, Any]) -> Iterator[tuple[int, range, bytes]]:
        made = prompt_groups(job(source), base=tmp_path, environment=no_environment)
        return ((group.task_index, group.rollout_indexes, group.row.content) for group in made)

    inline = list(groups({"rows": raw}))
    assert list(groups({"uri": "rows.jsonl"})) == inline
    bad = groups({"uri": "bad.jsonl"})
    assert list(itertools.islice(bad, 1000)) == inline
    with pytest.raises(DatasetError, match=r"bad\.jsonl:1001"):
        next(bad)


def test_reading_ahead_is_bounded_and_ends_with_its_reader() -> None:
    taken: list[int] = []
    full, closed = threading.Event(), threading.Event()

    def endless() -> Iterator[int]:
        try:
            for number in itertools.count():
                taken.append(number)
                if number == 1 + 3:  # the one that was read, those that wait, and the one that has no place yet
                    full.set()
                yield number
        finally:
            closed.set()

    items = endless()
    reader = read_ahead(items, 3)
    assert next(reader) == 0
    assert full.wait(30)
    assert taken == [0, 1, 2, 3, 4]
    reader.close()
    assert not any(thread.name == "kuberoll-rows" for thread in threading.enumerate())
    assert len(taken) <= 6
    del items
    assert closed.wait(30)


def test_what_is_raised_ahead_is_raised_in_its_place() -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise DatasetError("torn")

    reader = read_ahead(broken(), 5)
    assert next(reader) == 1
    with pytest.raises(DatasetError, match="torn"):
        next(reader)
    assert list(reader) == []


@settings(max_examples=examples(150), deadline=None)
@drawn(st.lists(st.sampled_from("abc"), max_size=8), st.lists(st.sampled_from("abc"), max_size=8), st.integers(1, 4))
def test_rows_that_changed_since_the_check_are_not_handed_on(was: list[str], now: list[str], size: int) -> None:
    def made(texts: list[str]) -> list[Row]:
        source = {"rows": [{"prompt": text} for text in texts]}
        return rows(dataset(source), names=("a",)) if texts else []

    taken: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inputs, "BLOCK_ROWS", size)
        same = verify_rows(made(now), [inputs._digest(block) for block in inputs._blocks(made(was))])
        handed_on = (row.messages[0]["content"] for row in same)
        if was == now:
            assert list(handed_on) == now
            return
        with pytest.raises(DatasetError, match="the rows are not those that this run was checked with"):
            taken.extend(handed_on)
    # Whole blocks, and nothing of the first one that differs.
    assert len(taken) % size == 0
    assert taken == was[: len(taken)] == now[: len(taken)]


def test_a_generator_that_is_not_deterministic_is_refused() -> None:
    class Fickle:
        calls = 0

        def generate_dataset(self, count: int, seed: int) -> list[dict[str, Any]]:
            Fickle.calls += 1
            return [{"prompt": f"{number} of call {Fickle.calls}"} for number in range(count)]

    given = job({"generator": {"count": 3, "environments": ["a"]}})
    fickle: Any = Fickle()
    summary = scan(given, base=Path(), environment=lambda name: fickle)
    groups = prompt_groups(given, base=Path(), environment=lambda name: fickle, blocks=summary.blocks)
    with pytest.raises(DatasetError, match=r"rows 1 to 3 .generated row 0.*generate_dataset must return the same"):
        next(groups)


def test_blocks_are_bounded_by_rows_and_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "BLOCK_ROWS", 3)
    monkeypatch.setattr(inputs, "_BLOCK_BYTES", 10)
    sizes = [1, 1, 1, 4, 5, 1, 20, 9, 1, 1]
    given: Any = [SimpleNamespace(content=b"x" * size) for size in sizes]
    blocks = [[len(row.content) for row in block] for block in inputs._blocks(given)]
    assert blocks == [[1, 1, 1], [4, 5, 1], [20], [9, 1], [1]]


def demanding(rows: list[Any], **fields: Any) -> RolloutJob:
    """A job of four environments: three of them check their rows, one in a way that this process must not run."""
    document = job({"rows": []}).model_dump(mode="json", by_alias=True, exclude_unset=True)
    own = {"entrypoint": f"{__name__}:Demanding", "config": {"name": "words"}}
    document["spec"]["environments"] = [
        {"name": "words", **own},
        {"name": "apart", "isolation": "Process", **own},
        {"name": "math", "type": "math", "isolation": "Process"},
        {"name": "free", "entrypoint": f"{__name__}:Undemanding"},
    ]
    document["spec"]["dataset"] = {"source": {"rows": rows}, **fields}
    return RolloutJob.model_validate(document)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"task_name": "words", "metadata": {"word": "x"}}, None),
        ({"task_name": "apart"}, None),
        ({"task_name": "free"}, None),
        ({"task_name": "math", "metadata": {"expected_answer": 4}}, None),
        ({"task_name": "math", "metadata": {"ground_truth": "so many: #### 1,234"}}, None),
        (
            {"task_name": "words", "metdata": {"word": "x"}},
            "metadata.word: missing, and words asks for it. The environment 'words' cannot score the row without it. "
            "The row has metdata, prompt, task_name; if one of these fields has it, map it: dataset.columns: "
            "{metadata.word: FIELD}",
        ),
        (
            {"task_name": "words", "metadata": {"word": "nothing"}},
            "no words are left. The environment 'words' cannot score the row without it; the row has metadata",
        ),
        (
            {"task_name": "words", "metadata": {"word": 3}},
            "check_row of environment 'words' raised AttributeError: 'int' object has no attribute 'strip'",
        ),
        ({"task_name": "math", "answer": "4"}, "metadata.ground_truth: found None; it must be the right answer"),
        (
            {"task_name": "math", "metadata": {"ground_truth": "\\boxed{1} or else \\boxed{2}, who knows"}},
            "metadata.ground_truth: '\\\\boxed{1} or else \\\\boxed{2}, who knows' cannot be read as one answer",
        ),
    ],
)
def test_environments_check_their_rows_before_anything_is_generated(row: dict[str, Any], message: str | None) -> None:
    given_job = demanding([{"prompt": "x", **row}])
    if message is None:
        assert scan(given_job, base=Path(), environment=no_environment).rows == 1
        return
    with pytest.raises(DatasetError) as caught:
        scan(given_job, base=Path(), environment=no_environment)
    assert str(caught.value).startswith(f"spec.dataset.source.rows[0]: {message}")


def test_the_traceback_of_a_check_that_breaks_is_kept() -> None:
    with pytest.raises(DatasetError) as caught:
        scan(
            demanding([{"prompt": "x", "task_name": "words", "metadata": {"word": 3}}]),
            base=Path(),
            environment=no_environment,
        )
    assert caught.value.traceback is not None
    assert "word.strip()" in caught.value.traceback.text


def test_rows_of_several_sources_are_counted_and_checked() -> None:
    sources: list[dict[str, Any]] = [
        {"name": "good", "source": {"rows": [{"prompt": "x"}, {"prompt": "y"}]}, "environment": "free"},
        {"name": "bad", "source": {"rows": [{"prompt": "x"}]}, "environment": "words"},
    ]
    given_job = demanding([], source=None, sources=sources[:1])
    assert scan(given_job, base=Path(), environment=no_environment).rows_of_sources == {"good": 2}
    given_job = demanding([], source=None, sources=sources)
    with pytest.raises(DatasetError, match=r"map it: columns of this source: \{metadata\.word: FIELD\}"):
        scan(given_job, base=Path(), environment=no_environment)


def test_all_bad_rows_are_reported_to_who_asks() -> None:
    rows: list[Any] = [{"prompt": "x", "task_name": name} for name in ("free", "chess", "words")] + [{"prompt": 4}]
    refused: list[DatasetError] = []
    summary = scan(demanding(rows), base=Path(), environment=no_environment, refused=refused.append)
    assert summary.rows == 1
    assert [str(error).partition(": ")[0] for error in refused] == [
        f"spec.dataset.source.rows[{number}]" for number in (1, 2, 3)
    ]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 9) | st.sampled_from(["4", "x", "#### 4", "\\frac12", "", " "]),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=9,
)
STATES = st.dictionaries(st.sampled_from(["ground_truth", "expected_answer", "board", "moves", "calls", "tests"]), JSON)


BUILT: dict[str, Any] = {name: resolve(type=name)({}) for name in set(BUILT_INS) - SERVED}  # type: ignore[call-arg]


@settings(deadline=None)
@drawn(st.sampled_from(sorted(BUILT)), STATES)
def test_a_built_in_checks_what_it_needs_to_step(name: str, state: dict[str, Any]) -> None:
    log = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    why = ""
    try:
        BUILT[name].check_row(state)
    except UnusableRow as error:
        why = str(error)
    if why:
        with pytest.raises(UnusableRow, match=re.escape(why)):
            awaited(BUILT[name].step([log], [state]))
    else:
        assert len(awaited(BUILT[name].step([log], [state])).rewards) == 1
