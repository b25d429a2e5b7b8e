"""Croissant metadata of exported documents: JSON-LD that describes a dataset to search
engines and loaders.

Vocabulary: https://docs.mlcommons.org/croissant/docs/croissant-spec-1.0.html.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from gristmill.dataprep.exporting import croissant_rai
from gristmill.dataprep.exporting.dataset_card import About, Exported
from gristmill.dataprep.exporting.origins import Origin
from gristmill.mixtures.schema.evaluation import Documents
from gristmill.mixtures.spdx import UNKNOWN

CONFORMS_TO = "http://mlcommons.org/croissant/1.0"
JsonLd = dict[str, object]
"""Node of JSON-LD."""
CONTEXT: JsonLd = json.loads(
    Path(__file__).with_name("croissant_context.json").read_bytes()
)
"""Context from the specification, section "Croissant JSON-LD context"."""
PARQUET = "application/x-parquet"
"""Media type of Parquet in the hub's own metadata and mlcroissant."""


def croissant(
    about: About,
    section: Documents,
    exported: Exported,
    origins: Sequence[Origin] = (),
) -> JsonLd:
    """Content of `croissant.json`: every file with its checksum, the columns of the
    rows, and the fields of responsible AI.

    Args:
        origins: of the sources; empty if not looked up.
    """
    licences = sorted({licence_url(row["licence"]) for row in exported.sources})
    sources = [source["name"] for source in about["sources"]]
    selection = "dropped by the steps" if section.dropped else "kept by every step"
    files = [
        {
            "@type": "cr:FileObject",
            "@id": name,
            "name": name,
            "contentUrl": name,
            "encodingFormat": PARQUET,
            "contentSize": f"{entry['bytes']} B",
            "sha256": entry["sha256"],
        }
        for name, entry in exported.files.items()
    ]
    fields = [
        {
            "@type": "cr:Field",
            "@id": f"documents/{column['name']}",
            "name": column["name"],
            "description": f"Column {column['name']}"
            + (f", measured by the step {column['step']}." if column["step"] else "."),
            "dataType": data_type(column["type"]),
            "source": {
                "fileSet": {"@id": "documents-files"},
                "extract": {"column": column["name"]},
            },
        }
        for column in exported.columns
    ]
    file_set = {
        "@type": "cr:FileSet",
        "@id": "documents-files",
        "name": "documents-files",
        "encodingFormat": PARQUET,
        "includes": "data/train-*.parquet",
    }
    return {
        "@context": CONTEXT,
        "@type": "sc:Dataset",
        "conformsTo": [CONFORMS_TO, croissant_rai.CONFORMS_TO],
        "name": about["name"],
        "description": f"{exported.documents:,} documents {selection} of the "
        f"gristmill run {about['name']}, with "
        f"{exported.text_bytes:,} bytes of text from {', '.join(sources)}; see "
        "README.md.",
        "license": licences,
        "url": "README.md",
        "keywords": ["text", "language modelling", *exported.languages],
        "version": "1.0.0",
        **croissant_rai.responsible_ai(about, section, exported, origins),
        "distribution": [*files, file_set],
        "recordSet": [
            {
                "@type": "cr:RecordSet",
                "@id": "documents",
                "name": "documents",
                "description": "One record for each document, in the order of the "
                "sources.",
                "key": {"@id": "documents/id"},
                "field": fields,
            }
        ],
    }


def licence_url(expression: str) -> str:
    """Address of an SPDX licence; an expression of several, or without one, as it is."""
    is_listed = re.fullmatch(r"[A-Za-z0-9.+-]+", expression) and expression != UNKNOWN
    if not is_listed or expression.startswith("LicenseRef-"):
        return expression
    return f"https://spdx.org/licenses/{expression}"


def data_type(kind: str) -> str:
    """Schema.org type of an Arrow type."""
    if kind == "bool":
        return "sc:Boolean"
    if re.fullmatch(r"u?int\d+", kind):
        return "sc:Integer"
    return (
        "sc:Float"
        if re.fullmatch(r"float|double|halffloat|float\d+", kind)
        else "sc:Text"
    )
