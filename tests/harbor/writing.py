"""Tasks of our own in Harbor's format, written where a test wants them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

PLAIN = """\
schema_version = "1.4"

[task]
name = "kuberoll/count-words"
description = "Count the words of a file."
authors = [{ name = "Ada", email = "ada@example.org" }]
keywords = ["text", "shell"]

[metadata]
difficulty = "easy"
written = 2026-05-04
weights = [0.5, nan]

[agent]
timeout_sec = 90
user = "worker"

[verifier]
timeout_sec = 45.5
user = 0

[verifier.env]
EXPECTED = "7"

[environment]
build_timeout_sec = 300.0
cpus = 2.0
memory_mb = 512
storage_mb = 1024
gpus = 0
workdir = "/work"
network_mode = "allowlist"
allowed_hosts = ["PyPI.org.", "*.pythonhosted.org", "10.0.0.0/8"]

[environment.env]
TOKEN = "${WORDS_TOKEN:-none}"

[environment.healthcheck]
command = "test -d /work"
retries = 2

[[environment.mcp_servers]]
name = "notes"
transport = "http"
url = "http://127.0.0.1:8000/mcp"
headers = { Authorization = "Bearer ${NOTES_TOKEN}" }

[solution.env]
MODE = "fast"
"""

STEPS = """\
version = "1.1"
multi_step_reward_strategy = "final"
artifacts = ["/work/report.txt"]

[agent]
timeout_sec = 60.0
network_mode = "no-network"

[verifier]
timeout_sec = 30.0
user = "checker"
env = { LEVEL = "low", KEPT = "yes" }

[[verifier.collect]]
command = "ps > /logs/artifacts/ps.txt"

[environment]
docker_image = "docker.io/library/alpine:3.20"
memory = "2G"
allow_internet = false

[[steps]]
name = "write"
min_reward = 0.5
artifacts = [{ source = "/work/notes", destination = "notes", exclude = ["*.tmp"] }]

[[steps]]
name = "check it"

[steps.agent]
timeout_sec = 20
user = 1000
network_mode = "public"

[steps.verifier]
env = { LEVEL = "high" }
environment_mode = "separate"

[steps.verifier.environment]
cpus = 1
network_mode = "no-network"

[steps.healthcheck]
command = "true"
interval_sec = 1
start_period_sec = 2.5

[steps.min_reward]
form = 0.25
reward = 1
"""

SCRIPT = "#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n"

PLAIN_FILES = {
    "task.toml": PLAIN,
    "instruction.md": "# canary 1234\n\nCount the words of /work/text.\n",
    "environment/Dockerfile": "FROM debian:bookworm-slim\nCOPY text /work/text\n",
    "environment/text": "one two three four five six seven\n",
    "tests/test.sh": SCRIPT,
    "tests/expected": "7\n",
    "solution/solve.sh": "#!/bin/sh\nwc -w < /work/text > /work/count\n",
}

STEPS_FILES = {
    "task.toml": STEPS,
    "environment/seed.txt": "put into the working directory\n",
    "tests/test.sh": SCRIPT,
    "tests/common.sh": "true\n",
    "steps/write/instruction.md": "Write a report.\n",
    "steps/write/solution/solve.sh": "#!/bin/sh\n",
    "steps/write/workdir/setup.sh": "#!/bin/sh\n",
    "steps/check it/instruction.md": "<!-- CANARY -->\nCheck the report.\n",
    "steps/check it/tests/test.sh": SCRIPT,
    "steps/check it/tests/Dockerfile": "FROM scratch\nCOPY . /tests\n",
}


NOTHING: Mapping[str, str | None] = {}


def write_task(
    directory: Path, files: Mapping[str, str | None] = PLAIN_FILES, changed: Mapping[str, str | None] = NOTHING
) -> Path:
    """Write a task.

    Args:
        files: Texts by name; None: no such file.
        changed: Further files, and others in place of those.

    Returns:
        Its directory.
    """
    for name, text in {**files, **changed}.items():
        if text is not None:
            file = directory / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(text.encode(errors="surrogateescape"))
            if name.endswith(".sh"):
                file.chmod(0o755)
    return directory
