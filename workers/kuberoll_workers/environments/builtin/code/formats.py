"""Tests of a dataset row, in the forms that public datasets of programming tasks have."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kuberoll_workers.environments.interface import UnusableRow

TESTS_KEYS = ("tests", "input_output", "test_list", "test")
FUNCTION_KEYS = ("entry_point", "fn_name", "func_name")


@dataclass(frozen=True, slots=True)
class OutputTests:
    """Programs' outputs for inputs.

    Attributes:
        cases: Pairs of standard input and expected standard output.
    """

    cases: Sequence[tuple[str, str]]

    def limited(self, most: int) -> OutputTests:
        """The first tests."""
        return OutputTests(self.cases[:most])


@dataclass(frozen=True, slots=True)
class CallTests:
    """Results of a function for arguments, as JSON values.

    Attributes:
        function: Its name; a method of the class `Solution`, if there is no such function.
        cases: Pairs of the arguments and the expected result.
        wrapped: True if every expected result is a list of one item, as in datasets that wrap results: the item itself
            is right, too.
    """

    function: str
    cases: Sequence[tuple[list[Any], Any]]
    wrapped: bool

    def limited(self, most: int) -> CallTests:
        """The first tests."""
        return CallTests(self.function, self.cases[:most], self.wrapped)


@dataclass(frozen=True, slots=True)
class PythonTests:
    """Tests in Python, which raise an exception for wrong code.

    Attributes:
        tests: Texts, each one test.
        entry_point: Name of the function that is passed to the `check` of each text; None if the tests name it
            themselves.
    """

    tests: Sequence[str]
    entry_point: str | None

    def limited(self, most: int) -> PythonTests:
        """The first tests."""
        return PythonTests(self.tests[:most], self.entry_point)


Tests = OutputTests | CallTests | PythonTests


def tests_of(state: Mapping[str, Any]) -> Tests:
    """The tests of an episode.

    Raises:
        UnusableRow: There are none, or they are in none of the forms of docs/reference/code-execution.md.
    """
    key = next((key for key in TESTS_KEYS if state.get(key) is not None), None)
    if key is None:
        raise _unusable(state, "tests", None, "it must have the tests of the task")
    found = state[key]
    function = next((state[name] for name in FUNCTION_KEYS if state.get(name) is not None), None)
    if function is not None and (not isinstance(function, str) or not function.isidentifier()):
        raise _unusable(state, "entry_point", function, "it must be the name of a function")
    if isinstance(found, str) and found.lstrip()[:1] in ("{", "["):
        try:
            found = json.loads(found)
        except (ValueError, RecursionError) as error:
            raise _unusable(state, key, found, f"it is not valid JSON: {error}") from error
    if isinstance(found, str):
        return _python(state, key, [found], function)
    if isinstance(found, list) and found and all(isinstance(item, str) for item in found):
        return _python(state, key, found, function)
    if isinstance(found, list) and found and all(isinstance(item, Mapping) for item in found):
        return _listed(state, key, found, function)
    if isinstance(found, Mapping):
        return _columns(state, key, found, function)
    raise _unusable(state, key, found, "it must be tests in one of the forms of docs/reference/code-execution.md")


def setup_of(state: Mapping[str, Any]) -> str:
    """Python that runs before the code and before the tests, such as imports; empty if there is none.

    Raises:
        UnusableRow: It is not Python.
    """
    found = next((state[key] for key in ("setup", "test_setup_code", "test_imports") if state.get(key)), "")
    text = "\n".join(found) if isinstance(found, list) and all(isinstance(line, str) for line in found) else found
    if not isinstance(text, str):
        raise _unusable(state, "setup", found, "it must be text, or a list of lines")
    _parsed(state, "setup", text)
    return text


def _python(state: Mapping[str, Any], key: str, tests: list[str], function: str | None) -> PythonTests:
    for text in tests:
        if not _decides(_parsed(state, key, text)):
            raise _unusable(
                state,
                key,
                text,
                "it tests nothing: it needs an assert, a call, or functions check or test_… that have one",
            )
    # Other tests name the function themselves.
    return PythonTests(tests, function if any("candidate" in text for text in tests) else None)


def _decides(node: ast.AST) -> bool:
    """True if something that runs can tell right code from wrong code; functions run if they are tests."""
    if isinstance(node, ast.Assert | ast.Raise) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        return True
    if isinstance(node, ast.ClassDef | ast.Lambda | ast.AsyncFunctionDef):
        return False
    if isinstance(node, ast.FunctionDef) and not (node.name == "check" or node.name.startswith("test")):
        return False
    return any(map(_decides, ast.iter_child_nodes(node)))


def _parsed(state: Mapping[str, Any], key: str, text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _unusable(state, key, text, f"it is not Python: {error}") from error


def _listed(state: Mapping[str, Any], key: str, items: list[Mapping[str, Any]], function: str | None) -> Tests:
    """A list of `{"input", "output", "testtype"}`."""
    for item in items:
        if "input" not in item or "output" not in item:
            raise _unusable(state, key, dict(item), "each test must have input and output")
    kinds = {item.get("testtype") for item in items}
    if "functional" in kinds or (function is not None and "stdin" not in kinds):
        if function is None:
            raise _unusable(state, "entry_point", None, "tests of a function need its name")
        # One argument a line.
        inputs = [
            [_json(state, key, line) for line in item["input"].splitlines() if line.strip()]
            if isinstance(item["input"], str)
            else item["input"]
            for item in items
        ]
        outputs = [
            _json(state, key, item["output"]) if isinstance(item["output"], str) else item["output"] for item in items
        ]
        return _calls(state, key, inputs, outputs, function)
    return _outputs(state, key, [item["input"] for item in items], [item["output"] for item in items])


def _columns(state: Mapping[str, Any], key: str, found: Mapping[str, Any], function: str | None) -> Tests:
    """`{"inputs": [...], "outputs": [...], "fn_name": ...}`, or `input` and `output`."""
    inputs = found.get("inputs", found.get("input"))
    outputs = found.get("outputs", found.get("output"))
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not inputs or len(inputs) != len(outputs):
        raise _unusable(state, key, dict(found), "it must have lists of inputs and outputs, as many of both")
    function = found.get("fn_name") or function
    if function is not None:
        return _calls(state, key, inputs, outputs, function)
    return _outputs(state, key, inputs, outputs)


def _calls(state: Mapping[str, Any], key: str, inputs: list[Any], outputs: list[Any], function: str) -> CallTests:
    for arguments in inputs:
        if not isinstance(arguments, list):
            raise _unusable(state, key, arguments, "the input of a function must be the list of its arguments")
    wrapped = all(isinstance(output, list) and len(output) == 1 for output in outputs)
    return CallTests(function, list(zip(inputs, outputs, strict=True)), wrapped)


def _outputs(state: Mapping[str, Any], key: str, inputs: list[Any], outputs: list[Any]) -> OutputTests:
    return OutputTests(
        [(_text(state, key, given), _text(state, key, wanted)) for given, wanted in zip(inputs, outputs, strict=True)]
    )


def _text(state: Mapping[str, Any], key: str, value: Any) -> str:
    """Text of an input or output; some datasets have a list of lines."""
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if not isinstance(value, str):
        raise _unusable(state, key, value, "an input or output must be text")
    return value


def _json(state: Mapping[str, Any], key: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _unusable(state, key, text, f"an argument or a result must be JSON: {error}") from error


def _unusable(state: Mapping[str, Any], key: str, found: Any, demand: str) -> UnusableRow:
    row = f"row {state['idx']!r}: " if "idx" in state else ""
    return UnusableRow(f"{row}metadata.{key}: found {repr(found)[:120]}; {demand}")
