"""Skipping of tests that run programs in the sandbox of `rl.tools: python`."""

from __future__ import annotations

import pytest

from gristmill.train.rl.tools.sandbox import SandboxError, check_sandbox


def skip_without_sandbox() -> None:
    """Skip a test if bubblewrap is missing or cannot create namespaces."""
    try:
        check_sandbox()
    except SandboxError as error:
        pytest.skip(str(error))
