"""What chat templates are, and their variables."""

from __future__ import annotations

from typing import Final

RESERVED_VARIABLES: Final = frozenset(
    {
        # Parameters of transformers' apply_chat_template.
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "self",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
        # Globals of the Jinja environment.
        "cycler",
        "dict",
        "joiner",
        "lipsum",
        "namespace",
        "raise_exception",
        "range",
        "strftime_now",
        "tojson",
    }
)
"""Names that the rendering of a chat template uses itself, so nobody else may set them."""

NO_TEMPLATE: Final = "has neither {{ nor {%: write the template itself, its Jinja source, and not the name of a file"
"""What is said of a text that is no chat template."""
