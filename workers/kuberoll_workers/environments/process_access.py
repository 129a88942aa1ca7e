"""Access of an environment's process: the variables and files that it may and may not use.

Everything is readable except for the paths named here, and only a scratch directory is writable. Landlock has no
exceptions, so the files around an exception are granted one by one. File names are not secret: all directories can be
listed.
"""

from __future__ import annotations

import contextlib
import ctypes
import fnmatch
import glob
import os
import pwd
import resource
import stat
import struct
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kuberoll_workers.data.places import state_directory
from kuberoll_workers.environments import landlock, sockets
from kuberoll_workers.environments.mounts import enter_view
from kuberoll_workers.environments.ray_classes import authentication

VARIABLES = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "LANG", "LANGUAGE", "LC_*", "TZ", "HOSTNAME",
    "PYTHON*", "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "LD_LIBRARY_PATH", "JAVA_HOME",
    "*_NUM_THREADS", "OMP_*", "MKL_*", "KMP_*", "CUDA_*", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES",
    "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "TOKENIZERS_PARALLELISM",
    "XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "HF_HOME",
    "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_CACHE",
    "HF_DATASETS_OFFLINE", "HF_ENDPOINT", "TRANSFORMERS_CACHE", "TRANSFORMERS_OFFLINE", "NLTK_DATA",
    "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE",
)  # fmt: skip
"""Variables that an environment's process inherits, as shell patterns; others only if the job names them."""

HOME_SECRETS = (
    ".ssh", ".aws", ".azure", ".kube", ".docker", ".gnupg", ".config/gcloud", ".config/gh", ".config/rclone",
    ".config/containers", ".config/google-chrome", ".config/chromium", ".config/op", ".mozilla", ".netrc",
    ".git-credentials", ".pypirc", ".npmrc", ".pgpass", ".my.cnf", ".boto", ".s3cfg", ".kaggle", ".vault-token",
    ".password-store", ".local/share/keyrings", ".terraform.d", ".bash_history", ".zsh_history", ".python_history",
    ".huggingface/token", ".cache/huggingface/token", ".cache/huggingface/stored_tokens", ".wandb", ".mlflow",
    ".ray/auth_token",
)  # fmt: skip
"""Locations of credentials, relative to a home directory."""

_PRIVATE = (
    "/tmp", "/var/tmp", "/run/secrets", "/run/user", "/run/credentials", "/dev", "/proc", "/etc/shadow", "/etc/gshadow",
)  # fmt: skip
# Python's multiprocessing and PyTorch's data loaders create files there.
_SHARED_MEMORY = "/dev/shm"
# Places where services of a machine have their sockets.
_RUN = ("/run", "/var/run")
# Files there are for KubeRoll's own programs.
_PROTECTED = ("/etc/kuberoll*", "/run/kuberoll*")
_DEVICES = (
    "null", "zero", "full", "random", "urandom", "tty", "ptmx", "pts", "nvidia*", "dri", "kfd", "infiniband", "accel*",
)  # fmt: skip
# A directory around a protected path with more entries than this is not granted at all.
_MOST_ENTRIES = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessAccess:
    """Files and variables that an environment's process may and may not use.

    Attributes:
        protected: Files and directories that are never granted: the run's output, tokens.
        readable: Additional readable paths, as the user wants.
        writable: Additional writable paths.
        variables: Names of variables to inherit in addition to `VARIABLES`.
        private: Directories of others: of what is inside, only what is granted by name is open.
        shared_memory: True if `/dev/shm` is writable even where it cannot be the process's own.
    """

    protected: Sequence[str] = ()
    readable: Sequence[str] = ()
    writable: Sequence[str] = ()
    variables: Sequence[str] = ()
    private: Sequence[str] = ()
    shared_memory: bool = True


# A Ray that an environment starts would look for `uv run` among its parents, which it may not see.
_FOR_RAY = {"RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}


def variables(own: Mapping[str, str], access: ProcessAccess, *, scratch: str) -> dict[str, str]:
    """Environment variables of an environment's process.

    Args:
        own: The variables of this process.
        scratch: Directory for temporary files.
    """
    patterns = (*VARIABLES, *access.variables)
    kept = {name: value for name, value in own.items() if any(fnmatch.fnmatchcase(name, item) for item in patterns)}
    # Both processes find the same modules.
    path = os.pathsep.join(os.path.abspath(item) for item in sys.path)
    return kept | _FOR_RAY | authentication(kept) | {"PYTHONPATH": path, "TMPDIR": scratch}


def enter(access: ProcessAccess, *, scratch: str) -> bool:
    """Limit this process, and all that it starts, to this access, irrevocably.

    Capabilities are dropped; where the system allows namespaces, what is not writable becomes read-only, and others'
    directories and Unix sockets disappear; Landlock closes files where the kernel has it.

    Returns:
        False if the system allows no namespaces.

    Raises:
        LandlockFailed: The kernel rejected the rules.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    viewed = _enter_view(access, scratch)
    drop_capabilities()
    if landlock.abi() > 0:
        landlock.restrict(rules(access, scratch=scratch, shared_memory=viewed or access.shared_memory))
    return viewed


def _enter_view(access: ProcessAccess, scratch: str) -> bool:
    writable = list(_writable(access, scratch, _protected(access)))
    wanted = _wanted(access)
    named = {_real(path) for path in (*access.readable, *access.writable)}
    closed = {path for path in _private(access, scratch) if os.path.isdir(path) and path not in ("/", "/dev", "/proc")}
    opened = wanted | named
    for path in {_real(place) for place in _RUN} - closed:
        if (parts := sockets.without_sockets(path)) is not None:
            closed.add(path)
            opened |= {part for part in parts if not any(_within(part, item) for item in closed - {path})}
    # What was asked for as a whole is seen, but for private places deeper inside it.
    closed -= wanted | set(writable)
    given = [path for path in sockets.listening() if path in named or any(_within(path, item) for item in writable)]
    return enter_view(
        writable=writable,
        closed=closed,
        opened=opened,
        sockets=[path for path in sockets.listening() if path not in given],
    )


def rules(access: ProcessAccess, *, scratch: str, shared_memory: bool = True) -> Iterator[tuple[str, int]]:
    """The paths that are granted, with the rights to them.

    Args:
        shared_memory: True if `/dev/shm` is granted.
    """
    protected, private = _protected(access), _private(access, scratch)
    yield "/", landlock.READ_DIR
    for root in sorted({"/", *_wanted(access)}):
        # A directory that was asked for is granted, except for private paths deeper inside it.
        denied = protected | {path for path in private if path != root and _within(path, root)}
        if not any(_within(root, path) for path in denied):
            for path in _granted(root, denied):
                yield path, landlock.READ
    # Landlock does not hide the variables of other processes, so of /proc/PID only this process's own is granted.
    for name in os.listdir("/proc"):
        if not name.isdecimal() or name == str(os.getpid()):
            yield f"/proc/{name}", landlock.READ
    for name in os.listdir("/dev"):
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in _DEVICES):
            yield f"/dev/{name}", landlock.DEVICE
    for path in map(_real, access.readable):
        if _is_socket(path):
            yield path, landlock.SOCKET
    for path in (*_writable(access, scratch, protected), *([_SHARED_MEMORY] if shared_memory else ())):
        yield path, landlock.EVERYTHING


def _wanted(access: ProcessAccess) -> set[str]:
    return {_real(path) for path in (*sys.path, sys.prefix, sys.base_prefix, os.getcwd(), *access.readable)}


def _private(access: ProcessAccess, scratch: str) -> set[str]:
    """Directories and files of others, in which nothing is open that is not asked for by name."""
    # Other processes have theirs beside it.
    others = {_real(path) for path in (os.path.dirname(_real(scratch)), *access.private)}
    homes = [_real(path) for path in _homes()]
    # A whole home is not private, also if temporary files are directly in it.
    others = {path for path in others if not any(_within(home, path) for home in homes)}
    return {_real(path) for path in (*_PRIVATE, tempfile.gettempdir())} | _home_secrets() | others


def _protected(access: ProcessAccess) -> set[str]:
    own = {_real(path) for pattern in _PROTECTED for path in glob.glob(pattern)}
    own |= {_real(str(state_directory())), *(_real(f"{home}/.local/state/kuberoll") for home in _homes())}
    return own | {_real(path) for path in access.protected} | _secret_volumes()


def _writable(access: ProcessAccess, scratch: str, protected: Iterable[str]) -> Iterator[str]:
    for path in map(_real, (scratch, *access.writable)):
        if not any(_within(item, path) or _within(path, item) for item in protected):
            yield path


def _granted(path: str, denied: Iterable[str]) -> Iterator[str]:
    below = [item for item in denied if _within(item, path)]
    if not below:
        yield path
        return
    if path in below:
        return
    try:
        with os.scandir(path) as entries:
            # A link grants nothing: its target is granted, or not, at its own path.
            children = [entry.path for entry in entries if not entry.is_symlink()]
    except OSError:
        return
    if len(children) <= _MOST_ENTRIES:
        for child in children:
            yield from _granted(child, below)


def hide_from_others() -> None:
    """Close this process's memory, variables and descriptors to other processes of the same user, except root."""
    if sys.platform == "linux":
        pr_set_dumpable = 4
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_dumpable, 0, 0, 0, 0)


def drop_capabilities() -> None:
    """Make root an ordinary user, in all programs that it starts, too; has no effect for others."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    pr_capbset_drop, version_3 = 24, 0x20080522
    for capability in range(64):
        # Fails harmlessly for numbers that the kernel does not know, and for users without capabilities.
        libc.prctl(pr_capbset_drop, capability, 0, 0, 0)
    libc.capset(struct.pack("=Ii", version_3, 0), bytes(24))


def _homes() -> set[str]:
    homes = {os.path.expanduser("~")}
    # A container's user may have no entry.
    with contextlib.suppress(KeyError):
        homes.add(pwd.getpwuid(os.getuid()).pw_dir)
    return homes


def _home_secrets() -> set[str]:
    return {_real(os.path.join(home, name)) for home in _homes() for name in HOME_SECRETS}


def _is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(os.stat(path).st_mode)
    except OSError:
        return False


def _secret_volumes() -> set[str]:
    """Mount points of Kubernetes' Secrets and service accounts: tmpfs with a `..data` link."""
    found = set()
    try:
        with open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as mounts:
            for line in mounts:
                _, place, kind, *_ = line.split(" ")
                place = place.encode("utf-8", "surrogateescape").decode("unicode_escape", "surrogateescape")
                if kind == "tmpfs" and os.path.lexists(os.path.join(place, "..data")):
                    found.add(_real(place))
    except OSError:
        pass
    return found


def _real(path: str) -> str:
    return os.path.realpath(os.path.expanduser(path))


def _within(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory.rstrip("/") + "/")
