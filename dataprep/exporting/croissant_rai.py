"""Fields of Croissant about responsible AI, as far as the records of a run state them.

Vocabulary: https://docs.mlcommons.org/croissant/docs/croissant-rai-spec.html, version
1.0, and `hasSyntheticData` of its namespace. What only the publisher knows, such as
social impact, is absent.
"""

from __future__ import annotations

from collections.abc import Sequence

from gristmill.dataprep.conservation import ranked
from gristmill.dataprep.exporting.dataset_card import (
    About,
    Exported,
    known_limits,
    masks_personal_data,
    setting_text,
)
from gristmill.dataprep.exporting.origins import Origin
from gristmill.mixtures.schema.evaluation import Documents

CONFORMS_TO = "http://mlcommons.org/croissant/RAI/1.0"


def responsible_ai(
    about: About, section: Documents, exported: Exported, origins: Sequence[Origin]
) -> dict[str, object]:
    """Fields with the prefix `rai:`.

    Args:
        origins: of the sources; empty if not looked up.
    """
    periods = [origin.period for origin in origins if origin.period is not None]
    types = []
    if any(origin.is_crawled for origin in origins):
        types.append("Web Scraping")
    if any(origin.written_by for origin in origins):
        types.append("Synthetic")
    use = "Training language models."
    if section.dropped:
        use = "Looking at the rules that dropped these documents; not for training."
    fields: dict[str, object] = {
        "rai:dataPreprocessingProtocol": _steps(about, exported),
        "rai:personalSensitiveInformation": [masks_personal_data(about)],
        "rai:dataLimitations": known_limits(about, section, exported),
        "rai:dataBiases": _composition(exported),
        "rai:dataUseCases": [use],
        "rai:dataReleaseMaintenancePlan": "The manifest in README.md makes the same "
        "files again from the same sources; _documents.json has their checksums.",
    }
    if origins:
        fields |= {
            "rai:dataCollection": ". ".join(origin.describe() for origin in origins),
            "rai:dataCollectionType": types,
            "rai:hasSyntheticData": any(origin.written_by for origin in origins),
        }
    if periods:
        fields["rai:dataCollectionTimeframe"] = [
            min(first for first, _ in periods),
            max(last for _, last in periods),
        ]
    return {name: value for name, value in fields.items() if value not in ([], "")}


def _steps(about: About, exported: Exported) -> list[str]:
    """Steps in order, with their settings and the documents that they dropped."""
    funnel = {row["step"]: row for row in exported.funnel}
    lines = []
    for step in about["steps"]:
        settings = "; ".join(
            f"{key}: {setting_text(value)}" for key, value in step["settings"]
        )
        line = f"{step['name']} ({settings or 'no settings'})"
        if (counts := funnel.get(step["name"])) is not None:
            line += f": {counts['read']:,} documents read, {counts['kept']:,} kept"
            dropped = [
                f"{name} {number:,}" for name, number in ranked(counts["dropped"])
            ]
            line += f"; dropped by {', '.join(dropped)}" if dropped else ""
        lines.append(line)
    return lines


def _composition(exported: Exported) -> list[str]:
    """Shares that tell whom the text speaks for: of sources, licences and languages."""
    sources: dict[str, float] = {}
    licences: dict[str, float] = {}
    for row in exported.sources:
        for shares, name in ((sources, row["source"]), (licences, row["licence"])):
            shares[name] = shares.get(name, 0.0) + row["share"]
    total = sum(exported.languages.values())
    languages = {name: number / total for name, number in exported.languages.items()}
    return [
        f"{title}: "
        + ", ".join(
            f"{name} {share:.1%}"
            for name, share in sorted(shares.items(), key=lambda item: -item[1])
        )
        for title, shares in (
            (f"Sources by share of the {exported.basis}", sources),
            (f"Licences by share of the {exported.basis}", licences),
            ("Languages by share of the documents, by a model", languages),
        )
        if shares
    ]
