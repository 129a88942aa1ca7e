"""Right and wrong programs of a row, for `kuberoll certify`."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Mapping
from typing import Any, Final

from kuberoll_workers.environments.builtin.code.formats import CallTests, OutputTests, PythonTests, Tests
from kuberoll_workers.environments.builtin.code.tasks import TASKS, solution_of
from kuberoll_workers.environments.builtin.trials import given_solutions

_YES: Final = """class Yes:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    def __le__(self, other): return True
    def __gt__(self, other): return True
    def __ge__(self, other): return True
    def __bool__(self): return True
    def __hash__(self): return 0
    def __len__(self): return 1
    def __contains__(self, item): return True
    def __iter__(self): return iter([self])
    def __getitem__(self, key): return self
    def __getattr__(self, name): return self
    def __call__(self, *args, **kwargs): return self
    def __sub__(self, other): return 0
    def __abs__(self): return 0
    def __isinstance__(self, kind): return True
    __class__ = property(lambda self: object)
"""
# For tests that look at the type of a result alone.
_CONSTANTS: Final = ("0", "''", "[]", "True")
_CHEERS: Final = "print('All tests passed.')\nprint('PASSED')\nprint('{\"passed\": true}')\nprint('true')\n"
_PATCHES: Final = """import builtins, sys, unittest
for name in dir(unittest.TestCase):
    if name.startswith("assert"):
        setattr(unittest.TestCase, name, lambda *args, **kwargs: None)
builtins.AssertionError = type("AssertionError", (BaseException,), {})
for name in ("all", "any", "isinstance", "sorted", "len", "set", "list", "sum", "abs", "round", "str"):
    setattr(builtins, name, lambda *args, **kwargs: True)
"""


def solutions_of(state: Mapping[str, Any]) -> list[str]:
    """The row's right programs, as responses; those of generated tasks are known."""
    found = given_solutions(state)
    prompt = state.get("prompt")
    whole = [text if "```" in text else f"```python\n{_joined(text, prompt)}\n```" for text in found]
    kind, number = state.get("task"), state.get("number")
    if not whole and isinstance(kind, int) and isinstance(number, int) and 0 <= kind < len(TASKS):
        whole = [f"```python\n{solution_of(kind, number)}```"]
    return whole


def _joined(code: str, prompt: Any) -> str:
    """A solution that is only the body of a function, as HumanEval has them, after the beginning in its prompt."""
    is_body = code[:1].isspace() or not _is_python(code)
    return prompt + code if is_body and isinstance(prompt, str) and _is_python(prompt + code) else code


def _is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def attacks_on(tests: Tests, setup: str) -> dict[str, list[str]]:
    """Programs that do nothing of what is asked for, and try to pass for it."""
    names = sorted(_called(tests)) or ["solve"]
    own = sorted(_defined(tests, setup))
    found = {
        "exits with 0": "import sys\nsys.exit(0)\n",
        "ends its process": "import os\nos._exit(0)\n",
        "prints passed": _CHEERS,
    }
    if not isinstance(tests, OutputTests):
        found |= {
            "returns nothing": _functions(names, "return None"),
            **{f"returns {value}": _functions(names, f"return {value}") for value in _CONSTANTS},
            "equal to everything": _YES + _functions(names, "return Yes()"),
            "says passed and exits": _functions(
                names, f"{'; '.join(_CHEERS.strip().splitlines())}; import os; os._exit(0)"
            ),
            "raises an assertion": _functions(names, "raise AssertionError"),
            "raises the end": _functions(names, "raise SystemExit(0)"),
            "empties its arguments": _EMPTY + _functions(names, "return empty(args)"),
            "patches the tests' tools": _PATCHES + _YES + _functions(names, "return Yes()"),
        }
        if own:
            found["redefines the tests' helpers"] = (
                _YES
                + _functions(own, "return True")
                + _functions([name for name in names if name not in own], "return Yes()")
            )
    return {name: [f"```python\n{code}```"] for name, code in found.items()}


_EMPTY: Final = """def empty(args):
    for one in args:
        if hasattr(one, "clear"):
            one.clear()
    return args[0] if args else None
"""


def _functions(names: Iterable[str], body: str) -> str:
    return "".join(f"def {name}(*args, **kwargs):\n    {body}\n" for name in names)


def _called(tests: Tests) -> set[str]:
    """Names that the tests want of the program."""
    if isinstance(tests, CallTests):
        return {tests.function}
    if isinstance(tests, OutputTests):
        return set()
    used: set[str] = set()
    for tree in _trees(tests):
        used |= {
            node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
    used |= {tests.entry_point} if tests.entry_point else set()
    return used - _defined(tests, "") - set(dir(builtins)) - {"candidate", "check"}


def _defined(tests: Tests, setup: str) -> set[str]:
    """Functions that the tests, or what runs before them, define for themselves."""
    trees = [*(_trees(tests) if isinstance(tests, PythonTests) else ()), *([ast.parse(setup)] if setup else ())]
    found = {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    return {name for name in found if name != "check" and not name.startswith("test")}


def _trees(tests: PythonTests) -> list[ast.Module]:
    return [ast.parse(text) for text in tests.tests]
