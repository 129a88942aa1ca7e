"""The root of the `kuberoll` command."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from click.testing import CliRunner

from kuberoll_api.cli import SUMMARIES, main
from kuberoll_api.plugins import COMMANDS
from tests.api.support import VALID, edited

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("examples/*/rolloutjob.yaml"))


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory, made the current one, with a good and a broken manifest."""
    (tmp_path / "good.yaml").write_text(VALID)
    (tmp_path / "bad.yaml").write_text(edited("maxTurns: 20", "maxTurns: 0").replace("engine: VLLM", "engine: vllm"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("files")
def test_validate_a_good_file() -> None:
    result = CliRunner().invoke(main, ["validate", "good.yaml"])
    assert (result.exit_code, result.output) == (0, "good.yaml: ok (RolloutJob puzzles)\n")


@pytest.mark.usefixtures("files")
def test_validate_tells_every_mistake_of_every_file() -> None:
    result = CliRunner().invoke(main, ["validate", "bad.yaml", "good.yaml", "none.yaml"])
    assert result.exit_code == 2
    assert result.stdout == "good.yaml: ok (RolloutJob puzzles)\n"
    assert result.stderr == (
        'bad.yaml:9: spec.generation.engine: found the text "vllm"; it must be VLLM or Simulated; did you mean VLLM?\n'
        "bad.yaml:33: spec.rollout.maxTurns: found the number 0; it must be a whole number from 1 to 1000000\n"
        "none.yaml: the file does not exist\n"
    )


def test_validate_needs_a_file() -> None:
    result = CliRunner().invoke(main, ["validate"])
    assert result.exit_code == 2
    assert "Missing argument 'FILE...'" in result.stderr


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_examples_are_valid(example: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    result = CliRunner().invoke(main, ["validate", example])
    assert result.exit_code == 0, result.stderr
    assert result.output.startswith(f"{example}: ok (RolloutJob ")


def test_version() -> None:
    result = CliRunner().invoke(main, ["--version"])
    assert result.exit_code == 0
    assert result.output.startswith("kuberoll, version ")


def test_help_lists_own_commands_and_those_of_entry_points() -> None:
    result = CliRunner().invoke(main, ["--help"])
    assert result.exit_code == 0
    assert {"validate", "run", "get", "logs", "top"} <= {
        line.split()[0] for line in result.output.splitlines() if line.strip()
    }


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed distribution with five subcommands, four of which cannot be used."""
    metadata = tmp_path / "plugins-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        textwrap.dedent("""\
            Metadata-Version: 2.4
            Name: plugins
            Version: 1.0
            Requires-Dist: click>=8
            Requires-Dist: click>=8; extra == 'whole'
            Requires-Dist: no-such-distribution<2,>=1; extra == 'lacking'
            Requires-Dist: only-elsewhere; (sys_platform == 'amiga') and extra == 'whole'
            """)
    )
    (metadata / "entry_points.txt").write_text(
        textwrap.dedent("""\
            [kuberoll.commands]
            greet = kuberoll_whole:greet
            lack = kuberoll_lacking:lack
            broken = kuberoll_broken:broken
            number = kuberoll_whole:number
            part = kuberoll_whole:greet [lacking]
            """)
    )
    (tmp_path / "kuberoll_whole.py").write_text(
        "import click\n\n@click.command()\ndef greet():\n    'Greets.'\n    click.echo('hello')\n\nnumber = 3\n"
    )
    (tmp_path / "kuberoll_lacking.py").write_text("raise AssertionError('loaded though something is missing')\n")
    (tmp_path / "kuberoll_broken.py").write_text("import no_such_module.inside\n")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("plugins")
def test_a_command_of_an_entry_point_runs() -> None:
    result = CliRunner().invoke(main, ["greet"])
    assert (result.exit_code, result.output) == (0, "hello\n")


@pytest.mark.usefixtures("plugins")
@pytest.mark.parametrize("arguments", [[], ["--help"], ["file", "--set", "a=b", "-x"]])
@pytest.mark.parametrize(
    ("name", "missing", "extra"),
    [
        ("lack", "no-such-distribution", "lacking"),
        ("part", "no-such-distribution", "lacking"),
        ("broken", "no_such_module", "broken"),
    ],
)
def test_a_command_without_its_dependencies_says_how_to_install_them(
    name: str, missing: str, extra: str, arguments: list[str]
) -> None:
    result = CliRunner().invoke(main, [name, *arguments])
    assert result.exit_code == 2
    assert result.stderr == (
        f"`kuberoll {name}` needs {missing}, which is not installed: pip install 'kuberoll[{extra}]'\n"
    )


@pytest.mark.usefixtures("plugins")
def test_an_entry_point_that_is_no_command_is_a_fault_of_its_package() -> None:
    with pytest.raises(TypeError, match="kuberoll_whole:number is not a click command"):
        CliRunner().invoke(main, ["number"], catch_exceptions=False)


@pytest.mark.usefixtures("plugins")
def test_help_says_what_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kuberoll_whole.number", None, raising=False)
    from kuberoll_api import cli

    entries = cli._entries()
    monkeypatch.setattr(cli, "_entries", lambda: {name: entries[name] for name in ("greet", "lack")})
    result = CliRunner().invoke(main, ["--help"], terminal_width=100)
    assert result.exit_code == 0
    assert "greet     Greets." in result.output
    assert "lack      (not installed: pip install 'kuberoll[lacking]')" in result.output


def test_help_has_a_whole_line_for_each_command_and_imports_none() -> None:
    entries = importlib.metadata.entry_points(group=COMMANDS)
    assert {*main.commands, *(entry.name for entry in entries)} == set(SUMMARIES)
    heavy = ("kuberoll_workers", "kuberoll_operator", "pydantic")
    code = (
        "import sys; from kuberoll_api.cli import main; main(['--help'], standalone_mode=False); "
        f"print([name for name in sys.modules if name.startswith({heavy})])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.endswith("[]\n")
    assert all(summary in result.stdout for summary in SUMMARIES.values())


@pytest.mark.parametrize(
    ("name", "words"),
    [("runn", "there is no command runn; did you mean run?"), ("xylophone", "there is no command xylophone\n")],
)
def test_a_command_that_is_misspelled_gets_the_nearest_one(name: str, words: str) -> None:
    result = CliRunner().invoke(main, [name])
    assert result.exit_code == 2
    assert words in result.stderr


@pytest.mark.slow
def test_the_installed_command_is_this_one() -> None:
    command = Path(sys.executable).parent / "kuberoll"
    result = subprocess.run([command, "validate", "/none.yaml"], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (2, "/none.yaml: the file does not exist\n")
