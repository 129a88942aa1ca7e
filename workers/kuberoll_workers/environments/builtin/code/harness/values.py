"""Values that cross between the process with the tests and the process with the policy's code, as JSON.

Only plain data crosses: an object of the policy's own class stays where it is, and a handle to it crosses. So no
`__eq__` of the policy's decides a test.
"""

import collections
import itertools
import json
import math
import sys
import types

MAX_DEPTH = 100
MAX_ITEMS = 1_000_000


class NotPlain(Exception):
    """A value cannot cross."""


class Encoder:
    """Turns values into JSON types. Objects that are not plain go through `handle`, which returns their number."""

    def __init__(self, handle):
        self._handle = handle

    def encode(self, value, depth=0):
        if value is None or value is True or value is False or type(value) is str:
            return value
        if depth > MAX_DEPTH:
            raise NotPlain("a value is nested too deeply")
        if type(value) is int:
            return value if -(1 << 53) < value < 1 << 53 else {"int": hex(value)}
        if type(value) is float:
            return value if math.isfinite(value) else {"float": repr(value)}
        return self._encode_other(value, depth)

    def _encode_other(self, value, depth):
        if isinstance(value, bool):
            return bool(value)
        if isinstance(value, int):
            return self.encode(int.__int__(value), depth)
        if isinstance(value, float):
            return self.encode(float.__float__(value), depth)
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, (bytes, bytearray)):
            kind = "bytearray" if isinstance(value, bytearray) else "bytes"
            return {kind: bytes.hex(bytes(value))}
        if isinstance(value, complex):
            return {"complex": [self.encode(value.real, depth), self.encode(value.imag, depth)]}
        if isinstance(value, list):
            return [self.encode(item, depth + 1) for item in list.__iter__(value)]
        for kind in (tuple, set, frozenset, collections.deque):
            if isinstance(value, kind):
                return {kind.__name__: [self.encode(item, depth + 1) for item in kind.__iter__(value)]}
        if isinstance(value, dict):
            pairs = [[self.encode(key, depth + 1), self.encode(item, depth + 1)] for key, item in dict.items(value)]
            return {"dict": pairs}
        if isinstance(value, range):
            return {"range": [value.start, value.stop, value.step]}
        for name, kind in _numbers():
            if isinstance(value, kind):
                return {name: kind.__str__(value)}
        if type(value).__module__ == "numpy":
            return {"numpy": [self.encode(value.tolist(), depth + 1), str(value.dtype)]}
        if isinstance(value, (map, filter, zip, enumerate, reversed, types.GeneratorType)) or type(value) in _ITERATORS:
            items = list(itertools.islice(value, MAX_ITEMS))
            return {"iterator": [self.encode(item, depth + 1) for item in items]}
        if type(value) in _VIEWS:
            return [self.encode(item, depth + 1) for item in value]
        return {"handle": self._handle(value)}


_ITERATORS = {type(iter([])), type(iter(())), type(iter({})), type(iter(set())), type(iter("")), type(iter(range(0)))}
_VIEWS = {type({}.keys()), type({}.values()), type({}.items())}


def _numbers():
    """Other numbers of the standard library; where their modules are not loaded, there are none."""
    for module, name in (("decimal", "Decimal"), ("fractions", "Fraction")):
        if isinstance(kind := getattr(sys.modules.get(module), name, None), type):
            yield name, kind


class Decoder:
    """The opposite of `Encoder`; `handle` makes something of a number."""

    def __init__(self, handle):
        self._handle = handle

    def decode(self, value):
        if isinstance(value, list):
            return [self.decode(item) for item in value]
        if not isinstance(value, dict):
            return value
        ((kind, body),) = value.items()
        if kind == "int":
            return int(body, 16)
        if kind == "float":
            return float(body)
        if kind == "handle":
            return self._handle(body)
        if kind in ("bytes", "bytearray"):
            return (bytes if kind == "bytes" else bytearray).fromhex(body)
        if kind in ("Decimal", "Fraction"):
            return getattr(__import__("decimal" if kind == "Decimal" else "fractions"), kind)(body)
        if kind == "range":
            return range(*body)
        if kind == "numpy":
            return self._array(*body)
        items = [self.decode(item) for item in body]
        if kind == "dict":
            return dict(items)
        made = {
            "tuple": tuple, "set": set, "frozenset": frozenset, "deque": collections.deque, "iterator": iter,
            "complex": lambda parts: complex(*parts),
        }  # fmt: skip
        return made[kind](items)

    def _array(self, items, dtype):
        try:
            import numpy
        except ImportError:
            return self.decode(items)
        found = self.decode(items)
        if isinstance(found, list):
            return numpy.array(found, dtype=dtype)
        return numpy.dtype(dtype).type(found)


def write(file, message):
    """Write one message: a line of JSON."""
    file.write(json.dumps(message).encode() + b"\n")
    file.flush()


def read(file):
    """Read one message; None at the end."""
    line = file.readline()
    return json.loads(line) if line.endswith(b"\n") else None
