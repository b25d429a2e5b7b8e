"""Rules of the stage `opt_outs` for replaying."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial

import numpy as np

from gristmill.dataprep.thresholds import Columns
from gristmill.dataprep.whatif_thresholds import Rule
from gristmill.mixtures.steps.opt_outs import OptOuts


def rules(
    stage: str, section: OptOuts, measured_columns: Collection[str]
) -> Iterator[Rule]:
    """Yield all rules, for replaying; one that is switched off drops nothing."""
    for name, is_on in section.reservations:
        yield Rule(
            name,
            f"{stage}.reservations.{name}",
            name,
            (str(is_on).lower(),),
            partial(_is_reserved, name, is_on),
            (name,),
        )


def _is_reserved(name: str, is_on: bool, columns: Columns) -> np.ndarray:
    reserved: np.ndarray = columns[name] != None  # noqa: E711 - elementwise
    return reserved & is_on
