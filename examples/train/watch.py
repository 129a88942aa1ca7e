"""Watch a policy learn: start the job, train on what it rolls out, and end both.

    python examples/train/watch.py --output runs/train

After Ctrl-C or a crash, `--resume` goes on where the training was. Other options are those of grpo.py.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from steps import read, waste

HERE = Path(__file__).parent
KUBEROLL = Path(sys.executable).with_name("kuberoll")


def main() -> None:
    arguments, others = _arguments()
    directory: Path = arguments.output
    if directory.exists() and not arguments.resume:
        sys.exit(f"{directory} is there already: name another --output, or go on with --resume")
    directory.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with running_job(directory, arguments.set) as job:
        wait_for_policy(directory, job)
        print(f"engine and job: {time.monotonic() - began:.0f} s; the job's log is {directory / 'run.log'}", flush=True)
        trainer = [sys.executable, str(HERE / "grpo.py"), str(directory), *others]
        try:
            code = train(trainer, job)
        except KeyboardInterrupt:
            sys.exit(f"interrupted; go on with --output {directory} --resume")
        if code and not job.poll():
            sys.exit(f"the trainer ended with exit code {code}; go on with --output {directory} --resume")
    if job.returncode:
        log = directory / "run.log"
        sys.exit(f"the job ended with exit code {job.returncode}: {log}; go on with --output {directory} --resume")
    steps = read(directory / "steps.jsonl")
    held_out = [step.held_out for step in steps if step.held_out is not None]
    if held_out:
        print(f"held-out puzzles: reward {held_out[0]:.3f} before, {held_out[-1]:.3f} after", end="; ")
    print(f"{100 * waste(steps):.1f} % of the tokens wasted; {time.monotonic() - began:.0f} s in all")
    print(f"  {directory / 'learning.svg'}\n  {directory / 'run' / 'report.html'}")


@contextmanager
def running_job(directory: Path, changes: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """`kuberoll run`, which finishes at the end, or is interrupted if the training was."""
    command = [str(KUBEROLL), "run", str(HERE / "rolloutjob.yaml"), "--output", str(directory / "run"), "--resume"]
    command += ["--metrics-port", "0", *(part for change in changes for part in ("--set", change))]
    # Of a job that was killed: its policy is gone.
    (directory / "run" / "policy.json").unlink(missing_ok=True)
    with (directory / "run.log").open("ab") as log:
        # In a group of its own: Ctrl-C is the trainer's, and the job ends after it.
        job = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            yield job
            job.wait()
        finally:
            if job.poll() is None:
                job.send_signal(signal.SIGINT)
                job.wait()


def train(command: list[str], job: subprocess.Popen[bytes]) -> int:
    """Run the trainer, and return its exit code.

    If the job dies it is killed: it would wait for a policy for minutes.
    """
    trainer = subprocess.Popen(command)
    try:
        while trainer.poll() is None and not job.poll():
            with suppress(subprocess.TimeoutExpired):
                trainer.wait(timeout=0.5)
    finally:
        trainer.kill()
        trainer.wait()
    return trainer.returncode


def wait_for_policy(directory: Path, job: subprocess.Popen[bytes]) -> None:
    """Wait until the job's policy answers."""
    while not (directory / "run" / "policy.json").exists():
        if job.poll() is not None:
            sys.exit(f"the job ended with exit code {job.returncode}:\n{(directory / 'run.log').read_text()}")
        time.sleep(0.2)


def _arguments() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="directory of the training")
    parser.add_argument("--resume", action="store_true", help="go on with the training in it")
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="change a field of the job")
    return parser.parse_known_args()


if __name__ == "__main__":
    main()
