"""Checks of the forms that a response may be asked to have: JSON schemas and grammars that no text can have.

An engine that compiles them finds out late, and some never do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

MAX_SCHEMA_NODES: Final = 20_000
"""Maximum number of values in a JSON schema."""

MAX_SCHEMA_DEPTH: Final = 64
MAX_TEXT: Final = 1 << 16
"""Maximum length of a regular expression or a grammar, characters."""

MAX_CHOICES: Final = 1024
MAX_CHOICE: Final = 4096

_SAME_PLACE: Final = ("anyOf", "allOf", "oneOf")
# A rule that is nothing but another one.
_ALIAS: Final = re.compile(r"^[ \t]*([A-Za-z_][\w.-]*)[ \t]*::=[ \t]*([A-Za-z_][\w.-]*)[ \t]*(?:#.*)?$", re.MULTILINE)


def check_schema(schema: Any, where: str) -> None:
    """Check the size of a JSON schema, and that none of its references leads back to itself without a value between.

    Args:
        where: Name of the schema for errors.

    Raises:
        ValueError: The message begins with `where`.
    """
    nodes, rest = 0, [(schema, 0)]
    places: list[Mapping[str, Any]] = []
    while rest:
        value, depth = rest.pop()
        nodes += 1
        if nodes > MAX_SCHEMA_NODES:
            raise ValueError(f"{where}: the schema has more than {MAX_SCHEMA_NODES:,} values")
        if depth > MAX_SCHEMA_DEPTH:
            raise ValueError(f"{where}: the schema is nested deeper than {MAX_SCHEMA_DEPTH}")
        if isinstance(value, dict):
            places.append(value)
            rest += [(item, depth + 1) for item in value.values()]
        elif isinstance(value, list):
            rest += [(item, depth + 1) for item in value]
    _check_references(schema, places, where)


def check_grammar(grammar: str, where: str) -> None:
    """Check that no rule of a grammar is only another name of itself.

    Args:
        where: Name of the grammar for errors.

    Raises:
        ValueError: The message begins with `where`.
    """
    aliases = dict(_ALIAS.findall(grammar))
    done = set[str]()
    for name in aliases:
        chain = dict[str, None]()
        while name in aliases and name not in done:
            if name in chain:
                raise ValueError(f"{where}: the rule {name[:100]} is defined only by itself: no text has this form")
            chain[name] = None
            name = aliases[name]
        done |= chain.keys()


def _check_references(schema: Any, places: list[Mapping[str, Any]], where: str) -> None:
    # Depth first without recursion; places are identified by the objects of the decoded schema.
    finished: set[int] = set()
    for place in places:
        open_places: dict[int, Iterator[Mapping[str, Any]]] = {}
        if id(place) not in finished:
            open_places[id(place)] = _same_places(place, schema)
        while open_places:
            current, following = next(reversed(open_places.items()))
            target = next(following, None)
            if target is None:
                del open_places[current]
                finished.add(current)
            elif id(target) in open_places:
                raise ValueError(f"{where}: a $ref leads back to itself: no value has this form")
            elif id(target) not in finished:
                open_places[id(target)] = _same_places(target, schema)


def _same_places(place: Mapping[str, Any], schema: Any) -> Iterator[Mapping[str, Any]]:
    """The schemas that the value itself must have, not one of its parts."""
    reference = place.get("$ref")
    if isinstance(reference, str) and (target := _resolved(reference, schema)) is not None:
        yield target
    for name in _SAME_PLACE:
        options = place.get(name)
        # Of several alternatives another one may end.
        if isinstance(options, list) and (name == "allOf" or len(options) == 1):
            yield from (option for option in options if isinstance(option, dict))


def _resolved(reference: str, schema: Any) -> Mapping[str, Any] | None:
    """The schema that a reference within the schema names; None: it names none here."""
    if not reference.startswith("#"):
        return None
    found = schema
    for part in filter(None, reference[1:].split("/")):
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and int(name[:9]) < len(found):
            found = found[int(name[:9])]
        elif isinstance(found, dict) and name in found:
            found = found[name]
        else:
            return None
    return found if isinstance(found, dict) else None
