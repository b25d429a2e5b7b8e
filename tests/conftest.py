"""What holds for all tests: property tests try the same examples in every run, however slow the machine is.

GRISTMILL_TEST_EXPLORE=1 makes them try new ones, and more of them; a failing example is printed and remembered.
"""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("same", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile("explore" if os.environ.get("GRISTMILL_TEST_EXPLORE") else "same")
