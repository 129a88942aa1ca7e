"""Whose doing a failure is: hundreds of them from a seed, through real processes, sockets and programs."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.faults.blame.composing import composed
from tests.faults.blame.playing import played
from tests.faults.blame.service import Places, serving

pytestmark = pytest.mark.slow

COUNT = int(os.environ.get("KUBEROLL_TEST_BLAME", "24"))
"""Scenarios of the infrastructure, and of the policy; of the other kinds less."""
SEED = int(os.environ.get("KUBEROLL_TEST_BLAME_SEED", "35"))
COUNTS = {
    "infrastructure": COUNT,
    "policy": COUNT,
    "environment": max(20, COUNT * 15 // 100),
    "data": max(10, COUNT // 10),
    "operator": max(6, COUNT // 10),
}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Places]:
    with serving(tmp_path_factory.mktemp("judge")) as found:
        yield found


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", COUNTS)
async def test_nobody_is_blamed_for_another_s_doing(kind: str, places: Places) -> None:
    scenarios = composed(SEED, {kind: COUNTS[kind]}, places)
    assert len(scenarios) == COUNTS[kind]
    wrong = await played(scenarios, places)
    assert not wrong, f"{len(wrong)} of {len(scenarios)} with seed {SEED}:\n" + "\n".join(wrong)
