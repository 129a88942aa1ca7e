"""Delete each battery of scripts/batteries.toml in a copy of the repository, and run the quick tests of what is left.

    python scripts/batteries.py [NAME…]           # all, or these
    python scripts/batteries.py --imports         # only check that nothing that stays imports what goes: `make lint`

Pages and tables that name a battery stay in the copy, so tests that hold these to the code are left out.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
SOURCES: Final = ("crds", "operator", "workers")
USERS: Final = ("benchmarks", "examples", "scripts", "tests")
# These say which parts there are, or play in each of them.
_LEFT_OUT: Final = (
    "tests/adapters/libraries/test_contract.py::test_all_adapters_are_subjects",
    "tests/adapters/libraries/test_examples.py::test_each_adapter_has_an_example",
    "tests/api/test_cli.py::test_help_has_a_whole_line_for_each_command",
    "tests/api/test_removed_options.py",
    "tests/data/test_stop_reasons.py::test_no_module_has_a_list_of_reasons_of_its_own",
    "tests/environments/test_registry.py::test_manifests_may_name_the_built_ins_and_no_others",
    "tests/rollouts/test_episodes.py::test_a_close_that_raises_harms_nothing[Remote]",
    "tests/test_architecture.py",
    "tests/test_batteries.py",
    "tests/test_docs.py",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Battery:
    """A part that can be deleted.

    Attributes:
        users: Who would miss it.
        code: Its packages and modules, as paths.
        needs: Other batteries that it is made from; it goes with each.
    """

    name: str
    users: str
    code: Sequence[str]
    needs: Sequence[str] = ()

    def holds(self, path: str) -> bool:
        """Say whether a path of the repository is in it."""
        return any(path == own or path.startswith(f"{own}/") for own in self.code)

    def has_module(self, module: str) -> bool:
        """Say whether this is a module of it, or an attribute of one."""
        return any(module == own or module.startswith(f"{own}.") for own in map(module_of, self.code))


def batteries() -> dict[str, Battery]:
    """Read the batteries, by name.

    Raises:
        SystemExit: One names a path or a battery that is not there.
    """
    found = tomllib.loads((ROOT / "scripts/batteries.toml").read_text())
    made = {name: Battery(name=name, **fields) for name, fields in found.items()}
    for battery in made.values():
        missing = [path for path in battery.code if not (ROOT / path).exists()]
        if missing := [*missing, *(name for name in battery.needs if name not in made)]:
            raise SystemExit(f"scripts/batteries.toml: [{battery.name}] names {missing[0]}, which is not there")
    return made


def goes_with(known: Mapping[str, Battery], name: str) -> list[Battery]:
    """A battery, and all that need it."""
    gone = [known[name]]
    for battery in gone:
        gone += [one for one in known.values() if battery.name in one.needs and one not in gone]
    return gone


def module_of(path: str) -> str:
    """Name of the module at a path below one of the sources."""
    return path.partition("/")[2].removesuffix(".py").replace("/", ".")


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and name of each module, or attribute of one, that a file imports; not for type checkers alone."""
    tree = ast.parse(path.read_text())
    skipped = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


Imports = Mapping[str, Sequence[tuple[int, str]]]
"""What each file of the repository imports, by its path."""


def all_imports() -> Imports:
    return {
        path.relative_to(ROOT).as_posix(): list(imports(path))
        for directory in (*SOURCES, *USERS)
        for path in (ROOT / directory).rglob("*.py")
    }


def leftovers(files: Imports, gone: Sequence[Battery]) -> list[str]:
    """Places of sources that would stay and import what would go, a line each."""
    return [
        f"{path}:{line} imports {name}, of the battery {battery.name}"
        for path, found in sorted(files.items())
        if path.startswith(tuple(f"{source}/" for source in SOURCES)) and not any(one.holds(path) for one in gone)
        for line, name in found
        for battery in gone
        if battery.has_module(name)
    ]


def users_of(files: Imports, gone: Sequence[Battery]) -> set[str]:
    """Paths of the tests, benchmarks and examples that import what goes, or another one that does."""
    others = {path: [name for _, name in found] for path, found in files.items() if path.split("/")[0] in USERS}
    users = {path for path, names in others.items() if any(one.has_module(name) for one in gone for name in names)}
    while True:
        modules = [path.removesuffix(".py").replace("/", ".") for path in users]
        more = {
            path
            for path, names in others.items()
            if path not in users and any(f"{name}.".startswith(f"{module}.") for name in names for module in modules)
        }
        if not more:
            return users
        users |= more


def copy_without(gone: Sequence[Battery], users: Collection[str], directory: Path) -> None:
    """Copy the files that git knows, but what goes, and what says that KubeRoll is installed."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file() and name not in users and not any(battery.holds(name) for battery in gone):
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, directory / name)
    installed = distribution("kuberoll")
    metadata = directory / SOURCES[0] / f"kuberoll-{installed.version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(installed.read_text("METADATA") or "")
    kept = [entry for entry in installed.entry_points if not any(one.has_module(entry.module) for one in gone)]
    lines = [
        line
        for group in sorted({entry.group for entry in kept})
        for line in (f"[{group}]", *(f"{entry.name} = {entry.value}" for entry in kept if entry.group == group))
    ]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")


def passes_without(gone: Sequence[Battery], users: Collection[str]) -> bool:
    """Say whether the quick tests of everything else pass."""
    with tempfile.TemporaryDirectory(prefix="kuberoll-without-") as place:
        copy_without(gone, users, Path(place))
        path = os.pathsep.join(str(Path(place, source)) for source in SOURCES)
        command = [sys.executable, "-m", "pytest", "--quick", "-q", "-p", "no:cacheprovider"]
        command += [f"--deselect={name}" for name in _LEFT_OUT]
        command += ["--numprocesses", "logical", "--dist", "loadgroup"]
        return subprocess.run(command, cwd=place, env=os.environ | {"PYTHONPATH": path}, check=False).returncode == 0


def main(arguments: Sequence[str]) -> int:
    """Run; the exit code is 1 if a battery cannot be deleted."""
    known = batteries()
    only_imports = "--imports" in arguments
    names = [name for name in arguments if name != "--imports"] or list(known)
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"there is no battery {unknown[0]!r}; there are {', '.join(known)}")
    files = all_imports()
    failed = []
    for name in names:
        gone = goes_with(known, name)
        found = leftovers(files, gone)
        print("\n".join(found), end="\n" * bool(found))
        if not (only_imports or found):
            users = users_of(files, gone)
            print(f"without {', '.join(one.name for one in gone)}, and {len(users)} tests and examples", flush=True)
            found = [] if passes_without(gone, users) else [name]
        failed += [name] * bool(found)
    print(f"cannot be deleted: {', '.join(failed)}" if failed else f"{len(names)} batteries can be deleted")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
