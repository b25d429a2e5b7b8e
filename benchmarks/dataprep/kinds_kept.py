"""Share of thirty kinds of text that the rules proposed by `gristmill new` keep, beside
Gopher's rules alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from benchmarks.dataprep.text_kinds import KINDS, documents
from benchmarks.measuring import Row, row
from gristmill.dataprep.filters.rule_sets import measure
from gristmill.dataprep.thresholds import failures, first_failures
from gristmill.flows.authoring.new_manifest import PROSE_RULES
from gristmill.mixtures.steps.rules import Rules, expand

GOPHER = ("gopher_quality", "gopher_repetition")


def rows() -> Iterator[Row]:
    """Measure the kept share of each kind; the peer is Gopher's rules in the default
    dialect.
    """
    proposed = Rules.model_validate(expand(list(PROSE_RULES)))
    gopher = Rules.model_validate(expand(list(GOPHER)))
    for kind in KINDS:
        texts = documents(kind)
        aim = "should be kept" if kind.keep else "should be dropped"
        yield row(
            f"kept of {kind.name}",
            kept_share(texts, proposed),
            kept_share(texts, gopher),
            "of texts",
            "; ".join(
                filter(
                    None,
                    [
                        aim,
                        f"{len(texts)} texts",
                        f"peer: {' and '.join(GOPHER)}",
                        kind.note,
                    ],
                )
            ),
        )


def kept_share(texts: list[str], rules: Rules) -> float:
    """Return the share of texts that no rule drops."""
    unknown = pa.nulls(len(texts), pa.string())
    table = pa.table(
        {
            "text": pa.array(texts, pa.large_string()),
            "language": unknown,
            "script": unknown,
        }
    )
    reasons = first_failures(failures(measure(table, rules), rules.sets), len(texts))
    return sum(reason is None for reason in reasons) / len(texts)
