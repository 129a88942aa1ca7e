"""The alerts: each fires when it should and not when it need not, and has a page in the runbook."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from tests.monitoring.support import ROOT, metric_names, panel_queries

RULES = ROOT / "workers" / "kuberoll_workers" / "monitor" / "alerts.yaml"
CASES = Path(__file__).with_name("alerts_test.yaml")

promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")


def alerts() -> list[str]:
    """Names of all alerts."""
    groups = YAML(typ="safe").load(RULES)["groups"]
    return [rule["alert"] for group in groups for rule in group["rules"]]


@promtool
def test_each_fires_when_it_should() -> None:
    done = subprocess.run(["promtool", "test", "rules", str(CASES)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@promtool
def test_they_are_well_formed() -> None:
    command = ["promtool", "check", "rules", "--lint-fatal", str(RULES)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_is_tested_both_ways() -> None:
    fires: set[str] = set()
    rests: set[str] = set()
    for case in YAML(typ="safe").load(CASES)["tests"]:
        for item in case["alert_rule_test"]:
            (fires if item.get("exp_alerts") else rests).add(item["alertname"])
    assert fires == rests == set(alerts())


def test_each_is_in_the_runbook() -> None:
    pages = re.findall(r"^## (\w+)$", (ROOT / "docs" / "reference" / "alerts.md").read_text(), flags=re.MULTILINE)
    assert pages == alerts()


def test_what_they_ask_for_is_in_a_dashboard() -> None:
    """Who is called sees the number that called."""
    shown = set().union(*(metric_names(query.expression) for query in panel_queries()))
    asked = metric_names("\n".join(line.split("#")[0] for line in _expressions()))
    # Counted only when something is wrong, and a limit that a job sets.
    assert asked - shown == {
        "kuberoll_journal_errors_total",
        "kuberoll_environment_timeout_seconds",
        "kuberoll_operator_queue_oldest_seconds",
    }


def _expressions() -> list[str]:
    groups = YAML(typ="safe").load(RULES)["groups"]
    return [rule["expr"] for group in groups for rule in group["rules"]]
