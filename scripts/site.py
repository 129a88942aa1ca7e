"""Hook of MkDocs: makes pages that GitHub renders right render right on the site, too."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
_LINK: Final = re.compile(r"\]\(((?:\.\./)+[^)#\s]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """A page of the site: files outside `docs` are linked in the repository.

    Raises:
        FileNotFoundError: There is no such file.
    """
    directory = Path("docs", page.file.src_uri).parent

    def absolute(match: re.Match[str]) -> str:
        path = os.path.normpath(directory / match[1])
        if path.startswith("docs/"):
            return match[0]
        if not (ROOT / path).exists():
            raise FileNotFoundError(f"{page.file.src_uri}: there is no {path}")
        return f"]({config.repo_url}/blob/main/{path}{match[2] or ''})"

    lines = _LINK.sub(absolute, markdown).splitlines()
    return "\n".join(_bars(line) if line.startswith("|") else line for line in lines)


def _bars(row: str) -> str:
    """The row of a table, with bars in code as Python's Markdown writes them: without a backslash."""
    return re.sub(r"`[^`]*`", lambda code: code[0].replace(r"\|", "|"), row)
