"""The choices that responses state, and those that they do not."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.environments import UnusableRow, create
from kuberoll_workers.environments.builtin.choices import read_choice
from kuberoll_workers.environments.builtin.multiple_choice import MultipleChoiceEnvironment
from kuberoll_workers.environments.registry import PlainSpec

CITIES = {"A": "Rome", "B": "A village", "C": "Paris", "D": "New Delhi", "E": "Berlin"}
LETTERS = dict.fromkeys("ABCDEFGHIJ", "")

# The first block has the responses of the tests of NeMo Gym's `mcqa` server, and what it grades them as.
STATED: list[tuple[str, str | None]] = [
    (r"Final: \boxed{ [C] }", "C"),
    ("Answer: c", "C"),
    ("I think the answer is B.\n\nAnswer: B", "B"),
    ("Maybe Answer: A? Let me reconsider. Final Answer: B", "B"),
    ("Reasoning here.\n\n**Answer: C**", "C"),
    ("__Answer__: A", "A"),
    ("Answer: B because C is not valid", "B"),
    ("Answer: B/B", "B"),
    ("Answer: $D$", "D"),
    ("Answer: (D)", "D"),
    (r"\boxed{\text{Answer: E}}", "E"),
    ("Answer: A\nAnswer: B", "B"),
    ("Answer: B\nAnswer: unknown", "B"),
    (r"\boxed{\text{E}}", "E"),
    (r"\boxed{\text{D: Something longer about a choice.}}", "D"),
    (r"\[ \boxed{E: \text{It is the capital.}} \]", "E"),
    (r"\boxed{B}", "B"),
    (r"Candidate is \boxed{C}, but on reflection the answer is \boxed{E}", "E"),
    (r"Thinking: \boxed{\text{some idea}}. Final answer: \boxed{E}", "E"),
    # Our own.
    ("C", "C"),
    ("(c)", "C"),
    ("**C**", "C"),
    ("C.", "C"),
    ("C) Paris", "C"),
    ("Paris", "C"),
    ("It has to be in France.\n\nC", "C"),
    ("The answer is (C).", "C"),
    ("The correct answer is **C**.", "C"),
    ("The correct answer is:\nC: Paris", "C"),
    ("The best option is C, since it is in France.", "C"),
    ("So C is the correct answer.", "C"),
    ("C is the answer.", "C"),
    ("It tests for a risk.\n\nOption Selected: C", "C"),
    ("The answer is option (C).", "C"),
    ("Therefore, **(C)** is the right choice.", "C"),
    ("The answer is new delhi.", "D"),
    (r"\boxed{Paris}", "C"),
    (r"$\boxed{\textbf{(C) } Paris}$", "C"),
    ("<answer>C</answer>", "C"),
    ("<answer> C. Paris </answer>", "C"),
    ("<think>Answer: A</think>Answer: C", "C"),
    ("The answer is C. The answer is not D.", "C"),
    ("Answer: A, because it is old.", "A"),
    ("The answer is A village", "B"),
    ("final answer = C", "C"),
    ("If the answer is A, the map is wrong. Answer: C", "C"),
    ("Answer: C\n\nIf the answer is A, the map is wrong.", "C"),
    ("Answer: C is correct", "C"),
]
# A statement that is clear does not give way to an older one.
STATED += [
    ("The answer is A. On reflection the answer is clearly C.", "C"),
    ("The answer is A. The answer is, of course, C", "C"),
    ("The answer is definitely C", "C"),
    ("The answer is not A but C.", "C"),
    ("The answer is A. Wait, it's C.", "C"),
    ("The answer is C. Wait, it is easy to see why.", "C"),
    ("The answer is C. The answer is easy to see.", "C"),
    ("The answer is C. Actually, the answer is not C.", None),
    ("The answer is A. The answer would be Paris if it were France.", None),
    # Letters that look the same are the same.
    ("Answer: \uff23", "C"),
    ("Answer: \u200bC\ufe0f", "C"),
    ("Answer: \u2066C\u2069", "C"),
    ("\ufeffC", "C"),
    # Courtesies are no answer.
    ("C\n\nI hope this helps!", "C"),
    ("**C. Paris**\n\nLet me know if you have any questions.", "C"),
]
UNSTATED = [
    # Of NeMo Gym's tests.
    "Answer: unknown",
    "Answer: G",
    "Answer: A/B/C",
    "Answer: D/E",
    "**Answer: D/E**",
    "Answer: A or B",
    "Answer: A and B",
    "Answer: A, B",
    "I think it might be B but I'm not sure",
    r"\boxed{B",
    r"\boxed{A polygenic risk score can provide a probability.}",
    # Our own.
    "",
    "Answer:",
    "A and C",
    "A, B, C, D, E",
    r"\boxed{A, C}",
    r"It is $\boxed{A}$ or $\boxed{B}$.",
    r"\boxed{A}, \boxed{B} and \boxed{C}",
    "<answer>A</answer> or <answer>B</answer>",
    "The answer is not C.",
    "Answer: A man who lives in Rome",
    "The answer is a matter of taste.",
    "A man lives there.",
    "I do not know.",
    "Is the answer C?",
    "Answer: C: Berlin",
    "Cats",
    "Answer: Cats",
    "Answer: Both A and C",
    "Suppose the answer is C.",
    "I do not think that C is the correct answer.",
    "The answer is C or D.",
    "Option C is incorrect.",
    # A last word that hedges is no choice, although NeMo Gym takes the one before it.
    "Answer: B\nAnswer: A/B/C",
]


@pytest.mark.parametrize(("text", "choice"), STATED)
def test_a_stated_choice_is_read(text: str, choice: str | None) -> None:
    assert read_choice(text, CITIES) == choice


@pytest.mark.parametrize("text", UNSTATED)
def test_no_choice_is_read_into_a_response(text: str) -> None:
    assert read_choice(text, CITIES) is None


BLOOD = {"A": "B", "B": "A", "C": "AB", "D": "O"}


@pytest.mark.parametrize("form", ["Answer: {}", "The answer is ({}).", r"\boxed{{{}}}", "<answer>{}</answer>", "{}"])
@pytest.mark.parametrize("label", BLOOD)
def test_a_label_is_not_the_text_of_another_choice(form: str, label: str) -> None:
    assert read_choice(form.format(label), BLOOD) == label
    # A text that is no label is still a text.
    assert read_choice(form.format("AB"), BLOOD) == "C"
    assert read_choice(form.format("O"), BLOOD) == "D"


FORMS = {
    "The answer is {}.": True,
    "Answer: {}\n": True,
    "So the correct option is clearly ({}).": True,
    r"\boxed{{{}}}.": True,
    "{} is the correct answer.": True,
    "The answer is not {}.": False,
}


@given(st.lists(st.tuples(st.sampled_from(sorted(FORMS)), st.sampled_from("ABCDE")), max_size=6))
def test_the_last_statement_counts(statements: list[tuple[str, str]]) -> None:
    text = "\n".join(form.format(label) for form, label in statements)
    denied: set[str] = set()
    expected = None
    for form, label in reversed(statements):
        if FORMS[form]:
            expected = None if label in denied else label
            break
        denied.add(label)
    assert read_choice(f"Let us see.\n{text}", LETTERS) == expected


@pytest.mark.parametrize(("text", "choice"), [("Answer: J", "J"), ("Answer: I think so", None), ("Answer: I", "I")])
def test_labels_are_enough(text: str, choice: str | None) -> None:
    assert read_choice(text, LETTERS) == choice


@given(st.text(), st.sampled_from([CITIES, LETTERS, {"1": "one", "2": "two"}]))
def test_any_text_is_read(text: str, options: dict[str, str]) -> None:
    assert read_choice(text, options) in {None, *options}


@given(st.sampled_from(sorted(CITIES)), st.text(alphabet="abcdefgh .,\n", max_size=200))
def test_what_stands_before_the_answer_does_not_matter(label: str, before: str) -> None:
    assert read_choice(f"{before}\nAnswer: {label}", CITIES) == label
    assert read_choice(f"{before}\n\\boxed{{{label}}}", CITIES) == label


@pytest.mark.parametrize(
    ("metadata", "right"),
    [
        ({"options": [{"A": "x"}, {"B": "y"}], "expected_answer": "B"}, "B"),
        ({"choices": ["x", "y", "z"], "answer": 1}, "B"),
        ({"choices": ["x", "y", "z"], "answer": "y"}, "B"),
        ({"choices": {"label": ["1", "2"], "text": ["x", "y"]}, "answerKey": "2"}, "2"),
        ({"choices": {"label": ["A", "B"], "text": ["x", "y"]}, "answerKey": "B"}, "B"),
        ({"options": {"a": "x", "b": "y"}, "ground_truth": "(b)"}, "B"),
        ({"ground_truth": "J"}, "J"),
    ],
)
def test_rows_of_public_datasets(metadata: dict[str, Any], right: str) -> None:
    environment = MultipleChoiceEnvironment()
    log = [{"role": "user", "content": "?"}, {"role": "assistant", "content": f"Answer: {right}"}]
    wrong = [log[0], {"role": "assistant", "content": "Answer: A" if right != "A" else "Answer: B"}]
    returned = environment.step([log, wrong], [metadata, metadata])
    assert returned.rewards == [1.0, 0.0]
    assert returned.terminateds == [True, True]
    assert returned.answers is not None
    assert returned.answers[0] == right


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "metadata.ground_truth: found None"),
        ({"ground_truth": "K"}, "metadata.ground_truth: found 'K'"),
        ({"ground_truth": 3}, "metadata.ground_truth: found 3"),
        ({"options": ["x"], "answer": 0}, "metadata.options"),
        ({"options": {"AB": "x", "C": "y"}, "answer": "C"}, "metadata.options: found the labels"),
        ({"options": 7, "answer": "C"}, "metadata.options: found '7'"),
        ({"options": ["x", "x"], "answer": "x"}, "metadata.answer: found 'x'"),
    ],
)
def test_unusable_rows_are_named(metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(UnusableRow, match=message.replace("(", r"\(")):
        MultipleChoiceEnvironment().check_row(metadata)


def test_generated_questions_have_one_right_choice() -> None:
    environment = create(PlainSpec(name="quiz", type="multiple_choice", entrypoint=None, config={}))
    rows = environment.generate_dataset(200, 3)
    assert rows[:50] == environment.generate_dataset(50, 3)
    for row in rows:
        state = row["metadata"]
        assert len(set(state["options"].values())) == 4
        logs = [[*row["messages"], {"role": "assistant", "content": f"Answer: {label}"}] for label in "ABCD"]
        rewards = environment.step(logs, [state] * 4).rewards
        assert [label for label, reward in zip("ABCD", rewards, strict=True) if reward] == [state["ground_truth"]]
        left, right = row["messages"][0]["content"].split("?")[0].removeprefix("What is ").split(" + ")
        assert state["options"][state["ground_truth"]] == str(int(left) + int(right))
