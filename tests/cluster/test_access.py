"""Who may use a policy behind Ray Serve: the tokens of pods outside the job, from their entries to their end."""

from __future__ import annotations

import base64
import json
from typing import Any

import aiohttp
import pytest

from kuberoll_workers.data.messages import token_array
from kuberoll_workers.policy import wire
from kuberoll_workers.policy.interface import GenerationRequest, SamplingParameters
from tests.cluster.api import ApiError, Object, is_true
from tests.cluster.asking import WEIGHTS
from tests.cluster.jobs import rollout_job
from tests.cluster.test_lifecycle import Cluster, cluster, installed

__all__ = ["cluster", "installed"]

pytestmark = pytest.mark.timeout(300, func_only=True)

GENERATED = GenerationRequest(
    request_id="1", session_id="1", token_ids=token_array([1, 2]), sampling=SamplingParameters(max_tokens=2)
)
JUDGE = {"name": "judge", "podSelector": {"matchLabels": {"app": "judge"}}}
TRAINER = {
    "name": "trainer",
    "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "training"}},
    "scopes": ["generate", "weights"],
    "tokenSecret": {"name": "trainer", "key": "token"},
}
CHOSEN = "chosen-by-the-trainer-itself"


def open_job(namespace: str) -> Object:
    """One that does not end by itself."""
    generation = {"access": [JUDGE, TRAINER]}
    return rollout_job(namespace, light=False, replicas=1, shards=1, count=20_000, seconds=0.2, generation=generation)


async def ready_address(cluster: Cluster) -> str:
    """The policy's address at its one pod, once it is ready."""
    await cluster.job(lambda item: is_true(item, "GenerationReady") and not is_true(item, "Suspended"))
    [pod] = await cluster.api.list("Pod", cluster.namespace, labels="app.kubernetes.io/component=generation")
    return f"http://{pod['status']['podIP']}:8000"


async def allowed(url: str, token: str) -> dict[str, int]:
    """The policy's answers to a holder of a token, by what was asked."""
    headers = {"Authorization": f"Bearer {token}"}
    asked: dict[str, tuple[str, dict[str, Any]]] = {
        "generate": (
            "/v1/generate",
            {"data": wire.encode_request(GENERATED), "headers": {"Content-Type": wire.MSGPACK}},
        ),
        "weights": ("/v1/weights", {"json": WEIGHTS}),
        "session": ("/sessions", {}),
    }
    found = {}
    async with aiohttp.ClientSession(headers=headers) as http:
        for what, (path, options) in asked.items():
            async with http.post(url + path, **options) as answer:
                await answer.read()
                found[what] = answer.status
        async with http.get(f"{url}/info") as answer:
            found["read"] = answer.status
    return found


REFUSED = dict.fromkeys(("generate", "weights", "session", "read"), 401)
SAMPLES = {"generate": 200, "weights": 403, "session": 201, "read": 200}
PUBLISHES = {**SAMPLES, "weights": 202}


async def test_a_token_is_good_for_its_scopes_until_its_entry_is_gone(
    cluster: Cluster,
    ray_pods: None,
) -> None:
    secret = {"metadata": {"name": "trainer", "namespace": cluster.namespace}, "stringData": {"token": f"{CHOSEN}\n"}}
    await cluster.api.create({"apiVersion": "v1", "kind": "Secret", **secret})
    cluster.operator()
    made = await cluster.create(open_job(cluster.namespace))
    url = await ready_address(cluster)
    given = await cluster.api.get("Secret", cluster.namespace, "puzzles-access-judge")
    assert [owner["uid"] for owner in given["metadata"]["ownerReferences"]] == [made["metadata"]["uid"]]
    content = {key: base64.b64decode(value).decode() for key, value in given["data"].items()}
    assert content["KUBEROLL_POLICY_URL"] == f"http://puzzles-generation.{cluster.namespace}.svc:8000/v1"
    token = content.pop("KUBEROLL_POLICY_TOKEN")
    assert await allowed(url, token) == SAMPLES
    assert await allowed(url, CHOSEN) == PUBLISHES
    assert await allowed(url, "of-somebody-who-guesses") == REFUSED
    assert await cluster.api.find("Secret", cluster.namespace, "puzzles-access-trainer") is None
    config = await cluster.api.list("ConfigMap", cluster.namespace)
    assert not [word for word in (token, CHOSEN, "judge") if word in json.dumps(config)]

    # While it runs it is as it was; then one entry goes, and its token with the engines that knew it.
    generation = open_job(cluster.namespace)["spec"]["generation"] | {"access": [TRAINER]}
    with pytest.raises(ApiError, match="cannot change while the job runs"):
        await cluster.patch({"generation": generation})
    await cluster.patch({"suspend": True})
    await cluster.job(lambda item: is_true(item, "Suspended"), why="to be suspended")
    await cluster.gone("Deployment", "puzzles-generation")
    await cluster.patch({"generation": generation, "suspend": False})
    url = await ready_address(cluster)
    assert await allowed(url, token) == REFUSED
    assert await allowed(url, CHOSEN) == PUBLISHES
    # It opens nothing; the operator may create Secrets, and not delete them.
    assert await cluster.api.find("Secret", cluster.namespace, "puzzles-access-judge") is not None
    await cluster.api.delete("RolloutJob", cluster.namespace, "puzzles")
    await cluster.gone("Secret", "puzzles-access-judge")
    await cluster.nothing_left()
    assert await cluster.api.find("Secret", cluster.namespace, "trainer") is not None
