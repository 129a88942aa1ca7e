"""Hides PyTorch from the process that imports this."""

import sys

sys.modules["torch"] = None  # type: ignore[assignment]
