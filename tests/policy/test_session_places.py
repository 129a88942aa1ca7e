"""Agents that wait for a place: they say so, they get one as soon as there is one, and they do not wait for ever."""

from __future__ import annotations

import asyncio
import logging

import pytest
from aiohttp import web

from kuberoll_workers.policy.agent_sessions import SessionSettings
from kuberoll_workers.policy.client import ServeClient, SessionsFull
from kuberoll_workers.policy.outage import PATIENCE_SECONDS
from kuberoll_workers.policy.routing import session_places
from kuberoll_workers.policy.routing.discovery import StaticDiscovery
from kuberoll_workers.policy.routing.router import RoutedPolicy
from kuberoll_workers.policy.routing.session_places import LONGEST_PAUSE_SECONDS, SessionPlaces
from tests.policy.test_client import serving

FULL = SessionsFull("4,096 sessions are open")


def test_agents_that_get_no_place_wait_for_an_outage_unless_others_of_theirs_play() -> None:
    places = SessionPlaces()
    places.record_opening()
    places.record_refusal(FULL, 0.0, tries=0)
    assert places.outage(1e6) is None
    places.record_closing()
    places.record_refusal(FULL, 100.0, tries=1)
    assert places.waiting == 1
    assert places.outage(100.0) is None
    (reason, seconds) = places.outage(100.0 + PATIENCE_SECONDS) or ("", 0.0)
    assert (reason, seconds) == ("4,096 sessions are open", PATIENCE_SECONDS)
    places.record_end(opened=False)
    assert places.outage(1e6) is None
    assert places.waiting == 0


def test_one_who_is_stopped_leaves_the_others_waiting() -> None:
    places = SessionPlaces()
    for _ in range(2):
        places.record_refusal(FULL, 0.0, tries=0)
    places.record_end(opened=False)
    assert places.outage(100.0) is not None
    places.record_end(opened=True)
    places.record_opening()
    assert places.outage(100.0) is None


def test_pauses_grow_to_a_limit() -> None:
    places = SessionPlaces()
    pauses = [places.record_refusal(FULL, 0.0, tries=tries) for tries in range(100)]
    assert pauses == sorted(pauses)
    assert pauses[-1] == LONGEST_PAUSE_SECONDS
    assert places.record_refusal(SessionsFull("", retry_after=1e9), 0.0, tries=5) == LONGEST_PAUSE_SECONDS


async def test_an_agent_waits_for_a_place_aloud(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(session_places, "FIRST_PAUSE_SECONDS", 0.001)
    refusals, waited = 0, list[int]()

    async def handler(request: web.Request) -> web.Response:
        nonlocal refusals
        if request.path == "/info":
            info = {"model": "m", "engine": "e", "max_model_len": 9, "vocab_size": 9, "policy_version": "0"}
            return web.json_response(info)
        if request.path != "/sessions":
            return web.json_response({})
        waited.append(policy.state().waiting)
        if refusals < 5:
            refusals += 1
            return web.json_response(
                {"error": {"type": "SessionRefused", "message": "2 sessions are open"}}, status=429
            )
        session = dict.fromkeys(("id", "url", "openai_base_url", "anthropic_base_url", "token", "model"), "s")
        return web.json_response(session, status=201)

    def connect(url: str) -> ServeClient:
        return ServeClient(url, limit=8)

    async with serving(handler) as url, RoutedPolicy(StaticDiscovery([url]), connect) as policy:
        with caplog.at_level(logging.WARNING):
            assert (await asyncio.wait_for(policy.open_session("1-0-0", SessionSettings()), 60)).id == "s"
        assert policy.outage() is None
        # A refusal of a session is none of a request: the replica takes as many as before.
        assert policy.state().window > 100
    assert waited == [0, 1, 1, 1, 1, 1]
    assert [record.message for record in caplog.records if "wait for a place" in record.message] == [
        f"1 agents wait for a place for their sessions, and 0 play: {url} answered 429: 2 sessions are open"
    ]
