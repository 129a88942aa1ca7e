"""Programs that try to get out of their confinement. Each prints REACHED if it got what it wanted.

They are formatted with the fields of `Target`; braces of their own are doubled.
"""

from __future__ import annotations

from dataclasses import dataclass

from kuberoll_workers.environments.programs import Limits

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What the programs attack.

    Attributes:
        file: A file that is not theirs.
        directory: Its directory.
        process: The process that runs the programs.
        port: A TCP port on 127.0.0.1, which listens, as the policy's does.
        abstract: The name of an abstract Unix socket, which listens.
        path: The path of a Unix socket, which listens.
    """

    file: str
    directory: str
    process: int
    port: int
    abstract: str
    path: str


_SYSCALL = """
import ctypes, os, platform
libc = ctypes.CDLL(None, use_errno=True)
def syscall(number, *arguments):
    result = libc.syscall(ctypes.c_long(number), *arguments)
    return result if result >= 0 else -ctypes.get_errno()
"""

REACHING: dict[str, str] = {
    "read a file": "print(open({file!r}).read()); print('REACHED')",
    "read a file through a link": "import os; os.symlink({file!r}, 'link'); open('link').read(); print('REACHED')",
    "read a file through a hard link": "import os; os.link({file!r}, 'hard'); open('hard').read(); print('REACHED')",
    "read a file through a link of a directory": (
        "import os; os.symlink({directory!r}, 'link'); print(os.listdir('link')); print('REACHED')"
    ),
    "move a file": "import os; os.rename({file!r}, 'moved'); os.rename('moved', {file!r}); print('REACHED')",
    "list a directory": "import os; os.listdir({directory!r}); print('REACHED')",
    "write a file": "open({file!r}, 'a').close(); print('REACHED')",
    "create a file": "open({directory!r} + '/new', 'w').close(); print('REACHED')",
    "make a directory": "import os; os.mkdir({directory!r} + '/made'); print('REACHED')",
    "truncate a file": "import os; os.truncate({file!r}, 7); print('REACHED')",
    "set an attribute": "import os; os.setxattr({file!r}, 'user.here', b'1'); print('REACHED')",
    "watch a directory": (
        "import ctypes, os\nlibc = ctypes.CDLL(None)\nwatch = libc.inotify_init()\n"
        "assert libc.inotify_add_watch(watch, os.fsencode({directory!r}), 0xfff) >= 0\nprint('REACHED')"
    ),
    "read variables of other processes": (
        "import glob\n"
        "for path in glob.glob('/proc/[0-9]*/environ') + ['/proc/{process}/environ']:\n"
        "    try:\n        if 'kuberoll-secret' in open(path).read(): print('REACHED')\n"
        "    except OSError: pass\n"
    ),
    "read its own variables": (
        "import os\nif any('kuberoll-secret' in value for value in os.environ.values()): print('REACHED')"
    ),
    "read the memory of its parent": "import os; open(f'/proc/{{os.getppid()}}/mem', 'rb'); print('REACHED')",
    "open the descriptors of its parent": "import os; os.listdir(f'/proc/{{os.getppid()}}/fd'); print('REACHED')",
    "connect by TCP": ("import socket; socket.create_connection(('127.0.0.1', {port}), timeout=5); print('REACHED')"),
    "ask the policy": (
        "import urllib.request; urllib.request.urlopen('http://127.0.0.1:{port}/', timeout=5); print('REACHED')"
    ),
    "ask for the machine's credentials": (
        "import socket; socket.create_connection(('169.254.169.254', 80), timeout=5); print('REACHED')"
    ),
    "send by UDP": (
        "import socket\nsender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        "sender.sendto(b'x', ('127.0.0.1', {port})); print('REACHED')"
    ),
    "connect by asyncio": (
        "import asyncio; asyncio.run(asyncio.open_connection('127.0.0.1', {port})); print('REACHED')"
    ),
    "connect to an abstract socket": (
        "import socket; socket.socket(socket.AF_UNIX).connect('\\0' + {abstract!r}); print('REACHED')"
    ),
    "connect to a socket by its path": (
        "import socket; socket.socket(socket.AF_UNIX).connect({path!r}); print('REACHED')"
    ),
    "connect a socket of a pair again": (
        "import socket\none, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
        "one.sendto(b'x', {path!r} + '.datagram'); print('REACHED')"
    ),
    "signal the runner": "import os; os.kill({process}, 0); print('REACHED')",
    "signal its parent": "import os; os.kill(os.getppid(), 0); print('REACHED')",
    "queue a signal to its parent": _SYSCALL.replace("{", "{{").replace("}", "}}")
    + (
        "class Info(ctypes.Structure):\n    _fields_ = [('head', ctypes.c_int * 3), ('rest', ctypes.c_char * 116)]\n"
        "info = Info(); info.head[0] = 28; info.head[2] = -1\n"
        "number = {{'x86_64': 129, 'aarch64': 138}}[platform.machine()]\n"
        "if syscall(number, os.getppid(), 28, ctypes.byref(info)) == 0: print('REACHED')"
    ),
    "have a descriptor signal the runner": (
        "import fcntl, os\nreading, writing = os.pipe()\nfcntl.fcntl(reading, 8, {process})\n"
        "assert fcntl.fcntl(reading, 9) == {process}\nprint('REACHED')"
    ),
    "trace its parent": "import ctypes, os; assert ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == 0; print('REACHED')",
    "limit the runner": (
        "import resource\nlimits = resource.prlimit({process}, resource.RLIMIT_CORE)\nprint('REACHED')"
    ),
    "pin the runner": ("import os; os.sched_setaffinity({process}, os.sched_getaffinity(0)); print('REACHED')"),
    "slow the runner": "import os; os.setpriority(os.PRIO_PROCESS, {process}, 0); print('REACHED')",
    "enter namespaces": "import ctypes; assert ctypes.CDLL(None).unshare(0x10000000) == 0; print('REACHED')",
    "share memory": "import ctypes; assert ctypes.CDLL(None).shmget(0, 4096, 0o1600) >= 0; print('REACHED')",
    "hide from the supervisor": ("import ctypes; assert ctypes.CDLL(None).prctl(4, 0, 0, 0, 0) == 0; print('REACHED')"),
    "hide by the upper half of a register": _SYSCALL.replace("{", "{{").replace("}", "}}")
    + (
        "number = {{'x86_64': 157, 'aarch64': 167}}[platform.machine()]\n"
        "if syscall(number, ctypes.c_ulong((1 << 32) | 4), 0, 0, 0, 0) == 0: print('REACHED')"
    ),
    "use io_uring": _SYSCALL.replace("{", "{{").replace("}", "}}")
    + "if syscall(425, 8, ctypes.create_string_buffer(120)) >= 0: print('REACHED')",
    "use a descriptor that was left open": (
        "import os\nfor number in range(3, 2000):\n"
        "    try:\n        os.fstat(number); print('REACHED', number)\n    except OSError: pass\n"
    ),
    "speak on the supervisor's channel": (
        "import os, resource, socket\none, other = socket.socketpair()\n"
        "try: resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))\nexcept (OSError, ValueError): pass\n"
        "os.dup2(one.fileno(), 1000)\nsocket.socket(fileno=1000).sendmsg([b'x']); print('REACHED')"
    ),
    "open the terminal": "open('/dev/tty'); print('REACHED')",
    "gain privileges": ("import ctypes; assert ctypes.CDLL(None).prctl(39, 0, 0, 0, 0) == 0; print('REACHED')"),
    "write to shared memory": "open('/dev/shm/kuberoll-was-here', 'w').close(); print('REACHED')",
    "write among the modules": (
        "import json, os; open(os.path.dirname(json.__file__) + '/was_here.py', 'w').close(); print('REACHED')"
    ),
}
"""Attempts to reach something outside."""

WITHOUT_EFFECT = {
    "change modes": "import os; os.chmod({file!r}, 0o777); os.chmod({directory!r}, 0)",
    "change times": "import os; os.utime({file!r}, (1, 1))",
    "change owners": "import os; os.chown({file!r}, os.getuid(), os.getgid())",
}
"""Changes of files that Landlock does not cover; they seem to succeed."""

_HOLD = "import time; time.sleep(1000)"

# This Python, in a file without the right to read it: the kernel closes such a process to others.
_UNREADABLE = (
    "import os, sys\nf = os.open('p', os.O_WRONLY | os.O_CREAT, 0o111)\n"
    "with open(os.path.realpath(sys.executable), 'rb') as g: os.write(f, g.read())\nos.close(f)\n"
)

LIMITED: dict[str, tuple[str, tuple[str, ...]]] = {
    "fork bomb": ("import os\nwhile True: os.fork()", ("error",)),
    "fork bomb that goes on": (
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        ("cpu_time", "wall_time"),
    ),
    "threads": (
        "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(1000,)).start()",
        ("error", "wall_time"),
    ),
    "memory": ("x = []\nwhile True: x.append(b'x' * 1000000)", ("memory",)),
    "memory in one piece": ("x = b'x' * (1 << 42)", ("error",)),
    "memory in many processes": (
        "import os, time\nfor _ in range(8):\n    if os.fork() == 0: break\nx = os.urandom(40000000)\ntime.sleep(1000)",
        ("memory",),
    ),
    "shared memory": (
        "import mmap, time\nx = mmap.mmap(-1, 1 << 29)\nfor _ in range(1 << 17): x.write(b'x' * 4096)\ntime.sleep(1000)",
        ("memory",),
    ),
    "memory without a name": (
        "import ctypes, os\nfd = ctypes.CDLL(None).memfd_create(b'x', 0)\nassert fd >= 0, 'refused'",
        ("error",),
    ),
    "a large file": ("f = open('f', 'wb')\nwhile True: f.write(b'x' * 1000000)", ("error", "disk")),
    "files": (
        "n = 0\nwhile True:\n    open(str(n), 'wb').write(b'x' * 1000000); n += 1",
        ("disk",),
    ),
    "empty files": ("n = 0\nwhile True:\n    open(str(n), 'wb').close(); n += 1", ("disk",)),
    "files without names": (
        "import os, time\nkept = []\nfor n in range(40):\n    f = open(str(n), 'wb'); os.unlink(str(n)); kept.append(f)\n"
        "    f.write(os.urandom(4000000)); f.flush()\ntime.sleep(1000)",
        ("disk",),
    ),
    "directories in directories": ("import os\nwhile True: os.mkdir('d'); os.chdir('d')", ("disk",)),
    "a thousand directories with long names": (
        "import os, time\nfor _ in range(900): os.mkdir('d' * 250); os.chdir('d' * 250)\ntime.sleep(1000)",
        ("disk",),
    ),
    "directories without rights": (
        "import os\nos.mkdir('a', 0o300); os.mkdir('a/b'); os.mkdir('a/b/c', 0)\nopen('a/f', 'w').close()",
        ("ok",),
    ),
    "output": ("import os\nwhile True: os.write(1, b'x' * 10000)", ("output",)),
    "errors": ("import os\nwhile True: os.write(2, b'x' * 10000)", ("output",)),
    "output of a child": (
        "import os\nif os.fork() == 0:\n    while True: os.write(1, b'x' * 10000)\n",
        ("ok", "output"),
    ),
    "processor time": ("while True: pass", ("cpu_time",)),
    "processor time of children": (
        "import os\nwhile True:\n    if os.fork() == 0:\n        for _ in range(1000000): pass\n        os._exit(0)\n    os.wait()",
        ("cpu_time",),
    ),
    "processor time, signals ignored": (
        "import signal\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\nwhile True: pass",
        ("cpu_time",),
    ),
    "processor time of children that nobody waits for": (
        "import os, signal, time\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\nfor _ in range(60):\n"
        "    if os.fork() == 0:\n        end = time.process_time() + 0.1\n        while time.process_time() < end: pass\n"
        "        os._exit(0)\n    try: os.wait()\n    except ChildProcessError: pass",
        ("cpu_time",),
    ),
    "processor time of children that are killed": (
        "import os, signal, time\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\nfor _ in range(600):\n"
        "    if os.fork() == 0:\n        end = time.process_time() + 0.01\n        while time.process_time() < end: pass\n"
        "        os.kill(os.getpid(), 9)\n    try: os.wait()\n    except ChildProcessError: pass",
        ("cpu_time",),
    ),
    "processor time of many short children": (
        "import os, signal, time\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\nfor _ in range(2000):\n"
        "    if os.fork() == 0:\n        end = time.process_time() + 0.003\n        while time.process_time() < end: pass\n"
        "        os._exit(0)\n    try: os.wait()\n    except ChildProcessError: pass",
        ("cpu_time",),
    ),
    "memory of a program that it cannot read": (
        _UNREADABLE + "os.execv('p', ['p', '-S', '-E', '-c', 'x = b\\'x\\' * 600000000; import time; time.sleep(1)'])",
        ("memory", "disk"),
    ),
    "files that are only mapped": (
        "import mmap, os, time\nkept = []\nfor n in range(60):\n    f = os.open('f', os.O_RDWR | os.O_CREAT)\n"
        "    os.truncate(f, 4000000); m = mmap.mmap(f, 4000000); m[:] = b'x' * 4000000\n    kept.append(m)\n"
        "    os.close(f); os.unlink('f')\ntime.sleep(0.2)",
        # The mapping keeps a descriptor of its own in Python.
        ("disk",),
    ),
    "files that are only mapped, by C's functions": (
        _SYSCALL.replace("import ctypes", "import ctypes, os, time")
        + "libc = ctypes.CDLL(None)\nlibc.mmap.restype = ctypes.c_void_p\nfor n in range(60):\n"
        "    f = os.open('f', os.O_RDWR | os.O_CREAT)\n    os.write(f, b'x' * 4000000)\n"
        "    libc.mmap(None, ctypes.c_size_t(4096), 1, 1, f, ctypes.c_long(0))\n    os.close(f); os.unlink('f')\n"
        "time.sleep(0.2)",
        ("disk",),
    ),
    "space that is reserved": (
        "import os\nfor n in range(1000):\n    f = os.open(str(n), os.O_RDWR | os.O_CREAT)\n"
        "    os.posix_fallocate(f, 0, 4 << 20)",
        ("disk",),
    ),
    "space that is reserved beyond the end": (
        "import ctypes, os\nlibc = ctypes.CDLL(None)\nf = os.open('f', os.O_RDWR | os.O_CREAT)\n"
        "assert libc.fallocate64(f, 1, ctypes.c_long(0), ctypes.c_long(1 << 30)) == 0, 'refused'",
        ("error",),
    ),
    "sleep": (_HOLD, ("wall_time",)),
    "sleep, signals blocked": (
        f"import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\n{_HOLD}",
        ("wall_time",),
    ),
    "a daemon": (
        "import os, signal, time\nif os.fork() == 0:\n    os.setsid(); signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "    signal.signal(signal.SIGHUP, signal.SIG_IGN)\n    if os.fork() == 0: time.sleep(1000)\n    os._exit(0)\n",
        ("ok",),
    ),
    "a daemon below a subreaper": (
        "import ctypes, os, time\nif os.fork() == 0:\n    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0); os.setsid()\n"
        "    for _ in range(3):\n        if os.fork() == 0:\n            if os.fork() == 0: time.sleep(1000)\n"
        "            os._exit(0)\n    time.sleep(1000)\ntime.sleep(0.2)",
        ("ok",),
    ),
    "a stopped child": (
        "import os, signal, time\nif os.fork() == 0: os.kill(os.getpid(), signal.SIGSTOP); time.sleep(1000)",
        ("ok",),
    ),
    "stopped": ("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", ("wall_time",)),
    "zombies": ("import os\nfor _ in range(8):\n    if os.fork() == 0: os._exit(0)", ("ok",)),
    "killed by itself": ("import os; os.kill(os.getpid(), 9)", ("error",)),
    "killed with its group": ("import os; os.kill(0, 9)", ("error",)),
    "everybody killed": ("import os\ntry: os.kill(-1, 9)\nexcept OSError: pass", ("ok", "error")),
    "its parent killed": ("import os\ntry: os.kill(os.getppid(), 9)\nexcept OSError: print('refused')", ("ok",)),
    "standard input not read": ("pass", ("ok",)),
    "standard streams closed": ("import os\nfor n in range(3): os.close(n)", ("ok",)),
    "a foreign system call": (
        _SYSCALL + "syscall(0x40000000 | 41, 2, 1, 0)\nprint('survived')",
        ("error",),
    ),
}
"""Attempts to use up something, with the kinds of outcome that are right."""


def kinds_of(name: str) -> tuple[str, ...]:
    """The kinds of outcome that are right for an attack."""
    return LIMITED[name][1] if name in LIMITED else ("ok", "error")


def limits_of(name: str) -> Limits:
    """Limits for an attack: times are short where they are what ends the program, else long on a busy machine."""
    return Limits(
        cpu_seconds=1 if "cpu_time" in kinds_of(name) else 20,
        wall_seconds=3 if "wall_time" in kinds_of(name) else 60,
        memory=128 * MIB,
        processes=12,
        file=8 * MIB,
        disk=24 * MIB,
        output=65536,
    )
