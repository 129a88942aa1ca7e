"""A sandbox of a warm pool: its server waits for the annotation of its claim, which a volume shows as a file."""

from __future__ import annotations

import asyncio
import json
import signal
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from kuberoll_api import contract
from tests.pods.support import PATIENCE_SECONDS, Pod, pod

MODULE = "kuberoll_workers.pods.environment"
CONFIG: dict[str, Any] = {
    "job": "puzzles",
    "name": "puzzle",
    "type": "sliding_puzzle",
    "config": {"size": 2},
    "token_digest": contract.token_digest("the job's token"),
}


class Volume:
    """A volume of the downward API: links into a directory that is exchanged as a whole."""

    def __init__(self, place: Path) -> None:
        self.file = place / "environment.json"
        self._place, self._written = place, 0
        place.mkdir()
        self.file.symlink_to("..data/environment.json")

    def write(self, text: str) -> None:
        self._written += 1
        directory = self._place / f"..{self._written}"
        directory.mkdir()
        (directory / "environment.json").write_text(text)
        link = self._place / "..next"
        link.symlink_to(directory.name)
        link.replace(self._place / "..data")


async def answers(one: Pod, status: int) -> str:
    """Wait for a status of its health; the text."""
    return await one.until_answers("/healthz", lambda found, _: found == status, port=contract.ENVIRONMENT_PORT)


def info(one: Pod, token: str) -> int:
    url = f"http://{one.ip}:{contract.ENVIRONMENT_PORT}/v1/info"
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"}), timeout=PATIENCE_SECONDS
        ) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


async def test_a_warm_server_takes_the_configuration_and_the_token_of_its_claim(tmp_path: Path) -> None:
    volume = Volume(tmp_path / "claim")
    volume.write("")
    # The last --config counts.
    arguments = ("--config", str(volume.file), "--claimed")
    async with pod(MODULE, {}, tmp_path, arguments=arguments) as one:
        assert "not been claimed" in await answers(one, 503)
        assert await asyncio.to_thread(info, one, "the job's token") == 503
        volume.write(json.dumps(CONFIG))
        await answers(one, 200)
        assert await asyncio.to_thread(info, one, "another job's") == 401
        assert await asyncio.to_thread(info, one, CONFIG["token_digest"]) == 401
        assert await asyncio.to_thread(info, one, "the job's token") == 200
        one.signal(signal.SIGTERM)
        assert await one.end() == 0


async def test_a_warm_server_that_is_never_claimed_ends_when_it_is_told_to(tmp_path: Path) -> None:
    volume = Volume(tmp_path / "claim")
    arguments = ("--config", str(volume.file), "--claimed")
    async with pod(MODULE, {}, tmp_path, arguments=arguments) as one:
        await answers(one, 503)
        one.signal(signal.SIGTERM)
        assert await one.end() == 0


async def test_a_claim_without_a_token_is_refused(tmp_path: Path) -> None:
    volume = Volume(tmp_path / "claim")
    volume.write(json.dumps({**CONFIG, "token_digest": None}))
    arguments = ("--config", str(volume.file), "--claimed")
    async with pod(MODULE, {}, tmp_path, arguments=arguments) as one:
        assert await one.end() == contract.EXIT_REFUSED
        assert "KUBEROLL_ENVIRONMENT_TOKEN is not set" in one.text()
