"""docs/reference/operating.md, reasons.md and metrics.md explain everything that the operator says."""

from __future__ import annotations

import re
from pathlib import Path

from kuberoll_api.conditions import CONDITION_TYPES, Reason
from kuberoll_operator.metrics import Metrics
from kuberoll_operator.status.job_status import _PHASES
from kuberoll_operator.transitions import RULES

PAGES = Path(__file__).parents[2] / "docs" / "reference"
TEXT = (PAGES / "operating.md").read_text()
REASONS_TEXT = (PAGES / "reasons.md").read_text()
REASONS = sorted(value for name, value in vars(Reason).items() if name.isupper())


def section(title: str) -> str:
    return TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0]


def named(text: str) -> set[str]:
    return set(re.findall(r"`([A-Za-z]+)`", text))


def test_every_reason_and_no_other() -> None:
    rows = {row.split("|")[1].strip(" `") for row in REASONS_TEXT.splitlines() if row.startswith("| `")}
    assert rows == set(REASONS)


def test_every_condition_phase_and_event() -> None:
    assert set(CONDITION_TYPES) <= named(section("Conditions"))
    assert {*_PHASES.values(), "Pending", "Succeeded"} == named(section("Phases"))
    assert {rule.name for rule in RULES if rule.name} <= named(section("Events"))


def test_every_metric() -> None:
    told = set(re.findall(r"^\| `(kuberoll_operator_[a-z_]+)` \|", (PAGES / "metrics.md").read_text(), re.MULTILINE))
    found = {family.name for family in Metrics().registry.collect()}
    # The gauges of queue, cache and lease are registered where these are made.
    assert found <= {name.removesuffix("_total") for name in told}
