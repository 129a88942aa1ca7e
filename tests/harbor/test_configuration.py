"""task.toml: what is read, which line a mistake has, and that no text is answered with a traceback."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.harbor.configuration import Configuration, parse_configuration, read_configuration
from kuberoll_workers.harbor.mistakes import Mistake, TaskError, field_name, line_of
from kuberoll_workers.harbor.phases import Network
from tests.harbor.mutations import mutations
from tests.harbor.writing import PLAIN, STEPS

FILE = Path("tasks/a/task.toml")


def parse(text: str) -> Configuration:
    return parse_configuration(text, FILE)


def mistakes(text: str) -> list[str]:
    with pytest.raises(TaskError) as caught:
        parse(text)
    return str(caught.value).splitlines()


def test_an_empty_file_has_harbor_s_defaults() -> None:
    found = parse("")
    assert (found.schema_version, found.task, found.steps, found.artifacts) == ("1.4", None, None, [])
    assert (found.verifier.timeout_sec, found.agent.timeout_sec) == (600.0, None)
    environment = found.environment
    assert (environment.build_timeout_sec, environment.cpus, environment.memory_mb) == (600.0, None, None)
    assert environment.network == Network(mode="public")


def test_old_spellings_are_read() -> None:
    found = parse(STEPS)
    assert found.schema_version == "1.1"
    assert found.environment.memory_mb == 2048
    assert found.environment.network == Network(mode="no-network")
    assert parse('[environment]\nallow_internet = false\nnetwork_mode = "public"').environment.network.mode == "public"
    assert parse("[environment]\nmemory = 2048").environment.memory_mb is None


def test_hosts_and_sizes_have_one_spelling() -> None:
    environment = parse(PLAIN).environment
    assert environment.network == Network(mode="allowlist", hosts=["pypi.org", "*.pythonhosted.org", "10.0.0.0/8"])
    assert repr(environment.cpus) == "2"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = ", "1: not TOML: Invalid value (at end of document)"),
        ('[agent]\n\nuser = "a\n', "3: not TOML: Illegal character '\\n' (at line 3, column 10)"),
        (
            "[environment]\n# two of them\ncpus = 'two'",
            '3: environment.cpus: found "two"; input should be a valid integer, unable to parse string as '
            "an integer or input should be a valid number, unable to parse string as a number",
        ),
        ("[task]\ndescription = 'x'", "1: task.name: is missing; it must be set"),
        ("version = 2", "1: version: found 2; input should be a valid string"),
        (
            "schema_version = '2.0'",
            "1: schema_version: KubeRoll reads format 1, and knows 1.4; found '2.0': a newer KubeRoll may read it",
        ),
        (
            '[environment]\nos = "Windows"',
            "2: environment.os: KubeRoll's machines run Linux: give the task an image for it, or leave the task out",
        ),
        (
            '[environment]\n[environment.tpu]\ntype = "v6e"\ntopology = "2x4"',
            "2: environment.tpu: KubeRoll has no machines with TPUs: remove the table, or leave the task out",
        ),
        (
            "[agent]\nuser = [1]",
            "2: agent.user: found [1]; input should be a valid string or input should be a valid integer",
        ),
        (
            '[verifier]\nallowed_hosts = ["a.org"]',
            '1: verifier: allowed_hosts is only for network_mode = "allowlist": set that, or remove the hosts',
        ),
        (
            'artifacts = [\n  "/a",\n  { source = "/b", destination = "../c" },\n]',
            "1: artifacts[1].destination: must be a relative path with / between its parts, none of which is ..",
        ),
        (
            '[[verifier.collect]]\ncommand = "x"\nservice = "db"',
            "3: verifier.collect[0].service: 'db': a task of KubeRoll has one machine, and no services "
            "of docker compose beside it: put what the service does into the image",
        ),
        (
            '[[steps]]\nname = "a"\n\n[[steps]]\nname = "../b"',
            '5: steps[1].name: is no name of a directory on every system: no / \\ : * ? " < > |, no dot '
            "or space at the end",
        ),
        (
            '[[steps]]\nname = "a"\n[[steps]]\nname = "A"',
            "1: steps: 'A' and 'a' are one directory on some systems: rename one",
        ),
        (
            '[environment]\nmemory = "2G"\nmemory_mb = 1024',
            "1: environment: memory = '2G' is 2048, and memory_mb is 1024: keep memory_mb",
        ),
        (
            '[environment]\n[[environment.mcp_servers]]\nname = "a"\nurl = "http://x"\nheaders = { X-Api-Key = "abc" }',
            "5: environment.mcp_servers[0].headers: 'X-Api-Key': a credential stands in the file; write "
            "${VARIABLE} in its place, without a default: Bearer ${TOKEN}",
        ),
        (
            '[environment]\nenv = { "A=B" = "x" }',
            "2: environment.env: 'A=B' is no variable of a process: it is empty or has =, or there is a NUL in it",
        ),
    ],
)
def test_a_mistake_is_told_with_its_line_its_field_and_what_to_do(text: str, expected: str) -> None:
    assert mistakes(text) == [f"{FILE}:{expected}"]


def test_all_mistakes_are_told() -> None:
    found = mistakes('[agent]\ntimeout_sec = "soon"\n\n[environment]\nmemory_mb = 1.5\nos = "plan9"')
    places = {tuple(line.split(": ")[:2]) for line in found}
    assert places == {
        (f"{FILE}:2", "agent.timeout_sec"), (f"{FILE}:5", "environment.memory_mb"), (f"{FILE}:6", "environment.os")
    }  # fmt: skip


@pytest.mark.parametrize("text", ["x = " + "[" * 5000, "x = " + "9" * 5000, "x.y = 1\n" * 2, "\0"])
def test_what_the_parser_itself_cannot_read_is_refused(text: str) -> None:
    assert len(mistakes(text)) == 1


def test_bytes_that_are_no_text_are_refused_with_their_line(tmp_path: Path) -> None:
    file = tmp_path / "task.toml"
    file.write_bytes(b"# fine\nname = \xff")
    with pytest.raises(TaskError, match=r"task\.toml:2: not UTF-8"):
        read_configuration(file)
    file.write_bytes(b"#" * (1 << 20) + b"x")
    with pytest.raises(TaskError, match="is larger than 1 MiB"):
        read_configuration(file)
    with pytest.raises(TaskError, match="No such file"):
        read_configuration(tmp_path / "none.toml")


def test_a_line_is_where_a_statement_begins() -> None:
    text = '# c\na = """\nx\n"""\n\n[t]\nb = [\n  1,\n  { c = 2 },\n]\nd.e = 1\n[[l]]\n\n[[l]]\nf = 1'
    lines = {
        ("a",): 2, ("t",): 6, ("t", "b"): 7, ("t", "b", 1, "c"): 7, ("t", "d", "e"): 11, ("l", 1): 14,
        ("l", 1, "f"): 15, ("l", 1, "g"): 14, ("t", "z"): 6, ("z",): None, (): None,
    }  # fmt: skip
    assert {path: line_of(text, path) for path in lines} == lines


NAMES = st.sampled_from(["a", "b", "c d", "é"])
TABLES: Any = st.recursive(
    st.integers(-5, 5) | st.text("xy", max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(NAMES, TABLES, min_size=1, max_size=5))
def test_every_field_of_a_document_has_the_line_that_it_was_written_on(document: dict[str, Any]) -> None:
    lines = [f'"{name}" = {inline(value)}' for name, value in document.items()]
    assert tomllib.loads("\n".join(lines)) == document
    for number, name in enumerate(document, start=1):
        assert line_of("\n".join(lines), (name,)) == number


def inline(value: Any) -> str:
    """A value as TOML."""
    if isinstance(value, dict):
        return "{" + ", ".join(f'"{name}" = {inline(item)}' for name, item in value.items()) + "}"
    return (
        f"[{', '.join(map(inline, value))}]"
        if isinstance(value, list)
        else f'"{value}"'
        if isinstance(value, str)
        else str(value)
    )


def test_a_field_is_named_by_its_path() -> None:
    assert field_name(("steps", 1, "agent", "user")) == "steps[1].agent.user"
    assert field_name(()) is None


def read_or_refused(text: str) -> None:
    """Read a configuration, or have it refused as it should be."""
    refused: list[Mistake] = []
    try:
        parse(text)
    except TaskError as error:
        refused += error.mistakes
        # Nothing is refused without a word.
        refused[0]
    assert all(mistake.file == FILE and mistake.message for mistake in refused)


@given(st.integers(0, 2**32), st.sampled_from([PLAIN, STEPS]))
def test_changed_files_are_read_or_refused(seed: int, text: str) -> None:
    for changed in mutations(text, 2, seed):
        read_or_refused(changed)


@given(st.text(max_size=60) | st.text("[]{}=\"'.#\n\\a1", max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    read_or_refused(text)


@given(st.dictionaries(st.sampled_from(sorted(Configuration.model_fields)), TABLES, max_size=3))
def test_values_of_any_kind_are_read_or_refused(document: dict[str, Any]) -> None:
    read_or_refused("\n".join(f"{name} = {inline(value)}" for name, value in document.items()))
