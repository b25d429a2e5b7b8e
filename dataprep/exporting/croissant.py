"""Croissant metadata of exported documents: JSON-LD that describes a dataset to search
engines and loaders.

Vocabulary: https://docs.mlcommons.org/croissant/docs/croissant-spec-1.0.html.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from gristmill.dataprep.exporting.dataset_card import About, Exported
from gristmill.mixtures.schema.evaluation import Documents

CONFORMS_TO = "http://mlcommons.org/croissant/1.0"
JsonLd = dict[str, object]
"""Node of JSON-LD."""
CONTEXT: JsonLd = json.loads(
    Path(__file__).with_name("croissant_context.json").read_bytes()
)
"""Context from the specification, section "Croissant JSON-LD context"."""
PARQUET = "application/x-parquet"
"""Media type of Parquet in the hub's own metadata and mlcroissant."""


def croissant(about: About, section: Documents, exported: Exported) -> JsonLd:
    """Content of `croissant.json`: every file with its checksum, and the columns of the
    rows.
    """
    licences = sorted(
        {source["licence"] or "not stated" for source in exported.sources}
    )
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
        "conformsTo": CONFORMS_TO,
        "name": about["name"],
        "description": f"{exported.documents:,} documents {selection} of the "
        f"gristmill run {about['name']}, with "
        f"{exported.text_bytes:,} bytes of text from {', '.join(sources)}; see "
        "README.md.",
        "license": licences,
        "url": "README.md",
        "keywords": ["text", "language modelling", *exported.languages],
        "version": "1.0.0",
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
