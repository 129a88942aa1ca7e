"""Run all attacks on the confinement of programs on this machine, and print what came of them as JSON: for containers.

python -m tests.environments.attack_here [supervise-signals]
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import sys
import tempfile
from pathlib import Path

from kuberoll_workers.environments.programs import Program, ProgramRunner
from tests.environments.attacks import LIMITED, REACHING, WITHOUT_EFFECT, Target, kinds_of, limits_of


def main() -> None:
    os.environ["KUBEROLL_TOKEN_GENERATE"] = "kuberoll-secret"
    faults: list[str] = []
    outcomes: dict[str, list[object]] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        ProgramRunner(parallel=2, supervise_signals="supervise-signals" in sys.argv) as runner,
    ):
        file = Path(folder, "generation.json")
        file.write_text("kuberoll-secret")
        with (
            socket.create_server(("127.0.0.1", 0)) as tcp,
            socket.socket(socket.AF_UNIX) as abstract,
            socket.socket(socket.AF_UNIX) as named,
        ):
            abstract.bind("\0kuberoll")
            named.bind(f"{folder}/socket")
            for item in (abstract, named):
                item.listen()
            target = Target(
                file=str(file),
                directory=folder,
                process=os.getpid(),
                port=tcp.getsockname()[1],
                abstract="kuberoll",
                path=named.getsockname(),
            )
            before = (file.stat().st_mode, Path(folder).stat().st_mode, file.stat().st_mtime)
            sources = {**REACHING, **WITHOUT_EFFECT}
            programs = {name: text.format(**dataclasses.asdict(target)) for name, text in sources.items()}
            programs |= {name: source for name, (source, _) in LIMITED.items()}
            done = runner.run_all([Program.python(source, limits=limits_of(name)) for name, source in programs.items()])
        for name, outcome in zip(programs, done, strict=True):
            outcomes[name] = [outcome.kind, outcome.exit_code, outcome.stdout[-200:], outcome.stderr[-200:]]
            if outcome.kind not in kinds_of(name):
                faults.append(f"{name}: ended as {outcome.kind}")
            if "REACHED" in outcome.stdout or "kuberoll-secret" in outcome.stdout:
                faults.append(f"{name}: reached what it wanted")
        if before != (file.stat().st_mode, Path(folder).stat().st_mode, file.stat().st_mtime):
            faults.append("the mode or the time of a file was changed")
        if file.read_text() != "kuberoll-secret" or sorted(os.listdir(folder)) != ["generation.json", "socket"]:
            faults.append("a file was changed")
    left = [name for name in os.listdir(tempfile.gettempdir()) if name.startswith("kuberoll-program-")]
    faults += [f"{name} was left" for name in left]
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            if b"main.py" in Path(f"/proc/{name}/cmdline").read_bytes():
                faults.append(f"process {name} was left")
        except OSError:
            continue
    print(json.dumps({"user": os.getuid(), "faults": faults, "outcomes": outcomes}))


if __name__ == "__main__":
    main()
