"""The process with the policy's code: loads it, and does what the checker asks over standard input and output.

Whatever the code prints, closes or exits, at worst the checker gets no answer, or a wrong one.
"""

import builtins
import os
import re
import sys
import types


def serve():
    questions, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    objects = []

    def handle(value):
        objects.append(value)
        return len(objects) - 1

    encoder, decoder = Encoder(handle), Decoder(lambda number: objects[number])  # noqa: F821
    sys.setrecursionlimit(10_000)
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    while (question := read(questions)) is not None:  # noqa: F821
        try:
            answer = _answer(question, module, encoder, decoder, objects)
        except BaseException as error:
            kinds = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"]
            try:
                text = str(error)[:1000]
            except BaseException:
                text = ""
            answer = {"raised": kinds[0] if kinds else "Exception", "text": text}
        write(answers, answer)  # noqa: F821
    os._exit(0)


def _answer(question, module, encoder, decoder, objects):
    operation = question["do"]
    if operation == "load":
        module.__dict__["__builtins__"] = _builtins(question["code"])
        for text in question["code"]:
            exec(compile(text, "solution.py", "exec"), module.__dict__)
        return {"value": None}
    if operation == "name":
        return {"value": {"handle": encoder._handle(_named(module, question["name"]))}}
    target = objects[question["handle"]]
    if operation == "attribute":
        found = getattr(target, question["name"])
        return {"value": encoder.encode(found)}
    if operation == "set":
        setattr(target, question["name"], decoder.decode(question["value"]))
        return {"value": None}
    arguments, keywords = decoder.decode(question["arguments"])
    value = target(*arguments, **keywords)
    answer = {"value": encoder.encode(value)}
    # What the function did to its arguments, as the caller would see it.
    changed = encoder.encode([arguments, keywords])
    if changed != question["arguments"]:
        answer["arguments"] = changed
    return answer


_USUAL = {
    "typing": "Any Callable Deque DefaultDict Dict FrozenSet Generator Iterable Iterator List Literal Mapping "
    "NamedTuple Optional Sequence Set Tuple Type TypeVar Union",
    "collections": "ChainMap Counter OrderedDict defaultdict deque namedtuple",
    "math": "ceil comb factorial floor gcd inf isqrt lcm perm sqrt",
    "functools": "cache cmp_to_key lru_cache partial reduce",
    "itertools": "accumulate chain combinations combinations_with_replacement count cycle groupby islice pairwise "
    "permutations product repeat starmap takewhile zip_longest",
    "heapq": "heapify heappop heappush heappushpop heapreplace merge nlargest nsmallest",
    "bisect": "bisect_left bisect_right insort insort_left insort_right",
    "string": "ascii_letters ascii_lowercase ascii_uppercase digits",
    "operator": "itemgetter xor",
    "copy": "deepcopy",
    "dataclasses": "dataclass field",
}
_USUAL_MODULES = "bisect collections copy functools heapq itertools math operator random re string sys typing"


def _builtins(texts):
    """The builtins, and those names that sites with tasks of this kind import before the code, as far as it has them.

    They are looked up last: what the code or the row defines, and Python's own builtins, come first.
    """
    words = set(re.findall(r"[A-Za-z_]\w*", "\n".join(texts)))
    found = {name: __import__(name) for name in words.intersection(_USUAL_MODULES.split())}
    for name, members in _USUAL.items():
        if used := words.intersection(members.split()):
            source = __import__(name)
            found.update((member, getattr(source, member)) for member in used if hasattr(source, member))
    return {**found, **vars(builtins)}


def _named(module, name):
    if hasattr(module, name):
        return getattr(module, name)
    solution = getattr(module, "Solution", None)
    if isinstance(solution, type) and hasattr(solution, name):
        return getattr(solution(), name)
    raise NameError(f"name {name!r} is not defined")


if __name__ == "__main__":
    serve()
