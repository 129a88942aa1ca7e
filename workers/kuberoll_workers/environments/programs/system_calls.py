"""Seccomp filter of a program: the system calls that it may use.

Calls are allowed by name; what is new in a kernel does not exist for programs. libseccomp turns the names into numbers
and the rules into a program for the kernel.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from collections.abc import Iterable
from types import ModuleType

from kuberoll_workers.environments.programs.model import ConfinementUnavailable

CHANNEL = 1000
"""Descriptor over which the filter's listener is sent to the supervisor; above the limit of open files, so that a
program cannot have one of this number."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_ALLOWED = _words("""
    read write readv writev pread64 pwrite64 preadv pwritev preadv2 pwritev2 open openat close close_range lseek
    stat fstat lstat newfstatat statx statfs fstatfs access faccessat faccessat2 readlink readlinkat
    getdents getdents64 getcwd chdir fchdir rename renameat renameat2 mkdir mkdirat rmdir unlink unlinkat creat
    link linkat symlink symlinkat truncate ftruncate fsync fdatasync flock fadvise64 readahead umask
    sendfile splice tee copy_file_range dup dup2 dup3 pipe pipe2
    mmap mprotect munmap brk mremap madvise msync mincore membarrier pkey_alloc pkey_free pkey_mprotect
    rt_sigaction rt_sigprocmask rt_sigreturn rt_sigsuspend rt_sigpending rt_sigtimedwait sigaltstack restart_syscall
    signalfd signalfd4 pause alarm getitimer setitimer nanosleep clock_nanosleep clock_gettime clock_getres
    gettimeofday time times timer_create timer_settime timer_gettime timer_getoverrun timer_delete
    timerfd_create timerfd_settime timerfd_gettime
    select pselect6 poll ppoll epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2 eventfd eventfd2
    getpid getppid gettid getuid geteuid getgid getegid getresuid getresgid getgroups getpgrp getpgid setpgid
    getsid setsid uname sysinfo getrandom getcpu getrusage getrlimit setrlimit capget arch_prctl
    execve execveat exit wait4 waitid futex futex_waitv set_robust_list set_tid_address rseq
    sched_yield sched_getaffinity sched_getparam sched_getscheduler sched_get_priority_max sched_get_priority_min
    getpriority pidfd_open sendto recvfrom recvmsg shutdown getsockopt setsockopt getsockname getpeername
""")

# Landlock does not cover the modes, owners and times of files. Programs change those of their own files, and need not
# notice that nothing happens.
_WITHOUT_EFFECT = _words("""
    chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat utime utimes utimensat futimesat sync syncfs
""")

# Extended attributes are not covered by Landlock; space that is reserved at once would be beyond any look at it.
_UNSUPPORTED = _words("""
    fallocate
    setxattr lsetxattr fsetxattr getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr
    removexattr lremovexattr fremovexattr
""")

_NETWORK = _words("socket connect bind listen accept accept4 sendmsg sendmmsg recvmmsg socketpair")

_FORBIDDEN = _words("""
    ptrace process_vm_readv process_vm_writev pidfd_getfd pidfd_send_signal kcmp prlimit64 sched_setaffinity
    sched_setscheduler sched_setparam sched_setattr setpriority ioprio_set move_pages migrate_pages
    unshare setns mount umount2 pivot_root chroot bpf perf_event_open userfaultfd io_uring_setup io_uring_enter
    io_uring_register keyctl add_key request_key shmget shmat semget semop msgget mq_open mknod mknodat
    inotify_init inotify_init1 fanotify_init personality seccomp setuid setgid setreuid setregid setresuid setresgid
    setgroups clone fcntl syslog reboot swapon swapoff init_module finit_module kexec_load quotactl acct
    open_by_handle_at name_to_handle_at
""")

SIGNALS = ("kill", "tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo")
"""Calls that send a signal."""
TASKS = ("clone", "fork", "vfork")
"""Calls that create a process or a thread."""
EXIT = "exit_group"
"""The call by which a process ends, unless it is killed."""
THREAD = 0x10000
"""CLONE_THREAD: what is created is no process."""

_NAMESPACES = 0x7E020080
"""CLONE_NEW*."""
_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX."""
_FCNTLS = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1031, 1032, 1033, 1034)
"""Duplicates, flags, locks, the size of a pipe and seals; not F_SETOWN, F_SETSIG, F_SETLEASE and F_NOTIFY, which
concern other processes."""
_PRCTLS = (1, 2, 3, 15, 16, 21, 23, 29, 30, 36, 37, 38, 39, 41, 42, 47, 0x53564D41)
"""Signals at the parent's death, names, subreapers and the like; not PR_SET_DUMPABLE, which would hide a process from
its supervisor."""


_REFUSED = (
    "the kernel refused the seccomp filter ({}): it must be Linux 5.19 or later, no seccomp profile may forbid "
    "filters, and no other seccomp listener may be around this process"
)


class _Described(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.argtypes = (ctypes.c_long, ctypes.c_uint, ctypes.c_uint, ctypes.c_void_p)
    libc.syscall.restype = ctypes.c_long
    return libc


class Filter:
    """The filter as the kernel takes it.

    Attributes:
        program: Instructions, 8 bytes each.
        numbers: Numbers of the calls that the supervisor decides, with their names.
    """

    def __init__(self, program: bytes, numbers: dict[int, str], install: int) -> None:
        self.program = program
        self.numbers = numbers
        self._install = install
        self._code = ctypes.create_string_buffer(program, len(program))
        self._described = _Described(len(program) // 8, ctypes.cast(self._code, ctypes.c_void_p).value)

    def install(self) -> int:
        """Put this process under the filter, irrevocably; returns the descriptor of its listener."""
        set_mode_filter, new_listener, wait_killable, set_no_new_privs = 1, 1 << 3, 1 << 5, 38
        _libc().prctl(set_no_new_privs, 1, 0, 0, 0)
        # A signal does not take back what is being decided, unless it kills.
        flags = new_listener | wait_killable
        listener = int(_libc().syscall(self._install, set_mode_filter, flags, ctypes.byref(self._described)))
        if listener < 0:
            number = ctypes.get_errno()
            raise ConfinementUnavailable(_REFUSED.format(errno.errorcode.get(number, number)))
        return listener


@functools.cache
def build(*, signals_are_scoped: bool) -> Filter:
    """The filter of all programs.

    Args:
        signals_are_scoped: True if Landlock keeps signals within what it confines; else the supervisor decides each.

    Raises:
        ConfinementUnavailable: libseccomp is missing, or the kernel has no filters that ask a supervisor.
    """
    try:
        return _build(_library(), signals_are_scoped)
    except (OSError, ValueError) as error:
        raise ConfinementUnavailable(_REFUSED.format(error)) from error


def _build(seccomp: ModuleType, signals_are_scoped: bool) -> Filter:
    made = seccomp.SyscallFilter(defaction=seccomp.ERRNO(errno.ENOSYS))
    rules = _Rules(seccomp, made)
    rules.add(seccomp.ALLOW, _ALLOWED)
    rules.add(seccomp.ERRNO(0), _WITHOUT_EFFECT)
    rules.add(seccomp.ERRNO(errno.EOPNOTSUPP), _UNSUPPORTED)
    equal, masked = seccomp.EQ, seccomp.MASKED_EQ
    arg = seccomp.Arg
    # Of a process, only its own.
    for name in ("prlimit64", "sched_setaffinity"):
        rules.add(seccomp.ALLOW, [name], arg(0, equal, 0))
    rules.add(seccomp.ALLOW, ["personality"], arg(0, equal, 0xFFFFFFFF))
    for command in _IOCTLS:
        rules.add(seccomp.ALLOW, ["ioctl"], arg(1, equal, command))
    for command in _FCNTLS:
        rules.add(seccomp.ALLOW, ["fcntl"], arg(1, equal, command))
    for option in _PRCTLS:
        rules.add(seccomp.ALLOW, ["prctl"], arg(0, equal, option))
    # A pair of connected sockets. A datagram socket could be connected again, to others.
    unix, stream, kind = 1, 1, 0xF
    rules.add(seccomp.ALLOW, ["socketpair"], arg(0, equal, unix), arg(1, masked, kind, stream))
    rules.add(seccomp.ALLOW, ["sendmsg"], arg(0, equal, CHANNEL))
    rules.add(seccomp.NOTIFY, ["clone"], arg(0, masked, _NAMESPACES, 0))
    rules.add(seccomp.NOTIFY, ["fork", "vfork", EXIT])
    rules.add(seccomp.ALLOW if signals_are_scoped else seccomp.NOTIFY, SIGNALS)
    for name in (*_NETWORK, *_FORBIDDEN, "ioctl"):
        rules.forbid(name)
    with os.fdopen(os.memfd_create("filter"), "w+b") as file:
        made.export_bpf(file)
        file.seek(0)
        program = file.read()
    numbers = {rules.number(name): name for name in (*TASKS, *SIGNALS, EXIT) if rules.known(name)}
    return Filter(program, numbers, rules.number("seccomp"))


class _Rules:
    """Rules of a filter; those with conditions leave the rest of a call to `forbid`."""

    def __init__(self, seccomp: ModuleType, made: object) -> None:
        self._seccomp = seccomp
        self._filter = made
        self._conditions: dict[str, list[tuple[object, ...]]] = {}

    def number(self, name: str) -> int:
        return int(self._seccomp.resolve_syscall(self._seccomp.system_arch(), name))

    def add(self, action: int, names: Iterable[str], *conditions: object) -> None:
        for name in names:
            # This architecture may not have it, or an old libseccomp not know it.
            if self.known(name):
                self._filter.add_rule(action, name, *conditions)  # type: ignore[attr-defined]
                if conditions:
                    self._conditions.setdefault(name, []).append(conditions)

    def forbid(self, name: str) -> None:
        """Refuse a call, where no rule with conditions allows it."""
        if name in self._conditions or not self.known(name):
            # A rule without conditions would replace those with conditions; the default action refuses it.
            return
        number = errno.EACCES if name in _NETWORK else errno.EPERM
        self._filter.add_rule(self._seccomp.ERRNO(number), name)  # type: ignore[attr-defined]

    def known(self, name: str) -> bool:
        try:
            return self.number(name) >= 0
        except (OSError, ValueError):
            return False


def _library() -> ModuleType:
    try:
        import pyseccomp
    except (ImportError, OSError, RuntimeError) as error:
        raise ConfinementUnavailable(
            f"libseccomp cannot be loaded ({error}): install kuberoll[workers] and the system's package libseccomp2"
        ) from error
    found: ModuleType = pyseccomp
    return found
