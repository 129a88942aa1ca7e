"""Programs that a policy writes, most of them bad: whatever they do is worth its reward, and nobody else's fault."""

from __future__ import annotations

import random
from typing import Final

RIGHT: Final = "def f(x):\n    return 2 * x"

BEFORE: Final[dict[str, str]] = {
    "raises": "raise ValueError('no')",
    "exits": "import sys; sys.exit({number})",
    "exits at once": "import os; os._exit({number})",
    "kills itself": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "terminates itself": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "kills its group": "import os, signal; os.killpg(0, signal.SIGKILL)",
    "kills its parent": "import os, signal; os.kill(os.getppid(), signal.SIGKILL); import time; time.sleep(60)",
    "kills all": "import os, signal; os.kill(-1, signal.SIGKILL); import time; time.sleep(60)",
    "stops itself": "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
    "segfaults": "import ctypes; ctypes.string_at(0)",
    "aborts": "import os; os.abort()",
    "memory": "x = bytearray({number} << 28); y = [bytearray(1 << 20) for _ in range(10**6)]",
    "memory slowly": "x = []\nwhile True: x.append('y' * {number} * 1000000)",
    "cpu": "while True: pass",
    "sleeps": "import time; time.sleep(3600)",
    "waits": "input(); input(); import threading; threading.Event().wait()",
    "big file": "with open('f', 'wb') as f:\n    while True: f.write(b'x' * (1 << 20))",
    "many files": "for n in range(10**7): open(f'f{{n}}', 'w').write('x')",
    "descriptors": "import os\nwhile True: os.dup(0)",
    "forks": "import os\nwhile True: os.fork()",
    "threads": "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(60,)).start()",
    "starts programs": "import subprocess\nwhile True: subprocess.Popen(['sleep', '60'])",
    "prints": "print('x' * {number} * 10**7)",
    "prints without an end": "while True: print('x' * 4096)",
    "garbage": "import sys; sys.stdout.buffer.write(bytes(range(256)) * 1000)",
    "errors": "import sys; sys.stderr.write('e' * {number} * 10**6)",
    "recursion": "def g(): return g()\ng()",
    "deep": "import sys; sys.setrecursionlimit(10**9)\ndef g(n): return [g(n + 1)]\ng(0)",
    "closes": "import os; os.closerange(0, 1000)",
    "disk full": "open('/dev/full', 'w').write('x' * 100000)",
    "no memory": "raise MemoryError()",
    "out of space": "raise OSError(28, 'No space left on device')",
    "network": "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9/')",
    "looks up": "import socket; socket.getaddrinfo('judge.invalid', 80)",
    "deletes": "import os, shutil; shutil.rmtree('.', ignore_errors=True); shutil.rmtree('/tmp', ignore_errors=True)",
    "syntax": "def (",
    "nothing": "",
    "no function": "g = 1",
    "null": "x = '\\0'\x00",
}
SLOW: Final = frozenset({"cpu", "sleeps", "waits", "stops itself", "kills its parent", "kills all", "forks", "threads"})
"""Those that take as long as they are given."""


def drawn(draw: random.Random) -> tuple[str, str, float]:
    """Name, source and reward of a program; with a small chance it is right."""
    if draw.random() < 0.1:
        return "right", RIGHT, 1.0
    name = draw.choice(sorted(BEFORE))
    if name in SLOW:
        name = draw.choice(sorted(BEFORE))
    source = BEFORE[name].format(number=draw.randint(1, 9))
    where = draw.choice(("instead", "within"))
    if where == "within" and source and "\x00" not in source and name != "syntax":
        body = "\n".join(f"    {line}" for line in source.splitlines())
        return f"{name}, when it is called", f"def f(x):\n{body}\n    return 3 * x", 0.0
    return name, source, 0.0
