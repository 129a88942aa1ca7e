"""Options that a command no longer has, and what to write instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_REPLAY: Final = {
    "admission": "NAME",
    "attention-ns": "N",
    "block-tokens": "N",
    "chunked-prefill": "true",
    "cold-start": "SECONDS",
    "deaths-per-hour": "N",
    "decode-us": "N",
    "kv-cache-tokens": "N",
    "margin": "N",
    "max-num-batched-tokens": "N",
    "max-num-seqs": "N",
    "prefill-us": "N",
    "prefix-caching": "true",
    "request-ms": "N",
    "routing": "NAME",
    "scheduling": "NAME",
    "seed": "N",
    "step-ms": "N",
    "weights-every": "SECONDS",
    "weights-seconds": "SECONDS",
    "window": "N",
}
_SYNTHESIZE: Final = {
    **dict.fromkeys(("environment", "observation", "prompt", "response", "turns"), "DISTRIBUTION"),
    **dict.fromkeys(("group-size", "most-tokens", "most-turns", "seed"), "N"),
}
_KUBECONFIG: Final = "set the variable KUBECONFIG to the file, as for kubectl"

REMOVED: Final[Mapping[tuple[str, str], str]] = {
    ("apply", "--kubeconfig"): _KUBECONFIG,
    **{("bench replay", f"--{name}"): f"write --set {name}={value}" for name, value in _REPLAY.items()},
    ("bench replay", "--no-chunked-prefill"): "write --set chunked-prefill=false",
    ("bench replay", "--no-prefix-caching"): "write --set prefix-caching=false",
    **{("bench synthesize", f"--{name}"): f"write --set {name}={value}" for name, value in _SYNTHESIZE.items()},
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
