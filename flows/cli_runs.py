"""Commands that look at what runs have left in a store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gristmill.flows.cli import (
    EXIT_USAGE,
    JsonOption,
    ManifestArgument,
    SetOption,
    StoreOption,
    app,
    fail,
    open_or_exit,
    open_store,
    print_json,
)


@app.command()
def logs(
    manifest: ManifestArgument,
    stage: Annotated[str | None, typer.Argument(metavar="[STAGE]", help="Absent: the one that runs, else one that "
                                                "stopped half-way, else the last one.", show_default=False)] = None,
    attempt: Annotated[int | None, typer.Option(help="An earlier attempt of the stage, by its number.", min=1)] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", help="The last so many lines; 0 for all.", min=0)] = 50,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the attempt has ended.")] = False,
    set_: SetOption = None, store: StoreOption = None,
) -> None:
    """Show what a stage's process printed, also while it runs."""
    from gristmill.flows.logs import NoLogError, find_log, read_log

    session = open_or_exit(manifest, set_, store)
    try:
        log = find_log(session, stage, attempt)
    except NoLogError as error:
        fail(str(error), EXIT_USAGE)
    typer.echo(f"{log}:", err=True)
    for text in read_log(log, lines or None, follow):
        typer.echo(text, nl=False)


@app.command()
def compare(
    first: Annotated[str, typer.Argument(metavar="RUN", help="A run's name or an unmistakable part of it, `last`, or "
                                         "`last-1` for the one before.")],
    second: Annotated[str, typer.Argument(metavar="RUN", help="Another one.")],
    store: StoreOption = None, as_json: JsonOption = False,
    html: Annotated[Path | None, typer.Option(help="Also write one HTML file with the losses as curves.")] = None,
) -> None:
    """Show two runs side by side: manifests, outputs, funnels, mixtures, losses, held-out text."""
    from gristmill.flows.compare import UnknownRunError, compare_runs, find_run, write_comparison
    from gristmill.flows.comparison_tables import print_comparison

    opened = open_store(store)
    try:
        records = [find_run(opened, wanted) for wanted in (first, second)]
    except UnknownRunError as error:
        fail(str(error), EXIT_USAGE)
    found = compare_runs(opened, *records)
    print_json(found) if as_json else print_comparison(found)
    if html is not None:
        write_comparison(opened, records, html)
        typer.echo(f"\nwritten: {html}", err=as_json)
