"""The section `clean`: edits that make text better instead of dropping it."""

from __future__ import annotations

from gristmill.mixtures.section import Judging


class Clean(Judging):
    """Line rules, Unicode repair and masking of personal data."""
