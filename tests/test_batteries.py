"""scripts/batteries.py: what a deletion takes along, and what it leaves behind."""

from __future__ import annotations

import itertools
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts import batteries
from scripts.batteries import Battery, goes_with, leftovers, users_of

GAMES = Battery(name="games", users="", code=["workers/kit/games", "workers/kit/commands/play.py"])
HALL = Battery(name="hall", users="", code=["workers/kit/hall.py"], needs=["games"])
SHOW = Battery(name="show", users="", code=["workers/kit/show.py"], needs=["hall"])


def test_a_battery_takes_along_all_that_need_it() -> None:
    known = {one.name: one for one in (SHOW, GAMES, HALL)}
    assert [one.name for one in goes_with(known, "games")] == ["games", "hall", "show"]
    assert goes_with(known, "show") == [SHOW]


def test_a_source_that_would_stay_is_named_with_its_line() -> None:
    files = {
        "workers/kit/core.py": [(3, "kit.gamesome"), (7, "kit.games.chess.Board")],
        "workers/kit/games/chess.py": [(1, "kit.games.board")],
        "workers/kit/hall.py": [(2, "kit.commands.play")],
        "tests/test_chess.py": [(1, "kit.games.chess")],
    }
    assert leftovers(files, [GAMES]) == [
        "workers/kit/core.py:7 imports kit.games.chess.Board, of the battery games",
        "workers/kit/hall.py:2 imports kit.commands.play, of the battery games",
    ]
    assert leftovers(files, [GAMES, HALL])[1:] == []


def test_tests_that_use_it_go_with_it_and_those_that_use_them() -> None:
    files = {
        "tests/chess.py": [(1, "kit.games.chess.Board")],
        "tests/test_matches.py": [(1, "tests.chess.board")],
        "tests/test_chess_clocks.py": [(1, "tests.chessclocks")],
        "examples/match.py": [(1, "kit.commands.play.play")],
        "workers/kit/core.py": [(1, "kit.games")],
    }
    assert users_of(files, [GAMES]) == {"tests/chess.py", "tests/test_matches.py", "examples/match.py"}


def test_imports_for_type_checkers_alone_do_not_count(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import kit.games\nelse:\n    import kit\n"
        "def play():\n    from kit.games import chess, go\n"
    )
    found = [name for _, name in batteries.imports(module)]
    assert found == ["typing.TYPE_CHECKING", "kit", "kit.games.chess", "kit.games.go"]


def test_every_battery_says_who_would_miss_it() -> None:
    for battery in batteries.batteries().values():
        assert battery.users.endswith(".")


def test_a_path_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/batteries.toml").write_text('[games]\nusers = "A."\ncode = ["workers/games.py"]\n')
    monkeypatch.setattr(batteries, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match=r"\[games\] names workers/games.py, which is not there"):
        batteries.batteries()


# What extras bring by others, and what the environment of a trainer has.
BROUGHT = {"accelerate": "trl", "httpx2": "mcp", "litellm": "mini-swe-agent", "openai": "verifiers", "torch": "vllm"}
TRAINERS = {"torch", "trl"}
OWN = {"kuberoll", "kuberoll_api", "kuberoll_operator", "kuberoll_workers"}


def test_what_a_battery_imports_is_brought_by_an_extra() -> None:
    project = tomllib.loads((batteries.ROOT / "pyproject.toml").read_text())["project"]
    extras = {extra: lines for extra, lines in project["optional-dependencies"].items() if extra not in ("dev", "docs")}
    lines = [*project["dependencies"], *itertools.chain.from_iterable(extras.values())]
    brought = {canonicalize_name(Requirement(line).name) for line in lines} | TRAINERS
    there = packages_distributions()
    # Of the standard library from Python 3.14 on.
    own = OWN | sys.stdlib_module_names | {"compression"}
    code = [batteries.ROOT / path for battery in batteries.batteries().values() for path in battery.code]
    for file in itertools.chain.from_iterable([path] if path.is_file() else path.rglob("*.py") for path in code):
        for line, imported in batteries.imports(file):
            package = imported.partition(".")[0]
            package = BROUGHT.get(package, package)
            if package not in own:
                distributions = {canonicalize_name(one) for one in (package, *there.get(package, ()))}
                assert distributions & brought, f"{file}:{line} imports {imported}, which no extra brings"
