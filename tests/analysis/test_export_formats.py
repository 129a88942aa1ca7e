"""Formats are found by entry points: ours, and those that other distributions bring."""

from __future__ import annotations

import pkgutil
import sys
import textwrap
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from click.testing import CliRunner

from kuberoll_api.plugins import EXPORTS, installed
from kuberoll_workers.analysis import export as package
from kuberoll_workers.analysis.export.exporting import export_run
from kuberoll_workers.analysis.export.formats import FORMATS, ExportError, Format
from kuberoll_workers.commands.export import export
from tests.analysis.test_export import run_of, trajectory

ROOT = Path(__file__).resolve().parent.parent.parent
OURS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][EXPORTS]


@pytest.fixture
def others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another distribution, with four formats: one that works."""
    metadata = tmp_path / "lengths-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: lengths\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        textwrap.dedent("""\
            [kuberoll.exports]
            lengths = lengths_of_rows:FORMAT
            trl = lengths_of_rows:FORMAT
            other = lengths_of_rows:FORMAT
            broken = no_such_module:FORMAT
            """)
    )
    (tmp_path / "lengths_of_rows.py").write_text(
        textwrap.dedent("""\
            from kuberoll_workers.analysis.export.formats import Format


            def row(record, role, path):
                return {"task": record.task_index, "turns": record.turn_count}


            FORMAT = Format(name="lengths", containers=("jsonl",), row=row)
            """)
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "lengths_of_rows", raising=False)


def test_ours_are_those_of_the_project_s_file() -> None:
    assert {name: entry.value for name, entry in installed(EXPORTS).items()} == OURS
    assert list(FORMATS) == sorted(OURS)
    for name, format in FORMATS.items():
        assert format.name == name


def test_each_module_with_a_format_is_registered() -> None:
    modules = {entry.module for entry in installed(EXPORTS).values()}
    for found in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        values = vars(__import__(found.name, fromlist=["_"])).values()
        assert any(isinstance(value, Format) for value in values) == (found.name in modules), found.name


def test_an_install_has_the_formats_that_its_metadata_list(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Elsewhere than in a checkout."""
    metadata = tmp_path / "kuberoll-9.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: kuberoll\nVersion: 9\n")
    listed = "\n".join(f"{name} = {value}" for name, value in OURS.items())
    (metadata / "entry_points.txt").write_text(f"[{EXPORTS}]\n{listed}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert {name: entry.value for name, entry in installed(EXPORTS).items()} == OURS


@pytest.mark.usefixtures("others")
def test_a_format_of_another_distribution_is_exported(tmp_path: Path) -> None:
    files = run_of(tmp_path / "run", trajectory())
    output = tmp_path / "out.jsonl"
    exported = export_run(files, to="lengths", output=output)
    assert (exported.path, output.read_text()) == (output, '{"task":0,"turns":2}\n')


@pytest.mark.usefixtures("others")
def test_ours_keep_their_names_and_what_cannot_be_loaded_says_why() -> None:
    assert FORMATS["trl"].name == "trl"
    assert "broken" in FORMATS
    with pytest.raises(ExportError, match="--to broken: no_such_module:FORMAT, of the entry point broken in"):
        FORMATS["broken"]
    with pytest.raises(ExportError, match="it must be a Format of this name"):
        FORMATS["other"]


def test_the_command_offers_what_is_installed() -> None:
    (to,) = (option for option in export.params if option.name == "to")
    assert list(getattr(to.type, "choices")) == list(installed(EXPORTS))  # noqa: B009 - of click's Choice
    refused = CliRunner().invoke(export, ["run", "--to", "parquet"])
    assert refused.exit_code == 2
    assert all(f"'{name}'" in refused.output for name in installed(EXPORTS))


def test_an_entry_point_is_loaded_only_when_its_format_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(self: EntryPoint) -> None:
        raise AssertionError(f"{self.name} was loaded")

    monkeypatch.setattr(EntryPoint, "load", load)
    assert list(FORMATS) == sorted(OURS)
    assert len(FORMATS) == len(OURS)
