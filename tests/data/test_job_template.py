"""Chat templates of a job's own: they render in place of the tokenizer's, or are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from kuberoll_api.model.generation import ModelSource
from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_workers.data.chat_observations import ChatTemplateObservations
from kuberoll_workers.data.tokenization import TemplateRefused
from kuberoll_workers.data.tokenizer import HuggingFaceTokenizer
from kuberoll_workers.worker.settings import job_tokenizer
from tests.data.support import model

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
OWN = """
{%- for message in messages %}
<|im_start|>{{ message.role | upper }}: {{ message.content }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>ASSISTANT:{% if mood is defined %} ({{ mood }}){% endif %}{% endif %}
"""
RENDERED = "<|im_start|>SYSTEM: Be brief.<|im_end|>\n<|im_start|>USER: 2+2?<|im_end|>\n<|im_start|>ASSISTANT:"


def wanting(**fields: Any) -> RolloutJob:
    return RolloutJob.model_validate(
        {
            "apiVersion": "kuberoll.io/v1alpha1",
            "kind": "RolloutJob",
            "metadata": {"name": "job"},
            "spec": {
                "generation": {"model": {"source": "m", **fields}},
                "environments": [{"name": "math", "type": "math"}],
                "dataset": {"source": {"uri": "rows.jsonl"}},
            },
        }
    )


def test_chats_are_rendered_by_it(qwen3: HuggingFaceTokenizer) -> None:
    before = qwen3.render_chat(CHAT)
    own = job_tokenizer(wanting(chatTemplate=OWN), qwen3)
    assert own.chat_text(CHAT, generation_prompt=True) == RENDERED
    assert own.render_chat(CHAT) == qwen3.encode(RENDERED)
    # The tokenizer itself is as it was, for whoever else has it.
    assert qwen3.render_chat(CHAT) == before != own.render_chat(CHAT)


def test_variables_are_those_of_the_job_s_template(qwen3: HuggingFaceTokenizer) -> None:
    moody = job_tokenizer(wanting(chatTemplate=OWN, chatTemplateKwargs={"mood": "calm"}), qwen3)
    assert moody.chat_text(CHAT, generation_prompt=True) == RENDERED + " (calm)"
    with pytest.raises(TemplateRefused) as caught:
        # The tokenizer's own template has it.
        job_tokenizer(wanting(chatTemplate=OWN, chatTemplateKwargs={"enable_thinking": False}), qwen3)
    assert str(caught.value) == (
        "spec.generation.model.chatTemplateKwargs.enable_thinking: the job's chat template "
        "(spec.generation.model.chatTemplate) has no such variable, and would ignore it"
    )


def test_observations_have_its_boundaries(qwen3: HuggingFaceTokenizer) -> None:
    own = job_tokenizer(wanting(chatTemplate=OWN), qwen3)
    ids = ChatTemplateObservations(own).render(
        "user", "And 3+3?", previous=own.encode("4<|im_end|>"), generation_prompt=True
    )
    text = own.decode_with_special_tokens(list(ids))
    assert text == "\n<|im_start|>USER: And 3+3?<|im_end|>\n<|im_start|>ASSISTANT:"


def test_without_one_the_tokenizer_s_stays(qwen3: HuggingFaceTokenizer) -> None:
    assert job_tokenizer(wanting(), qwen3) is qwen3


MARKED = """
{%- set kind = 'out' %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{% generation %}{% set kind = 'in' %}{{ message.content ~ kind }}<|im_end|>{% endgeneration %}
{%- else %}
{{ '<|im_start|>' + message.content + kind + '<|im_end|>' }}
{%- endif %}
{%- if loop.index > 8 %}{% break %}{% endif %}
{%- endfor %}
{{- {'b': 'ä<', 'a': [1]} | tojson }}
"""


def test_templates_with_marks_for_trainers_are_rendered_as_by_transformers(tmp_path: Path) -> None:
    found = model("qwen3").hugging_face
    found.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    plain = HuggingFaceTokenizer.load(str(tmp_path)).with_template(MARKED)
    chat = [*CHAT, {"role": "assistant", "content": "4"}, {"role": "user", "content": "Sure?"}]
    expected = found.apply_chat_template(chat, chat_template=MARKED, tokenize=False)
    assert "4in<|im_end|>" in expected
    assert "Sure?out" in expected
    assert plain.chat_text(chat, generation_prompt=False) == expected
    # As the model's own, too.
    (tmp_path / "chat_template.jinja").write_text(MARKED)
    assert HuggingFaceTokenizer.load(str(tmp_path)).chat_text(chat, generation_prompt=False) == expected


def test_a_template_may_want_a_system_s_message_and_its_variables(qwen3: HuggingFaceTokenizer) -> None:
    wants = "{% if messages[0].role != 'system' or not style %}{{ raise_exception('no!') }}{% endif %}" + OWN
    made = job_tokenizer(wanting(chatTemplate=wants, chatTemplateKwargs={"style": "plain"}), qwen3)
    assert made.chat_text(CHAT, generation_prompt=True) == RENDERED


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ messages[0].content }}\n{% for m in messages %}", "it is not Jinja: line 2: Unexpected end of template"),
        ("{{ messages[0].content | shorten }}", "it is not Jinja: line 1: No filter named 'shorten'"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "it cannot be compiled: RecursionError"),
        ("{{ mesages[0].content }}", "it cannot render a user's message: UndefinedError: 'mesages' is undefined"),
        ("{{ raise_exception('never') }}", "it cannot render a user's message: TemplateError: never"),
        ("{% for m in messages %}{{ m.contents }}{% endfor %}", "it leaves out what a user's message says; write {{ "),
        (
            "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}",
            "it leaves out what a user's message says",
        ),
        ("{{ messages.clear() }}", "SecurityError"),
    ],
)
def test_what_cannot_render_chats_is_refused(qwen3: HuggingFaceTokenizer, template: str, says: str) -> None:
    with pytest.raises(TemplateRefused) as caught:
        job_tokenizer(wanting(chatTemplate=template), qwen3)
    assert str(caught.value).startswith("spec.generation.model.chatTemplate: ")
    assert says in str(caught.value)


@pytest.mark.parametrize("text", ["", "template.jinja", "/templates/chat.jinja", "{a}\n"])
def test_the_name_of_a_file_is_no_template(text: str) -> None:
    with pytest.raises(ValidationError) as caught:
        ModelSource.model_validate({"source": "m", "chatTemplate": text})
    details: Any = caught.value.errors()[0]
    assert details["ctx"]["path"] == ("chatTemplate",)
    assert "write the template itself" in details["msg"]
