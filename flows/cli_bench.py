"""The command `bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gristmill.flows.cli.application import EXIT_USAGE, JsonOption, app, fail, out_file


@app.command()
def bench(
    area: Annotated[str, typer.Argument(help="What to measure: dataprep, quality, tokenize, train, ...")],
    as_json: JsonOption = False,
    markdown: Annotated[Path | None, typer.Option(
        metavar="FILE", help="Also keep the rows as a page of markdown.")] = None,
    points: Annotated[int | None, typer.Option(
        metavar="N", help="Of chaos: how many kills; 200 where not said.", min=1)] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Of chaos: decides where and how.")] = None,
    folder: Annotated[Path | None, typer.Option(
        metavar="DIR", help="Of chaos: where to work, and to go on with what is there.")
                      ] = None,
    at_once: Annotated[int | None, typer.Option(
        metavar="N", help="Of chaos: points at a time; 2 where not said.", min=1)] = None,
) -> None:
    """Measure against a named peer or bound, both in this run, on this machine.

    The area `chaos` kills, starves and damages a tiny pipeline instead, and measures the share of runs that ended with
    the same bytes all the same.
    """
    from gristmill.flows.bench import AREAS, print_rows
    from gristmill.mixtures.yaml_text import did_you_mean

    if markdown is not None:
        out_file("--markdown", markdown)
    if area not in AREAS:
        fail(f"no such area: {area}{did_you_mean(area, AREAS) or ';'} areas are {', '.join(AREAS)}", EXIT_USAGE)
    options = {name: value for name, value in (("points", points), ("seed", seed), ("folder", folder),
                                               ("at_once", at_once)) if value is not None}
    if options and area != "chaos":
        fail("--points, --seed, --folder and --at-once belong to the area chaos", EXIT_USAGE)
    print_rows(area, as_json, markdown, **options)
