"""The commands `kuberoll env`, as processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from click.testing import CliRunner

from kuberoll_workers.authoring.template import NameRefused, Names
from kuberoll_workers.commands.env import env
from kuberoll_workers.environments import BUILT_INS, LIBRARIES

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow

TINY = ROOT / "examples" / "models" / "tiny-policy"
COMMAND = [sys.executable, "-c", "from kuberoll_api.cli import main; main()"]


def kuberoll(*arguments: str, at: Path, given: str = "", code: int = 0, **variables: str) -> str:
    """Output of a command, standard error included, with these environment variables beside those of the tests."""
    done = subprocess.run(
        [*COMMAND, *arguments],
        cwd=at,
        input=given,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        env={**os.environ, "COLUMNS": "120", **variables},
        check=False,
    )
    assert done.returncode == code, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a new environment."""
    directory = tmp_path_factory.mktemp("new")
    kuberoll("env", "new", "guess-word", at=directory)
    return directory


def test_list_names_all_types_with_their_metadata_and_libraries(tmp_path: Path) -> None:
    text = kuberoll("env", "list", at=tmp_path)
    names = [line for line in text.splitlines() if line in {*BUILT_INS, *LIBRARIES}]
    assert names == [*sorted(BUILT_INS), *sorted(LIBRARIES)]
    assert "metadata.board: rows of tiles, 0 the gap" in text
    assert f"    gymnasium {version('gymnasium')} is installed\n" in text


def test_list_says_how_a_missing_library_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", missing)
    text = CliRunner().invoke(env, ["list"]).output
    assert "    skyrl-gym is not installed: pip install 'kuberoll[skyrl-gym]'\n" in text


class TestNew:
    def test_what_it_writes_is_valid(self, written: Path) -> None:
        names = ["guess_word.py", "guess_word.yaml", "simulated-model", "test_guess_word.py"]
        assert sorted(path.name for path in written.iterdir() if not path.name.startswith("_")) == names
        assert "ok (RolloutJob guess-word)" in kuberoll("validate", "guess_word.yaml", at=written)

    @pytest.mark.processes
    @pytest.mark.parametrize("isolation", ["Inline", "Process"])
    def test_it_passes_its_contract(self, written: Path, isolation: str) -> None:
        text = kuberoll("env", "test", "guess_word.yaml", "--isolation", isolation, at=written)
        assert f"all {11 if isolation == 'Inline' else 9} checks passed" in text
        assert "Error" not in text

    @pytest.mark.processes
    def test_its_own_test_passes(self, written: Path) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_guess_word.py"],
            cwd=written,
            stdout=subprocess.PIPE,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        assert "2 passed" in done.stdout

    @pytest.mark.processes
    def test_it_runs(self, written: Path, tmp_path: Path) -> None:
        kuberoll("run", "guess_word.yaml", "--output", str(tmp_path / "run"), "--metrics-port", "0", at=written)
        lines = (tmp_path / "run" / "shard-00000.jsonl").read_text().splitlines()
        assert len(lines) == 32
        assert {reward for line in lines for reward in [json.loads(line)["total_reward"]]} == {0.0, 1.0}

    def test_nothing_is_overwritten(self, written: Path, tmp_path: Path) -> None:
        mine = tmp_path / "test_maze.py"
        mine.write_text("mine")
        text = kuberoll("env", "new", "maze", at=tmp_path, code=2)
        assert "test_maze.py: already there; nothing was written" in text
        assert [path.name for path in tmp_path.iterdir()] == ["test_maze.py"]
        assert mine.read_text() == "mine"
        (tmp_path / "other" / "simulated-model").mkdir(parents=True)
        (tmp_path / "other" / "simulated-model" / "config.json").write_text("{}")
        assert "config.json: already there" in kuberoll("env", "new", "maze", at=tmp_path / "other", code=2)

    def test_a_second_one_shares_the_tokenizer(self, written: Path) -> None:
        text = kuberoll("env", "new", "./second_one", at=written)
        try:
            assert "simulated-model" not in text
            assert "ok (RolloutJob second-one)" in kuberoll("validate", "second_one.yaml", at=written)
        finally:
            for name in ("second_one.py", "second_one.yaml", "test_second_one.py"):
                (written / name).unlink()

    def test_a_model_is_named_in_the_job(self, tmp_path: Path) -> None:
        kuberoll("env", "new", "deep/er/maze", "--model", "Qwen/Qwen2.5-0.5B-Instruct", at=tmp_path)
        assert 'source: "Qwen/Qwen2.5-0.5B-Instruct"' in (tmp_path / "deep" / "er" / "maze.yaml").read_text()
        assert not (tmp_path / "deep" / "er" / "simulated-model").exists()

    @pytest.mark.parametrize("name", ["random", "class", "kuberoll-x", "../x", "9lives", "Guess", "a--b", "a" * 41, ""])
    def test_a_bad_name_is_refused(self, name: str) -> None:
        with pytest.raises(NameRefused):
            Names.of(name)


BROKEN = """
class Guess:
    def __init__(self, config):
        self.tries = config.get("tries", 5)

    def step(self, logs, metadata):
        right = [int(log[-1]["content"]) == state["number"] for log, state in zip(logs, metadata)]
        texts = [{"role": "environment", "content": "yes" if yes else "no"} for yes in right]
        return texts, None, None, [float(yes) for yes in right], [True] * len(right)

    def global_post_process_and_metrics(self, batch):
        return batch, {}
"""
ECHO = """
class Guess:
    def __init__(self, config):
        pass

    def step(self, logs, metadata):
        texts = [{"role": "environment", "content": repr(log[-1]["content"])} for log in logs]
        return texts, None, None, [0.0] * len(logs), [True] * len(logs)

    def global_post_process_and_metrics(self, batch):
        return batch, {}
"""
ROWS = '{"prompt": "Which number?", "metadata": {"number": 1}}\n{"prompt": "And now?", "metadata": {"number": 2}}\n'


@pytest.fixture
def guessing(tmp_path: Path) -> Path:
    """A directory with an environment that cannot read words, and rows for it."""
    (tmp_path / "guessing.py").write_text(BROKEN)
    (tmp_path / "rows.jsonl").write_text(ROWS)
    return tmp_path


class TestTest:
    def test_a_failure_is_reported_with_its_input_and_line(self, guessing: Path) -> None:
        text = kuberoll("env", "test", "guessing:Guess", "--dataset", "rows.jsonl", at=guessing, code=1)
        lines = text.splitlines()
        [failed] = [number for number, line in enumerate(lines) if line.startswith("FAIL")]
        assert "step raised ValueError: invalid literal for int() with base 10: 'The answer is" in lines[failed]
        assert lines[failed + 1].split() == ["row:", "rows.jsonl:1,", "metadata", '{"number":1}']
        assert lines[failed + 2].strip() == r"turn 1:   response 'The answer is \\boxed{1}.'"
        assert lines[failed + 3].strip() == "guessing.py:7 in step"
        assert lines[-1].startswith("1 failed, ")

    def test_without_rows_it_says_how_to_give_some(self, guessing: Path) -> None:
        text = kuberoll("env", "test", "guessing:Guess", at=guessing, code=1)
        assert "the environment has no generate_dataset: give rows with --dataset rows.jsonl" in text

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["nothing"], "there is no built-in environment 'nothing'"),
            (["calculater"], "did you mean 'calculator'"),
            (["missing:Class"], "there is no module 'missing'"),
            (["guessing:Gess"], "did you mean 'Guess'"),
            (["job.yaml"], "job.yaml"),
            (["math", "--config", "{"], "--config: it is not JSON"),
            (["math", "--config", "[]"], "--config: it must be a JSON object"),
            (["math", "--skip", "all"], "--skip all: the checks are creation, "),
            (["math", "--environment", "math"], "--environment and --set are for a manifest"),
        ],
    )
    def test_a_wrong_call_says_what_is_wrong(self, guessing: Path, arguments: list[str], message: str) -> None:
        text = " ".join(kuberoll("env", "test", *arguments, at=guessing, code=2).split())
        assert message in text
        assert "Traceback" not in text

    def test_a_config_is_checked(self, tmp_path: Path) -> None:
        text = kuberoll("env", "test", "sliding_puzzle", "--config", '{"sise": 2}', at=tmp_path, code=1)
        assert "FAIL  creation     environment 'sliding_puzzle': config.sise: unknown; did you mean size?" in text

    def test_one_of_several_environments_is_named(self) -> None:
        job = str(ROOT / "examples" / "mixed" / "rolloutjob.yaml")
        assert "--environment: the job has several" in kuberoll("env", "test", job, at=ROOT, code=2)
        text = kuberoll(
            "env", "test", job, "--environment", "calculator", "--isolation", "Inline", "--skip", "nonsense", at=ROOT
        )
        assert "skip  nonsense     left out" in text
        assert "all 11 checks passed" in text

    @pytest.mark.processes
    def test_a_step_that_hangs_is_reported(self, guessing: Path) -> None:
        (guessing / "hanging.py").write_text(
            BROKEN.replace("        right", "        import time; time.sleep(99)\n        right")
        )
        options = ["--dataset", "rows.jsonl", "--isolation", "Process", "--timeout", "0.5", "--skip", "nonsense"]
        text = kuberoll("env", "test", "hanging:Guess", *options, at=guessing, code=1)
        assert "FAIL  returns      step took longer than" in text


class TestPlay:
    def test_an_episode_with_several_turns(self, written: Path) -> None:
        # The numbers of row 1 are those of the seed 0: the answer is found by the hints.
        given = "".join(f"{number}\n" for number in range(10))
        fields = ["spec.environments[0].config.guesses=10", "spec.rollout.maxTurns=20"]
        options = ["--row", "1", *(part for field in fields for part in ("--set", field))]
        text = kuberoll("env", "play", "guess_word.yaml", *options, at=written, given=given + ":quit\n")
        assert text.startswith("--- prompt of generated row 1 of environment 'guess-word'\n[user]\nGuess my number")
        assert "--- your response (one line; :help)" in text
        assert "Right.\n--- reward 1, 1 in all\n--- the episode ended: reward 1 after" in text

    def test_commands(self, tmp_path: Path) -> None:
        given = ":help\n:state\n<action>view</action>\n:state\n:restart\n:state\n:quit\n"
        text = kuberoll("env", "play", "sliding_puzzle", "--config", '{"size": 2}', at=tmp_path, given=given)
        assert ":restart  begin again" in text
        assert [line.strip(", ") for line in text.splitlines() if '"moves"' in line] == [
            '"moves": 0',
            '"moves": 1',
            '"moves": 0',
        ]
        assert text.count("--- prompt of generated row 0") == 2

    def test_a_response_of_several_lines_ends_with_an_empty_one_or_the_input(self, tmp_path: Path) -> None:
        given = "First:\nit is so.\n\n:restart\nSecond:\n\\boxed{1}"
        text = kuberoll("env", "play", "math", "--seed", "3", at=tmp_path, given=given)
        assert text.count("--- turn 1: observation (environment)\n\nWrong.") == 2
        assert text.count("the episode ended") == 2
        assert "--- answer '1'" in text

    def test_tools_and_calls_are_shown(self, tmp_path: Path) -> None:
        shutil.copy(ROOT / "tests" / "environments" / "calling.py", tmp_path / "calling.py")
        (tmp_path / "rows.jsonl").write_text('{"prompt": "Two pears.", "metadata": {"wanted": {"pear": 2}}}\n')
        call = '<tool_call>{"name": "buy", "arguments": {"item": "pear", "count": 2}}</tool_call>'
        text = kuberoll(
            "env", "play", "calling:Shop", "--dataset", "rows.jsonl", at=tmp_path,
            given=f"{call}\n\n<tool_call>{{\n\nDone.\n\n:quit\n",
        )  # fmt: skip
        assert '[tool 1]\n{"name":"price","description":"Price of an item, in cents."' in text
        assert '--- call buy({"item": "pear", "count": 2})' in text
        assert "[tool] 2 x pear" in text
        assert "--- a call that cannot be read: it is not JSON: Expecting property name" in text
        assert "--- the episode ended: reward 1 after 3 turns" in text

    def test_text_after_the_stop_string_is_not_the_policy_s(self, tmp_path: Path) -> None:
        (tmp_path / "echo.py").write_text(ECHO)
        (tmp_path / "rows.jsonl").write_text('{"prompt": "?", "metadata": {"number": 1}, "stop_strings": ["</a>"]}')
        text = kuberoll(
            "env", "play", "echo:Guess", "--dataset", "rows.jsonl", at=tmp_path, given="<a>\nx</a> and more\n"
        )
        assert "'<a>\\nx</a>'" in text

    def test_the_prompt_as_a_model_s_template_writes_it(self, tmp_path: Path) -> None:
        text = kuberoll("env", "play", "math", "--tokenizer", str(TINY), at=tmp_path)
        assert text.splitlines()[1].startswith("<|begin|><|user|>What is ")
        assert "<|assistant|>" in text
        # Where there is no network, the hub's own client asks for most of a minute.
        missing = kuberoll(
            "env", "play", "math", "--tokenizer", "nowhere/none", at=tmp_path, code=2, HF_HUB_OFFLINE="1"
        )
        assert "--tokenizer nowhere/none" in missing

    def test_observations_as_a_model_s_template_writes_them(self, written: Path) -> None:
        options = ["--tokenizer", "simulated-model", "--set", "spec.rollout.observationTemplate=ChatTemplate"]
        text = kuberoll("env", "play", "guess_word.yaml", *options, at=written, given="many\n")
        assert "<|end|><|environment|>Write a whole number.\n<|end|><|assistant|>" in text

    def test_the_prompt_as_the_job_s_template_writes_it(self, written: Path) -> None:
        own = "{% for m in messages %}<|system|>({{ m.role }}) {{ m.content }}{% endfor %}<|assistant|>"
        field = "spec.generation.model.chatTemplate"
        options = ["--tokenizer", "simulated-model", "--set", f"{field}={json.dumps(own)}"]
        text = kuberoll("env", "play", "guess_word.yaml", *options, at=written, given="")
        assert "<|system|>(user) " in text
        options = ["--tokenizer", "simulated-model", "--set", f"{field}={json.dumps('{{ messages')}"]
        text = kuberoll("env", "play", "guess_word.yaml", *options, at=written, code=2)
        assert f"{field}: it is not Jinja: line 1" in text

    def test_a_failure_ends_it_with_the_line(self, guessing: Path) -> None:
        text = kuberoll("env", "play", "guessing:Guess", "--dataset", "rows.jsonl", "--row", "1", at=guessing,
                        given="two\n\n", code=1)  # fmt: skip
        assert "[user]\nAnd now?" in text
        assert "step raised ValueError: invalid literal for int() with base 10: 'two'\n  guessing.py:7 in step" in text

    def test_a_row_that_is_not_there(self, guessing: Path) -> None:
        text = kuberoll("env", "play", "guessing:Guess", "--dataset", "rows.jsonl", "--row", "2", at=guessing, code=2)
        assert text == "--row 2: there are only 2 rows, counted from 0\n"

    def test_an_environment_s_text_cannot_move_the_cursor(self, tmp_path: Path) -> None:
        (tmp_path / "rows.jsonl").write_text('{"prompt": "\\u001b[2Jgone", "metadata": {"ground_truth": "1"}}')
        text = kuberoll("env", "play", "math", "--dataset", "rows.jsonl", at=tmp_path)
        assert "\x1b" not in text
        assert "␛[2Jgone" in text

    def test_a_seed_gives_other_rows(self, written: Path, tmp_path: Path) -> None:
        for target in ("guess_word.yaml", "guess_word:GuessWord"):
            texts = [
                kuberoll("env", "play", target, *seed, at=written, given=":state\n")
                for seed in ([], ["--seed", "0"], ["--seed", "1"])
            ]
            assert texts[0] == texts[1] != texts[2]
