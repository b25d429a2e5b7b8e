"""The command `bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gristmill.flows.command_line import EXIT_USAGE, JsonOption, app, fail


@app.command()
def bench(
    area: Annotated[str, typer.Argument(help="What to measure: dataprep, quality, tokenize, train, ...")],
    as_json: JsonOption = False,
    markdown: Annotated[Path | None, typer.Option(help="Also keep the rows as a page of markdown.")] = None,
) -> None:
    """Measure against a named peer or bound, both in this run, on this machine."""
    from gristmill.flows.bench import AREAS, print_rows

    if area not in AREAS:
        fail(f"no such area: {area}; areas are {', '.join(AREAS)}", EXIT_USAGE)
    print_rows(area, as_json, markdown)
