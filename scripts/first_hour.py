"""Makes docs/tutorials/first-hour.md: a new user's first commands, with what they print and how long they take.

    python scripts/first_hour.py [--page docs/tutorials/first-hour.md]

It clones this repository into an empty directory, installs it, and runs every command of the page there. It stops at a
command whose exit code is not the expected one; then the page stays as it was.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
PAGE: Final = ROOT / "docs" / "tutorials" / "first-hour.md"

# What every run prints at its end: times and files. The page shows it for the first run alone.
SUMMARY: Final = re.compile(r"(time|schedule|per trajectory): |  runs/")

ENVIRONMENT: Final = '''\
class Guess:
    """Guess a digit."""

    def __init__(self, config):
        self.tries = config.get("tries", 5)

    def step(self, message_log_batch, metadata):
        observations, states, rewards, ended = [], [], [], []
        for log, state in zip(message_log_batch, metadata):
            guess = log[-1]["content"].strip()
            left = state["left"] - 1
            right = int(guess) == state["number"]
            observations.append({"role": "environment", "content": "yes\\n" if right else "no, try again\\n"})
            states.append({**state, "left": left})
            rewards.append(1.0 if right else 0.0)
            ended.append(right or left == 0)
        return observations, states, [["\\n"]] * len(ended), rewards, ended

    def global_post_process_and_metrics(self, batch):
        return batch, {}

    def generate_dataset(self, count, seed):
        return [
            {"prompt": "Guess a digit.\\n", "metadata": {"number": (seed + n) % 10, "left": self.tries}}
            for n in range(count)
        ]
'''

JOB: Final = """\
apiVersion: kuberoll.io/v1alpha1
kind: RolloutJob
metadata: {name: guess}
spec:
  generation:
    model: {source: examples/models/tiny-policy}
    engine: Simulated                 # no engine while the environment is written
    simulated: {responses: ["3\\n", "7\\n", "seven\\n"]}
    engineArgs: {dtype: float32, max_model_len: 512}
    sampling: {maxTokens: 8}
  environments:
    - {name: guess, entrypoint: "guessing:Guess"}
  dataset:
    source: {generator: {count: 8}}
    repeats: 4
"""

ROWS: Final = """\
{"prompt": "Guess a digit between 0 and 4.\\n", "metadata": {"number": 3, "left": 5}}
{"prompt": "Guess a digit between 5 and 9.\\n", "metadata": {"number": 7, "left": 5}}
{"promt": "Guess a digit.\\n", "metadata": {"number": 1, "left": 5}}
"""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A command of the page.

    Attributes:
        text: Paragraph before it.
        files: Files that are written before it, by their names, and shown.
        edits: Replacements in files, shown as what they remove and add.
        command: For the shell, in the clone.
        code: Expected exit code.
        interrupt_at: Pattern of a line of its output at which it is interrupted, as with Ctrl-C.
        background: It goes on until the page is finished; its output until this pattern is shown.
        lines: Maximum number of lines of output to show.
    """

    text: str
    command: str
    files: dict[str, str] = field(default_factory=dict)
    edits: dict[str, tuple[str, str]] = field(default_factory=dict)
    code: int = 0
    interrupt_at: str | None = None
    background: str | None = None
    lines: int = 40


SECTIONS: Final[dict[str, Sequence[Step]]] = {
    "Install": [
        Step(
            text="Everything that a machine without a GPU needs:",
            command="make install",
            lines=6,
        ),
    ],
    "The demo": [
        Step(
            text="A tiny policy that was trained for it plays 256 sliding puzzles, with vLLM on the CPU:",
            command="make demo",
        ),
        Step(
            text="Some of its trajectories:",
            command=".venv/bin/kuberoll show runs/demo-* --limit 5",
        ),
    ],
    "An environment of your own, with a bug": [
        Step(
            text="An environment is a class with two methods ([environments](../reference/environments.md)):",
            files={"guessing.py": ENVIRONMENT, "job.yaml": JOB},
            command=".venv/bin/kuberoll run job.yaml --output runs/bug",
            code=1,
        ),
        Step(
            text="One failed sample, with its dataset row and the traceback:",
            command=".venv/bin/kuberoll show runs/bug --failed --limit 1",
            lines=60,
        ),
    ],
    "Its mending": [
        Step(
            text="A response that is not a number is a wrong guess:",
            edits={"guessing.py": ("int(guess) == state", 'guess.isdigit() and int(guess) == state')},
            command=".venv/bin/kuberoll run job.yaml --output runs/mended",
        ),
    ],
    "A dataset of your own": [
        Step(
            text="Rows in a file, one with a mistake:",
            files={"prompts.jsonl": ROWS},
            edits={"job.yaml": ("generator: {count: 8}", "uri: prompts.jsonl")},
            command=".venv/bin/kuberoll run job.yaml --output runs/rows",
            code=2,
        ),
        Step(
            text="Without it:",
            edits={"prompts.jsonl": ('{"promt"', '{"prompt"')},
            command=".venv/bin/kuberoll run job.yaml --output runs/rows",
        ),
    ],
    "A model of your own": [
        Step(
            text="Any directory that vLLM loads, or a hub id; here one with random weights:",
            command=".venv/bin/python examples/train_tiny_policy.py --random --output my-model",
            lines=3,
        ),
        Step(
            text="`kuberoll serve` keeps an engine up, so that runs start at once:",
            edits={
                "job.yaml": (
                    "    model: {source: examples/models/tiny-policy}\n    engine: Simulated                 "
                    "# no engine while the environment is written\n"
                    '    simulated: {responses: ["3\\n", "7\\n", "seven\\n"]}\n',
                    "    model: {source: my-model}\n",
                )
            },
            command=".venv/bin/kuberoll serve job.yaml",
            background="Ctrl-C ends it",
        ),
        Step(
            text="In another terminal:",
            command=".venv/bin/kuberoll run job.yaml --output runs/model",
        ),
    ],
    "Interrupt and resume": [
        Step(
            text="Ctrl-C finishes what is in flight. Here it is pressed after the first trajectories:",
            command=".venv/bin/kuberoll run job.yaml --output runs/long --set spec.dataset.repeats=2000",
            code=130,
            interrupt_at=r"^[1-9]\d*/",
        ),
        Step(
            text="The same command with `--resume` runs the others:",
            command=".venv/bin/kuberoll run job.yaml --output runs/long --set spec.dataset.repeats=2000 --resume",
        ),
    ],
    "The report": [
        Step(
            text="Each run's `report.html` has all its trajectories ([inspecting](../how-to/inspecting.md)). "
            "`kuberoll report` makes it again:",
            command=".venv/bin/kuberoll report runs/bug --output bug.html",
        ),
    ],
}  # fmt: skip


class Transcript:
    """The commands in their clone, and the page that they make."""

    def __init__(self, clone: Path) -> None:
        self._clone = clone
        self._page: list[str] = []
        self._background: list[subprocess.Popen[str]] = []
        self._seconds: list[tuple[str, float]] = []
        self._summarized = False

    def run(self) -> str:
        """Run all steps; return the page."""
        try:
            for title, steps in SECTIONS.items():
                self._page.append(f"## {title}\n")
                began = time.perf_counter()
                for step in steps:
                    self._run(step)
                self._seconds.append((title, time.perf_counter() - began))
        finally:
            for process in self._background:
                process.send_signal(signal.SIGINT)
                process.wait()
        return "\n".join([self._head(), *self._page])

    def _run(self, step: Step) -> None:
        self._page.append(step.text + "\n")
        for name, contents in step.files.items():
            (self._clone / name).write_text(contents)
            self._page.append(f"`{name}`:\n\n```{_language(name)}\n{contents}```\n")
        for name, (before, after) in step.edits.items():
            path = self._clone / name
            text = path.read_text()
            if text.count(before) != 1:
                raise SystemExit(f"{name} does not contain once: {before}")
            path.write_text(text.replace(before, after))
            self._page.append(f"`{name}`:\n\n```diff\n{_difference(text, path.read_text())}```\n")
        code, output, seconds = self._execute(step)
        if code not in (None, step.code):
            raise SystemExit(f"$ {step.command}\n{output}\nexit code {code}, expected {step.code}")
        lines = self._clean(output)
        if self._summarized:
            lines = _without_summary(lines)
        self._summarized |= any(SUMMARY.match(line) for line in lines)
        if len(lines) > step.lines:
            lines = ["...", *lines[-step.lines :]]
        exit_code = "" if code in (None, 0) else f", exit code {code}"
        shown = step.command.replace(".venv/bin/", "")
        self._page.append(f"```\n$ {shown}\n" + "\n".join(lines) + "\n```\n")
        self._page.append(f"*{seconds:.1f} s{exit_code}*\n")

    def _execute(self, step: Step) -> tuple[int | None, str, float]:
        """Run the command; return its exit code (None: it goes on), its output and its seconds."""
        began = time.perf_counter()
        process = subprocess.Popen(
            ["bash", "-c", f"exec {step.command}"],
            cwd=self._clone,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, "COLUMNS": "100", "XDG_STATE_HOME": str(self._clone.parent / "state")},
        )
        assert process.stdout is not None
        output = []
        for line in process.stdout:
            output.append(line)
            if step.interrupt_at is not None and re.search(step.interrupt_at, line):
                process.send_signal(signal.SIGINT)
            if step.background is not None and re.search(step.background, line):
                self._background.append(process)
                return None, "".join(output), time.perf_counter() - began
        return process.wait(), "".join(output), time.perf_counter() - began

    def _clean(self, output: str) -> list[str]:
        text = output.replace(str(self._clone), "~/kuberoll").replace(
            str(self._clone.parent / "state"), "~/.local/state"
        )
        # pip warns of package sources that only this machine has.
        return [line.rstrip() for line in text.strip("\n").splitlines() if not line.startswith("WARNING: Location")]

    def _head(self) -> str:
        rows = "\n".join(f"| [{title}](#{_anchor(title)}) | {seconds:.0f} |" for title, seconds in self._seconds)
        return (
            "# The first hour\n\n"
            "Your first commands, in a clone of this repository, with what they print. `scripts/first_hour.py` made "
            f"this page by running them on {datetime.now(UTC):%d %B %Y}, on {os.cpu_count()} cores ({_processor()}) "
            f"without a GPU, with Python {platform.python_version()} and a package mirror nearby.\n\n"
            f"| part | seconds |\n|---|---|\n{rows}\n"
        )


def _anchor(title: str) -> str:
    return re.sub(r"[^\w-]", "", title.lower().replace(" ", "-"))


def _without_summary(lines: Sequence[str]) -> list[str]:
    """The lines, with `...` in place of a summary."""
    kept: list[str] = []
    for line in lines:
        if not SUMMARY.match(line):
            kept.append(line)
        elif kept[-1:] != ["..."]:
            kept.append("...")
    return kept


def _language(name: str) -> str:
    return {".py": "python", ".yaml": "yaml", ".jsonl": "json"}[Path(name).suffix]


def _difference(before: str, after: str) -> str:
    old, new = before.splitlines(), after.splitlines()
    removed = [f"-{line}" for line in old if line not in new]
    added = [f"+{line}" for line in new if line not in old]
    return "\n".join([*removed, *added]) + "\n"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return re.sub(r"\(\w+\)", "", line.partition(": ")[2])
    return platform.machine()


def main() -> None:
    """Make the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--page", type=Path, default=PAGE)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="first-hour-") as directory:
        clone = Path(directory) / "kuberoll"
        subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
        page = Transcript(clone).run()
    arguments.page.write_text(page)
    sys.stdout.write(f"{arguments.page}\n")


if __name__ == "__main__":
    main()
