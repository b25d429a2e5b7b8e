"""The command `ablate`: find out which steps and rules make a better model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from typer import Context, Exit, Option, echo

from gristmill.flows.cli.application import (
    EXIT_STAGE_FAILED,
    JsonOption,
    ManifestArgument,
    SetOption,
    StoreOption,
    app,
    open_or_exit,
    print_json,
    refuse_without,
    resumable,
)


@app.command()
def ablate(
    context: Context,
    manifest: ManifestArgument,
    arms: Annotated[
        Path | None,
        Option(metavar="FILE", help="YAML: arms, budget and rule of the decisions."),
    ] = None,
    each_rule: Annotated[
        bool,
        Option(
            "--each-rule",
            help="Compare no rule set of the filters, each left out, and each alone.",
        ),
    ] = False,
    quick: Annotated[
        bool,
        Option(
            "--quick", help="Train the smallest proxies, with three seeds and a rate."
        ),
    ] = False,
    plan: Annotated[
        bool,
        Option(
            "--plan",
            help="Time some steps of each size, and print how long all trainings take.",
        ),
    ] = False,
    price: Annotated[
        float | None,
        Option(metavar="X", help="With --plan: price of an hour.", min=0.0),
    ] = None,
    set_: SetOption = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train small models on variants of the prepared documents, and tell which variants
    make a better model.
    """
    from gristmill.flows.sweeps.ablation import (
        plan_ablation,
        read_ablation,
        run_ablation,
    )
    from gristmill.flows.sweeps.ablation_cost import estimate_cost
    from gristmill.flows.sweeps.ablation_report import print_ablation, write_ablation
    from gristmill.flows.sweeps.ablation_results import analyse_ablation, fix_rule

    if not plan:
        refuse_without(context, "--plan", ["price"])
    session = open_or_exit(manifest, set_, store)
    with resumable():
        settings = read_ablation(arms, each_rule, quick)
        planned = plan_ablation(settings, manifest, set_ or [], store)
        output = sys.stderr if as_json else sys.stdout
        if plan:
            costs = estimate_cost(planned, output)
            lines = [cost.describe(price) for cost in costs]
            print_json(costs) if as_json else echo("\n".join(lines))
            return
        earlier_rule = fix_rule(planned, session.store)
        trained = run_ablation(planned, output)
        results = analyse_ablation(planned, trained, earlier_rule)
    written = write_ablation(session.manifest_file, results)
    print_json(results) if as_json else print_ablation(results)
    for path in written:
        echo(path, err=as_json)
    raise Exit(EXIT_STAGE_FAILED if results.failed else 0)
