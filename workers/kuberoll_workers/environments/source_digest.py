"""What an environment's code is, as a digest: another one may pay other rewards under the same name."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from kuberoll_workers.environments.registry import BUILT_INS, EnvironmentSpec

_INSTALLED = ("site-packages", "dist-packages")


def source_digest(spec: EnvironmentSpec) -> str | None:
    """A digest of the module that an environment's class is in, and of the modules beside it that it imports.

    Of an installed package that is the package; of a module in the user's directory, everything there that it imports.
    What those import from elsewhere belongs to the machine. Nothing is run.

    Returns:
        None: There is no source to be found.
    """
    entrypoint = spec.entrypoint or BUILT_INS.get(spec.type or "", "")
    module = entrypoint.partition(":")[0]
    root = _root(module)
    if root is None:
        return None
    scope = module.partition(".")[0] if root.name in _INSTALLED else None
    sources: dict[str, bytes] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        path = _source(root, name)
        if path is None or name in sources or (scope is not None and name.partition(".")[0] != scope):
            continue
        sources[name] = path.read_bytes()
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        waiting.extend(_imports(sources[name], package))
        if package and package != name:
            # A package is run before its modules.
            waiting.append(package)
    if not sources:
        return None
    digest = hashlib.blake2b(digest_size=12)
    for name in sorted(sources):
        digest.update(f"{name} {len(sources[name])}\n".encode() + sources[name])
    return digest.hexdigest()


def _root(module: str) -> Path | None:
    """The directory that a module's top level lies in."""
    top = module.partition(".")[0]
    try:
        found = importlib.util.find_spec(top) if top else None
    except (ImportError, ValueError):
        return None
    if found is None:
        return None
    if found.submodule_search_locations:
        return Path(next(iter(found.submodule_search_locations))).parent
    return Path(found.origin).parent if found.origin and found.origin.endswith(".py") else None


def _source(root: Path, module: str) -> Path | None:
    place = root.joinpath(*module.split("."))
    candidates = (place.with_name(f"{place.name}.py"), place / "__init__.py")
    return next((path for path in candidates if path.is_file()), None)


def _imports(source: bytes, package: str) -> Iterator[str]:
    """The modules that a source imports, wherever in it; names that may be modules too."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            above = ".".join(parents[: len(parents) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (above, node.module)))
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)
