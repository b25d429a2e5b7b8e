"""The command `ladder`: predict the loss of a training from smaller ones."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Annotated

from typer import Option, echo

from gristmill.flows.cli.application import (
    JsonOption,
    ManifestArgument,
    SetOption,
    StoreOption,
    app,
    fail,
    open_or_exit,
    print_json,
    resumable,
)


@app.command()
def ladder(
    manifest: ManifestArgument,
    sizes: Annotated[
        str, Option(metavar="SIZE,...", help="Model sizes, as in pretrain.size.")
    ],
    tokens_per_parameter: Annotated[
        str,
        Option(
            metavar="R,...",
            help="Training tokens per parameter; every size is trained with each.",
        ),
    ],
    set_: SetOption = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train small models, fit a scaling law to their losses, and predict the loss of
    the manifest's own training.
    """
    from gristmill.flows.sweeps.ladder import analyse_ladder, climb, plan_ladder
    from gristmill.flows.sweeps.ladder_report import print_ladder
    from gristmill.flows.sweeps.sweep_report import write_beside

    session = open_or_exit(manifest, set_, store)
    try:
        ratios = [float(text) for text in tokens_per_parameter.split(",")]
    except ValueError:
        fail(
            f"--tokens-per-parameter: {tokens_per_parameter!r} is not a list of "
            "numbers separated by commas"
        )
    with resumable():
        planned = plan_ladder(
            manifest,
            [text.strip() for text in sizes.split(",")],
            ratios,
            set_ or [],
            store,
        )
        results = analyse_ladder(
            planned, climb(planned, sys.stderr if as_json else sys.stdout)
        )
    written = write_beside(session.manifest_file, "ladder", asdict(results))
    print_json(results) if as_json else print_ladder(results)
    echo(written, err=as_json)
