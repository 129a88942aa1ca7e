"""Modules beside a manifest: what belongs to them, and that a copy of it is the same code."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_api.manifest.modules import files_of_modules
from kuberoll_workers.environments.registry import PlainSpec
from kuberoll_workers.environments.source_digest import source_digest


def written(directory: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return directory


def found(directory: Path, *modules: str) -> list[str]:
    return [str(path.relative_to(directory)) for path in files_of_modules(directory, modules)]


def test_a_module_and_what_it_imports_from_beside_it(tmp_path: Path) -> None:
    written(
        tmp_path,
        {
            "guessing.py": "import json, numpy\nfrom scoring import score\ndef late():\n    import rarely\n",
            "scoring.py": "import guessing\n",
            "rarely.py": "this is not Python",
            "other.py": "",
            "guessing.yaml": "",
        },
    )
    assert found(tmp_path, "guessing") == ["guessing.py", "rarely.py", "scoring.py"]


def test_a_package_with_its_data(tmp_path: Path) -> None:
    written(
        tmp_path,
        {
            "games/__init__.py": "",
            "games/guessing.py": "from . import words\nfrom ..outside import x\nimport scoring\n",
            "games/words.txt": "one\n",
            "games/deep/more.py": "import lazily\n",
            "games/__pycache__/guessing.cpython-311.pyc": "",
            "games/.cache/x": "",
            "scoring.py": "",
            "lazily.py": "",
        },
    )
    wanted = ["games/__init__.py", "games/deep/more.py", "games/guessing.py", "games/words.txt", "lazily.py"]
    assert found(tmp_path, "games.guessing") == [*wanted, "scoring.py"]


def test_a_directory_that_is_no_package_gives_what_is_imported_from_it(tmp_path: Path) -> None:
    # A directory with the name of an installed package (`datasets`) is not what `import datasets` finds.
    written(tmp_path, {"games/guessing.py": "import datasets\n", "games/other.py": "", "datasets/rows.jsonl": ""})
    assert found(tmp_path, "games.guessing") == ["games/guessing.py"]


def test_modules_elsewhere_have_no_files_here(tmp_path: Path) -> None:
    assert found(tmp_path, "json", "no_such_module") == []


NAMES = ["alpha_beside", "beta_beside", "pack_beside.one", "pack_beside.two", "bare_beside.one"]
GRAPHS = st.fixed_dictionaries({name: st.lists(st.sampled_from(NAMES), max_size=3) for name in NAMES})


@given(graph=GRAPHS, entry=st.sampled_from(NAMES))
def test_a_copy_of_the_files_has_the_digest_of_the_original(graph: dict[str, list[str]], entry: str) -> None:
    """What a run is recognized by is equal beside the manifest and where the files were shipped to."""
    files = {
        f"{name.replace('.', '/')}.py": "".join(f"import {other}\n" for other in others)
        for name, others in graph.items()
    }
    files["pack_beside/__init__.py"] = "import beta_beside\n"
    with TemporaryDirectory() as first, TemporaryDirectory() as second:
        original, copy = written(Path(first), files), Path(second)
        for path in files_of_modules(original, [entry]):
            target = copy / path.relative_to(original)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
        assert digest_in(original, entry) == digest_in(copy, entry)


def digest_in(directory: Path, module: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(directory)
        for name in [name for name in sys.modules if name.partition(".")[0].endswith("_beside")]:
            del sys.modules[name]
        digest = source_digest(PlainSpec(name="e", type=None, entrypoint=f"{module}:E", config={}))
    assert digest is not None
    return digest
