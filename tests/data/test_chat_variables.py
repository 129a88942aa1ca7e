"""Variables of chat templates: they are wherever a chat is rendered, or are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from kuberoll_api.model.generation import ModelSource
from kuberoll_workers.data.chat_observations import ChatTemplateObservations
from kuberoll_workers.data.chat_template import template_variables
from kuberoll_workers.data.tokenization import TemplateRefused
from kuberoll_workers.data.tokenizer import HuggingFaceTokenizer
from tests.data.support import model, wrap

CHAT = [{"role": "user", "content": "2+2?"}]
THOUGHT = "<think>\n\n</think>\n\n"
QWEN3 = Path(__file__).parent / "templates" / "qwen3.jinja"


def test_thinking_is_turned_off_in_prompts_and_texts(qwen3: HuggingFaceTokenizer) -> None:
    quiet = qwen3.with_variables({"enable_thinking": False})
    for tokenizer, thinks in ((qwen3, True), (quiet, False)):
        text = tokenizer.chat_text(CHAT, generation_prompt=True)
        assert text.endswith("<|im_start|>assistant\n" if thinks else f"<|im_start|>assistant\n{THOUGHT}")
        assert tokenizer.render_chat(CHAT) == tokenizer.encode(text)


def test_thinking_is_turned_off_after_observations() -> None:
    tokenizer = model("qwen3").tokenizer
    endings = []
    for given in (tokenizer, tokenizer.with_variables({"enable_thinking": False})):
        ids = ChatTemplateObservations(given).render(
            "user", "And 3+3?", previous=given.encode("4<|im_end|>"), generation_prompt=True
        )
        endings.append(str(model("qwen3").hugging_face.decode(list(ids))))
    assert endings[0].endswith("<|im_start|>assistant\n")
    assert endings[1] == endings[0] + THOUGHT


def test_a_variable_that_the_template_lacks_is_refused(qwen3: HuggingFaceTokenizer) -> None:
    with pytest.raises(TemplateRefused) as caught:
        qwen3.with_variables({"enable_thinkng": False})
    assert str(caught.value) == (
        "spec.generation.model.chatTemplateKwargs.enable_thinkng: the model's chat template has no such variable, and "
        "would ignore it; did you mean enable_thinking?"
    )


def test_without_variables_nothing_changes() -> None:
    tokenizer = HuggingFaceTokenizer(wrap(model("qwen3").hugging_face.backend_tokenizer, None))
    assert tokenizer.with_variables({}) is tokenizer


def test_variables_of_templates() -> None:
    assert template_variables("{% set a = b %}{{ a }}{% for c in messages %}{{ c }}{% endfor %}") == {"b", "messages"}
    assert "enable_thinking" in (template_variables(QWEN3.read_text()) or ())
    assert template_variables("{% generation %}{{ x }}{% endgeneration %}") == {"x"}
    # A tag of nobody's, and several templates by name.
    assert template_variables("{% generate %}x{% endgenerate %}") is None
    assert template_variables({"default": "x"}) is None


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "a b", "tokenize"])
def test_names_that_the_rendering_sets_are_nobody_s(name: str) -> None:
    with pytest.raises(ValidationError) as caught:
        ModelSource.model_validate({"source": "m", "chatTemplateKwargs": {name: True}})
    details: Any = caught.value.errors()[0]
    assert (details["ctx"]["path"], "the rendering of chat templates sets it" in details["msg"]) == (
        ("chatTemplateKwargs", name),
        True,
    )
