"""Commands that look at what runs have left in a store."""

from __future__ import annotations

from typing import Annotated

import typer

from gristmill.flows.cli import (
    EXIT_USAGE,
    ManifestArgument,
    SetOption,
    StoreOption,
    app,
    fail,
    open_or_exit,
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
