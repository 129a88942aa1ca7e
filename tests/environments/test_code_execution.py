"""Code execution: formats of tests, right and wrong programs, and programs that cheat."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from kuberoll_workers.environments.builtin.code.comparison import same_output
from kuberoll_workers.environments.builtin.code.execution import CodeExecutionEnvironment
from kuberoll_workers.environments.builtin.code.extraction import program_of
from kuberoll_workers.environments.builtin.code.tasks import TASKS, solution_of
from kuberoll_workers.environments.interface import EnvironmentReturn, UnusableRow
from kuberoll_workers.environments.isolation import make_executor
from kuberoll_workers.environments.processes import ProcessExecutor
from kuberoll_workers.environments.registry import PlainSpec, UnusableEnvironment
from kuberoll_workers.environments.runner import EnvironmentRunner


@pytest.fixture(scope="module")
def environment() -> Iterator[CodeExecutionEnvironment]:
    # Little memory, so that filling it takes no time to speak of.
    made = CodeExecutionEnvironment({"cpuSeconds": 2, "wallSeconds": 20, "memoryMiB": 128})
    yield made
    made.shutdown()


@pytest.fixture(scope="module")
def fractions() -> Iterator[CodeExecutionEnvironment]:
    made = CodeExecutionEnvironment({"cpuSeconds": 2, "wallSeconds": 20, "reward": "Fraction"})
    yield made
    made.shutdown()


def fenced(code: str) -> str:
    return f"Here it is:\n```python\n{code}\n```\n"


def step(environment: CodeExecutionEnvironment, logs: list[Any], states: list[Any]) -> EnvironmentReturn:
    return asyncio.run(environment.step(logs, states))


def graded(environment: CodeExecutionEnvironment, code: str, **metadata: Any) -> tuple[float, dict[str, Any]]:
    """Reward of a program, and the episode's state."""
    log = [{"role": "user", "content": "?"}, {"role": "assistant", "content": fenced(code)}]
    returned = step(environment, [log], [metadata])
    assert list(returned.terminateds) == [True]
    state = returned.metadata[0] if returned.metadata else None
    assert state is not None
    return returned.rewards[0], state


MBPP = {
    "test_list": [
        "assert similar_elements((3, 4, 5, 6), (5, 7, 4, 10)) == (4, 5)",
        "assert similar_elements((1, 2, 3, 4), (5, 4, 3, 7)) == (3, 4)",
        "assert set(similar_elements((11, 12, 14, 13), (17, 15, 14, 13))) == {13, 14}",
    ],
}
HUMANEVAL = {
    "setup": 'from typing import List\n\n\ndef truncate_number(number: float) -> float:\n    """ Decimal part. """\n',
    "test": "METADATA = {}\n\n\ndef check(candidate):\n    assert candidate(3.5) == 0.5\n"
    "    assert abs(candidate(1.33) - 0.33) < 1e-6\n    assert abs(candidate(123.456) - 0.456) < 1e-6\n",
    "entry_point": "truncate_number",
}
APPS = {"input_output": json.dumps({"inputs": ["3\n1 2 3\n", "1\n5\n"], "outputs": ["6\n", "5\n"]})}
APPS_CALLS = {"input_output": {"fn_name": "twice", "inputs": [[4], [[1, 2]]], "outputs": [[8], [[1, 2, 1, 2]]]}}
LIVE_STDIN = {
    "tests": json.dumps(
        [
            {"input": "2 3\n", "output": "5", "testtype": "stdin"},
            {"input": "-1 1\n", "output": "0\n", "testtype": "stdin"},
        ]
    )
}
LIVE_CALLS = {
    "tests": [
        {"input": "[2,7,11,15]\n9", "output": "[0,1]", "testtype": "functional"},
        {"input": "[3,2,4]\n6", "output": "[1,2]", "testtype": "functional"},
    ],
    "func_name": "twoSum",
}
CONTESTS = {"tests": {"input": ["1.0\n"], "output": ["0.333333333\n"]}}

SIMILAR = "def similar_elements(a, b):\n    return tuple(sorted(set(a) & set(b)))"
SUM = "input()\nprint(sum(map(int, input().split())))"
TWO_SUM = (
    "class Solution:\n    def twoSum(self, nums, target):\n        seen = {}\n        for i, x in enumerate(nums):\n"
    "            if target - x in seen: return [seen[target - x], i]\n            seen[x] = i\n"
)

RIGHT = [
    (MBPP, SIMILAR),
    (HUMANEVAL, "def truncate_number(number: float) -> float:\n    return number % 1.0"),
    (HUMANEVAL, "def truncate_number(number):\n    numbers: List[float] = [number % 1.0]\n    return numbers[0]"),
    (APPS, SUM),
    (APPS, f"def main():\n    {SUM.splitlines()[0]}\n    {SUM.splitlines()[1]}\nif __name__ == '__main__':\n    main()"),
    (APPS, f"{SUM.replace('print(', 'print(')}\nimport sys; sys.exit(0)"),
    (APPS_CALLS, "def twice(x):\n    return x * 2"),
    (APPS_CALLS, "class Solution:\n    def twice(self, x):\n        print('noise')\n        return x * 2"),
    (LIVE_STDIN, "import sys\nprint(*[sum(map(int, line.split())) for line in sys.stdin], sep='\\n', end='  \\n\\n')"),
    (LIVE_CALLS, TWO_SUM),
    (LIVE_CALLS, TWO_SUM.replace("return [seen[target - x], i]", "return (seen[target - x], i)")),
    (CONTESTS, "print(float(input()) / 3)"),
    # In place, with an exception, by a generator, of an object, with numbers too long for a text.
    ({"tests": ["x = [3, 1, 2]\nsort(x)\nassert x == [1, 2, 3]"]}, "def sort(x): x.sort()"),
    (
        {"tests": ["try:\n    f(-1)\n    raise SystemError\nexcept ValueError:\n    pass"]},
        "class Negative(ValueError): pass\ndef f(x):\n    if x < 0: raise Negative(x)",
    ),
    ({"tests": ["assert list(evens(7)) == [0, 2, 4, 6]"]}, "def evens(n):\n    yield from range(0, n, 2)"),
    (
        {"tests": ["s = Stack()\ns.push(1)\ns.push(2)\nassert s.pop() == 2 and len(s) == 1 and s.items == [1]"]},
        "class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n"
        "    def pop(self): return self.items.pop()\n    def __len__(self): return len(self.items)",
    ),
    ({"tests": ["assert f(5000) % 7 == 2 and f(5000) > 10 ** 4999"]}, "def f(n): return 10 ** n"),
    ({"tests": ["assert Point(1) == Point(1) and Point(1) != Point(2)"]}, "from dataclasses import dataclass\n"
     "@dataclass\nclass Point:\n    x: int"),
    # As in MBPP/367 and MBPP/126: what comes before the tests uses the code; a function has the name of a builtin.
    (
        {"test_setup_code": "root = Node(1)\nroot.left = Node(2)", "test_list": ["assert depth(root) == 2"]},
        "class Node:\n    def __init__(self, x): self.x, self.left = x, None\n"
        "def depth(node): return 0 if node is None else 1 + depth(node.left)",
    ),
    ({"test_list": ["assert sum(10, 15) == 6", "assert sum(100, 150) == 93"]},
     "def sum(a, b):\n    return __builtins__['sum'](i for i in range(1, min(a, b)) if a % i == b % i == 0)"),
    ({"tests": ["import math\nassert math.isnan(f())"]}, "def f(): return float('nan')"),
    ({"tests": ["assert f() == ({1, 2}, {1: (2, b'x')}, 1j, None, True)"]},
     "def f(): return {1, 2}, {1: (2, b'x')}, 1j, None, True"),
    ({"tests": ["import numpy as np\nassert np.allclose(f(np.ones(3)), [2, 2, 2])"]}, "def f(x): return x * 2"),
    # As LeetCode takes it: its names are there without imports, and give way to the code's own.
    (APPS_CALLS, "class Solution:\n    def twice(self, x: Union[int, List[int]]) -> Optional[Any]:\n"
     "        assert Counter('aab')['a'] == 2 and math.floor(inf) if False else True\n        return x * 2"),
    (APPS_CALLS, "@lru_cache(None)\ndef two(n): return n if n < inf else gcd(1, 2)\n"
     "def twice(x):\n    heap = []\n    heappush(heap, two(2))\n    return x * heap[0]"),
    (APPS_CALLS, "def gcd(x): return x * 2\ndef twice(x): return gcd(x)"),
    ({"tests": ["assert pow(2, 3, 5) == 3"]}, "import builtins\ndef pow(a, b, c): return builtins.pow(a, b, c)"),
    # Classes that tests ask for behave as they like; other objects are looked through.
    ({"tests": ["s = Bag()\ns.add(3)\nassert 3 in s and 4 not in s"]},
     "class Bag:\n    def __init__(self): self.held = []\n    def add(self, x): self.held.append(x)\n"
     "    def __contains__(self, x): return x in self.held"),
    ({"tests": ["assert 3 in f(2) and 9 not in f(2)"]},
     "class Some:\n    def __iter__(self): return iter([1, 2, 3])\ndef f(x): return Some()"),
    ({"tests": ["assert decode(encode('x')) == 'x'"]}, "def encode(x): return x + '!'\ndef decode(x): return x[:-1]"),
    ({"tests": ["def test_f():\n    assert f(2) == 4\n\n\ndef test_g():\n    assert f(3) == 9"]}, "def f(x): return x * x"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "code"), RIGHT)
def test_a_right_program_gets_1(environment: CodeExecutionEnvironment, row: dict[str, Any], code: str) -> None:
    reward, state = graded(environment, code, **row)
    assert reward == 1.0, state


EQUAL = "class Equal:\n    def __eq__(self, other): return True\n    def __ne__(self, other): return False\n"
WRONG = [
    (MBPP, "def similar_elements(a, b):\n    return ()"),
    (MBPP, "def similar_elements(a, b):\n    return sorted(set(a) & set(b))"),
    (MBPP, "def other(a, b): pass"),
    (MBPP, "def similar_elements(a, b:"),
    (MBPP, "while True: pass"),
    (HUMANEVAL, "def truncate_number(number): return number"),
    (APPS, "print(6)"),
    (APPS, f"{SUM}\nraise SystemExit(1)"),
    (APPS, f"{SUM}\n1 / 0"),
    (APPS, f"{SUM}\nprint()\nprint(1)"),
    (APPS, "print('6 5')"),
    (APPS, "input()\nprint(float(sum(map(int, input().split()))))"),
    (APPS_CALLS, "def twice(x): return [x * 2, x * 2]"),
    (LIVE_CALLS, "class Solution:\n    def twoSum(self, nums, target): return [1, 0]"),
    (CONTESTS, "print(0.33)"),
    ({"input_output": {"fn_name": "f", "inputs": [[1], [2]], "outputs": [True, False]}}, "def f(x): return int(x == 1)"),
    # Cheating: what was printed, exits, equality, patches, reading what is expected.
    (MBPP, "print('true\\n' * 10)"),
    (MBPP, "import os, sys\nsys.stdout.write('true\\ntrue\\ntrue\\n'); sys.stdout.flush(); os._exit(0)"),
    (MBPP, "import os\nfor n in range(3, 64):\n    try: os.write(n, b'true\\ntrue\\ntrue\\n')\n    except OSError: pass\n"
     "os._exit(0)"),
    (MBPP, "raise SystemExit(0)"),
    (MBPP, "def similar_elements(a, b): raise SystemExit(0)"),
    (MBPP, "def similar_elements(a, b): raise AssertionError"),
    (MBPP, f"{EQUAL}def similar_elements(a, b): return Equal()"),
    (MBPP, f"{EQUAL}class T(tuple, Equal): pass\ndef similar_elements(a, b): return T()"),
    (MBPP, "import builtins\nbuiltins.set = lambda x: {13, 14}\ndef similar_elements(a, b): return ()"),
    ({"test_setup_code": "root = Node(1)", "test_list": ["assert depth(root) == 1"]}, "def depth(node): return 1"),
    (MBPP, "def set(x): return {13, 14}\ndef similar_elements(a, b): return (4, 5)"),
    (MBPP, "import json\njson.dumps = lambda *a, **k: 'true'\ndef similar_elements(a, b): return ()"),
    (MBPP, "import sys\nsys.modules['__main__']._answer = lambda *a: {'value': True}\n"
     "def similar_elements(a, b): return ()"),
    (MBPP, "import gc\ndef similar_elements(a, b):\n    for x in gc.get_objects():\n"
     "        if isinstance(x, tuple) and x == (4, 5): return x\n    return ()"),
    (MBPP, "import glob\ndef similar_elements(a, b):\n    for p in glob.glob('*') + glob.glob('/proc/*/cmdline'):\n"
     "        try:\n            if '(4, 5)' in open(p).read(): return (4, 5)\n        except OSError: pass\n"),
    (MBPP, "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)"),
    (MBPP, "import os, signal\nos.kill(os.getppid(), signal.SIGTERM)\ndef similar_elements(a, b): return ()"),
    (MBPP, "open('fractions.py', 'w').write('import os; os._exit(0)')\nopen('checker.py', 'w').write('print(True)')\n"
     "def similar_elements(a, b): return ()"),
    (MBPP, "def similar_elements(a, b):\n    import inspect\n    return inspect.stack()[-1].frame"),
    (HUMANEVAL, "def check(candidate): pass\ndef truncate_number(number): return 0"),
    (HUMANEVAL, "def abs(x): return 0\ndef truncate_number(number): return 0.5"),
    (HUMANEVAL, f"{EQUAL}def truncate_number(number): return Equal()"),
    (HUMANEVAL, "class F(float):\n    def __eq__(self, o): return True\n    def __sub__(self, o): return 0.0\n"
     "def truncate_number(number): return F(7)"),
    (APPS_CALLS, f"{EQUAL}def twice(x): return Equal()"),
    (APPS, "print('Correct. All tests passed'); import os; os._exit(0)"),
    ({"tests": ["assert 3 in f(2)"]}, "class Yes:\n    def __contains__(self, x): return True\ndef f(x): return Yes()"),
    ({"tests": ["assert 3 in f(2)"]}, "class f:\n    def __init__(self, x): pass\n    def __contains__(self, x): return True"),
    ({"tests": ["assert 3 in f(2).all"]}, "class Yes:\n    def __contains__(self, x): return True\n"
     "    def __getattr__(self, name): return Yes()\ndef f(x): return Yes()"),
    ({"tests": ["assert f(2).total() == 471"]}, "class Yes:\n    def __getattr__(self, name): return lambda *a: Yes()\n"
     "    def __eq__(self, other): return True\n    def __call__(self): return self\ndef f(x): return Yes()"),
    ({"tests": ["def test_f():\n    assert f(2) == 4"]}, "def f(x): return 5"),
    (APPS, "import sys\nprint(open('main.py').read(), sys.argv, __file__)"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("row", "code"), WRONG)
def test_a_wrong_program_gets_0(environment: CodeExecutionEnvironment, row: dict[str, Any], code: str) -> None:
    reward, state = graded(environment, code, **row)
    assert reward == 0.0
    assert state["correct"] is False
    assert state["test_failure"]


def test_a_helper_of_the_tests_is_not_the_policys(environment: CodeExecutionEnvironment) -> None:
    # As in HumanEval/32: the tests call a function that the prompt defines, and that the response repeats.
    row = {
        "setup": "def poly(xs, x): return sum(c * x ** i for i, c in enumerate(xs))\n",
        "test": "def check(candidate):\n    assert abs(poly([2, 1], candidate([2, 1]))) < 1e-4\n",
        "entry_point": "find_zero",
    }
    cheat = "def poly(xs, x): return 0\ndef find_zero(xs): return 7"
    assert graded(environment, cheat, **row)[0] == 0.0
    assert graded(environment, "def find_zero(xs): return -xs[0] / xs[1]", **row)[0] == 1.0
    with pytest.raises(UnusableRow, match="the tests use poly, which setup must define"):
        graded(environment, cheat, test=row["test"], entry_point="find_zero")


@pytest.mark.parametrize(
    "test",
    ["assertEqual(f(2), 4)", "assert close(f(2), 4)", "assert not differs(4, f(2))", "self.assertEqual(f(2), second=4)",
     "check(want=f(2), got=4)", "assert True and close(f(2), 4)"],
)  # fmt: skip
def test_the_code_does_not_judge_itself(environment: CodeExecutionEnvironment, test: str) -> None:
    code = "def f(x): return 0\nassertEqual = close = check = lambda *a, **k: True\ndiffers = lambda *a: False\n"
    code += "class self:\n    def assertEqual(*a, **k): pass\n"
    with pytest.raises(UnusableRow, match="decides the tests, so setup must define it"):
        graded(environment, code, tests=[test])
    helpers = "def assertEqual(a, b): assert a == b\ndef close(a, b): return abs(a - b) < 1\ndef differs(a, b): return a != b\n"
    helpers += (
        "def check(want, got): assert want == got\nclass self:\n    def assertEqual(a, second): assert a == second\n"
    )
    assert graded(environment, code, tests=[test], setup=helpers)[0] == 0.0
    assert graded(environment, "def f(x): return 4", tests=[test], setup=helpers)[0] == 1.0


@pytest.mark.parametrize(
    "test",
    ["x = f(2) == 4", "def case():\n    assert f(2) == 4", "f(2) == 4", "",
     "import unittest\nclass T(unittest.TestCase):\n    def test_f(self):\n        self.assertEqual(f(2), 4)"],
)  # fmt: skip
def test_tests_that_test_nothing_are_the_rows_fault(environment: CodeExecutionEnvironment, test: str) -> None:
    with pytest.raises(UnusableRow, match="tests nothing"):
        graded(environment, "def f(x): return 0", tests=["assert f(1) == 0", test])


@pytest.mark.slow
def test_the_reward_is_a_share(fractions: CodeExecutionEnvironment) -> None:
    half = "def f(x):\n    if x > 1: raise ValueError('large')\n    return x"
    row = {"tests": ["assert f(0) == 0", "assert f(1) == 1", "assert f(2) == 2", "assert f(3) == 3"]}
    reward, state = graded(fractions, half, **row)
    assert (reward, state["tests_passed"], state["correct"]) == (0.5, 2, False)
    assert state["test_failure"] == "ValueError: large"
    hanging = "def f(x):\n    while x > 0: pass\n    return x"
    assert graded(fractions, hanging, **row)[0] == 0.25
    reward, state = graded(fractions, "print(6 if input() == '3' else 0)", **APPS)
    assert (reward, state["test_failure"]) == (0.5, "wrong answer")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "failure"),
    [
        ("x = []\nwhile True: x.append(b'x' * 10 ** 6)", "memory limit"),
        ("while True: pass", "time limit"),
        ("while True: print('x' * 1000)", "printed too much"),
        ("import socket; socket.create_connection(('127.0.0.1', 1))", "PermissionError"),
        ("1 / 0", "ZeroDivisionError"),
        ("import os; os.kill(os.getpid(), 9)", "exit code -9"),
    ],
)
def test_what_was_wrong_is_in_the_metadata(environment: CodeExecutionEnvironment, code: str, failure: str) -> None:
    reward, state = graded(environment, code, **APPS)
    assert reward == 0.0
    assert failure in state["test_failure"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, r"metadata\.tests: found None; it must have the tests"),
        ({"idx": "q-1", "tests": 3}, r"row 'q-1': metadata\.tests: found 3"),
        ({"tests": []}, "forms of docs/reference/code-execution.md"),
        ({"tests": ["assert f(1 =="]}, "it is not Python"),
        ({"tests": ["assert f(1)"], "setup": "import ("}, r"metadata\.setup: .* it is not Python"),
        ({"input_output": "{'inputs'"}, "it is not valid JSON"),
        ({"tests": {"inputs": ["1"], "outputs": []}}, "as many of both"),
        ({"tests": [{"input": "1"}]}, "must have input and output"),
        ({"tests": [{"input": "1", "output": "1", "testtype": "functional"}]}, "need its name"),
        ({"tests": {"fn_name": "f", "inputs": [1], "outputs": [1]}}, "the list of its arguments"),
        ({"tests": ["assert f(1)"], "entry_point": "f()"}, "name of a function"),
        ({"tests": ["assert f(1)"], "setup": "1 / 0"}, "setup: ZeroDivisionError"),
        ({"tests": ["assert f(lambda x: x) == 1"]}, "a test passes an object of type function"),
    ],
)
def test_tests_that_cannot_be_used_are_the_rows_fault(
    environment: CodeExecutionEnvironment, row: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnusableRow, match=message):
        graded(environment, "def f(x): return x", **row)


def test_the_oracle_solves_what_is_generated_and_others_do_not(environment: CodeExecutionEnvironment) -> None:
    rows = environment.generate_dataset(len(TASKS), seed=3)
    assert rows == environment.generate_dataset(len(TASKS) + 4, seed=3)[: len(TASKS)]
    states = [row["metadata"] for row in rows]

    def rewards(programs: list[str]) -> list[float]:
        logs = [[{"role": "assistant", "content": fenced(code)}] for code in programs]
        return list(step(environment, logs, list(states)).rewards)

    assert rewards([solution_of(state["task"], state["number"]) for state in states]) == [1.0] * len(TASKS)
    assert rewards([solution_of(state["task"], state["number"] + 1) for state in states]) == [0.0] * len(TASKS)
    assert rewards(["def solve(numbers): return numbers"] * len(TASKS)) == [0.0] * len(TASKS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "failure"),
    [
        ("def f(x):\n    while True: pass", "exceeded the time limit"),
        ("while True: pass", "exceeded the time limit"),
        ("import os\ndef f(x): os._exit(0)", "the code ended its process"),
        ("def f(x): return g", "NameError: name 'g' is not defined"),
    ],
)
def test_what_was_wrong_with_a_call_is_in_the_metadata(
    environment: CodeExecutionEnvironment, code: str, failure: str
) -> None:
    assert graded(environment, code, tests=["assert f(1) == 1"])[1]["test_failure"] == failure


def test_metrics_count_programs(environment: CodeExecutionEnvironment) -> None:
    states = [{"correct": True}, {"correct": False, "test_failure": "no program"}, None]
    _, metrics = environment.global_post_process_and_metrics({"extra_env_info": states})
    assert metrics == {"episodes": 3, "accuracy": 1 / 3, "no_program_rate": 1 / 3, "time_limit_rate": 0.0}


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```python\nx\n```", "x\n"),
        ("First:\n```python\na\n```\nBetter:\n```py\nb\n```\nDone.", "b\n"),
        ("```python\ncode\n```\nOutput:\n```text\n3\n```", "code\n"),
        ("```\nplain\n```", "plain\n"),
        ("```python\nnot closed", "not closed"),
        ("print(1)", "print(1)"),
        ("```cpp\nint main() {}\n```", None),
        ("```python\n```", None),
        ("", None),
    ],
)
def test_the_program_of_a_response(response: str, program: str | None) -> None:
    assert program_of(response) == program


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("1 2\n3\n", "1 2\n3", True),
        ("1  2 \n3\n\n\n", "1 2\n3", True),
        ("1\n2\n3", "1 2\n3", False),
        ("1 2\n\n3", "1 2\n3", False),
        ("Yes", "YES", False),
        ("0.3333333334", "0.333333333", True),
        ("0.3334", "0.333333333", False),
        ("1e-9", "0.0", True),
        ("3.0", "3", False),
        ("3", "3.0", True),
        ("003", "3", False),
        ("nan", "0.5", False),
        ("inf", "1e5", False),
        ("1_0.0", "10.0", False),
        ("1.0.0", "1.0", False),
        ("", "", True),
        ("", "x", False),
    ],
)
def test_outputs_are_compared_by_words(printed: str, expected: str, same: bool) -> None:
    assert same_output(printed, expected, tolerance=1e-6) is same


def test_a_wrong_config_names_its_key() -> None:
    with pytest.raises(UnusableEnvironment, match=r"config\.reward"):
        CodeExecutionEnvironment({"reward": "Most"})
    with pytest.raises(UnusableEnvironment, match=r"config\.memoryMiB"):
        CodeExecutionEnvironment({"memoryMiB": 1})
    with pytest.raises(UnusableEnvironment, match="did you mean cpuSeconds"):
        CodeExecutionEnvironment({"cpuSecond": 1})


# ---- an environment in a process of its own


async def test_code_is_executed_by_an_environment_in_a_process() -> None:
    # Filling 512 MiB took 2 s of CPU time on a virtual machine: the time is ample, so that memory is what ends it.
    config = {"cpuSeconds": 60, "memoryMiB": 128, "parallel": 1}
    spec = PlainSpec(name="code", type="code_execution", entrypoint=None, config=config)
    runner = EnvironmentRunner(ProcessExecutor(spec, processes=1, timeout=150), max_batch=8)
    try:
        log = [{"role": "assistant", "content": "```python\ndef f(x): return x + 1\n```"}]
        right = await runner.step(log, {"tests": ["assert f(1) == 2"]})
        wrong = await runner.step(log, {"tests": ["assert f(1) == 3"]})
        log = [
            {
                "role": "assistant",
                "content": "```python\ndef f(x):\n    a = []\n    while True: a.append(' ' * 9999)\n```",
            }
        ]
        memory = await runner.step(log, {"tests": ["assert f(1) == 3"]})
    finally:
        await runner.close()
    assert [outcome.reward for outcome in (right, wrong, memory)] == [1.0, 0.0, 0.0]
    assert memory.metadata is not None
    assert memory.metadata["test_failure"] == "exceeded the memory limit"


@pytest.mark.slow
async def test_responses_that_wait_for_their_turn_do_not_time_out() -> None:
    # Before, a call had all that waited: one that hangs took the others with it.
    spec = PlainSpec(
        name="code", type="code_execution", entrypoint=None, config={"cpuSeconds": 60, "wallSeconds": 6, "parallel": 1}
    )
    runner = EnvironmentRunner(make_executor(spec, isolation="Inline", processes=1, timeout=15), max_batch=256)
    hanging = [{"role": "assistant", "content": fenced("import time\ndef f(x): time.sleep(100)")}]
    right = [{"role": "assistant", "content": fenced("def f(x): return x")}]
    try:
        outcomes = await runner.step_batch([*[hanging] * 3, right], [{"tests": ["assert f(1) == 1"]}] * 4)
    finally:
        await runner.close()
    assert [getattr(outcome, "reward", outcome) for outcome in outcomes] == [0.0] * 3 + [1.0]
