"""Rules of the stage `opt_outs` for replaying."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np

from gristmill.dataprep.thresholds import Columns
from gristmill.dataprep.whatif_thresholds import Rule
from gristmill.mixtures.steps.opt_outs import OPT_OUT_RULES, OptOuts


def rules(
    stage: str, section: OptOuts, measured_columns: Collection[str]
) -> Iterator[Rule]:
    """Yield all rules, for replaying; one that is switched off drops nothing."""
    for name in OPT_OUT_RULES:
        is_on = getattr(section.reservations, name)

        def fails(
            columns: Columns, name: str = name, is_on: bool = is_on
        ) -> np.ndarray:
            reserved: np.ndarray = columns[name] != None  # noqa: E711 - elementwise
            return reserved & is_on

        key = f"{stage}.reservations.{name}"
        yield Rule(name, key, name, (str(is_on).lower(),), fails, (name,))
