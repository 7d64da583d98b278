"""Where the tests find the repository, its test data and, beside the repository, the shared recordings."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).resolve().parent
REPOSITORY = TESTS.parent
