"""Python modules in a directory, and what they import from there; no code is executed."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path


def module_file(root: Path, module: str) -> Path | None:
    """The source file of a module below a directory of the module path; None if there is none.

    A package precedes a module of the same name, as in Python.
    """
    place = root.joinpath(*module.split("."))
    candidates = (place / "__init__.py", place.with_name(f"{place.name}.py"))
    return next((path for path in candidates if path.is_file()), None)


@lru_cache(maxsize=1024)
def imported_modules(source: bytes, package: str) -> tuple[str, ...]:
    """Modules that a source imports anywhere, including imported names that may be modules.

    Args:
        package: The package that the source belongs to, where relative imports start; empty for none.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return ()
    modules: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            above = ".".join(parents[: len(parents) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (above, node.module)))
            modules.append(module)
            modules += (f"{module}.{alias.name}" for alias in node.names)
    return tuple(modules)


def files_of_modules(root: Path, modules: Iterable[str]) -> list[Path]:
    """Files below a directory that these modules consist of, sorted; none for a module that is not there.

    They are the modules themselves, what they import from the directory, and what that imports. Of a package with an
    `__init__.py` they are all files, since it may read data of its own; except for hidden ones and compiled modules.
    """
    found: set[Path] = set()
    seen: set[str] = set()
    waiting = list(modules)
    while waiting:
        name = waiting.pop()
        if not name or name in seen:
            continue
        seen.add(name)
        top = root / name.partition(".")[0]
        if (top / "__init__.py").is_file():
            new = set(_files_below(top))
        else:
            file = module_file(root, name)
            new = set() if file is None else {file}
        for file in new - found:
            if file.suffix == ".py":
                waiting.extend(imported_modules(file.read_bytes(), ".".join(file.relative_to(root).parent.parts)))
        found |= new
        if "." in name:
            # A package's __init__ runs before its modules.
            waiting.append(name.rpartition(".")[0])
    return sorted(found)


def _files_below(directory: Path) -> Iterator[Path]:
    for path in directory.iterdir():
        if path.name.startswith(".") or path.name == "__pycache__" or path.suffix == ".pyc":
            continue
        if path.is_dir():
            yield from _files_below(path)
        elif path.is_file():
            yield path
