"""The tiny policy's tokenizer, and conversations as the rollout loop would tokenize them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from kuberoll_workers.data.tokenizer import HuggingFaceTokenizer
from kuberoll_workers.environments.interface import ChatMessage

VOCABULARY = 512
MAX_POSITIONS = 1024
IGNORED = -100
"""Label of a position that the loss leaves out."""

BEGIN, END, PADDING = "<|begin|>", "<|end|>", "<|pad|>"
_ROLES = ("system", "user", "assistant", "environment")

# Every message opens with its role. After the prompt, the loop appends replies and observations as they are, so the
# template is only ever used for the prompt.
_TEMPLATE = (
    "{{ '" + BEGIN + "' }}{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# Tags whole, digits one by one (numbers are copied digit by digit), words with the space before them.
_PIECES = r" ?</?[a-z]+>|[0-9]|\n| ?[A-Za-z]+| ?[^ A-Za-z0-9\n]"


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE: any text can be tokenized, and the environments' words and tags are one token each."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [BEGIN, END, PADDING, *(f"<|{role}|>" for role in _ROLES)]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(token, special=True) for token in special],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=PADDING,
        additional_special_tokens=[f"<|{role}|>" for role in _ROLES],
        chat_template=_TEMPLATE,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def encode(tokenizer: PreTrainedTokenizerFast, log: Sequence[ChatMessage]) -> tuple[list[int], list[int]]:
    """A conversation as the loop's context would be, and what to learn from it.

    The prompt is rendered by the chat template; every later message is tokenized on its own and appended, raw.

    Returns:
        Token ids, and labels of the same length: the ids of the replies, each followed by the end token (in the
        place of the observation's first token, which it does not displace from the context); IGNORED elsewhere.
    """
    loop = HuggingFaceTokenizer(tokenizer)
    prompt = [message for message in log if message["role"] in ("system", "user")]
    ids = list(loop.render_chat(prompt))
    learned = [False] * len(ids)
    ends: list[int] = []
    for message in log[len(prompt) :]:
        piece = loop.encode(message["content"])
        ids.extend(piece)
        learned.extend([message["role"] == "assistant"] * len(piece))
        if message["role"] == "assistant":
            ends.append(len(ids))
    end_token = int(tokenizer.eos_token_id)
    ids.append(end_token)
    learned.append(False)
    labels = [token if learn else IGNORED for token, learn in zip(ids, learned, strict=True)]
    for position in ends:
        labels[position] = end_token
    return ids, labels
