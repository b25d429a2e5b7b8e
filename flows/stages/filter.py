"""`filter`: drops documents by sets of rules, each a statistic of the text held against a threshold."""

from __future__ import annotations

from collections.abc import Iterable

from gristmill.flows.stages.stage import Stage
from gristmill.mixtures.steps.filter import Filter


def columns(section: Filter) -> Iterable[str]:
    """Every statistic of the rule sets that are chosen."""
    from gristmill.dataprep.filtering.rule_sets import RULE_SETS, configured_sets

    return [name for chosen in configured_sets(section.rules) for name in RULE_SETS[chosen].statistics]


STAGE = Stage("filter", 2, "gristmill.dataprep.filtering.filter:run", section=Filter, columns=columns,
              rules="gristmill.dataprep.filtering.filter:rules",
              report=("gristmill.flows.report.document_sections:lengths",))
