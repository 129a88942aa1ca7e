"""Small tasks of which something is right and something is not, with the rewards that Harbor 0.26 gives for them.

Harbor needs bash in an image, and so these have it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.harbor.kinds import REWARD, Kind, with_libraries, write_kind
from tests.sandboxes.layouts import busybox_layout

Rewards = Mapping[str, float] | None
"""By their names; None: the task could not be played, or scored."""

_NAMED: Final = "/logs/verifier/reward.json"
_NOTHING: Final[Rewards] = {"reward": 0.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialKind:
    """A kind of task, and what it is worth.

    Attributes:
        solution: With its solution.
        nothing: Without an agent.
        ours: With its solution, in KubeRoll, where that differs.
        reason: Why it does.
    """

    kind: Kind
    solution: Rewards
    nothing: Rewards = None
    ours: Rewards = None
    reason: str | None = None


def _writes(reward: str) -> str:
    return f"#!/bin/sh\necho '{reward}' > {REWARD}\n"


def _names(rewards: str) -> str:
    return f"#!/bin/sh\necho '{rewards}' > {_NAMED}\n"


def _if(condition: str, first: str, second: str = "0") -> str:
    return f"#!/bin/bash\nif {condition}; then r='{first}'; else r='{second}'; fi\necho $r > {REWARD}\n"


def _steps(*, tests: tuple[str, str], solutions: tuple[str, str] = ("touch first", "touch second")) -> dict[str, str]:
    files = {}
    for name, test, solution in zip(("first", "second"), tests, solutions, strict=True):
        files[f"steps/{name}/instruction.md"] = f"Do the {name}.\n"
        files[f"steps/{name}/tests/test.sh"] = test
        if solution:
            files[f"steps/{name}/solution/solve.sh"] = f"#!/bin/bash\n{solution}\n"
    return files


def _two_steps(
    *,
    tests: tuple[str, str],
    least: str = "",
    final: bool = False,
    solutions: tuple[str, str] = ("touch first", "touch second"),
    toml: str = "",
    files: Mapping[str, str] | None = None,
) -> Kind:
    head = 'multi_step_reward_strategy = "final"\n' if final else ""
    return Kind(
        image="bash",
        toml=f'[[steps]]\nname = "first"\n{least}[[steps]]\nname = "second"\n{toml}',
        test=None,
        solve=None,
        files={**_steps(tests=tests, solutions=solutions), "head.toml": head, **(files or {})},
    )


def _one(test: str, solve: str = "touch done", *, toml: str = "", files: Mapping[str, str] | None = None) -> Kind:
    return Kind(image="bash", toml=toml, test=test, solve=f"#!/bin/bash\n{solve}\n", files=files or {})


# A statement that only bash has.
_ARRAY: Final = 'parts=(a b); [ "${parts[1]}" = b ]'

PARTIAL_KINDS: Final[dict[str, PartialKind]] = {
    # Numbers and names.
    "fraction": PartialKind(kind=_one(_if("[ -e done ]", "0.375")), solution={"reward": 0.375}, nothing=_NOTHING),
    "below-zero": PartialKind(
        kind=_one(_if("[ -e done ]", "-0.5", "-2")), solution={"reward": -0.5}, nothing={"reward": -2}
    ),
    "names": PartialKind(
        kind=_one(
            f'#!/bin/sh\n[ -e done ] && r=0.75 || r=0.25\necho "{{\\"right\\": $r, \\"style\\": -0.5}}" > {_NAMED}\n'
        ),
        solution={"right": 0.75, "style": -0.5},
        nothing={"right": 0.25, "style": -0.5},
    ),
    # Steps.
    "steps-with-other-names": PartialKind(
        kind=_two_steps(tests=(_names('{"right": 1, "style": 0.5}'), _names('{"right": 0.5}'))),
        solution={"right": 0.75, "style": 0.25},
        nothing={"right": 0.75, "style": 0.25},
    ),
    "stopped": PartialKind(
        kind=_two_steps(tests=(_writes("0.4"), _writes("1")), least="min_reward = 0.5\n"),
        solution={"reward": 0.4},
        nothing={"reward": 0.4},
    ),
    "stopped-final": PartialKind(
        kind=_two_steps(
            tests=(_if("[ -e first ]", "0.5", "0.25"), _if("[ -e second ]", "0.75")),
            least="min_reward = 0.5\n",
            final=True,
        ),
        solution={"reward": 0.75},
        nothing={"reward": 0.25},
    ),
    "stopped-by-name": PartialKind(
        kind=_two_steps(
            tests=(_names('{"right": 0.5, "style": 0.1}'), _writes("1")),
            least="min_reward = { right = 0.5, style = 0.2 }\n",
        ),
        solution={"right": 0.5, "style": 0.1},
        nothing={"right": 0.5, "style": 0.1},
    ),
    "second-step-without-reward": PartialKind(
        kind=_two_steps(tests=(_writes("0.5"), "#!/bin/sh\ntrue\n")),
        solution={"reward": 0.5},
        nothing={"reward": 0.5},
        reason="tests without a reward are a failure of the task, whatever other steps are worth",
    ),
    "solution-of-the-task": PartialKind(
        kind=_two_steps(
            tests=(_if("[ -e common ]", "0.5"), _if("[ -e second ]", "1")),
            solutions=("", "touch second"),
            files={"solution/solve.sh": "#!/bin/sh\ntouch common\n"},
        ),
        solution={"reward": 0.75},
        nothing=_NOTHING,
    ),
    # Ends of the agent.
    "solution-that-fails": PartialKind(
        kind=_one(_if("[ -e done ]", "0.5"), "touch done\nexit 3"), solution={"reward": 0.5}, nothing=_NOTHING
    ),
    "late": PartialKind(
        kind=_one(_if("[ -e done ]", "0.5"), "touch done\nsleep 60\ntouch late", toml="[agent]\ntimeout_sec = 2.0\n"),
        solution={"reward": 0.5},
        nothing=_NOTHING,
    ),
    # No reward.
    "no-reward": PartialKind(kind=_one("#!/bin/sh\nexit 1\n"), solution=None, nothing=None),
    "agents-own-reward": PartialKind(
        kind=_one("#!/bin/sh\ntrue\n", f"mkdir -p /logs/verifier; echo 1 > {REWARD}"), solution=None, nothing=None
    ),
    "late-tests": PartialKind(
        kind=_one(f"#!/bin/sh\nsleep 60\necho 1 > {REWARD}\n", toml="[verifier]\ntimeout_sec = 2.0\n"),
        solution=None,
        nothing=None,
    ),
    # Commands of tasks are bash's.
    "bash-healthcheck": PartialKind(
        kind=_one(
            _if("[ -e done ]", "0.5"), toml=f"[environment.healthcheck]\ncommand = '{_ARRAY}'\ninterval_sec = 0.1\n"
        ),
        solution={"reward": 0.5},
        nothing=_NOTHING,
    ),
    "bash-collect": PartialKind(
        kind=_one(
            _if("[ -e /logs/artifacts/b ]", "0.5"),
            toml=f"[[verifier.collect]]\ncommand = '{_ARRAY} && cp done /logs/artifacts/${{parts[1]}}'\n",
        ),
        solution={"reward": 0.5},
        nothing=_NOTHING,
    ),
    "bash-setup": PartialKind(
        kind=_two_steps(
            tests=(_if("[ -e b ]", "0.5", "0.25"), _writes("1")),
            files={"steps/first/workdir/setup.sh": f"{_ARRAY} && touch b\n"},
        ),
        solution={"reward": 0.75},
        nothing={"reward": 0.75},
    ),
    "users-of-a-step": PartialKind(
        kind=_two_steps(
            tests=(_if('[ "$(stat -c %U /tmp/up)" = app ]', "0.5"), _writes("1")),
            toml='[steps.agent]\nuser = "app"\n',
            least='[steps.agent]\nuser = "app"\n[steps.healthcheck]\ncommand = "touch /tmp/up"\n',
            solutions=("touch /tmp/first", "touch /tmp/second"),
        ),
        solution={"reward": 0.75},
        nothing={"reward": 0.75},
    ),
    "variables-of-commands": PartialKind(
        kind=_one(
            _if('[ "$(cat /tmp/said)" = "/home/app /work noninteractive" ] && [ "$HOME $PWD" = "/root /work" ]', "0.5"),
            'echo "$HOME $PWD $DEBIAN_FRONTEND" > /tmp/said',
            toml='[agent]\nuser = "app"\n',
        ),
        solution={"reward": 0.5},
        nothing=_NOTHING,
    ),
    # What an agent leaves.
    "server": PartialKind(
        kind=_one(
            _if('[ "$(wget -q -O - http://127.0.0.1:8099/done)" = yes ]', "0.5"),
            "echo yes > done\nhttpd -p 127.0.0.1:8099 -h /work",
        ),
        solution={"reward": 0.5},
        nothing=_NOTHING,
        ours=_NOTHING,
        reason="no process of the agent is there when the tests come",
    ),
    "files-among-the-tests": PartialKind(
        kind=_one(_if("[ -e /tests/left ]", "0.5"), "mkdir -p /tests; touch /tests/left"),
        solution={"reward": 0.5},
        nothing=_NOTHING,
        ours=_NOTHING,
        reason="what an agent has left in the place of tests is removed",
    ),
}


def expected(kind: PartialKind) -> tuple[Rewards, Rewards]:
    """What KubeRoll gives: with the solution, and without an agent."""
    if kind.reason is None:
        return kind.solution, kind.nothing
    return kind.ours, kind.nothing if kind.ours is not None else None


def bash_layout(directory: Path) -> str:
    """Write an image of busybox and bash; Harbor's runtime needs both.

    Raises:
        Impossible: This machine has no bash.
    """
    return busybox_layout(directory, files=with_libraries("bash", "bin/bash"), Env=["PATH=/bin"])


def write_partial_tasks(directory: Path, *, image: str) -> None:
    """Write the tasks into a directory."""
    for name, partial in PARTIAL_KINDS.items():
        write_kind(directory / name, name, partial.kind, image)
