"""Measure how large KubeRoll is, and hold it to the limits of scripts/sizes.toml: `make lint` runs it.

A limit may be lowered in any commit. It is raised in a commit of its own that says why.

A line counts if it holds code: blank lines, comments and docstrings do not. What a root reaches is the closure of its
imports, those inside functions too; imports for type checkers alone are not followed.
"""

from __future__ import annotations

import ast
import sys
import tokenize
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parent.parent
LIMITS = ROOT / "scripts/sizes.toml"
SOURCES = {
    "kuberoll": "workers",
    "kuberoll_api": "crds",
    "kuberoll_operator": "operator",
    "kuberoll_workers": "workers",
}
"""The packages, and the directory of each one's source."""

_NO_CODE = frozenset(
    {
        tokenize.COMMENT,
        tokenize.DEDENT,
        tokenize.ENCODING,
        tokenize.ENDMARKER,
        tokenize.INDENT,
        tokenize.NEWLINE,
        tokenize.NL,
    }
)
_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def code_lines(path: Path) -> int:
    """Count the lines of a Python file that hold code."""
    with path.open("rb") as source:
        lines = {
            line
            for token in tokenize.tokenize(source.readline)
            if token.type not in _NO_CODE
            for line in range(token.start[0], token.end[0] + 1)
        }
    return len(lines - set(_docstring_lines(ast.parse(path.read_text()))))


def _docstring_lines(tree: ast.Module) -> Iterator[int]:
    """Numbers of the lines of all texts that stand as statements: docstrings, those of attributes too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield from range(node.lineno, (node.end_lineno or node.lineno) + 1)


def sources() -> dict[str, Path]:
    """Map the name of each module of the packages to its file."""
    found = {}
    for package, directory in SOURCES.items():
        for path in (ROOT / directory / package).rglob("*.py"):
            parts = path.relative_to(ROOT / directory).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def within(module: str, packages: Collection[str]) -> bool:
    """Say whether a module is one of these packages or modules, or in one of them."""
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def closure(graph: grimp.ImportGraph, roots: Sequence[str]) -> set[str]:
    """Find all modules that importing the roots, and calling what they hold, may load."""
    found = set(roots)
    waiting = list(roots)
    while waiting:
        module = waiting.pop()
        reached = graph.find_modules_directly_imported_by(module)
        # Importing a module imports the packages that it is in.
        parent = module.rpartition(".")[0]
        for name in {*reached, parent} - found - {""}:
            found.add(name)
            waiting.append(name)
    return found


def measures(limits: Mapping[str, Mapping[str, object]]) -> Iterator[tuple[str, int, int, int, int]]:
    """Yield name, code lines, modules, limit and goal of everything that the limits name; the goal may be the limit."""
    lines = {module: code_lines(path) for module, path in sources().items()}
    graph = grimp.build_graph(*SOURCES, exclude_type_checking_imports=True)
    for name, rule in limits.items():
        match rule:
            case {"roots": list(roots), "limit": int(limit)}:
                modules = closure(graph, roots)
            case {"packages": list(packages), "limit": int(limit)}:
                modules = {module for module in lines if within(module, packages)}
            case {"without": list(packages), "limit": int(limit)}:
                modules = {module for module in lines if not within(module, packages)}
            case _:
                raise SystemExit(f"{LIMITS.name}: [{name}] needs a limit, and one of roots, packages and without")
        if unknown := modules - lines.keys():
            raise SystemExit(f"{LIMITS.name}: [{name}] names {sorted(unknown)[0]}, which is no module")
        goal = rule.get("goal", limit)
        assert isinstance(goal, int)
        yield name, sum(lines[module] for module in modules), len(modules), limit, goal


def main() -> None:
    found = list(measures(tomllib.loads(LIMITS.read_text())))
    print(f"{'':14}{'lines':>8}{'modules':>9}{'limit':>8}{'goal':>8}")
    for name, lines, modules, limit, goal in found:
        over = "  over its limit" if lines > limit else ""
        print(f"{name:14}{lines:8,}{modules:9,}{limit:8,}{goal:8,}{over}")
    sys.exit(any(lines > limit for _, lines, _, limit, _ in found))


if __name__ == "__main__":
    main()
