"""A stored prompt is the one that its turns were sampled under, whatever changed while the run was down."""

from __future__ import annotations

import json
import shutil
import signal
from array import array
from pathlib import Path
from typing import Any

import pytest

from kuberoll_workers.data.tokenizer import HuggingFaceTokenizer
from tests.local.support import (
    TINY,
    Endpoint,
    external_generation,
    manifest,
    run_to_end,
    running,
    trajectories,
    wait_for_trajectories,
)

# As templates of Llama 3.2 and of gpt-oss ask for the day, and further for the time, which differs between all zones.
DATED = [
    """
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
<|system|>Today Date: {{ date_string }}<|end|>
{%- for message in messages -%}
<|user|>{{ message.content }}<|end|>
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}
""",
    """
{%- macro system() %}Current date: {{ strftime_now("%Y-%m-%d") }} {{ strftime_now("%H:%M") }}{% endmacro %}
<|system|>{{ system() }}<|end|>
{%- for message in messages -%}
<|user|>{{ message.content }}<|end|>
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}
""",
]
# The date differs between these at any time.
ZONES = ("Etc/GMT+12", "Etc/GMT-14")


def check_samples(output: Path, endpoint: Endpoint) -> None:
    """Check that each stored response is what the engine answered to exactly the ids that are stored before it."""
    answered = {(tuple(prompt), tuple(response)) for prompt, response in endpoint.answers}
    for record in trajectories(output):
        context: array[int] = array("i")
        for message in record.messages:
            if message.sampled:
                assert (tuple(context), tuple(message.token_ids)) in answered, record.key
            context.extend(message.token_ids)


def lives(endpoint: Endpoint, begun: int) -> tuple[set[str], set[str]]:
    """Trajectories that began, and those that only went on, in the requests from the one numbered `begun`."""
    later = [request.rsplit("-", 2) for request in endpoint.requests[begun:]]
    began = {session for session, turn, _ in later if turn == "1"}
    return began, {session for session, _, _ in later} - began


def killed(job: Path, output: Path, *options: str) -> None:
    with running(job, "--output", output, "--metrics-port", "0", *options) as run:
        wait_for_trajectories(run, output, 2)
        run.process.send_signal(signal.SIGKILL)


def job_of(path: Path, generation: dict[str, Any], model: dict[str, Any]) -> Path:
    return manifest(
        path,
        generation={**generation, "model": model},
        rollout={"concurrency": 6, "observationTemplate": "Raw"},
    )


@pytest.mark.parametrize("template", [DATED[0], pytest.param(DATED[1], marks=pytest.mark.long)], ids=["day", "minute"])
def test_a_run_is_continued_on_the_day_on_which_it_began(
    template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint, output = Endpoint(0.05), tmp_path / "out"
    with external_generation(endpoint=endpoint) as generation:
        job = job_of(tmp_path / "job.yaml", generation, {"source": str(TINY), "chatTemplate": template})
        monkeypatch.setenv("TZ", ZONES[0])
        killed(job, output)
        begun = len(endpoint.requests)
        monkeypatch.setenv("TZ", ZONES[1])
        code, text = run_to_end(job, "--output", output, "--metrics-port", "0", "--resume")
    assert code == 0, text
    check_samples(output, endpoint)
    assert len(trajectories(output)) == 32
    _, continued = lives(endpoint, begun)
    assert continued
    tokenizer = HuggingFaceTokenizer.load(str(TINY))
    heads = {tokenizer.decode(record.messages[0].token_ids).partition("202")[2][:6] for record in trajectories(output)}
    assert len(heads) == 1


CHANGES = {
    "chat template": ("chat_template.jinja", "'<|assistant|>'", "'<|environment|>'"),
    "tokenizer": ("tokenizer_config.json", '"model_max_length": 1024', '"model_max_length": 1000'),
}


@pytest.mark.parametrize("name", ["chat template", pytest.param("tokenizer", marks=pytest.mark.long)])
def test_a_run_whose_tokenizer_changed_is_refused_and_forced_starts_over(name: str, tmp_path: Path) -> None:
    model, output = tmp_path / "model", tmp_path / "out"
    shutil.copytree(TINY, model)
    endpoint = Endpoint(0.05)
    with external_generation(endpoint=endpoint) as generation:
        job = job_of(tmp_path / "job.yaml", generation, {"source": str(model)})
        killed(job, output)
        begun = len(endpoint.requests)
        file, old, new = CHANGES[name]
        text = (model / file).read_text()
        assert old in text
        (model / file).write_text(text.replace(old, new))
        options = (job, "--output", output, "--metrics-port", "0", "--resume")
        code, told = run_to_end(*options)
        assert code == 2, told
        assert f"{name}: changed, so tokens may differ (was " in told
        code, told = run_to_end(*options, "--force")
    assert code == 0, told
    check_samples(output, endpoint)
    _, continued = lives(endpoint, begun)
    assert not continued
    forced = json.loads((output / "manifest.json").read_text())["forced"]
    assert [line.partition(":")[0] for line in forced] == [name]
    log = (output / "logs" / "worker-0.log").read_text()
    assert "starts over, without its" in log
