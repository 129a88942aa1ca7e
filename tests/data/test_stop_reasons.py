"""One table says how trajectories end, and what is true of each way; every other place asks it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from kuberoll_workers.data.stop_reasons import (
    ENDINGS,
    FAILED,
    FINISHED,
    OUTCOMES,
    OVERRULING,
    WHOLE_GROUP,
    Kind,
    by_environment,
    is_cut,
    look,
)
from kuberoll_workers.environments.interface import EndReason

ROOT = Path(__file__).resolve().parent.parent.parent
TABLE = ROOT / "workers/kuberoll_workers/data/stop_reasons.py"
SOURCES = [
    path for folder in ("crds", "operator", "workers", "scripts") for path in sorted((ROOT / folder).rglob("*.py"))
]
# Words of others that are spelled like reasons: a step's results in NeMo Gym.
OTHERS = {"adapters/nemo_gym_steps.py"}
# Who makes an end may look at the end that it made; and a run counts the groups that its budget of drops limits.
MAKERS = {"rollouts/groups.py", "output/run_state.py"}


def test_each_outcome_has_a_row_in_the_table() -> None:
    assert tuple(ENDINGS) == OUTCOMES
    assert {ending.kind for ending in ENDINGS.values()} == set(get_args(Kind))
    assert set(get_args(EndReason)) == {*OUTCOMES, "interrupted", "lost"}


def test_what_the_table_says_of_each() -> None:
    looks = {"terminated": "plain", "truncated": "limit", "max_turns": "limit", "failed": "failed", "stale": "dropped"}
    assert {name: look(name) for name in looks} == looks
    assert {"terminated", "truncated", "max_turns"} <= set(FINISHED)
    assert (is_cut("truncated"), is_cut("max_turns"), is_cut("terminated")) == (True, False, False)
    assert (by_environment("terminated"), by_environment("truncated"), by_environment(None)) == (True, False, False)
    assert {"failed"} == FAILED
    assert {"filtered", "stale"} <= WHOLE_GROUP
    assert "oversampled" not in WHOLE_GROUP
    assert {"stale"} == OVERRULING


def test_finished_trajectories_have_names_in_the_metrics_of_nemo_rl_of_their_own() -> None:
    for names in ([ending.rate for ending in FINISHED.values()], [ending.flag for ending in FINISHED.values()]):
        assert all(names)
        assert len(set(names)) == len(FINISHED)


def _reasons(nodes: list[ast.expr | None]) -> list[str]:
    return [str(node.value) for node in nodes if isinstance(node, ast.Constant) and node.value in ENDINGS]


def lists_of_their_own(source: str) -> Iterator[tuple[int, str]]:
    """Lines that name several reasons in a collection, or compare a reason or an outcome with one that they name."""
    collections = ast.Tuple | ast.List | ast.Set
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.expr):
            continue
        named: list[str] = []
        if isinstance(node, collections):
            named = _reasons(list(node.elts))
        elif isinstance(node, ast.Dict):
            named = _reasons(list(node.keys))
        elif isinstance(node, ast.Compare) and re.search("reason|outcome", ast.unparse(node)):
            sides = [node.left, *node.comparators]
            listed = [item for side in sides if isinstance(side, collections) for item in side.elts]
            # One is enough.
            named = ["", *_reasons([*sides, *listed])]
        if len(set(named)) > 1:
            yield node.lineno, ast.unparse(node)


@pytest.mark.parametrize(
    "source",
    [
        'X = ("terminated", "truncated")',
        'X = Literal["max_turns", "failed"]',
        'X = {"stale": 1, "failed": 2}',
        'X = record.stop_reason == "truncated"',
        'X = row.outcome in {"stale"}',
    ],
)
def test_a_list_of_its_own_is_found(source: str) -> None:
    assert [*lists_of_their_own(source)]
    assert not [*lists_of_their_own('record.stop_reason = "truncated"')]


def test_no_module_has_a_list_of_reasons_of_its_own() -> None:
    found = {
        str(path.relative_to(ROOT)): lines
        for path in SOURCES
        if path != TABLE and (lines := [*lists_of_their_own(path.read_text())])
    }
    exempt = {name for name in found if name.endswith(tuple(OTHERS | MAKERS))}
    wrong = {name: lines for name, lines in found.items() if name not in exempt}
    assert not wrong, f"ask kuberoll_workers.data.stop_reasons instead: {wrong}"
    assert len(exempt) == len(OTHERS | MAKERS), "an exemption that nothing needs"


def test_the_report_s_scripts_and_styles_name_no_reason() -> None:
    """`failed` is a kind there, too, and `truncated` a mark of a message."""
    names = "|".join(set(ENDINGS) - {"failed", "truncated"})
    for path in (ROOT / "workers/kuberoll_workers/analysis/report/assets").iterdir():
        assert not re.findall(rf"\b(?:{names})\b", path.read_text()), path.name
        assert not re.findall(r"outcomes?\.(?:failed|truncated)\b|\.(?:failed|truncated) \{", path.read_text()), (
            path.name
        )


def test_alerts_and_dashboards_ask_for_reasons_that_exist() -> None:
    files = [*(ROOT / "charts").rglob("*.json"), *(ROOT / "workers").rglob("*.yaml"), *(ROOT / "scripts").rglob("*.py")]
    named = {name for path in files for name in re.findall(r'stop_reason=\\?"(\w+)\\?"', path.read_text())}
    assert named
    assert named <= set(ENDINGS)


def test_pages_list_the_reasons_of_the_table() -> None:
    """docs/explanation/rollouts.md has the one table for people."""
    text = (ROOT / "docs/explanation/rollouts.md").read_text()
    rows = text[text.index("| `stop_reason` | when |") :].split("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", rows, re.M)) == {
        name for name, ending in ENDINGS.items() if ending.kind != "dropped"
    } | {"stop_reason"}
