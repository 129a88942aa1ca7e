"""Changed copies of a task.toml: lines that go, come twice, move or have another value, and single characters."""

from __future__ import annotations

import random
from collections.abc import Iterator

VALUES = (
    "0", "1", "-1", "2.5", "-0.5", "1e3", "inf", "nan", "true", "false", '""', '"x"', '"2"', '"1.5"', '"two words"',
    "[]", '["a"]', '["a", "b"]', "[1]", "{}", '{ a = "b" }', "{ a = 1 }", '"windows"', '"Linux"', '"public"',
    '"allowlist"', '"no-network"', '"separate"', '"shared"', '"main"', '"other"', '"/abs"', '"a/../b"', '"2G"', '"12"',
    '"512m"', '"${HOME}"', '"org/name"', '"org/.x"', '"mean"', '"final"', '"stdio"', '"http"', "1979-05-27", '"root"',
    "99999999999", '["example.org"]', '["http://x"]', '["10.0.0.1/8"]', '["*.x.org"]', '["::1"]', '"CON"',
    '"a."', '"manifest.json"', "18446744073709551616", '"yes"', '"nul\\u0000"', '"line\\nline"',
)  # fmt: skip

FIELDS = (
    "schema_version", "version", "source", "artifacts", "multi_step_reward_strategy", "name", "description", "authors",
    "keywords", "timeout_sec", "user", "network_mode", "allowed_hosts", "env", "environment_mode", "build_timeout_sec",
    "docker_image", "os", "cpus", "memory_mb", "storage_mb", "memory", "storage", "gpus", "gpu_types", "skills_dir",
    "workdir", "allow_internet", "command", "interval_sec", "retries", "start_period_sec", "transport", "url", "args",
    "headers", "min_reward", "service", "destination", "exclude", "collect", "steps", "unknown", "mcp_servers",
    "healthcheck", "tpu",
)  # fmt: skip

TABLES = (
    "[task]", "[metadata]", "[agent]", "[verifier]", "[verifier.environment]", "[verifier.env]", "[[verifier.collect]]",
    "[environment]", "[environment.env]", "[environment.healthcheck]", "[environment.tpu]",
    "[[environment.mcp_servers]]",
    "[solution]", "[solution.env]", "[[steps]]", "[steps.agent]", "[steps.verifier]", "[steps.verifier.environment]",
    "[[artifacts]]", "[unknown]",
)  # fmt: skip


def mutations(text: str, count: int, seed: int) -> Iterator[str]:
    """Changed texts, each by one to three changes."""
    choices = random.Random(seed)
    for _ in range(count):
        lines = text.splitlines()
        for _ in range(choices.randint(1, 3)):
            lines = _changed(lines, choices)
        yield "\n".join(lines) + "\n"


def _changed(lines: list[str], choices: random.Random) -> list[str]:
    lines = list(lines) or [""]
    number = choices.randrange(len(lines))
    kind = choices.choices(["value", "field", "table", "delete", "repeat", "move", "letter"], [8, 8, 2, 2, 1, 1, 1])[0]
    settings = [place for place, line in enumerate(lines) if " = " in line and not line.startswith("#")]
    if kind == "value" and settings:
        number = choices.choice(settings)
        lines[number] = f"{lines[number].split(' = ')[0]} = {choices.choice(VALUES)}"
    elif kind == "field":
        lines.insert(number, f"{choices.choice(FIELDS)} = {choices.choice(VALUES)}")
    elif kind == "table":
        lines.insert(number, choices.choice(TABLES))
    elif kind == "delete":
        del lines[number]
    elif kind == "repeat":
        lines.insert(number, lines[number])
    elif kind == "move":
        lines.insert(choices.randrange(len(lines)), lines.pop(number))
    elif lines[number]:
        place = choices.randrange(len(lines[number]))
        lines[number] = lines[number][:place] + choices.choice('"[]{}=.#x7\\\t') + lines[number][place + 1 :]
    return lines
