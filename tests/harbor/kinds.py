"""Small tasks of many kinds in Harbor's format, with images that need neither a builder nor a registry.

With its solution each is worth 1, and without an agent 0.
"""

from __future__ import annotations

import gzip
import io
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.harbor.writing import write_task
from tests.sandboxes.layouts import BUSYBOX, busybox_layout, write_layout
from tests.sandboxes.programs import NoCompiler, musl_files

REWARD: Final = "/logs/verifier/reward.txt"
DONE: Final = "#!/bin/sh\necho done > done\n"
_MEBIBYTE: Final = 1 << 20


class Impossible(Exception):
    """This machine cannot make an image; the message says why."""


def scored(condition: str, first: str = "#!/bin/sh\n") -> str:
    """Tests that are worth 1 under a condition of the shell, and else 0."""
    return f"{first}if {condition}; then r=1; else r=0; fi\necho $r > {REWARD}\n"


IS_DONE: Final = '[ "$(cat /work/done)" = done ]'


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of task.

    Attributes:
        image: Name of its image, of `IMAGES`.
        toml: Of task.toml, what comes after the table [environment] has begun.
        test, solve: The scripts; None: there are others among the files.
        files: Further files.
    """

    image: str = "busybox"
    toml: str = ""
    test: str | None = scored(IS_DONE)
    solve: str | None = DONE
    files: Mapping[str, str] = field(default_factory=dict)


STEPS: Final = {
    "steps/first/instruction.md": "Do the first.\n",
    "steps/first/tests/test.sh": scored("[ -e /work/first ]"),
    "steps/first/solution/solve.sh": "#!/bin/sh\ntouch first\n",
    "steps/second/instruction.md": "Do the second.\n",
    "steps/second/tests/test.sh": scored("[ -e /work/first ] && [ -e /work/second ]"),
    "steps/second/solution/solve.sh": "#!/bin/sh\ntouch second\n",
}

KINDS: Final[dict[str, Kind]] = {
    # Rewards.
    "number": Kind(),
    "object": Kind(
        test='#!/bin/sh\n[ -e /work/done ] && r=1 || r=0\necho "{\\"reward\\": $r}" > /logs/verifier/reward.json\n'
    ),
    "parts": Kind(
        test="#!/bin/sh\n[ -e /work/done ] && r=1 || r=0\n"
        'echo "{\\"right\\": 0.$((r * 75)), \\"style\\": 0.$((r * 25))}" > /logs/verifier/reward.json\n'
    ),
    "object-first": Kind(
        test=f"#!/bin/sh\n[ -e /work/done ] && r=1 || r=0\necho 0.5 > {REWARD}\n"
        'echo "{\\"reward\\": $r, \\"other\\": 7}" > /logs/verifier/reward.json\n'
    ),
    "exit-code": Kind(test=scored(IS_DONE) + "exit 3\n"),
    # Steps.
    "mean": Kind(test=None, solve=None, toml='[[steps]]\nname = "first"\n[[steps]]\nname = "second"\n', files=STEPS),
    "final": Kind(
        test=None,
        solve=None,
        toml='[[steps]]\nname = "first"\nmin_reward = 1.0\n[[steps]]\nname = "second"\n',
        files={**STEPS, "head.toml": 'multi_step_reward_strategy = "final"\n'},
    ),
    "prepared-steps": Kind(
        solve=None,
        toml='[[steps]]\nname = "only one"\n[steps.healthcheck]\ncommand = "test -e /work/ready"\n',
        test=scored(f"{IS_DONE} && [ -e /work/ready ]"),
        files={
            "steps/only one/instruction.md": "Do it.\n",
            "steps/only one/workdir/setup.sh": "#!/bin/sh\ncp given ready\n",
            "steps/only one/workdir/given": "given\n",
            "steps/only one/solution/solve.sh": "#!/bin/sh\ncmp given ready && echo done > done\n",
        },
    ),
    # A machine of the tests' own.
    "own-machine": Kind(
        toml='[verifier]\nenvironment_mode = "separate"\n',
        solve="#!/bin/sh\necho done > /logs/artifacts/done; touch left\n",
        test=scored('[ "$(cat /logs/artifacts/done)" = done ] && [ ! -e /work/left ]'),
    ),
    "own-machine-artifacts": Kind(
        toml='[verifier]\nenvironment_mode = "separate"\n',
        solve="#!/bin/sh\nmkdir -p out/in; echo done > out/in/done; echo no > out/in/a.tmp; echo report > report.txt\n",
        test=scored(
            '[ "$(cat /work/out/in/done)" = done ] && [ ! -e /work/out/in/a.tmp ] && '
            '[ "$(cat /work/report.txt)" = report ]'
        ),
        files={
            "head.toml": 'artifacts = ["/work/report.txt", "/work/none", '
            '{ source = "/work/out", exclude = ["*.tmp"] }]\n'
        },
    ),
    "own-machine-files": Kind(
        toml='[verifier]\nenvironment_mode = "separate"\n',
        solve="#!/bin/sh\ncp question /logs/artifacts/answer\n",
        test=scored("cmp /work/question /logs/artifacts/answer"),
        files={"environment/question": "why\n"},
    ),
    # Users.
    "agent-user": Kind(
        toml='[agent]\nuser = "app"\n',
        solve="#!/bin/sh\ncat /root/secret && exit 1\n[ $(id -u) = 1000 ] && echo done > /tmp/done\n",
        test=scored('[ "$(cat /tmp/done)" = done ] && [ "$(stat -c %U /tmp/done)" = app ] && [ "$(id -u)" = 0 ]'),
    ),
    "image-user": Kind(
        image="user",
        test=scored('[ "$(cat /home/app/done)" = done ] && [ "$(id -u)" = 1000 ]'),
    ),
    "verifier-user": Kind(
        toml='[verifier]\nuser = 1000\n[verifier.env]\nLEVEL = "high"\n',
        test=scored(f'{IS_DONE} && [ "$(id -u) $LEVEL" = "1000 high" ] && [ ! -w /work ]'),
    ),
    # The machine.
    "health": Kind(
        toml='[environment.healthcheck]\ncommand = "test -e /tmp/up || { touch /tmp/up; false; }"\ninterval_sec = 0.1\n'
    ),
    "collected": Kind(
        toml='[[verifier.collect]]\ncommand = "cp /work/done /logs/artifacts/state"\n',
        test=scored('[ "$(cat /logs/artifacts/state)" = done ]'),
    ),
    "variables": Kind(
        toml='workdir = "/srv/new place"\n[environment.env]\nPLACE = "${NOWHERE:-here}"\n'
        '[solution.env]\nMODE = "fast"\n',
        solve='#!/bin/sh\necho "$PLACE $MODE" > done\n',
        test=scored('[ "$(cat "/srv/new place/done") $PLACE$MODE" = "here fast here" ]'),
    ),
    "uploaded": Kind(
        files={"environment/in/given": "given\n"},
        solve="#!/bin/sh\ncp in/given done\n",
        test=scored("cmp /work/in/given /work/done"),
    ),
    "left-out": Kind(
        files={
            "tests/.harborignore": "*.log\n/notes/\n",
            "tests/old.log": "x",
            "tests/notes/a": "x",
            "tests/is right": "done\n",
            "tests/größe/leer": "",
        },
        test=scored(
            "cmp '/tests/is right' /work/done && [ -e /tests/größe/leer ] && "
            "[ ! -e /tests/old.log ] && [ ! -e /tests/notes ]"
        ),
    ),
    "background": Kind(
        solve="#!/bin/sh\nsleep 1000 &\nsetsid sleep 1001 &\necho done > done\n",
        test=scored(f'{IS_DONE} && ! ps | grep -q "[s]leep 100"'),
    ),
    "no-first-line": Kind(solve="echo done > done\n", test=scored(IS_DONE, first="")),
    "temporary-disk": Kind(
        toml="memory_mb = 512\nstorage_mb = 64\ncpus = 1\n",
        solve="#!/bin/sh\ndd if=/dev/zero of=zeros bs=1048576 count=16 && echo done > done\n",
        test=scored(f"{IS_DONE} && [ $(stat -c %s /work/zeros) = 16777216 ]"),
    ),
    # Images.
    "entrypoint": Kind(image="entrypoint", test=scored(f"{IS_DONE} && [ ! -e /ran ]")),
    "no-shell": Kind(
        image="no-shell",
        solve="#!/opt/busybox sh\necho done > /work/done\n",
        test=f'#!/opt/busybox sh\n[ "$(/opt/busybox cat /work/done)" = done ] && r=1 || r=0\necho $r > {REWARD}\n',
    ),
    "large-layers": Kind(
        image="large",
        solve="#!/bin/sh\ntail -c 5 /data/1.bin > done\n",
        test=scored('[ $(stat -c %s /data/0.bin) = 104857604 ] && [ "$(cat /work/done)" = 1end ]'),
    ),
    "many-layers": Kind(
        image="layers",
        solve="#!/bin/sh\nls -R /data > done\n",
        test=scored(
            "[ -s /work/done ] && [ ! -e /data/removed ] && [ ! -e /data/hidden/old ] && [ -e /data/hidden/new ] && "
            "[ -f /data/turned ] && [ /data/19 -ef /data/linked ] && [ $(cat /data/counter) = 39 ]"
        ),
    ),
    "musl": Kind(
        image="musl",
        solve="#!/bin/sh\nhello > done\n",
        test=scored('[ "$(cat /work/done)" = "hello from musl" ]'),
    ),
    "node": Kind(
        image="node",
        solve="#!/usr/bin/env node\nrequire('fs').writeFileSync('done', 'done\\n')\n",
        test=f"#!/usr/bin/env node\nconst fs = require('fs')\n"
        f"fs.writeFileSync('{REWARD}', String(Number(fs.existsSync('/work/done'))))\n",
    ),
    "go": Kind(image="go", solve="#!/bin/sh\nworker done\n", test=scored(IS_DONE)),
    "python": Kind(
        image="python",
        toml='workdir = "/work"\n',
        solve="#!/usr/bin/env python3\nfrom pathlib import Path\nPath('done').write_text('done')\n",
        test="#!/bin/bash\nset -euo pipefail\npython3 - <<'END'\nfrom pathlib import Path\n"
        f"Path('{REWARD}').write_text(str(int(Path('/work/done').exists())))\nEND\n",
    ),
}


def write_tasks(
    directory: Path,
    *,
    images: Mapping[str, str] | None = None,
    publish: Callable[[str, str], str] = lambda _, reference: reference,
) -> dict[str, str]:
    """Write the tasks and their images.

    Args:
        directory: The tasks come into `tasks` there.
        images: References of further images, by their names.
        publish: Has an image, by its name and reference, where machines can have it; returns its reference there.

    Returns:
        Why tasks are left out, by their names.
    """
    made: dict[str, str] = dict(images or {})
    left: dict[str, str] = {}
    for name, kind in KINDS.items():
        try:
            if kind.image not in made:
                made[kind.image] = publish(kind.image, _image(kind.image, directory / "images" / kind.image))
        except Impossible as problem:
            left[name] = str(problem)
            continue
        write_kind(directory / "tasks" / name, name, kind, made[kind.image])
    return left


def write_kind(directory: Path, name: str, kind: Kind, image: str) -> None:
    """Write a task of a kind, with the reference of its image."""
    files = dict(kind.files)
    environment = f'[environment]\ndocker_image = "{image}"\nnetwork_mode = "no-network"\n'
    head = files.pop("head.toml", "")
    files["task.toml"] = f'schema_version = "1.4"\n{head}[task]\nname = "kinds/{name}"\n{environment}{kind.toml}'
    if "[[steps]]" not in kind.toml:
        files["instruction.md"] = "Do it.\n"
    if kind.test is not None:
        files["tests/test.sh"] = kind.test
    if kind.solve is not None:
        files["solution/solve.sh"] = kind.solve
    write_task(directory, files)


def _image(name: str, directory: Path) -> str:
    """Make an image.

    Raises:
        Impossible: This machine cannot.
    """
    if name not in _IMAGES:
        raise Impossible(f"no image {name} was given")
    directory.mkdir(parents=True)
    return _IMAGES[name](directory)


def _user(directory: Path) -> str:
    return busybox_layout(directory, User="app", WorkingDir="/home/app", Env=["PATH=/bin"])


def _busybox(directory: Path) -> str:
    return busybox_layout(directory, Env=["PATH=/bin"])


def _no_shell(directory: Path) -> str:
    """One program, and no shell by any name that is known."""
    assert BUSYBOX is not None
    layer = _layer(
        {"opt/busybox": Path(BUSYBOX).read_bytes(), "work/": b"", "tmp/": b"", "etc/passwd": b"root:x:0:0::/:\n"}
    )
    return write_layout(directory, [layer], {"WorkingDir": "/work"})


def _large(directory: Path) -> str:
    """Three layers of 100 MiB each, of little but zeros."""
    base = directory / "base"
    busybox_layout(base)
    layers = [_first_layer(base)]
    layers += [_layer({f"data/{number}.bin": bytes(100 * _MEBIBYTE) + f"{number}end".encode()}) for number in range(3)]
    shutil.rmtree(base)
    return write_layout(directory, layers, {"WorkingDir": "/work"}, packed=lambda data: gzip.compress(data, 1))


def _layers(directory: Path) -> str:
    """Forty layers: files that are replaced, removed, hidden with their directory, linked, and of another kind."""
    base = directory / "base"
    busybox_layout(base)
    layers = [_first_layer(base)]
    for number in range(40):
        files = {f"data/{number}": b"", "data/counter": str(number).encode()}
        if number == 3:
            files |= {"data/removed": b"x", "data/hidden/old": b"x", "data/turned/in": b"x"}
        if number == 7:
            files |= {
                "data/.wh.removed": b"",
                "data/hidden/.wh..wh..opq": b"",
                "data/hidden/new": b"",
                "data/turned": b"f",
            }
        layers.append(_layer(files, links={"data/linked": "data/19"} if number == 19 else {}))
    shutil.rmtree(base)
    return write_layout(directory, layers, {"WorkingDir": "/work"})


def _musl(directory: Path) -> str:
    try:
        return busybox_layout(directory / "image", files=musl_files(directory), Env=["PATH=/bin"])
    except NoCompiler as missing:
        raise Impossible(str(missing)) from missing


def _node(directory: Path) -> str:
    return busybox_layout(
        directory,
        files={**with_libraries("node", "usr/bin/node"), "usr/bin/env": '#!/bin/sh\nexec "$@"\n'},
        Env=["PATH=/usr/bin:/bin"],
    )


def _go(directory: Path) -> str:
    if shutil.which("go") is None:
        raise Impossible("no go")
    (directory / "main.go").write_text(
        'package main\nimport "os"\nfunc main() { os.WriteFile(os.Args[1], []byte("done\\n"), 0o644) }\n'
    )
    subprocess.run(
        ["go", "build", "-o", "worker", "main.go"], cwd=directory, check=True, env=_go_environment(directory)
    )
    files = {"bin/worker": (directory / "worker").read_bytes()}
    return busybox_layout(directory / "image", files=files, Env=["PATH=/bin"])


def _go_environment(directory: Path) -> dict[str, str]:
    return {**os.environ, "CGO_ENABLED": "0", "GOCACHE": str(directory / "cache"), "GO111MODULE": "off"}


_IMAGES: Final[dict[str, Callable[[Path], str]]] = {
    "busybox": _busybox,
    "user": _user,
    "entrypoint": lambda directory: busybox_layout(
        directory, Entrypoint=["/bin/touch", "/ran"], Cmd=["/ran"], Env=["PATH=/bin"]
    ),
    "no-shell": _no_shell,
    "large": _large,
    "layers": _layers,
    "musl": _musl,
    "node": _node,
    "go": _go,
}


def with_libraries(program: str, target: str) -> dict[str, bytes]:
    """A program of this machine and the libraries that it needs, by their paths.

    Raises:
        Impossible: It is not there.
    """
    if (found := shutil.which(program)) is None:
        raise Impossible(f"no {program}")
    said = subprocess.run(["ldd", found], capture_output=True, text=True, check=True).stdout
    libraries = re.findall(r"(/\S+) \(0x", said)
    return {target: Path(found).read_bytes(), **{path[1:]: Path(path).read_bytes() for path in libraries}}


def _first_layer(layout: Path) -> bytes:
    """The layer of a layout that has one: the largest of its files."""
    return max(
        (path for path in (layout / "blobs/sha256").iterdir()), key=lambda path: path.stat().st_size
    ).read_bytes()


def _layer(files: Mapping[str, bytes], links: Mapping[str, str] | None = None) -> bytes:
    """A layer; a name that ends with `/` is a directory, and links are hard ones."""
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name.rstrip("/"))
            member.mode = 0o755
            if name.endswith("/"):
                member.type = tarfile.DIRTYPE
            else:
                member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        for name, target in (links or {}).items():
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.LNKTYPE, target
            archive.addfile(member)
    return written.getvalue()
