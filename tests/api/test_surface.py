"""How much there is to know: numbers of fields and options, the fields that come first, an example of each field."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from ruamel.yaml import YAML

from kuberoll_api.cli import main
from kuberoll_api.manifest.documents import read_documents
from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_api.schema.common import COMMON
from kuberoll_api.schema.crd import schema

ROOT = Path(__file__).parents[2]
SPEC = schema()["properties"]["spec"]
EXAMPLES = Path(__file__).with_name("field_examples.yaml")


def leaves(given: dict[str, Any], path: str) -> Iterator[str]:
    """Paths of the fields that hold a value: those without fields of their own, which a list's items have, too.

    A map with free keys and a list of plain values are one field each. The same in several places counts in each.
    """
    inner = given.get("items", given)
    if "properties" not in inner:
        yield path
        return
    place = f"{path}[]" if "items" in given else path
    for name, field in inner["properties"].items():
        yield from leaves(field, f"{place}.{name}")


def options(command: click.Command, context: click.Context) -> Iterator[str]:
    """Options of a command and of all its subcommands; `--help` does not count, and a flag with its opposite is one."""
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from options(inner, click.Context(inner, info_name=name, parent=context))
    yield from (
        f"{context.command_path} {given.opts[0]}" for given in command.params if isinstance(given, click.Option)
    )


def test_a_manifest_can_be_held_in_the_head() -> None:
    # Six of them are of sandboxes in a cluster: what their pods are, and what rows leave open. Four are the demand for
    # certificates of rows, one is of sandboxes that start ahead.
    assert len(list(leaves(SPEC, "spec"))) <= 246


def test_commands_have_no_more_options_than_they_need() -> None:
    assert len(list(options(main, click.Context(main, info_name="kuberoll")))) <= 127


def test_what_most_jobs_set_comes_first() -> None:
    """In the CRD, at each level; twenty fields, all of which are there."""
    assert len(COMMON) == len(set(COMMON)) == 20
    assert set(COMMON) <= set(leaves(SPEC, "spec"))

    def check(given: dict[str, Any], path: str) -> None:
        inner, place = (given["items"], f"{path}[]") if "items" in given else (given, path)
        found = inner.get("properties", {})
        common = [name for name in found if any(is_in(f"{place}.{name}", field) for field in COMMON)]
        assert list(found)[: len(common)] == common, place
        for name in common:
            check(found[name], f"{place}.{name}")

    check(SPEC, "spec")


def is_in(path: str, field: str) -> bool:
    return field == path or field.startswith((f"{path}.", f"{path}[]"))


def test_what_half_of_the_examples_set_is_among_these() -> None:
    found: Counter[str] = Counter()
    count = 0
    for file in (ROOT / "examples").rglob("*.yaml"):
        for document in read_documents(file):
            if isinstance(document.value, dict) and document.value.get("kind") == RolloutJob.__name__:
                count += 1
                found.update(set(given(document.value["spec"], SPEC, "spec")))
    assert count >= 10
    assert {field for field, times in found.items() if 2 * times >= count} <= set(COMMON)


def given(value: Any, known: dict[str, Any], path: str) -> Iterator[str]:
    """Fields that a value sets."""
    if isinstance(value, list) and "properties" in known.get("items", {}):
        for item in value:
            yield from given(item, known["items"], f"{path}[]")
    elif isinstance(value, dict) and "properties" in known:
        for name, inner in value.items():
            yield from given(inner, known["properties"][name], f"{path}.{name}")
    else:
        yield path


JOBS: list[dict[str, Any]] = list(YAML(typ="safe").load_all(EXAMPLES.read_text())) if EXAMPLES.exists() else []


@pytest.mark.parametrize("job", JOBS, ids=lambda job: str(job["metadata"]["name"]))
def test_each_example_is_a_job(job: dict[str, Any]) -> None:
    RolloutJob.model_validate(job)


def test_each_field_has_an_example() -> None:
    found = {field for job in JOBS for field in given(job["spec"], SPEC, "spec")}
    assert sorted(set(leaves(SPEC, "spec")) - found) == []
