"""The report in a browser."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from kuberoll_workers.analysis.report.token_texts import TokenTexts
from kuberoll_workers.analysis.report.trajectory_sample import MOST
from kuberoll_workers.data.record import TrajectoryRecord
from kuberoll_workers.data.tracebacks import Frame
from kuberoll_workers.output.precedence import EndedRecord
from kuberoll_workers.output.run_directory import RunManifest
from tests.analysis.report.conftest import Open
from tests.analysis.report.runs import (
    WordTokenizer,
    agent_trajectory,
    dropped,
    failure,
    message,
    realistic,
    sampled,
    trajectory,
)

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
expect = sync_api.expect

ROWS = "#rows [role=option]"


def mixed() -> list[TrajectoryRecord]:
    return [
        trajectory(task, rollout, environment=("puzzle", "math")[task % 2], rewards=[float(rollout), 0.5 * task])
        for task in range(6)
        for rollout in range(2)
    ]


def test_the_numbers_are_of_the_environment_that_is_chosen(opened: Open) -> None:
    page = opened([*mixed(), failure(9, number=1)]).page
    cells = page.locator("#key div")
    expect(cells.nth(0)).to_contain_text("12")
    expect(cells.nth(6)).to_contain_text("1")
    expect(page.locator("#charts h3")).to_have_text([
        "Reward", "Learning signal: rewards within prompt groups", "Turns", "Generated tokens",
        "Time of a trajectory in generation", "How trajectories ended", "Where the time went", "Failures by cause",
    ])  # fmt: skip
    expect(page.locator("#charts")).to_contain_text("step took longer than 30 s")
    page.get_by_role("combobox", name="Environment").select_option("math")
    expect(cells.nth(0)).to_contain_text("6")
    expect(cells.nth(6)).to_contain_text("0")
    expect(page.locator("#count")).to_have_text("6 of 13 trajectories")
    expect(page.locator("#charts")).not_to_contain_text("step took longer")
    # Every chart says in words what it shows, and has its numbers in a table.
    for chart in page.locator("svg").all():
        assert chart.get_attribute("role") == "img"
        assert len(chart.get_attribute("aria-label") or "") > 20
    page.locator("#charts summary").first.click()
    expect(page.locator("#charts details[open] tbody tr").first).to_be_visible()


def test_sandboxes_are_shown_where_there_are_some(opened: Open) -> None:
    record = trajectory(7, environment="harbor")
    use = {"asked": 100.0, "start_seconds": 0.25, "seconds": 4.0, "left": True}
    record.metadata = {
        "result": {"sandboxes": [use, {**use, "start_seconds": 1.5, "left": False}], "sandboxes_lost": 3}
    }
    page = opened([*mixed(), record]).page
    shown, chosen = page.locator("#sandboxes"), page.get_by_role("combobox", name="Environment")
    expect(shown.locator("div")).to_have_text([
        "Sandboxes2of finished trajectories", "Start of a sandbox0.875 smedian; 95 % within 1.5 s",
        "Sandboxes at a time2at most", "Sandboxes lost3trajectories started over",
        "Sandboxes left1could not be removed",
    ])  # fmt: skip
    expect(shown.locator(".bad")).to_have_count(2)
    expect(page.locator("#charts h3").filter(has_text="Start of a sandbox")).to_have_count(1)
    chosen.select_option("math")
    expect(shown).to_be_hidden()
    expect(page.locator("#charts h3").filter(has_text="Start of a sandbox")).to_have_count(0)
    chosen.select_option("harbor")
    expect(shown).to_be_visible()


def test_filters_and_orders(opened: Open) -> None:
    page = opened([*mixed(), failure(9), dropped(9, 1)]).page
    count, rows = page.locator("#count"), page.locator(ROWS)
    expect(count).to_have_text("14 trajectories")
    page.get_by_label("Stop reason").select_option("failed")
    expect(rows).to_have_count(1)
    expect(rows).to_contain_text("#9.0")
    page.get_by_role("button", name="Clear").click()
    page.get_by_label("Least reward").fill("1")
    page.get_by_label("Most reward").fill("1.5")
    expect(count).to_have_text("4 of 14 trajectories")
    page.get_by_label("Order").select_option("best")
    expect(rows.first).to_contain_text("1.500")
    page.get_by_label("Text").fill("#1")
    expect(count).to_have_text("1 of 14 trajectories")
    expect(rows).to_contain_text("#1.1")
    page.get_by_label("Text").fill("nothing says this")
    expect(count).to_have_text("No trajectory matches. Clear the filters to see all.")
    expect(rows).to_have_count(0)
    page.get_by_role("button", name="Clear").click()
    expect(count).to_have_text("14 trajectories")


def test_a_trajectory_turn_by_turn(opened: Open) -> None:
    messages = [
        message("user", "How many?", 0),
        message("assistant", "I look.", 1),
        message("environment", "Three.", 1, truncated=True),
        message("assistant", "Three it is.", 2),
    ]
    page = opened([trajectory(3, 1, messages=messages, rewards=[0.25, 1.0]), failure(4)]).page
    page.locator(ROWS).first.click()
    detail = page.locator("#detail")
    expect(detail.locator("h3")).to_have_text("#3.1 puzzle")
    expect(detail.locator(".message pre")).to_have_text([item.content for item in messages])
    expect(detail.locator(".turn")).to_have_text([
        "Prompt", "Turn 1reward 0.250generation 0.5 senvironment 0.25 s",
        "Turn 2reward 1.000generation 0.5 senvironment 0.25 s",
    ])  # fmt: skip
    expect(detail.locator(".environment .flag")).to_have_text("truncated")
    # More digits than a browser's numbers have.
    expect(detail.locator("dl")).to_contain_text(str(2**62 + 3))
    page.locator(ROWS).last.click()
    expect(detail).to_contain_text("infrastructure, generation, after 5 tries")


def test_branches_of_an_agent_s_trajectory(opened: Open) -> None:
    page = opened([agent_trajectory()]).page
    page.locator(ROWS).first.click()
    detail = page.locator("#detail")
    expect(detail.locator(".turn b")).to_have_text(["Prompt", "Turn 1", "Turn 2", "Branch 1", "Branch 2"])
    expect(detail.locator(".turn").nth(3)).to_contain_text("after 2 messages of an earlier path")
    expect(detail.locator(".message pre")).to_have_text(
        ["how?", "so", "really?", "yes", "or so?", "maybe", "again: how?", "otherwise"]
    )
    expect(detail.locator("dl")).to_contain_text("2 new, 2 clean")


def test_a_failure_of_an_environment_s_code(opened: Open) -> None:
    bad = replace(
        failure(4),
        metadata={"answers": 1},
        row="data.jsonl:5",
        frames=[Frame("/home/me/guess.py", 18, "grade", "return answers[0]")],
        traceback="Traceback (most recent call last):\n  File <guess.py>\nTypeError: <b>",
    )
    page = opened([trajectory(3), bad]).page
    expect(page.locator("#charts")).to_contain_text("(me/guess.py:18 in grade)")
    page.locator(ROWS).last.click()
    detail = page.locator("#detail")
    assert bad.traceback is not None
    expect(detail.locator(".message pre").last).to_have_text(bad.traceback)
    expect(detail).to_contain_text("data.jsonl:5")
    expect(detail).to_contain_text('{"answers":1}')


def test_the_keyboard_alone(opened: Open) -> None:
    page = opened([trajectory(task, messages=[message("user", f"task {task}", 0)]) for task in range(100)]).page
    chosen, title = page.locator("#rows [aria-selected=true]"), page.locator("#detail h3")
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("ArrowDown")
    expect(title).to_have_text("#2.0 puzzle")
    expect(page.locator("#list")).to_have_attribute("aria-activedescendant", "row-2")
    page.keyboard.press("k")
    page.keyboard.press("ArrowUp")
    expect(title).to_have_text("#0.0 puzzle")
    page.keyboard.press("End")
    expect(title).to_have_text("#99.0 puzzle")
    expect(chosen).to_be_in_viewport()
    page.keyboard.press("/")
    expect(page.locator("#search")).to_be_focused()
    page.keyboard.type("TASK 42")
    expect(page.locator("#count")).to_have_text("1 of 100 trajectories")
    page.keyboard.press("ArrowDown")
    expect(title).to_have_text("#42.0 puzzle")
    expect(page.locator("#detail mark")).to_have_text("task 42")
    page.keyboard.press("/")
    page.keyboard.press("Escape")
    expect(page.locator("#count")).to_have_text("100 trajectories")
    expect(page.locator("#list")).to_be_focused()


def test_nothing_that_was_generated_is_markup(opened: Open) -> None:
    evil = '</script><!--<script><img src=x onerror="window.hacked=1"><style>*{display:none}</style>&lt;b&gt;\u2028'
    shown = evil.replace("\u2028", "⟨U+2028⟩")
    messages = [message("user", evil, 0), message("assistant", evil, 1), message(evil[:30], evil, 1)]
    one = trajectory(0, environment=evil, messages=messages)
    one.metadata, one.idx, one.answer, one.reward_parts = {evil: evil}, evil, evil, {evil: [1.0]}
    bad = failure(1, environment="other")
    bad.cause = evil
    page = opened([one, bad], report={"location": evil}).page
    expect(page.locator("h1")).to_have_text(evil)
    page.locator(ROWS).first.click()
    expect(page.locator("#detail pre").first).to_have_text(shown)
    page.get_by_label("Text").fill("onerror")
    expect(page.locator("#count")).to_have_text("2 trajectories")
    expect(page.locator("#charts table").last).to_contain_text("</script><!--")
    assert page.evaluate("document.querySelectorAll('img').length") == 0
    assert page.evaluate("document.querySelectorAll('style').length") == 1
    assert page.evaluate("window.hacked") is None
    # What slipped in all the same would not run.
    policy = page.locator("meta[http-equiv=Content-Security-Policy]").get_attribute("content") or ""
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


def test_light_and_dark(opened: Open) -> None:
    page = opened([trajectory(0)], color_scheme="dark").page
    background = "getComputedStyle(document.documentElement).backgroundColor"
    dark = page.evaluate(background)
    button = page.get_by_role("button", name="Colours")
    button.click()
    light = page.evaluate(background)
    assert dark != light
    expect(button).to_have_accessible_name("Colours: light")
    page.emulate_media(color_scheme="light")
    button.click()
    assert page.evaluate(background) == dark
    button.click()
    assert page.evaluate(background) == light


def test_charts_are_drawn_again_for_another_width(opened: Open) -> None:
    page = opened(realistic(30)).page
    first = page.locator("#charts svg").first
    before = first.get_attribute("viewBox")
    page.set_viewport_size({"width": 700, "height": 900})
    expect(first).not_to_have_attribute("viewBox", str(before))


def test_a_narrow_screen(opened: Open) -> None:
    page = opened(realistic(30), viewport={"width": 360, "height": 740}).page
    wide = "document.documentElement.scrollWidth"
    assert page.evaluate(wide) == 360
    page.locator(ROWS).nth(3).click()
    expect(page.locator("#detail .message").first).to_be_in_viewport()
    expect(page.locator("#list")).not_to_be_visible()
    assert page.evaluate(wide) == 360
    page.get_by_role("button", name="Back to list").click()
    expect(page.locator("#list")).to_be_visible()
    expect(page.locator("#detail")).not_to_be_visible()


def test_an_address_leads_to_a_trajectory(opened: Open) -> None:
    page = opened([trajectory(task) for task in range(50)]).page
    page.evaluate("location.hash = '#33.0'")
    expect(page.locator("#detail h3")).to_have_text("#33.0 puzzle")
    expect(page.locator("#rows [aria-selected=true]")).to_be_in_viewport()


def test_paper_has_the_numbers_and_the_trajectory(opened: Open) -> None:
    page = opened(mixed()).page
    page.locator(ROWS).first.click()
    expect(page.locator("#detail .message").first).to_be_visible()
    page.emulate_media(media="print")
    for name, visible in {"#key": True, "#charts": True, "#detail": True, ".listing": False, ".filters": False}.items():
        expect(page.locator(name)).to_be_visible(visible=visible)


def test_ten_thousand_trajectories(opened: Open) -> None:
    def one(number: int) -> TrajectoryRecord:
        text = f"The {number % 7}th of many. " * 20 + ("The Needle lies here." if number == 7777 else "")
        return trajectory(number // 8, number % 8, messages=[message("user", "hi", 0), message("assistant", text, 1)])

    page = opened(one(number) for number in range(MOST)).page
    rows, count = page.locator(ROWS), page.locator("#count")
    expect(count).to_have_text("10,000 trajectories")
    assert rows.count() < 60
    page.locator("#list").scroll_into_view_if_needed()
    page.locator("#list").evaluate("list => { list.scrollTop = list.scrollHeight / 2; }")
    expect(page.locator("#rows [aria-posinset='5001']")).to_be_in_viewport()
    assert rows.count() < 60
    page.get_by_label("Text").fill("needle lies")
    expect(count).to_have_text("1 of 10,000 trajectories")
    expect(rows).to_contain_text("#972.1")
    rows.click()
    expect(page.locator("#detail mark")).to_have_text("Needle lies")
    # A search that nobody waits for any more changes nothing.
    page.get_by_label("Text").fill("many")
    page.get_by_label("Text").fill("#1249.7")
    expect(count).to_have_text("1 of 10,000 trajectories")
    expect(rows).to_contain_text("#1249.7")


def test_of_a_longer_run_a_sample_can_be_read(opened: Open) -> None:
    records = [*(trajectory(task) for task in range(500)), *(failure(task, 1) for task in range(3))]
    page = opened(records, report={"most": 100}).page
    expect(page.locator("#sample")).to_contain_text("100 of 503 can be read here")
    expect(page.locator("#key")).to_contain_text("500")
    expect(page.locator("#count")).to_have_text("100 trajectories")
    page.get_by_label("Stop reason").select_option("failed")
    expect(page.locator("#count")).to_have_text("3 of 100 trajectories")


def test_a_run_without_trajectories(opened: Open) -> None:
    page = opened([]).page
    expect(page.locator("#detail")).to_have_text("The run has no trajectory yet.")
    expect(page.get_by_role("heading", name="Numbers")).to_be_hidden()


def real(tasks: int = 9) -> tuple[list[EndedRecord], TokenTexts]:
    """A run as it is sampled, and the texts of its tokens."""
    tokenizer = WordTokenizer()
    return list(sampled(realistic(tasks), tokenizer, concurrency=4)), TokenTexts(tokenizer)


@pytest.mark.parametrize("width", [1280, 1000, 390])
@pytest.mark.parametrize("kind", ["real", "one", "failed", "mixed"])
def test_every_card_has_a_chart_and_every_row_is_full(opened: Open, kind: str, width: int) -> None:
    runs: dict[str, list[EndedRecord]] = {
        "real": real()[0], "one": [trajectory(0)], "failed": [failure(0), failure(1, number=1)], "mixed": [*mixed()],
    }  # fmt: skip
    page = opened(runs[kind], viewport={"width": width, "height": 900}).page
    cards = page.locator("#charts figure")
    assert cards.count() > 0
    room = page.locator("#charts").bounding_box()
    assert room is not None
    ends: dict[float, float] = {}
    for card in cards.all():
        assert card.locator("svg, table").count() > 0, card.text_content()
        box = card.bounding_box()
        assert box is not None
        ends[box["y"]] = max(ends.get(box["y"], 0), box["x"] + box["width"])
    assert list(ends.values()) == pytest.approx([room["x"] + room["width"]] * len(ends), abs=1)


def test_throughput_over_time_and_policy_versions(opened: Open) -> None:
    records, _ = real()
    page = opened(records).page
    card = page.locator("#charts figure", has=page.get_by_role("heading", name="Throughput over time"))
    expect(card.locator("path.area")).to_have_count(3)
    expect(card.locator("figcaption")).to_contain_text("up to 4 trajectories in flight")
    expect(card.locator("figcaption")).to_contain_text(
        re.compile(r"\d\.\d\d × the bound: .* at full speed, longest trajectory")
    )
    card.locator("rect.hit").nth(10).hover()
    expect(page.locator("#tip")).to_contain_text("tokens/s")
    expect(page.locator("#tip")).to_contain_text("in flight")
    versions = page.locator("#charts figure", has=page.get_by_role("heading", name="Policy versions"))
    expect(versions.locator("figcaption")).to_contain_text("several versions")
    # One version is no chart: it is said in the head.
    only = [trajectory(0)]
    only[0].messages[1].policy_versions = [("step-7", 0, 1)]
    page = opened(only).page
    expect(page.locator("#facts")).to_contain_text("policy version step-7")
    expect(page.locator("#charts")).not_to_contain_text("Policy versions")
    expect(page.locator("#charts")).not_to_contain_text("Throughput")


CONTRAST = """span => {
    const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    const pixel = (...colours) => {
        canvas.clearRect(0, 0, 1, 1);
        for (const colour of colours) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
        return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
    };
    const card = getComputedStyle(document.querySelector(".browser")).backgroundColor, style = getComputedStyle(span);
    const linear = (part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    const light = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
    const both = [light(pixel(card, style.backgroundColor)), light(pixel(card, style.color))];
    const [one, two] = both.sort((a, b) => b - a);
    return (one + 0.05) / (two + 0.05);
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_probabilities_of_tokens(opened: Open, scheme: str) -> None:
    records, texts = real()
    page = opened(records, report={"texts": texts}, color_scheme=scheme).page
    page.evaluate("location.hash = '#1.0'")
    answer = page.locator("#detail .assistant pre")
    expect(answer).to_contain_text("Step 1")
    plain = answer.text_content()
    legend = page.locator(".tokens-legend")
    expect(legend).to_be_hidden()
    page.get_by_role("checkbox", name="Token probabilities").check()
    expect(legend).to_be_visible()
    # The last token has no text; nothing else changes.
    assert answer.text_content() == f"{plain}∅"
    tokens = answer.locator("[data-token]")
    record = next(item for item in records if item.key == (1, 0))
    (response,) = [item for item in record.messages if item.role == "assistant"]
    assert response.logprobs is not None
    expect(tokens).to_have_count(len(response.logprobs))
    least = min(range(len(response.logprobs)), key=lambda place: response.logprobs[place])  # type: ignore[index]
    tokens.nth(least).hover()
    expect(page.locator("#tip")).to_contain_text(f"token {least + 1} of {len(response.logprobs)}")
    expect(page.locator("#tip")).to_contain_text("policy version")
    # The same in words and numbers.
    page.locator(".least summary").click()
    expect(page.locator(".least tbody tr").first.locator("td").first).to_have_text(str(least + 1))
    expect(page.locator("#detail .about")).to_contain_text("policy version")
    for style in ("t1", "t2", "t3"):
        for place in (".tokens-legend", "pre"):
            for token in page.locator(f"{place} .{style}").all()[:1]:
                assert token.evaluate(CONTRAST) >= 4.5, (place, style)
    # The choice stays for the next one.
    page.keyboard.press("j")
    expect(page.locator("#detail h3")).to_contain_text("#1.1")
    expect(page.get_by_role("checkbox", name="Token probabilities")).to_be_checked()
    expect(page.locator("#detail [data-token]").first).to_be_visible()


def test_a_simulated_run_says_so(opened: Open) -> None:
    manifest = RunManifest(
        format=1, job="dry", created="", shards=1, identity={"generation.engine": "Simulated"}, inputs={}, versions={}
    )
    facts = "#facts"
    expect(opened([trajectory(0)], report={"manifest": manifest}).page.locator(facts)).to_contain_text("no model wrote")
    manifest.identity["generation.engine"] = "VLLM"
    page = opened([trajectory(0)], report={"manifest": manifest}).page
    expect(page.locator(facts)).not_to_contain_text("no model wrote")


def test_tokens_without_a_tokenizer_are_ids(opened: Open) -> None:
    records, _ = real()
    page = opened([*records, trajectory(99)]).page
    page.evaluate("location.hash = '#1.0'")
    page.get_by_role("checkbox", name="Token probabilities").check()
    expect(page.locator("#detail pre .id").first).to_have_text(re.compile(r"^\d+$"))
    expect(page.locator("#detail .assistant")).to_contain_text("kuberoll report --tokenizer")
    # Nothing to switch where there are no log-probabilities.
    page.evaluate("location.hash = '#99.0'")
    expect(page.locator("#detail h3")).to_contain_text("#99.0")
    expect(page.get_by_role("checkbox", name="Token probabilities")).to_have_count(0)
