"""The runtime that comes into a sandbox: an interpreter with a loader, libraries and modules of its own.

An image may have another C library than glibc, or none, and no Python. The dynamic loader is therefore started by its
path, with the directory of the libraries that it may use; the interpreter finds its modules beside itself. All of it is
one directory, which is mounted read-only at `PLACE`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import py_compile
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kuberoll_api.sandboxes import RUNTIME_DIRECTORY, RUNTIME_VARIABLE
from kuberoll_workers.sandboxes import guest
from kuberoll_workers.sandboxes.errors import SandboxUnavailable
from kuberoll_workers.sandboxes.guest.settings import VARIABLE, Settings

PLACE: Final = RUNTIME_DIRECTORY
"""Where the runtime is in a sandbox."""

_GUEST: Final = "kuberoll_guest"
_PROGRAM: Final = (
    f"from {_GUEST}.server import main; from {_GUEST}.settings import from_variable; main(from_variable())"
)
_IDENTIFICATION: Final = f"import sys; from {_GUEST}.settings import write_identity; write_identity(*sys.argv[1:])"
_INTERPRETER: Final = (
    *(f"{PLACE}/ld", "--library-path", f"{PLACE}/lib", f"{PLACE}/bin/python3"),
    # Neither variables nor directories of the image have a part in it.
    *("-I", "-S", "-B", "-c"),
)
# What the guest imports only when it needs it, beside what it imports at once.
_LATER: Final = ("tarfile", "encodings.ascii", "encodings.latin_1", "encodings.utf_8", "encodings.idna")
_COMPLETE: Final = "complete.json"


@dataclass(frozen=True, slots=True)
class Runtime:
    """A runtime.

    Attributes:
        directory: Where it is on this machine.
    """

    directory: Path

    @staticmethod
    def argv() -> list[str]:
        """The program that a sandbox begins with, and its arguments."""
        return [*_INTERPRETER, _PROGRAM]

    @staticmethod
    def identification() -> list[str]:
        """The program that writes whom it runs as to the files that are to be its last arguments."""
        return [*_INTERPRETER, _IDENTIFICATION]

    @staticmethod
    def environment(settings: Settings) -> dict[str, str]:
        """Variables of that program; they take the place of those that the loader would read of the image's."""
        return {VARIABLE: settings.encode(), "LD_PRELOAD": "", "LD_AUDIT": "", "GLIBC_TUNABLES": ""}

    @property
    def size(self) -> int:
        """Bytes of its files."""
        return sum(path.stat().st_size for path in self.directory.rglob("*") if path.is_file())


def find_runtime(cache: Path) -> Runtime:
    """The runtime of this release: the one that a variable names, or one that is made of this interpreter, once.

    Args:
        cache: Directory in which runtimes are kept.

    Raises:
        SandboxUnavailable: This interpreter cannot serve.
    """
    if place := os.environ.get(RUNTIME_VARIABLE):
        return Runtime(Path(place))
    if sys.platform != "linux":
        raise SandboxUnavailable(
            f"sandboxes on this machine need the Linux runtime of our worker image: set {RUNTIME_VARIABLE} to it"
        )
    directory = cache / f"runtime-{_digest()}"
    if not (directory / _COMPLETE).exists():
        cache.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix="runtime-", dir=cache))
        try:
            make_runtime(made)
            with contextlib.suppress(OSError):
                # Another process may have been faster.
                made.rename(directory)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    return Runtime(directory)


def make_runtime(directory: Path) -> None:
    """Make a runtime of this interpreter.

    Raises:
        SandboxUnavailable: It is no dynamic program for Linux.
    """
    python = Path(sys.executable).resolve()
    if (loader := _loader(python)) is None:
        raise SandboxUnavailable(f"{python} has no dynamic loader; use a Python that is linked dynamically")
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    modules = directory / "lib" / version
    dynamic = modules / "lib-dynload"
    dynamic.mkdir(parents=True)
    (directory / "bin").mkdir()
    # An image may have libraries for all programs (ld.so(8)), which are not for this one; both paths have one length.
    (directory / "ld").write_bytes(loader.read_bytes().replace(b"/etc/ld.so.preload\0", b"/.kuberoll/preload\0"))
    shutil.copy(python, directory / "bin" / "python3")
    libraries = set(_libraries(loader, python))
    source = Path(guest.__file__).parent
    (modules / _GUEST).mkdir()
    for path in sorted(source.glob("*.py")):
        _compile(path, modules / _GUEST / path.name)
    for name, path in _modules(source):
        if path.suffix == ".so":
            shutil.copy(path, dynamic / path.name)
            libraries.update(_libraries(loader, path))
        else:
            target = modules.joinpath(*name.split("."))
            target = target / "__init__.py" if path.name == "__init__.py" else target.with_suffix(".py")
            target.parent.mkdir(parents=True, exist_ok=True)
            _compile(path, target)
    for library in sorted(libraries):
        shutil.copy(library, directory / "lib" / library.name)
    (directory / _COMPLETE).write_text(json.dumps({"python": sys.version}))
    _open(directory)


def _open(directory: Path) -> None:
    """Let everybody read it, whatever the mask of this process is: keepers do so as other users."""
    with contextlib.suppress(PermissionError):
        # A volume's own directory is open to all.
        directory.chmod(0o755)
    for path in directory.rglob("*"):
        is_program = path.is_dir() or path.parent.name in ("bin", "lib") or path.name == "ld"
        path.chmod(0o755 if is_program else 0o644)


def _compile(source: Path, target: Path) -> None:
    """Put a module's code in place of its text: it is what an interpreter reads that may not write."""
    py_compile.compile(str(source), cfile=str(target.with_suffix(".pyc")), dfile=target.name, doraise=True, optimize=2)


def _modules(source: Path) -> Iterator[tuple[str, Path]]:
    """Name and file of the modules of the standard library that the guest needs."""
    code = (
        "import sys, importlib, json\n"
        f"sys.path.insert(0, {str(source.parent)!r})\n"
        f"for name in {('guest.server', *_LATER)!r}: importlib.import_module(name)\n"
        "print(json.dumps({name: module.__spec__.origin for name, module in sys.modules.items()"
        " if getattr(module, '__spec__', None) is not None and not name.startswith('guest')}))\n"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
    found: dict[str, str | None] = json.loads(done.stdout)
    # The frozen ones are read from their files, too, so that the interpreter finds where its library is.
    library = Path(os.__file__).parent
    for name, origin in found.items():
        if origin == "frozen":
            place = library.joinpath(*name.split("."))
            origin = str(place / "__init__.py" if place.is_dir() else place.with_suffix(".py"))
        if origin is not None and origin != "built-in" and Path(origin).exists():
            yield name, Path(origin)


def _libraries(loader: Path, program: Path) -> Iterator[Path]:
    """The shared libraries that a program is linked with."""
    done = subprocess.run([loader, "--list", program], capture_output=True, text=True, check=True)
    for line in done.stdout.splitlines():
        if "=>" in line and (path := line.split("=>")[1].split("(")[0].strip()).startswith("/"):
            yield Path(path)


def _loader(program: Path) -> Path | None:
    """The dynamic loader that a program names; None if it names none."""
    with program.open("rb") as file:
        head = file.read(64)
        if head[:4] != b"\x7fELF" or head[4] != 2:
            return None
        (offset,) = struct.unpack_from("<Q", head, 32)
        size, count = struct.unpack_from("<HH", head, 54)
        file.seek(offset)
        table = file.read(size * count)
        for index in range(count):
            kind, _, place, _, _, length = struct.unpack_from("<IIQQQQ", table, index * size)
            if kind == 3:
                file.seek(place)
                return Path(os.fsdecode(file.read(length).rstrip(b"\0"))).resolve()
    return None


def _digest() -> str:
    """Digest of what a runtime is made of."""
    digest = hashlib.blake2b(digest_size=8)
    files: Sequence[Path] = (*sorted(Path(guest.__file__).parent.glob("*.py")), Path(__file__))
    for path in files:
        digest.update(path.read_bytes())
    digest.update(
        f"{sys.version}\n{Path(sys.executable).resolve()}\n{Path(sys.executable).stat().st_mtime_ns}".encode()
    )
    return digest.hexdigest()


def main() -> None:
    """`python -m kuberoll_workers.sandboxes.runtime DIRECTORY`: put the runtime of this image into a directory."""
    directory = Path(sys.argv[1])
    if place := os.environ.get(RUNTIME_VARIABLE):
        shutil.copytree(place, directory, dirs_exist_ok=True, copy_function=shutil.copyfile)
        _open(directory)
    else:
        make_runtime(directory)


if __name__ == "__main__":
    main()
