"""Scenarios from a seed: each draws what happens, how it is noticed, and whether it happens again."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from tests.environments import misbehaving
from tests.faults.blame import acting, programs
from tests.faults.blame.scenario import Scenario
from tests.faults.blame.service import CUT, GARBAGE, HALF, RESET, SILENT, Places

Draw = Callable[[random.Random, int, Places], Scenario]

JUDGE_OUTAGES = ("500", "502", "503", "504", "429", "408", CUT, RESET, SILENT, GARBAGE)
NOWHERE = ("nobody", "unknown", "no TLS", "unsigned")
ENGINE_FAULTS = (
    *("500", "502", "503", "504", "429", "529", "408", CUT, RESET, HALF, SILENT, GARBAGE),
    *("abort", "nan", "mismatch", "too many", "empty body", "html"),
)
ENGINE_SILENT = {SILENT: ("PolicySilent",), "429": ("PolicyOverloaded",)}
REFUSALS = ("400", "413", "422")
BARE_TIMEOUTS = ("aiohttp", "aiohttp_in_time", "http_client", "httpx_waited_for", "urllib")
"""Clients that raise Python's own `TimeoutError`."""
RESOURCE_REASONS = {
    "killed": ("ProcessKilled",),
    "terminated": ("ProcessKilled",),
    "no route": ("DependencyUnavailable",),
    "network file system gone": ("DependencyUnavailable", "ResourceExhausted"),
}


def judge(draw: random.Random, number: int, places: Places) -> Scenario:
    """A judge is out of order."""
    client = draw.choice(list(acting.CLIENTS))
    way = draw.choice(list(acting.WAYS))
    once = draw.random() < 0.4
    what = draw.choice((*JUDGE_OUTAGES, *NOWHERE))
    if what == SILENT and way == "group" and client in BARE_TIMEOUTS:
        # Python makes another exception of it on its way out of the thread, which says nothing any more.
        way = "from"
    if what in NOWHERE or way == "thrice" or client == "session":
        # It stays, or the environment itself tries again, and nobody is the wiser.
        once = False
    if what.isdecimal() and client in ("urllib3", "http_client"):
        # They raise nothing for a status.
        what = CUT
    path = f"/{'once/' if once else ''}{what.replace(' ', '-')}/{number}"
    url = {
        "nobody": places.nobody + path,
        "unknown": places.unknown + path,
        # A service that speaks no TLS where TLS is expected.
        "no TLS": places.url.replace("http:", "https:") + path,
        "unsigned": places.secure + f"/200/{number}",
    }.get(what, places.url + path)
    return _environment(
        f"judge {what} by {client}, {way}{', once' if once else ''}",
        number,
        places,
        ("judge", (client, url, way)),
        kind="infrastructure",
        reasons=("DependencyUnavailable",),
        # The service itself does it once.
        once=once,
        counted=False,
    )


def resources(draw: random.Random, number: int, places: Places) -> Scenario:
    """The machine has no more, or ends the process."""
    what = draw.choice(list(acting.RESOURCES))
    # A process that had answered before is replaced without an incident: see docs/reference/failures.md.
    once = draw.random() < 0.5 and what not in ("killed", "terminated")
    return _environment(
        f"{what}{', once' if once else ''}",
        number,
        places,
        ("resource", what),
        kind="infrastructure",
        reasons=RESOURCE_REASONS.get(what, ("ResourceExhausted",)),
        once=once,
    )


def engine(draw: random.Random, number: int, places: Places) -> Scenario:
    """The engine is out of order."""
    what = draw.choice((*ENGINE_FAULTS, "nobody"))
    once = what != "nobody" and draw.random() < 0.5
    api = draw.choice(("own", "openai"))
    if api == "openai" and what in ("nan", "too many"):
        what = "mismatch"
    return Scenario(
        name=f"engine {what} by {api}{', once' if once else ''}",
        stage="engine",
        kind="infrastructure",
        reasons=ENGINE_SILENT.get(what, ()),
        once=once,
        reward=1.0,
        engine=f"{api}/{'once/' if once else ''}{what}",
    )


def bug(draw: random.Random, number: int, places: Places) -> Scenario:
    """The environment's code is wrong."""
    if draw.random() < 0.15:
        client = draw.choice([name for name in acting.CLIENTS if name not in ("urllib3", "http_client")])
        status = draw.choice((400, 404, 405, 409, 422))
        url = f"{places.url}/{status}/{number}"
        return _environment(
            f"judge refuses with {status} by {client}", number, places, ("judge", (client, url, "plainly")),
            kind="environment", reasons=("EnvironmentRaised",), once=False,
        )  # fmt: skip
    once = draw.random() < 0.3
    what = draw.choice([*acting.BUGS, "misread"])
    does = ("misread", f"{places.url}/200/{number}") if what == "misread" else ("bug", what)
    name = f"bug: {what}{', once' if once else ''}"
    reasons = ("EnvironmentRaised",)
    return _environment(name, number, places, does, kind="environment", reasons=reasons, once=once)


def bad(draw: random.Random, number: int, places: Places) -> Scenario:
    """The environment misbehaves as in the table of misbehaviors."""
    tables = (
        *(misbehaving.METADATA, misbehaving.REWARDS, misbehaving.RAISED, misbehaving.RETURNED),
        dict.fromkeys(("os_exit", "os_exit_zero", "segfault", "abort", "close_descriptors", "garbage")),
    )
    what = draw.choice(sorted(draw.choice(tables)))
    return Scenario(name=f"bad: {what}", stage="bad", kind="environment", metadata={"n": number, "do": what})


def row(draw: random.Random, number: int, places: Places) -> Scenario:
    """The row cannot be used."""
    does = draw.choice((("row", "metadata.answer is missing"), ("row from", "/nowhere")))
    return _environment(does[0], number, places, does, kind="data", reasons=("RowUnusable",), once=False)


def refused(draw: random.Random, number: int, places: Places) -> Scenario:
    """The engine refuses the request."""
    what, api = draw.choice((*REFUSALS, "too long")), draw.choice(("own", "openai"))
    if what == "too long":
        api = "openai"
    return Scenario(
        name=f"engine refuses {what} by {api}", stage="engine", kind="data", reasons=("RequestRefused",),
        metadata={"prompt": "p" * (900 if what == "too long" else 10)},
        engine=f"{api}/{'200' if what == 'too long' else what}",
    )  # fmt: skip


def credentials(draw: random.Random, number: int, places: Places) -> Scenario:
    """The engine refuses the job's credentials."""
    what, api = draw.choice(("401", "403")), draw.choice(("own", "openai"))
    return Scenario(
        name=f"engine refuses credentials {what} by {api}", stage="engine", kind="operator",
        reasons=("AccessRefused",), engine=f"{api}/{what}",
    )  # fmt: skip


def deadline(draw: random.Random, number: int, places: Places) -> Scenario:
    """A time limit of the job's is over, while an environment or an engine works."""
    return _environment(
        "deadline", number, places, ("sleep", 60), kind="operator",
        reasons=("TurnDeadline", "TrajectoryDeadline"), once=False, stage="deadline",
    )  # fmt: skip


def unknown_tokens(draw: random.Random, number: int, places: Places) -> Scenario:
    """The policy samples what is no token."""
    return Scenario(
        name="unknown tokens", stage="engine", kind="policy", reasons=("UnknownTokens",), engine="own/unknown tokens"
    )


def response(draw: random.Random, number: int, places: Places) -> Scenario:
    """The policy answers wrongly, nothing, or without an end."""
    what = draw.choice(("wrong", "empty", "endless", "garbage", "right"))
    texts = {"empty": "", "endless": "z" * 4000, "garbage": "\x00\ufffd\u202e" * 9, "right": "4", "wrong": "5"}
    return Scenario(
        name=f"response {what}", stage="response", kind="policy", reward=float(what == "right"), answer=texts[what],
        metadata={"expected_answer": "4"},
    )  # fmt: skip


def program(draw: random.Random, number: int, places: Places) -> Scenario:
    """The policy writes a program that does not do what it should."""
    name, source, reward = programs.drawn(draw)
    return Scenario(
        name=f"program {name}", stage="program", kind="policy", reward=reward, answer=f"```python\n{source}\n```",
        metadata={"tests": ["assert f(2) == 4", "assert f(3) == 6"]},
    )  # fmt: skip


def _environment(
    name: str, number: int, places: Places, does: Any, *, kind: str, reasons: tuple[str, ...], once: bool,
    counted: bool = True, stage: str = "acting",
) -> Scenario:  # fmt: skip
    worth = 0.25 * (1 + number % 7)
    return Scenario(
        name=name,
        stage=stage,
        kind=kind,
        reasons=reasons,
        once=once,
        reward=worth,
        metadata={
            "do": list(does), "worth": worth, "once": once and counted, "key": f"{kind}-{number}",
            "service": places.url, "nobody": places.nobody,
        },
    )  # fmt: skip


SHARES: dict[str, Sequence[tuple[Draw, float]]] = {
    "infrastructure": ((judge, 0.5), (resources, 0.25), (engine, 0.25)),
    "environment": ((bug, 0.5), (bad, 0.5)),
    "data": ((row, 0.5), (refused, 0.5)),
    "operator": ((credentials, 0.7), (deadline, 0.3)),
    "policy": ((program, 0.7), (response, 0.27), (unknown_tokens, 0.03)),
}


def composed(seed: int, counts: dict[str, int], places: Places) -> list[Scenario]:
    """So many scenarios of each kind."""
    draw = random.Random(seed)
    chosen: list[Draw] = []
    for kind, count in counts.items():
        draws, weights = zip(*SHARES[kind], strict=True)
        # One of each at least.
        chosen += [*draws, *draw.choices(draws, weights, k=count)][:count]
    return [make(draw, number, places) for number, make in enumerate(chosen)]
