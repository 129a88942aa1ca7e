"""Options that a command no longer has, and what to write instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_KUBECONFIG: Final = "set the variable KUBECONFIG to the file, as for kubectl"

REMOVED: Final[Mapping[tuple[str, str], str]] = {
    ("apply", "--kubeconfig"): _KUBECONFIG,
    ("bench replay", "--routing"): "write --set routing=NAME",
    ("bench replay", "--seed"): "write --set seed=N",
    ("bench synthesize", "--group-size"): "write --set group-size=N",
    ("bench synthesize", "--response"): "write --set response=DISTRIBUTION",
    ("bench synthesize", "--seed"): "write --set seed=N",
    ("bench synthesize", "--turns"): "write --set turns=DISTRIBUTION",
    ("crd", "--reference"): "`kubectl explain rlj.spec` and docs/reference/rolloutjob.md have all fields",
    ("env new", "--directory"): "write the name as DIR/NAME",
    ("env play", "--max-turns"): "write --set spec.rollout.maxTurns=N with a manifest; otherwise there are 100 turns",
    ("env serve", "--drain-seconds"): "leave it out; open episodes have 25 seconds to end after SIGTERM",
    ("env serve", "--idle-seconds"): "leave it out; an episode that nobody has used for an hour is closed",
    ("env serve", "--name"): "leave it out; messages name the type or the class",
    ("env serve", "--spare-processes"): "leave it out; there is one",
    ("export", "--allow-mixed-sampling"): "write --allow mixed-sampling",
    ("export", "--allow-simulated"): "write --allow simulated",
    ("get", "--image"): "set the variable KUBEROLL_WORKER_IMAGE to it",
    ("get", "--kubeconfig"): _KUBECONFIG,
    ("get", "--start-timeout"): "leave it out; the reader pod has 300 seconds to start, and Ctrl-C removes it earlier",
    ("logs", "--kubeconfig"): _KUBECONFIG,
    ("render", "--all"): "leave it out; all RolloutJobs of the file are rendered",
    ("top", "--interval"): "leave it out; the table is refreshed every 2 seconds",
    ("top", "--kubeconfig"): _KUBECONFIG,
}
"""What to write instead, by the command without `kuberoll` and the option."""


def sentence(command: str, option: str) -> str | None:
    """Words about a removed option: its name, and what to write instead; None if it was not removed."""
    said = REMOVED.get((command, option))
    return None if said is None else f"{option} was removed: {said}"
