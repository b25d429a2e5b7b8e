"""Installed code is identified by its distribution, without being run."""

from __future__ import annotations

import sys

import pytest

from gristmill.mixtures.user_code import installed_distribution


def test_import_hook_without_find_spec_is_skipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "meta_path", [object(), *sys.meta_path])
    distribution = installed_distribution("yaml")
    assert distribution is not None
    assert distribution.startswith("PyYAML ")
