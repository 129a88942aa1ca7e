"""docs/tutorials/first-hour.md is the page that scripts/first_hour.py makes now."""

from __future__ import annotations

from scripts.first_hour import PAGE, SECTIONS


def test_the_page_has_the_script_s_commands_and_files_in_their_order() -> None:
    page = PAGE.read_text()
    place = 0
    for title, steps in SECTIONS.items():
        place = page.index(f"\n## {title}\n", place)
        for step in steps:
            place = page.index(step.text, place)
            for name, contents in step.files.items():
                place = page.index(f"`{name}`:", place)
                place = page.index(contents, place)
            place = page.index("$ " + step.command.replace(".venv/bin/", ""), place)


def test_the_page_names_no_path_of_the_machine_that_made_it() -> None:
    page = PAGE.read_text()
    assert not [word for word in ("/root/", "/home/", "/opt/", "first-hour-") if word in page]


def test_the_page_has_the_summary_of_a_run_once() -> None:
    page = PAGE.read_text()
    assert page.count("\nschedule: ") == 1
    assert page.count("\n  runs/") == 5
