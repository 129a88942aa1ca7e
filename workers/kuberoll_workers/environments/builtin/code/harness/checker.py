"""The process with the tests: asks the process with the policy's code, and decides.

Standard input is one JSON object: `code`, `setup`, and either `cases`, `function`, `wrapped` and `tolerance`,
or `tests` (texts of Python) and `entry_point`. It prints a line of JSON after each test: true, or what was wrong.
"""

import builtins
import itertools
import json
import math
import os
import sys
import types


class Unusable(Exception):
    """The tests cannot be used, whatever the code is."""


class Remote:
    """Something of the policy's code, to call and to look into. It is equal only to itself.

    Tests ask an object of a class (`Stack()`), or what comes from one, how it behaves. What a function returns instead
    of plain data decides no more than plain data would.
    """

    def __init__(self, solution, number, asked_for=False):
        object.__setattr__(self, "_Remote__solution", solution)
        object.__setattr__(self, "_Remote__number", number)
        object.__setattr__(self, "_Remote__asked_for", asked_for)

    def __call__(self, *arguments, **keywords):
        value = self.__solution.call(self.__number, arguments, keywords)
        given = (*arguments, *keywords.values())
        return self.__from(value, any(isinstance(item, Remote) and item.__asked_for for item in given))

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self.__from(self.__solution.attribute(self.__number, name))

    def __from(self, value, asked_for=False):
        if isinstance(value, Remote) and (self.__asked_for or asked_for):
            object.__setattr__(value, "_Remote__asked_for", True)
        return value

    def __setattr__(self, name, value):
        self.__solution.set(self.__number, name, value)

    def __special(self, name, *arguments):
        return self.__solution.attribute(self.__number, name)(*arguments)

    def __len__(self):
        return self.__special("__len__")

    def __iter__(self):
        return iter(self.__special("__iter__"))

    def __getitem__(self, key):
        return self.__special("__getitem__", key)

    def __setitem__(self, key, value):
        self.__special("__setitem__", key, value)

    def __contains__(self, item):
        if self.__asked_for:
            return self.__special("__contains__", item)
        return any(found == item for found in itertools.islice(self, MAX_ITEMS))  # noqa: F821

    def __str__(self):
        return self.__special("__str__")

    def __eq__(self, other):
        if isinstance(other, Remote):
            return self is other or self.__special("__eq__", other) is True
        return NotImplemented

    __hash__ = object.__hash__


class Named(Remote):
    """A name of the policy's code, which is looked up when it is used. One with a capital letter is a class's."""

    def __init__(self, solution, name):
        object.__setattr__(self, "_Named__solution", solution)
        object.__setattr__(self, "_Named__name", name)
        object.__setattr__(self, "_Remote__asked_for", False)

    def __found(self):
        found = self.__solution.named(self.__name)
        if self.__name[:1].isupper():
            object.__setattr__(found, "_Remote__asked_for", True)
        return found

    def __call__(self, *arguments, **keywords):
        return self.__found()(*arguments, **keywords)

    def __getattr__(self, name):
        return getattr(self.__found(), name)


class Solution:
    """The process with the policy's code."""

    def __init__(self, code):
        # Pipes are not inherited, except for these two as standard input and output.
        reading, self_writing = os.pipe()
        self_reading, writing = os.pipe()
        actions = [
            (os.POSIX_SPAWN_DUP2, reading, 0),
            (os.POSIX_SPAWN_DUP2, writing, 1),
            (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
        ]
        argv = [sys.executable, "-s", "-B", "solution.py"]
        os.posix_spawn(sys.executable, argv, os.environ, file_actions=actions)
        os.close(reading)
        os.close(writing)
        self._questions, self._answers = os.fdopen(self_writing, "wb"), os.fdopen(self_reading, "rb")
        self._encoder = Encoder(self._number)  # noqa: F821
        self._decoder = Decoder(lambda number: Remote(self, number))  # noqa: F821
        self._names = {}
        self._ask({"do": "load", "code": code})

    def named(self, name):
        if name not in self._names:
            self._names[name] = self._ask({"do": "name", "name": name})
        return self._names[name]

    def attribute(self, number, name):
        return self._ask({"do": "attribute", "handle": number, "name": name})

    def set(self, number, name, value):
        self._ask({"do": "set", "handle": number, "name": name, "value": self._encoded(value)})

    def _encoded(self, value):
        try:
            return self._encoder.encode(value)
        except NotPlain as error:  # noqa: F821
            raise Unusable(f"a test passes what is not plain data: {error}") from error

    def call(self, number, arguments, keywords):
        encoded = self._encoded([list(arguments), keywords])
        return self._ask({"do": "call", "handle": number, "arguments": encoded}, (arguments, keywords))

    def _ask(self, question, given=None):
        try:
            write(self._questions, question)  # noqa: F821
            answer = read(self._answers)  # noqa: F821
        except (OSError, ValueError, RecursionError) as error:
            raise Gone(f"the code's process does not answer: {type(error).__name__}") from error
        if answer is None:
            raise Gone("the code ended its process")
        try:
            if "raised" in answer:
                kind = getattr(builtins, str(answer["raised"]), None)
                if not (isinstance(kind, type) and issubclass(kind, Exception)) or issubclass(kind, AssertionError):
                    kind = RuntimeError
                raise _raised(kind, str(answer["text"]))
            if given is not None and "arguments" in answer:
                arguments, keywords = self._decoder.decode(answer["arguments"])
                for before, after in zip(given[0], arguments, strict=True):
                    _restore(before, after)
                for name, after in keywords.items():
                    _restore(given[1][name], after)
            return self._decoder.decode(answer["value"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if "raised" in answer:
                raise
            raise Gone("the code's process does not keep to the protocol") from error

    def _number(self, value):
        if isinstance(value, Named):
            value = value._Named__found()
        if isinstance(value, Remote):
            return value._Remote__number
        raise Unusable(f"a test passes an object of type {type(value).__name__} to the code, which must be plain data")


class Gone(Exception):
    """The policy's code does not answer anymore."""


class Wrong(Exception):
    """What comes before the tests uses the policy's code, and does not work with it."""


def _raised(kind, text):
    try:
        return kind(text)
    except TypeError:
        return RuntimeError(text)


def _restore(before, after):
    """Give an argument the content that the code gave its copy."""
    if type(before) is not type(after):
        return
    if isinstance(before, list):
        # Objects within keep their identity where they have not changed.
        if before != after:
            before[:] = after
    elif isinstance(before, (dict, set)):
        if before != after:
            before.clear()
            before.update(after)
    elif isinstance(before, bytearray):
        before[:] = after


def same(value, expected, tolerance):
    """True if a value is what was expected, which comes from JSON: a tuple is a list there, and keys are texts."""
    if isinstance(value, (list, tuple)) and isinstance(expected, (list, tuple)):
        return len(value) == len(expected) and all(map(same, value, expected, [tolerance] * len(value)))
    if hasattr(value, "tolist"):
        return same(value.tolist(), expected, tolerance)
    if isinstance(value, dict) and isinstance(expected, dict):
        texts = {str(key): item for key, item in value.items()}
        return (
            len(value) == len(expected)
            and texts.keys() == {str(key) for key in expected}
            and all(same(texts[str(key)], item, tolerance) for key, item in expected.items())
        )
    if isinstance(value, bool) or isinstance(expected, bool):
        return value is expected
    if isinstance(value, (int, float)) and isinstance(expected, (int, float)):
        if isinstance(expected, float) or isinstance(value, float):
            return math.isclose(value, expected, rel_tol=tolerance, abs_tol=tolerance)
        return value == expected
    return type(value) is type(expected) and value == expected


def checks_of(solution, request):
    """One function for each test; it returns, or raises what was wrong."""
    if request["cases"] is not None:
        if request["setup_needs_code"]:
            raise Unusable("setup uses a name that it does not define")
        function = Named(solution, request["function"])
        return [_case(function, arguments, expected, request) for arguments, expected in request["cases"]]
    scope, entry_point = dict(request["scope"]), request["entry_point"]
    if entry_point is None:
        texts = [*request["tests"], *([request["setup"]] if request["setup_needs_code"] else [])]
        missing = _missing(texts, scope)
        if judges := _judges(request["tests"], missing):
            raise Unusable(f"{', '.join(judges)} decides the tests, so setup must define it, not the code")
        for name in missing or _builtins_of_all(request["tests"]):
            scope[name] = Named(solution, name)
    elif request["setup_needs_code"]:
        raise Unusable("setup uses a name that it does not define")
    else:
        if missing := _missing(request["tests"], scope) - {entry_point, "candidate"}:
            # The code may define them, but then it would decide what they do.
            raise Unusable(f"the tests use {', '.join(sorted(missing))}, which setup must define")
        scope[entry_point] = scope["candidate"] = Named(solution, entry_point)
    if request["setup_needs_code"]:
        try:
            exec(compile(request["setup"], "setup", "exec"), scope)
        except Exception as error:
            raise Wrong(_failure(error)) from error
    return [_test(text, scope, entry_point) for text in request["tests"]]


def prepare(request):
    """Run what comes before code and tests; where it needs the code, it waits for it."""
    scope = {"__name__": "tests"}
    try:
        exec(compile(request["setup"], "setup", "exec"), scope)
        request |= {"scope": scope, "setup_needs_code": False}
    except NameError:
        request |= {"scope": {"__name__": "tests"}, "setup_needs_code": True}
    setup = [] if request["setup_needs_code"] or not request["setup"] else [request["setup"]]
    return [*setup, request["code"]]


def _case(function, arguments, expected, request):
    def check():
        value = function(*arguments)
        wanted = [expected, expected[0]] if request["wrapped"] else [expected]
        assert any(same(value, item, request["tolerance"]) for item in wanted)

    return check


def _test(text, scope, entry_point):
    def check():
        before = dict(scope)
        exec(compile(text, "test", "exec"), scope)
        if entry_point is not None and isinstance(scope.get("check"), types.FunctionType):
            scope["check"](scope["candidate"])
        for name, value in list(scope.items()):
            if name.startswith("test") and isinstance(value, types.FunctionType) and before.get(name) is not value:
                value()

    return check


def _judges(tests, missing):
    """Names of the code that are given what the code returns, and whose own result decides a test.

    `assertEqual(f(2), 4)` and `assert close(f(2), 4)` ask the code whether the code is right.
    """
    import ast

    def root(node):
        while isinstance(node, ast.Attribute):
            node = node.value
        return node.id if isinstance(node, ast.Name) and node.id in missing else None

    def judge(node):
        """The name of the code that decides an expression; None if no single one does."""
        while isinstance(node, ast.UnaryOp):
            node = node.operand
        if not isinstance(node, ast.Call) or (name := root(node.func)) is None:
            return None
        inner = (part for given in (*node.args, *node.keywords) for part in ast.walk(given))
        asked = {root(part.func) for part in inner if isinstance(part, ast.Call)} - {None}
        return name if asked else None

    found = set()
    for text in tests:
        nodes = list(ast.walk(ast.parse(text)))
        asserts = [node.test for node in nodes if isinstance(node, ast.Assert)]
        parts = [part for test in asserts for part in (test.values if isinstance(test, ast.BoolOp) else [test])]
        if not asserts:
            parts = [node.value for node in nodes if isinstance(node, ast.Expr)]
        found.update(filter(None, map(judge, parts)))
    return sorted(found)


def _missing(tests, scope):
    """Names that tests use and nothing defines: those of the code."""
    import ast

    used, made = set(), set()
    for text in tests:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Name):
                (used if isinstance(node.ctx, ast.Load) else made).add(node.id)
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                made.add(node.name)
            elif isinstance(node, ast.alias):
                made.add((node.asname or node.name).partition(".")[0])
            elif isinstance(node, ast.arg):
                made.add(node.arg)
    return used - made - scope.keys() - set(dir(builtins))


def _builtins_of_all(tests):
    """Builtins that all tests call: where they use nothing else, the code has a function of this name."""
    import ast

    calls = [
        {node.func.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call) and hasattr(node.func, "id")}
        for text in tests
    ]
    return set.intersection(*calls) & set(dir(builtins))


def main():
    request = json.loads(sys.stdin.buffer.read())
    out = os.fdopen(os.dup(1), "w")
    # The code's process inherits none of these.
    with open(os.devnull, "r+") as nothing:
        for number in (0, 1):
            os.dup2(nothing.fileno(), number)
    folder = os.getcwd()

    def say(verdict):
        out.write(json.dumps(verdict) + "\n")
        out.flush()

    try:
        code = prepare(request)
    except Exception as error:
        return say({"unusable": f"setup: {_failure(error)}"})
    try:
        solution = Solution(code)
    except Exception as error:
        return say({"failure": _failure(error)})
    # The code may write here; nothing is imported from here.
    assert folder not in sys.path
    os.chdir("/")
    try:
        checks = checks_of(solution, request)
    except Wrong as error:
        return say({"failure": str(error)})
    except Unusable as error:
        return say({"unusable": str(error)})
    except Exception as error:
        return say({"unusable": _failure(error)})
    for check in checks:
        try:
            check()
            say(True)
            continue
        except Unusable as error:
            return say({"unusable": str(error)})
        except Gone as error:
            return say({"failure": _failure(error)})
        except AssertionError:
            say({"failure": "wrong answer"})
        except Exception as error:
            say({"failure": _failure(error)})
        if request["stop"]:
            return None
    return None


def _failure(error):
    if isinstance(error, Gone):
        return str(error)
    return f"{type(error).__name__}: {error}"[:300]


if __name__ == "__main__":
    main()
    # The process with the policy's code is killed when this one has ended.
    os._exit(0)
