"""A source's condition is SQL over what was measured; what was not measured is unknown, and mistakes are named."""

from __future__ import annotations

import pyarrow as pa
import pytest

from gristmill.tokenize.mixing.shares import MixError
from gristmill.tokenize.mixing.where import MET, NOT_MET, UNKNOWN, judge

MEASURED = pa.table({"quality": pa.array([0.2, None, 0.9]), "tokens": pa.array([5, 6, 7])})


def test_a_value_that_was_not_measured_is_neither_met_nor_not() -> None:
    assert judge("web", "quality >= 0.5", MEASURED).tolist() == [NOT_MET, UNKNOWN, MET]
    assert judge("web", "tokens > 5", MEASURED).tolist() == [NOT_MET, MET, MET]


def test_a_shard_with_no_document_left_has_no_verdicts() -> None:
    assert judge("web", "quality >= 0.5", MEASURED.slice(0, 0)).tolist() == []


def test_an_unknown_column_is_named_with_the_ones_there_are() -> None:
    with pytest.raises(MixError, match=r"sources\.web\.where: 'qualty > 1'.*columns: quality, tokens"):
        judge("web", "qualty > 1", MEASURED)
