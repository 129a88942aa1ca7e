"""An environment that says that a row is wrong is believed, wherever it runs."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest

from kuberoll_api.model.environments import Environment
from kuberoll_workers.dataset.row_checks import RowChecks
from kuberoll_workers.dataset.rows import DatasetError, RowPosition, parse_row
from kuberoll_workers.environments import BUILT_INS, EnvironmentReturn, EpisodeStart, UnusableRow, resolve
from kuberoll_workers.environments.batches import awaited
from kuberoll_workers.environments.isolation import make_executor
from kuberoll_workers.environments.outcome import RowFault, StepOutcome, StepRaised
from kuberoll_workers.environments.registry import PlainSpec
from kuberoll_workers.environments.runner import EnvironmentRunner
from tests.environments.support import log_of


class Picky:
    """Refuses rows without an answer, and leaves the program where it is told to."""

    def __init__(self, config: Any = None) -> None:
        self.sizes: list[int] = []

    def step(self, logs: list[Any], metadata: list[Any]) -> EnvironmentReturn:
        self.sizes.append(len(logs))
        for state in metadata:
            if state.get("exit"):
                sys.exit("enough")
            if "answer" not in state:
                raise UnusableRow("metadata.answer is missing")
        size = len(logs)
        return EnvironmentReturn(
            [{"role": "environment", "content": ""}] * size, None, None, [1.0] * size, [True] * size
        )

    def global_post_process_and_metrics(self, batch: Any) -> Any:
        return batch, {}


class PickyCoroutine(Picky):
    async def step(self, logs: list[Any], metadata: list[Any]) -> EnvironmentReturn:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().step(logs, metadata)


@pytest.mark.parametrize(
    ("make", "isolation"),
    [(Picky, "Inline"), (Picky, "Process"), (PickyCoroutine, "Inline"), (PickyCoroutine, "Process")],
    ids=str,
)
async def test_only_the_wrong_row_is_refused(make: Any, isolation: str) -> None:
    spec = PlainSpec(name="picky", type=None, entrypoint=f"{__name__}:{make.__name__}", config={})
    runner = EnvironmentRunner(make_executor(spec, isolation=isolation, processes=1, timeout=60), max_batch=8)
    try:
        results = await runner.step_batch([[]] * 4, [{"answer": 1}, {}, {"answer": 2}, {"answer": 3}])
    finally:
        await runner.close()
    assert [type(result) for result in results] == [StepOutcome, RowFault, StepOutcome, StepOutcome]
    assert str(results[1]) == "metadata.answer is missing"


async def test_each_row_of_a_refused_batch_is_stepped_once_more() -> None:
    environment = Picky()
    runner = EnvironmentRunner(
        make_executor(lambda: environment, isolation="Inline", processes=1, timeout=60), max_batch=8
    )
    try:
        await runner.step_batch([[]] * 3, [{"answer": 1}, {}, {}])
    finally:
        await runner.close()
    assert environment.sizes == [3, 1, 1, 1]


async def test_an_environment_that_exits_ends_its_step_and_not_the_program() -> None:
    runner = EnvironmentRunner(make_executor(Picky, isolation="Inline", processes=1, timeout=60), max_batch=8)
    try:
        results = await runner.step_batch([[]] * 2, [{"exit": True}, {"answer": 1}])
    finally:
        await runner.close()
    assert [type(result) for result in results] == [StepRaised, StepOutcome]
    assert str(results[0]) == "step raised SystemExit: enough"


@pytest.mark.parametrize("name", sorted(set(BUILT_INS) - {"judge_pairs", "reward_model"}))
@pytest.mark.parametrize("metadata", [None, {}, {"expected_answer": "x y", "board": [[1]], "ground_truth": " "}])
def test_built_ins_refuse_rows_that_nobody_could_play(name: str, metadata: Any) -> None:
    environment: Any = resolve(type=name)({})  # type: ignore[call-arg]
    with pytest.raises(UnusableRow, match=r"metadata\.[a-z_]+: found"):
        awaited(environment.step([log_of("anything")], [metadata]))


class Greeting(Picky):
    """Gives the prompt itself."""

    def reset(self, episodes: list[Any]) -> list[Any]:
        return [EpisodeStart(messages=[{"role": "user", "content": "hello"}]) for _ in episodes]


@pytest.mark.parametrize(
    ("make", "isolation", "refused"),
    [(Picky, "Inline", True), (Greeting, "Inline", False), (Picky, "Process", False)],
)
def test_a_row_without_a_prompt_is_refused_where_nothing_gives_one(make: Any, isolation: Any, refused: bool) -> None:
    spec = Environment(name="picky", entrypoint=f"{__name__}:{make.__name__}", isolation=isolation)
    row = parse_row({"messages": []}, place=RowPosition("rows:", 1), task_names=("picky",), template=None)
    checks = RowChecks([spec])
    if refused:
        with pytest.raises(
            DatasetError, match="rows:1: the row has no prompt, and the environment 'picky' has no reset"
        ):
            checks.check(row)
    else:
        checks.check(row)
