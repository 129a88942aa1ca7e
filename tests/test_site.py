"""The site of docs/: what its hook makes of links and tables, and the whole of it where MkDocs is installed."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from scripts.site import on_page_markdown

ROOT = Path(__file__).resolve().parent.parent
CONFIG = SimpleNamespace(repo_url="https://example.com/repository")
PAGE = SimpleNamespace(file=SimpleNamespace(src_uri="how-to/local.md"))


def test_files_that_are_no_pages_are_linked_in_the_repository() -> None:
    text = "[a](../reference/metrics.md#x), [b](../../README.md#start), [c](training.md)"
    repository = "https://example.com/repository/blob/main/README.md#start"
    assert on_page_markdown(text, page=PAGE, config=CONFIG) == text.replace("../../README.md#start", repository)
    with pytest.raises(FileNotFoundError, match=r"how-to/local.md: there is no nowhere.md"):
        on_page_markdown("[a](../../nowhere.md)", page=PAGE, config=CONFIG)


def test_bars_in_the_code_of_tables() -> None:
    assert (
        on_page_markdown("| `a\\|b` | c \\| d |\n`e\\|f`", page=PAGE, config=CONFIG) == "| `a|b` | c \\| d |\n`e\\|f`"
    )


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("material") is None or importlib.util.find_spec("mike") is None,
    reason="needs the extra docs",
)
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True)
    assert (tmp_path / "reference" / "rolloutjob" / "index.html").exists()
