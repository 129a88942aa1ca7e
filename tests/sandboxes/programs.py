"""Programs of tests that need musl, as Alpine's do."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path
from typing import Final

_PROGRAMS: Final = {
    "hello": """
int puts(const char *text);
int fflush(void *file);
void _exit(int code);
void _start(void) { puts("hello from musl"); fflush(0); _exit(0); }
""",
    # Leaves the first process no descriptor.
    "choke": """
int prlimit(int process, int resource, const unsigned long *limits, unsigned long *before);
void _exit(int code);
void _start(void) { unsigned long limits[] = {0, 0}; _exit(prlimit(1, 7, limits, 0) ? 1 : 0); }
""",
}


class NoCompiler(Exception):
    """This machine cannot make them; the message says what is missing."""


def musl_files(place: Path) -> dict[str, bytes]:
    """Files of an image: the programs, and the loader and library that they need.

    Args:
        place: Directory to compile in.

    Raises:
        NoCompiler: This machine cannot make them.
    """
    machine = platform.machine()
    loader, library = Path(f"/lib/ld-musl-{machine}.so.1"), Path(f"/lib/{machine}-linux-musl/libc.so")
    if shutil.which("gcc") is None or not library.exists():
        raise NoCompiler("no gcc and musl: Debian has gcc, musl")
    options = ["-nostdlib", "-fno-builtin", "-fno-stack-protector", f"-Wl,--dynamic-linker={loader}"]
    # By this name its loader knows itself.
    libraries = [f"-L{library.parent}", f"-l:{library.name}"]
    files = {str(loader)[1:]: library.read_bytes()}
    for name, source in _PROGRAMS.items():
        (place / f"{name}.c").write_text(source)
        subprocess.run(["gcc", *options, "-o", name, f"{name}.c", *libraries], cwd=place, check=True)
        files[f"bin/{name}"] = (place / name).read_bytes()
    return files
