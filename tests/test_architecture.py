"""What docs/explanation/architecture.md and guarantees.md say of imports, of what they cost, of code and tests."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from kuberoll_api import contract

ROOT = Path(__file__).resolve().parent.parent
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
HEAVY = {"ray", "torch", "vllm", "transformers"}
# What a machine must have that only validates; with what pydantic itself is made of.
API_NEEDS = {
    "click",
    "pydantic",
    "ruamel",
    "annotated_types",
    "pydantic_core",
    "typing_extensions",
    "typing_inspection",
}

# Dataclasses that are filled or changed after they are made; all others are values, which tasks and threads share.
STATE = {
    "Branch", "Coverage", "DroppedRecord", "EngineTally", "EnvironmentSummary", "ExtendedMessage", "FailureCause",
    "FailureCauses", "FailureRecord", "GroupResult", "GymRollout", "Incident", "Message", "PaceState", "Pacer",
    "Partial", "Progress", "RescoreCounts", "RescoredManifest", "RunEnd", "RunManifest", "RunResult", "RunState",
    "SelectionCounts", "Timing", "TokenCounts", "TrajectoryRecord", "TrajectoryTotals", "TurnRecord", "_Form",
    "_Offered", "_OpenGroup", "_Segment", "_Server", "_Turn",
}  # fmt: skip

# Dataclasses of many fields that may be made without naming these: they are read from lines, or made in one place.
POSITIONAL = {
    "DroppedRecord", "ExtendedMessage", "FailureRecord", "Message", "RescoreCounts", "StepOutcome", "TrajectoryRecord",
    "Turn", "TurnRecord", "_Frame",
}  # fmt: skip


def loaded_by(*modules: str) -> set[str]:
    """The top-level modules that a fresh interpreter loads for these, above what it always loads."""
    imports = "".join(f"import {module}\n" for module in modules)
    code = f"import sys\nalways = set(sys.modules)\n{imports}print(*(set(sys.modules) - always))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {module.partition(".")[0] for module in done.stdout.split()}


def modules_of(package: str) -> list[str]:
    """The package and everything in it."""
    path = importlib.import_module(package).__path__
    return [package, *(info.name for info in pkgutil.walk_packages(path, f"{package}."))]


def test_the_import_rules_hold() -> None:
    linter = "from importlinter.cli import lint_imports_command; lint_imports_command(['--no-logo'])"
    done = subprocess.run([sys.executable, "-c", linter], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("root", ["crds", "operator", "workers"])
def test_source_roots_are_no_packages(root: str) -> None:
    # A package named `operator` would shadow the standard library's.
    assert not (ROOT / root / "__init__.py").exists()


@pytest.mark.slow
@pytest.mark.parametrize("package", ["kuberoll", "kuberoll_api", "kuberoll_operator", "kuberoll_workers"])
def test_importing_any_module_is_cheap(package: str) -> None:
    modules = modules_of(package)
    assert not loaded_by(*modules) & HEAVY


def test_processes_of_environments_load_neither_the_model_nor_what_it_is_made_with() -> None:
    """There are many of them, and it would take each longer than the rest."""
    loaded = loaded_by("kuberoll_workers.environments.child")
    assert "kuberoll_workers" in loaded
    assert "pydantic" not in loaded


def dataclasses_of_workers() -> dict[tuple[str, str], type]:
    """All dataclasses of kuberoll_workers and kuberoll, by module and name."""
    return {
        (module.__name__, name): found
        for module in map(importlib.import_module, [*modules_of("kuberoll_workers"), *modules_of("kuberoll")])
        for name, found in vars(module).items()
        if dataclasses.is_dataclass(found) and isinstance(found, type) and found.__module__ == module.__name__
    }


def test_values_cannot_be_changed_and_take_no_names_that_they_lack() -> None:
    classes = dataclasses_of_workers()
    assert len(classes) > len(STATE)
    for (module, name), found in classes.items():
        frozen = found.__dataclass_params__.frozen  # type: ignore[attr-defined]
        assert frozen or name in STATE, f"{module}.{name} can be changed"
        # Of a tokenizer there is one in a process, and it has the attributes that transformers' have.
        assert "__slots__" in vars(found) or name == "FileTokenizer", f"{module}.{name} has no slots"


def test_what_has_many_fields_is_made_by_their_names() -> None:
    """Fields of one type that are swapped are no error."""
    for (module, name), found in dataclasses_of_workers().items():
        fields = inspect.signature(found).parameters.values()
        if len(fields) > 5 and name not in POSITIONAL:
            assert all(item.kind is item.KEYWORD_ONLY for item in fields), f"{module}.{name} takes them by their order"


def test_the_command_needs_little() -> None:
    assert foreign_modules("kuberoll_api.cli") == {"click", "kuberoll_api"}
    assert foreign_modules("kuberoll_api.cli, kuberoll_api.manifest.loading") == API_NEEDS | {"kuberoll_api"}


def foreign_modules(names: str) -> set[str]:
    return {name for name in loaded_by(names) - set(sys.stdlib_module_names) if name[0] != "_"}


def rows_of(title: str) -> list[list[str]]:
    """The cells of the tables of a section of docs/explanation/architecture.md, without their heads."""
    page = (ROOT / "docs/explanation/architecture.md").read_text()
    return rows_in(page.split(f"\n## {title}\n")[1].split("\n## ")[0])


def rows_in(text: str) -> list[list[str]]:
    """The cells of its tables, without their heads."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return [row for row in rows if "`" in row[0] or "`" in row[-1]]


def quoted(text: str) -> list[str]:
    """What stands between backticks."""
    return re.findall(r"`([^`]+)`", text)


def test_the_map_has_the_import_rules() -> None:
    rows = rows_of("Packages and what they may import")
    packages = {quoted(row[0])[0]: set(quoted(row[2])) for row in rows if len(row) == 3}
    layers = [set(quoted(row[0])) for row in rows if len(row) == 2]
    assert packages == {
        rule["source_modules"][0]: set(rule["forbidden_modules"])
        for rule in CONTRACTS
        # That of core and batteries has many sources.
        if rule["type"] == "forbidden" and len(rule["source_modules"]) == 1
    }
    [rule] = [rule for rule in CONTRACTS if rule["type"] == "layers"]
    assert layers == [set(layer.split(" | ")) for layer in rule["layers"]]


def test_the_map_names_the_contract() -> None:
    named = {name for row in rows_of("The contract between operator and pods") for name in quoted(row[2])}
    assert named <= set(vars(contract))
    types = {name for name, value in vars(contract).items() if getattr(value, "__module__", "") == contract.__name__}
    # Parts of others.
    assert {name for name in types if name[0].isupper()} - named == {
        "CachedModel",
        "EnvironmentResult",
        "WeightsSource",
    }


def test_the_page_names_code_and_tests_of_every_guarantee() -> None:
    rows = rows_in((ROOT / "docs/explanation/guarantees.md").read_text())
    assert len(rows) > 20
    for guarantee, code, tests in rows:
        assert quoted(code), guarantee
        assert [path for path in quoted(code) if not (ROOT / path).is_file()] == []
        assert all("::test_" in test for test in quoted(tests) or [""]), guarantee
