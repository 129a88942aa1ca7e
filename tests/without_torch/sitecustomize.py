"""Hides PyTorch from the process that imports this, in place of `tests/starting`."""

import gc
import sys

sys.modules["torch"] = None  # type: ignore[assignment]
gc.set_threshold(20_000, 20, 50)
