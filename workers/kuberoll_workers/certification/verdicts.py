"""From the rewards of right and wrong answers to the verdict on a row: pure, and the same in any order of the rows."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kuberoll_workers.analysis.statistics import wilson_interval
from kuberoll_workers.certification.trials import ECHO, PROMPT, Repeated
from kuberoll_workers.dataset.certificates import Finding, NetworkUse, Verdict

TOLERANCE: Final = 1e-9
"""Difference of two rewards that are the same: sums depend on the order of their terms."""

CLASSES: Final = {
    "never_passes": "a right answer does not get the full reward",
    "always_passes": "everything that was tried gets the full reward",
    "passes_on": "a wrong answer gets the full reward",
    "truth_in_prompt": "what the prompt says gets the full reward",
    "wrong_truth": "the row's truth and its solution disagree",
    "flaky": "the same answer gets different rewards",
    "depends_on_order": "the reward depends on what was graded before",
    "needs_network": "the grader needs a network",
    "grader_error": "the grader fails",
}
"""Classes of findings for which a row is refused."""

_NETWORK: Final = re.compile(
    r"(?i)name or service not known|temporary failure in name resolution|nodename nor servname|getaddrinfo"
    r"|network is unreachable|no route to host|urlopen error|connection ?(?:refused|error|timed ?out|reset)"
    r"|max retries exceeded|could not resolve host|cannot connect to host|failed to establish a new connection"
    r"|gaierror|proxyerror|networkerror|offline mode|name resolution|clientconnector"
)
# Fewer gradings in an order say nothing of it.
_LEAST_OF_ORDER: Final = 2
_LEAST_LATER: Final = 3
# Wrong answers beside none at all, of which one that all pass is a grader that looks at none.
_LEAST_ATTACKS: Final = 2
_SHORT: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What the gradings of a row show.

    Attributes:
        findings: For which the row is refused.
        warnings: Which should be looked at.
        unproven: What could not be shown.
        full_reward: Reward that counted as full.
        network: Whether right answers need a network to get it; None: not known.
    """

    verdict: Verdict
    findings: tuple[Finding, ...]
    warnings: tuple[Finding, ...]
    unproven: tuple[str, ...]
    full_reward: float
    network: NetworkUse | None = None


def judge(
    repeated: Sequence[Repeated],
    *,
    full_reward: float | None = None,
    network: bool | None = None,
    unproven: Sequence[str] = (),
) -> Judgement:
    """Judge a row by all gradings of its right and wrong answers.

    Args:
        full_reward: Reward of a right answer; None: 1, or what all solutions get if that is more.
        network: Whether there was a network, as usual; None: unknown.
        unproven: What could not be tried, and why.
    """
    others = {one.trial.name: one for one in repeated if one.trial.network is not None}
    repeated = [one for one in repeated if one.trial.network is None]
    full = _full(repeated, full_reward)
    solutions = [one for one in repeated if one.trial.kind == "solution"]
    wrong = [one for one in repeated if one.trial.kind != "solution"]
    needing = [one for one in solutions if _needs_network(one, others.get(one.trial.name), full)]
    offline = [one for one in needing if not _passed(one, full)]
    rest = [one for one in repeated if one not in offline]
    findings = [
        *_of_network(offline, full),
        *_of_errors(rest),
        *_of_solutions([one for one in rest if one.trial.kind == "solution"], full),
        *_of_flakes(rest),
        *_of_wrong(wrong, full),
    ]
    warnings = [*_of_network([one for one in needing if one not in offline], full), *_warnings(wrong, full)]
    missing = [
        *unproven,
        *(f"{_name(one)} was not graded: {_short(one.troubles[0])}" for one in repeated if one.troubles),
    ]
    if not any(one.rewards or one.problems for one in solutions):
        missing.append("no solution: that a right answer gets the full reward could not be shown")
    if not wrong:
        missing.append("no wrong answer was graded: that they get less could not be shown")
    return Judgement(
        verdict="refused" if findings else "unproven" if missing else "certified",
        findings=tuple(findings),
        warnings=tuple(warnings),
        unproven=tuple(missing),
        full_reward=full,
        network="needed" if needing else _without_network(solutions, others, full, network),
    )


def _needs_network(usual: Repeated, other: Repeated | None, full: float) -> bool:
    """Whether a solution passes with a network, and was graded without one and never does."""
    if other is None:
        return False
    online, offline = (other, usual) if other.trial.network else (usual, other)
    return bool(_passed(online, full) and not _passed(offline, full) and (offline.rewards or offline.problems))


def _without_network(
    solutions: Sequence[Repeated], others: Mapping[str, Repeated], full: float, network: bool | None
) -> NetworkUse | None:
    if network is None:
        return None
    tried = [others[one.trial.name] for one in solutions if one.trial.name in others] if network else solutions
    return "not needed" if tried and all(_passed(one, full) for one in tried) else None


def _of_network(needing: Sequence[Repeated], full: float) -> Iterator[Finding]:
    for one in needing:
        usual = "it is played with one" if _passed(one, full) else "it is played without"
        yield Finding(
            kind="needs_network",
            text=f"needs a network: {_name(one)} gets the full reward with one, and never without; {usual}",
            trial=one.trial.name,
        )


def _full(repeated: Sequence[Repeated], given: float | None) -> float:
    if given is not None:
        return given
    rewards = [reward for one in repeated if one.trial.kind == "solution" for reward in one.rewards]
    # An environment that does not say may give more than 1; less is no full reward.
    return max(1.0, min(rewards, default=1.0))


def passes(reward: float, full: float) -> bool:
    """True if a reward is the full one, or more."""
    return reward >= full - TOLERANCE


def _passed(one: Repeated, full: float) -> int:
    return sum(passes(reward, full) for reward in one.rewards)


def _of_errors(repeated: Sequence[Repeated]) -> Iterator[Finding]:
    """Graders that fail where they must not: on right answers, and on none."""
    for one in repeated:
        if not one.problems or one.trial.kind == "attack":
            continue
        problem = one.problems[0]
        often = "" if one.failed == len(one.gradings) else f" in {_of(one.failed, len(one.gradings))} repetitions"
        if _NETWORK.search(problem):
            yield Finding(
                kind="needs_network",
                text=f"the grader needs a network: on {_name(one)} it failed{often}: {_short(problem)}",
                trial=one.trial.name,
            )
        else:
            yield Finding(
                kind="grader_error",
                text=f"the grader fails on {_name(one)}{often}: {_short(problem)}",
                trial=one.trial.name,
                **_rate(one.failed, len(one.gradings)) if often else {},
            )


def _of_solutions(solutions: Sequence[Repeated], full: float) -> Iterator[Finding]:
    graded = [one for one in solutions if one.rewards]
    never = [one for one in graded if not _passed(one, full)]
    always = [one for one in graded if _passed(one, full)]
    for one in never:
        said = f"; the grader said: {_short(one.detail)}" if one.detail else ""
        if _NETWORK.search(one.detail):
            yield Finding(
                kind="needs_network",
                text=f"the grader needs a network: {_name(one)} gets {_rewards(one)} of {full:g}{said}",
                trial=one.trial.name,
            )
        elif any(other.trial.name != one.trial.name for other in always):
            yield Finding(
                kind="wrong_truth",
                text=f"the row contradicts itself: {_name(one)} gets {_rewards(one)} of {full:g}, and "
                f"{_name(always[0])} the full reward{said}",
                trial=one.trial.name,
            )
        else:
            less = max(one.rewards)
            stated = " (if that is the full reward, the environment must say so: full_reward)" if less > 0 else ""
            yield Finding(
                kind="never_passes",
                text=f"never passes: {_name(one)} gets {_rewards(one)} of {full:g}{stated}{said}",
                trial=one.trial.name,
            )


def _of_flakes(repeated: Sequence[Repeated]) -> Iterator[Finding]:
    for one in repeated:
        values = Counter(round(reward / TOLERANCE) for reward in one.rewards)
        if max(one.rewards, default=0.0) - min(one.rewards, default=0.0) <= TOLERANCE:
            continue
        total = len(one.rewards)
        rate = _rate(total - max(values.values()), total)
        listed = ", ".join(f"{reward:g}" for reward in one.rewards[:20])
        order = _order(one)
        if order is not None:
            yield Finding(
                kind="depends_on_order",
                text=f"depends on what was graded before: {_name(one)} gets {order} (rewards {listed})",
                trial=one.trial.name,
                **rate,
            )
        else:
            yield Finding(
                kind="flaky",
                text=f"flaky: {_name(one)} gets different rewards ({listed}); about {rate['rate']:.0%} differ, "
                f"with 95 % confidence {rate['low']:.0%} to {rate['high']:.0%}",
                trial=one.trial.name,
                **rate,
            )


def _order(one: Repeated) -> str | None:
    """How the reward follows from what was graded before, in words; None if that does not explain it."""
    rewards = [(graded.before, graded.outcome.reward) for graded in one.gradings]
    if any(reward is None for _, reward in rewards):
        return None
    (_, first), *later = rewards
    # That the first of n gradings is the one that differs is chance, in one of n cases.
    if len(later) >= _LEAST_LATER and len({reward for _, reward in later}) == 1 and first != later[0][1]:
        return f"{first:g} the first time and {later[0][1]:g} after it"
    after: dict[str, list[float | None]] = defaultdict(list)
    for before, reward in rewards:
        after[before].append(reward)
    if len(after) < 2 or any(len(given) < _LEAST_OF_ORDER or len(set(given)) > 1 for given in after.values()):
        return None
    return " and ".join(f"{given[0]:g} after {before or 'the row before'}" for before, given in sorted(after.items()))


def _of_wrong(wrong: Sequence[Repeated], full: float) -> Iterator[Finding]:
    """Wrong answers that get the full reward, in all repetitions or in some."""
    graded = [one for one in wrong if one.rewards]
    passing = [one for one in graded if _passed(one, full)]
    attacks = [one for one in graded if one.trial.kind == "attack"]
    careless = len(attacks) >= _LEAST_ATTACKS and all(one in passing for one in attacks)
    if passing and (len(passing) == len(graded) or careless):
        empty = "no answer, and " if any(one.trial.kind == "nothing" for one in passing) else ""
        yield Finding(
            kind="always_passes",
            text=f"always passes: {empty}all {len(attacks)} wrong answers that were tried get the full reward"
            if attacks
            else "always passes: no answer gets the full reward",
            trial=passing[0].trial.name,
        )
        return
    copied = any(one.trial.name.startswith(PROMPT) and one.trial.name != ECHO for one in passing)
    for one in passing:
        if one.trial.name == ECHO and not copied:
            continue
        count, total = _passed(one, full), len(one.rewards)
        often = "" if count == total else f" in {_of(count, total)} repetitions"
        leaked = one.trial.name.startswith(PROMPT)
        yield Finding(
            kind="truth_in_prompt" if leaked else "passes_on",
            text=f"{'the prompt gives the answer away' if leaked else 'passes on a wrong answer'}: {_name(one)} gets "
            f"the full reward{often}",
            trial=one.trial.name,
            **_rate(count, total) if often else {},
        )


def _warnings(wrong: Sequence[Repeated], full: float) -> Iterator[Finding]:
    nothing = max((reward for one in wrong if one.trial.kind == "nothing" for reward in one.rewards), default=0.0)
    for one in wrong:
        if one.trial.kind != "attack":
            continue
        if one.problems:
            yield Finding(
                kind="grader_error",
                text=f"the grader fails on {_name(one)}: {_short(one.problems[0])}; such answers are missing from runs",
                trial=one.trial.name,
            )
        best = max(one.rewards, default=nothing)
        if one.trial.name == ECHO and passes(best, full):
            yield Finding(
                kind="reads_prompt",
                text="the prompt, given as the answer, gets the full reward: the grader takes something in it for one",
                trial=one.trial.name,
            )
            continue
        if best > nothing + TOLERANCE and not passes(best, full):
            yield Finding(
                kind="pays",
                text=f"{_name(one)} gets {best:g}, more than no answer ({nothing:g})",
                trial=one.trial.name,
            )


def _rate(count: int, total: int) -> dict[str, float]:
    low, high = wilson_interval(count / total, total)
    return {"rate": count / total, "low": low, "high": high}


def _of(count: int, total: int) -> str:
    return f"{count} of {total}"


def _name(one: Repeated) -> str:
    trial = one.trial
    if trial.kind == "nothing":
        return "no answer"
    if trial.kind == "attack":
        return f"the wrong answer {trial.name!r}"
    return "the solution" if trial.name == "solution" else f"the solution {trial.name!r}"


def _rewards(one: Repeated) -> str:
    least, most = min(one.rewards), max(one.rewards)
    return f"{least:g}" if most - least <= TOLERANCE else f"{least:g} to {most:g}"


def _short(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= _SHORT else f"{flat[: _SHORT - 1]}…"
