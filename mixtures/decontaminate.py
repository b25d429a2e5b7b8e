"""The section `decontaminate`: evaluation text that must not be trained on."""

from __future__ import annotations

from gristmill.mixtures.section import Judging


class Decontaminate(Judging):
    """Documents that hold text of evaluation sets."""
