"""Digest of an environment's source code: changed code may give different rewards under the same name."""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path

from kuberoll_api.manifest.modules import imported_modules, module_file
from kuberoll_api.model.environments import Environment
from kuberoll_workers.environments.registry import EnvironmentSpec, entrypoint_of

_INSTALLED = ("site-packages", "dist-packages")


def source_digest(spec: EnvironmentSpec) -> str | None:
    """Digest of the module with an environment's class, and of the neighboring modules that it imports.

    For an installed package these are the package's own modules; for a module in the user's directory, all modules
    there that it imports. Imports from elsewhere are considered part of the machine. No code is executed.

    Returns:
        None if no source code is found.
    """
    own = spec.own_entrypoint if isinstance(spec, Environment) else spec.entrypoint
    entrypoint = own or (spec.type and entrypoint_of(spec.type)) or ""
    module = entrypoint.partition(":")[0]
    root = _root(module)
    if root is None:
        return None
    scope = module.partition(".")[0] if root.name in _INSTALLED else None
    sources: dict[str, bytes] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        path = module_file(root, name)
        if path is None or name in sources or (scope is not None and name.partition(".")[0] != scope):
            continue
        sources[name] = path.read_bytes()
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        waiting.extend(imported_modules(sources[name], package))
        if package and package != name:
            # A package's __init__ runs before its modules.
            waiting.append(package)
    if not sources:
        return None
    digest = hashlib.blake2b(digest_size=12)
    for name in sorted(sources):
        digest.update(f"{name} {len(sources[name])}\n".encode() + sources[name])
    return digest.hexdigest()


def _root(module: str) -> Path | None:
    """The directory that contains a module's top-level package or file."""
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
