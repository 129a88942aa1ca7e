"""Tracebacks of a person's own code as bounded plain data, and their short form for messages.

A traceback is made where the code runs: showing an exception calls methods of its class. Everything in it is text that
code of environments can choose.
"""

from __future__ import annotations

import functools
import itertools
import linecache
import os
import re
import site
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from kuberoll_workers.data.text import cut, one_line, visible

MAX_TEXT = 16_000
"""Maximum length of a traceback's text, in characters."""
MAX_FRAMES = 8
"""Maximum number of frames in a person's own files."""
_MAX_STACK = 60
_MAX_SOURCE = 200
_MAX_PATH = 1024

_PACKAGE = str(Path(__file__).resolve().parent.parent) + os.sep
_PRINTED_FRAME = re.compile(r'^  File "(.+?)", line (\d+) in (.+)$', re.MULTILINE)
_TEXT_FRAME = re.compile(r'^ *File "(.+?)", line (\d+), in (.+)\n(?! *File ")(?: +(.*))?', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Frame:
    """One call of a traceback.

    Attributes:
        file: Path of the source file.
        source: The line of the file; empty if it cannot be read.
        own: False for a library's frame, in which the exception was raised.
    """

    file: str
    line: int
    function: str
    source: str = ""
    own: bool = True


@dataclass(frozen=True, slots=True)
class Traceback:
    """A traceback as plain data.

    Attributes:
        frames: The last frames in the person's own files, at most `MAX_FRAMES`, the outermost first; then the frame
            that raised, if it is a library's.
        text: The traceback as Python prints it, from the person's first frame, with the exceptions that led to it.
    """

    frames: tuple[Frame, ...]
    text: str

    def bounded(self) -> Traceback:
        """This traceback within all limits and without control characters, whoever made it."""
        frames = tuple(
            replace(
                frame,
                file=one_line(frame.file, _MAX_PATH),
                function=one_line(frame.function, _MAX_SOURCE),
                source=one_line(frame.source, _MAX_SOURCE),
            )
            for frame in self.frames[-MAX_FRAMES - 1 :]
        )
        return Traceback(frames, visible(cut(self.text, MAX_TEXT)))


def traceback_of(error: BaseException) -> Traceback | None:
    """The traceback of an exception; None if it was never raised, or its class cannot be shown."""
    try:
        if error.__traceback__ is None and not isinstance(error, SyntaxError):
            return None
        shown = traceback.TracebackException(type(error), error, error.__traceback__, compact=True)
        # Without KubeRoll's calls that led to the person's code.
        ours = next((number for number, frame in enumerate(shown.stack) if not _is_ours(frame.filename)), 0)
        del shown.stack[:ours]
        return Traceback(_chosen(list(_frames(error))), "".join(shown.format())).bounded()
    except BaseException:
        # The methods of a foreign class may raise anything.
        return None


def parse_traceback(text: str) -> Traceback | None:
    """The traceback that another process printed; None if the text has no frame."""
    frames = [
        Frame(match[1], int(match[2]), match[3], (match[4] or "").strip()) for match in _TEXT_FRAME.finditer(text)
    ]
    return Traceback(_chosen(frames), text).bounded() if frames else None


def stack_of(frame: FrameType | None) -> Traceback | None:
    """The calls that a running thread is in, by its innermost frame; None if there are none."""
    walked = [] if frame is None else [one for one, _ in traceback.walk_stack(frame)]
    return stack_of_calls(walked[:_MAX_STACK][::-1])


def stack_of_calls(frames: Sequence[FrameType]) -> Traceback | None:
    """Calls by their frames, the outermost first; None if there are none."""
    return _stack([Frame(one.f_code.co_filename, one.f_lineno or 0, one.f_code.co_name) for one in frames])


def parse_stack(text: str) -> Traceback | None:
    """The calls of the first thread that `faulthandler` has printed; None if the text has no frame."""
    _, _, thread = text.partition("(most recent call first):\n")
    frames = [
        Frame(match[1], int(match[2]), match[3]) for match in _PRINTED_FRAME.finditer(thread.partition("\n\n")[0])
    ]
    return _stack(frames[_MAX_STACK::-1])


def _stack(frames: list[Frame]) -> Traceback | None:
    if not frames:
        return None
    lines = [f'  File "{frame.file}", line {frame.line}, in {frame.function}\n' for frame in frames]
    return Traceback(_chosen(frames), f"Stack (most recent call last):\n{''.join(lines)}").bounded()


def location(frames: Sequence[Frame]) -> str:
    """Where the person's code failed, `file:line in function`; empty without frames."""
    own = [frame for frame in frames if frame.own] or frames
    return f"{_place(own[-1])}" if own else ""


def excerpt(frames: Sequence[Frame], count: int = MAX_FRAMES) -> list[str]:
    """Two lines for each of the last `count` own frames, and for a library's last one: its place, and its source."""
    own = [frame for frame in frames if frame.own]
    return [line for frame in (*own[-count:], *(frame for frame in frames if not frame.own)) for line in _lines(frame)]


def with_frames(error: BaseException) -> str:
    """An error's message, followed by the frames of the code that caused it, if the error or its causes have any.

    An error has them in its attribute `traceback`.
    """
    found = attached_traceback(error)
    return "\n".join([str(error), *(f"  {line}" for line in (excerpt(found.frames) if found is not None else ()))])


def attached_traceback(error: BaseException) -> Traceback | None:
    """The first attribute `traceback` of an error and its causes."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(found := getattr(cause, "traceback", None), Traceback):
            return found
        cause = cause.__cause__
    return None


def _lines(frame: Frame) -> Iterator[str]:
    yield _place(frame)
    if frame.source:
        yield f"  {frame.source}"


def _place(frame: Frame) -> str:
    return f"{short_path(frame.file)}:{frame.line} in {frame.function}"


def short_path(file: str) -> str:
    """A path from the working directory, else from where its module was imported, else its last two parts."""
    path = Path(file)
    if not path.is_absolute():
        return file
    if (near := near_path(file)) != file:
        return near
    # Longest first: the directory of a package inside another one.
    roots = sorted((root for root in map(Path, sys.path) if root.is_absolute()), key=lambda root: -len(root.parts))
    inside = next((root for root in roots if path.is_relative_to(root)), None)
    return str(Path(*path.parts[-2:]) if inside is None else path.relative_to(inside))


def near_path(file: str) -> str:
    """A path from the working directory if it is inside, else the same path."""
    try:
        return str(Path(file).relative_to(Path.cwd()))
    except (ValueError, FileNotFoundError):
        return file


def _frames(error: BaseException) -> Iterator[Frame]:
    """All frames of an exception, without their sources; those of a group's first member."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    for frame, line in traceback.walk_tb(error.__traceback__):
        # `linecache` finds the sources of modules in archives by this.
        linecache.lazycache(frame.f_code.co_filename, frame.f_globals)
        yield Frame(frame.f_code.co_filename, line, frame.f_code.co_name)
    if isinstance(error, SyntaxError) and error.filename:
        yield Frame(error.filename, error.lineno or 0, "<module>", (error.text or "").strip())


def _chosen(frames: list[Frame]) -> tuple[Frame, ...]:
    last = frames[-1]
    first = next((number for number, frame in enumerate(frames) if not _is_ours(frame.file)), None)
    if first is None:
        # A fault of a built-in environment.
        return (_with_source(last),)
    home = Path(frames[first].file).parent
    own = [frame for frame in frames if not _is_ours(frame.file) and not _is_library(frame.file)]
    # An environment may be installed as a library.
    own = own or [frame for frame in frames if Path(frame.file).is_relative_to(home)]
    # A recursion, and a comprehension with its function, are one line each.
    lines = [next(calls) for _, calls in itertools.groupby(own, key=lambda frame: (frame.file, frame.line))]
    found = [_with_source(frame) for frame in lines[-MAX_FRAMES:]]
    # Where the person's own line ends in a method of KubeRoll's, that line says enough.
    ended = (own and own[-1] is last) or _is_ours(last.file)
    return tuple(found) if ended else (*found, replace(_with_source(last), own=False))


def _with_source(frame: Frame) -> Frame:
    return frame if frame.source else replace(frame, source=linecache.getline(frame.file, frame.line).strip())


def _is_ours(file: str) -> bool:
    return file.startswith(_PACKAGE)


def _is_library(file: str) -> bool:
    inside = f"{os.sep}site-packages{os.sep}" in file or f"{os.sep}dist-packages{os.sep}" in file
    return inside or file.startswith(("<", *_library_directories()))


@functools.cache
def _library_directories() -> tuple[str, ...]:
    paths = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    paths |= {str(Path(os.__file__).parent), site.getusersitepackages()}
    known = [Path(path) for path in paths if path]
    return tuple(f"{path}{os.sep}" for path in {*known, *(path.resolve() for path in known)})
