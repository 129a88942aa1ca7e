"""System calls that no program in a sandbox makes: they change the machine, or are ways into its kernel.

The list follows what Docker's default profile closes to containers without privileges; capabilities, and user
namespaces that cannot be made, close most of them, too.
"""

from __future__ import annotations

import errno
from typing import Final

_FORBIDDEN: Final = (
    "acct", "add_key", "bpf", "clock_adjtime", "clock_settime", "create_module", "delete_module", "finit_module",
    "fsconfig", "fsmount", "fsopen", "fspick", "init_module", "io_uring_enter", "io_uring_register", "io_uring_setup",
    "ioperm", "iopl", "kcmp", "kexec_file_load", "kexec_load", "keyctl", "lookup_dcookie", "mount", "mount_setattr",
    "move_mount", "move_pages", "nfsservctl", "open_by_handle_at", "open_tree", "perf_event_open", "pivot_root",
    "quotactl", "quotactl_fd", "reboot", "request_key", "setns", "settimeofday", "swapoff", "swapon", "syslog",
    "umount2", "userfaultfd", "vhangup",
)  # fmt: skip
# Kernel crypto, virtual machines' own, and netlink's audit are ways into the kernel that need no network.
_FORBIDDEN_FAMILIES: Final = (38, 40)


def forbid_calls() -> None:
    """Close the calls to this process and all that it starts, for ever."""
    import pyseccomp as seccomp

    rules = seccomp.SyscallFilter(defaction=seccomp.ALLOW)
    # The process keeps its right to have programs gain rights (`sudo`), which filters otherwise take away.
    rules.set_attr(seccomp.Attr.CTL_NNP, 0)
    refuse = seccomp.ERRNO(errno.EPERM)
    for name in _FORBIDDEN:
        # Of another architecture, or of a kernel to come.
        if seccomp.resolve_syscall(seccomp.system_arch(), name) >= 0:
            rules.add_rule(refuse, name)
    for family in _FORBIDDEN_FAMILIES:
        rules.add_rule(seccomp.ERRNO(errno.EAFNOSUPPORT), "socket", seccomp.Arg(0, seccomp.EQ, family))
    rules.load()
