"""Write the reference of the rules that judge documents: docs/reference/rules.md (`make
reference`).

Thresholds and their sources come from the manifest's schema, definitions from the
modules of the statistics, and the values of the sample texts from the kernels
themselves.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.dataprep.filters.gopher import DIALECTS
from gristmill.dataprep.filters.rule_sets import columns_read, measure
from gristmill.mixtures.base import docstrings
from gristmill.mixtures.steps.rules import PRESETS, Rules, section_of

ROOT = Path(__file__).resolve().parents[1]
FOLDER = "dataprep/filters"
SAMPLES = {
    "A": "The mill by the river grinds corn, and the miller of the village has been "
    "up since four.\n"
    'He asked: "Have you seen the boat?" Nobody had.\n\n- corn\n- rye\n- oats ...',
    "B": "Click here!\nClick here!\nClick here!\nsubscribe to our newsletter #deal "
    "#deal {x}",
    "C": "int main(void) { return 0; }\n" * 3,
}
"""Sample texts of the page: prose with a list, boilerplate, and code (as `main.c`)."""
LISTED = {"urls", "bad_words", "toxicity"}
"""Rule sets that need lists or models of the user."""
TITLE = """\
# Rules

The rules of `filter`: each measures a column and bounds it, `min_x` and `max_x` the column `x`. A document is dropped
by the first that fails, under the name `set/rule`; all values are kept, so that `gristmill whatif` can try other
bounds. Written by `make reference` from the rules themselves: thresholds with their sources, definitions, and what is
measured of three texts.

"""


def page() -> str:
    """Return the whole page."""
    parts = [TITLE]
    texts = "\n\n".join(
        f"{name}:\n\n```text\n{text.rstrip()}\n```" for name, text in SAMPLES.items()
    )
    parts.append(f"The three texts (C is called `main.c`):\n\n{texts}\n")
    for name in Rules.model_fields:
        parts += section(name)
    parts.append("## Presets\n")
    parts += [
        f"- `{preset}`: "
        f"{', '.join(f'`{name}` {values}' for name, values in sets.items())}"
        for preset, sets in PRESETS.items()
    ]
    parts += ["", "## Gopher's dialects, definition by definition\n"]
    for dialect in DIALECTS:
        parts += [f"### {dialect}\n", definitions(f"gopher_{dialect}"), ""]
    return "\n".join(parts).rstrip() + "\n"


def section(name: str) -> list[str]:
    """Return the parts of a rule set: source, thresholds and options, definitions, and
    golden values.
    """
    model = section_of(name)
    parts = [
        f"## {name}\n",
        " ".join((model.__doc__ or "").split()) + "\n",
        "| key | default | |",
        "| --- | --- | --- |",
    ]
    for key, field in model.model_fields.items():
        default = (
            "required"
            if field.is_required()
            else shown(field.get_default(call_default_factory=True))
        )
        parts.append(
            f"| `{key}` | {default} | "
            f"{' '.join(docstrings(model).get(key, '').split())} |"
        )
    parts.append("")
    if not name.startswith("gopher"):  # one module per dialect
        parts.append(definitions(name) + "\n")
    if name in LISTED:
        parts.append("Without lists or a model of yours there is nothing to measure.\n")
        return parts
    columns = golden(name)
    if name.startswith("gopher"):
        parts += [
            "| column, by dialect | " + " | ".join(SAMPLES) + " |",
            "| --- |" + " ---: |" * len(SAMPLES),
        ]
        by_dialect = {dialect: golden(name, dialect) for dialect in DIALECTS}
        parts += [
            f"| `{column}`, {dialect} | "
            + " | ".join(map(value, by_dialect[dialect][column]))
            + " |"
            for column in columns
            for dialect in DIALECTS
        ]
    else:
        parts += [
            "| column | " + " | ".join(SAMPLES) + " |",
            "| --- |" + " ---: |" * len(SAMPLES),
        ]
        parts += [
            f"| `{column}` | " + " | ".join(map(value, numbers)) + " |"
            for column, numbers in columns.items()
        ]
    return [*parts, ""]


def golden(name: str, dialect: str | None = None) -> dict[str, np.ndarray]:
    """Return column -> its value for each sample, with the set's defaults."""
    unknown = pa.nulls(len(SAMPLES), pa.string())
    rows = pa.table(
        {
            "text": list(SAMPLES.values()),
            "language": unknown,
            "script": unknown,
            "locator": ["a.txt", "b.txt", "main.c"],
            "metadata": ["{}"] * len(SAMPLES),
        }
    )
    rules = Rules.model_validate(
        {name: {} if dialect is None else {"dialect": dialect}}
    )
    return measure(rows.select(["text", *columns_read([name])]), rules)


def value(number: float) -> str:
    """Return a value as text: whole numbers whole, others with four digits."""
    if np.isnan(number):
        return "null"
    return f"{int(number)}" if float(number).is_integer() else f"{number:.4g}"


def shown(default: Any) -> str:
    """Return a default as in a manifest."""
    if default is None:
        return "none"
    return f"`{str(default).lower()}`" if isinstance(default, bool) else f"`{default}`"


def definitions(module: str) -> str:
    """Return the docstring of a module, with a link to it."""
    path = ROOT / FOLDER / f"{module}.py"
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    text = re.sub(r"(?m)^    (?=\S)", "  ", text) if "\n- " in text else text
    summary, blank, rest = text.partition("\n\n")
    text = " ".join(summary.split()) + blank + rest
    return f"[`{module}.py`](../../{FOLDER}/{module}.py): {text}"


if __name__ == "__main__":
    print(page(), end="")
