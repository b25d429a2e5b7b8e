"""The commands that run a manifest, or say what a run would do: `run`, `stage`, `plan`, `status`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gristmill.flows.command_line import (
    EXIT_STAGE_FAILED,
    EXIT_USAGE,
    JsonOption,
    ManifestArgument,
    SetOption,
    StoreOption,
    app,
    fail,
    open_or_exit,
    print_json,
    refuse_without,
)
from gristmill.flows.completion import complete_stage

if TYPE_CHECKING:
    from gristmill.flows.session import Session


@app.command()
def run(
    manifest: ManifestArgument,
    until: Annotated[str | None, typer.Option(
        metavar="STAGE", help="The last stage to run.", autocompletion=complete_stage)] = None,
    force: Annotated[list[str] | None, typer.Option(
        metavar="STAGE", help="A stage to make anew although it is committed.",
        autocompletion=complete_stage)] = None,
    set_: SetOption = None,
    store: StoreOption = None,
    no_ui: Annotated[bool, typer.Option("--no-ui", help="Do not record the run in Prefect (starts faster).")] = False,
    verify_inputs: Annotated[bool, typer.Option(help="Hash the content of all inputs.")] = False,
    deterministic: Annotated[bool, typer.Option("--deterministic", help="Let trainings refuse operations whose result "
                                                "may differ between two runs.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say which stages would run, and why.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --dry-run: print JSON for scripts.")] = False,
) -> None:
    """Run a manifest: what is committed is reused, what is unfinished goes on."""
    from gristmill.mixtures.yaml_text import did_you_mean

    settings = [*(set_ or []), *(["engine.deterministic=true"] if deterministic else [])]
    session = open_or_exit(manifest, settings, store, until=until, exactly=True, verify_inputs=verify_inputs)
    unknown = [name for name in force or [] if name not in session.plan]
    if unknown:
        fail(f"--force {unknown[0]}: this run has no such stage{did_you_mean(unknown[0], session.plan) or ';'} "
             f"it has {', '.join(session.plan)}", EXIT_USAGE)
    if dry_run:
        show_plan(session, frozenset(force or []), as_json)
        raise typer.Exit
    if as_json:
        fail("--json belongs to --dry-run; what a finished run has made is printed by: "
             f"{session.command('status', '--json')}", EXIT_USAGE)
    from gristmill.flows.launch import launch

    raise typer.Exit(launch(session, list(session.plan), frozenset(force or []), tracked=not no_ui, summarise=True))


@app.command()
def stage(
    name: Annotated[str, typer.Argument(metavar="STAGE", help="The stage to run.", autocompletion=complete_stage)],
    manifest: ManifestArgument,
    force: Annotated[bool, typer.Option("--force", help="Make it anew although it is committed.")] = False,
    set_: SetOption = None,
    store: StoreOption = None,
    no_ui: Annotated[bool, typer.Option("--no-ui", help="Do not record the run in Prefect (starts faster).")] = False,
) -> None:
    """Run one stage; the stages before it must be committed."""
    from gristmill.flows.launch import launch

    session = open_or_exit(manifest, set_, store, until=name, exactly=True)
    raise typer.Exit(launch(session, [name], frozenset([name] if force else []), tracked=not no_ui, summarise=False))


@app.command()
def plan(
    context: typer.Context,
    manifest: ManifestArgument, set_: SetOption = None, store: StoreOption = None, as_json: JsonOption = False,
    predict: Annotated[bool, typer.Option(
        "--predict", help="Run a small sample, and say what time, memory and disk each stage needs.")] = False,
    sample_mb: Annotated[float, typer.Option(metavar="X", help="Size of that sample, in MB of input.", min=0.1)] = 16.0,
    sample_seconds: Annotated[float, typer.Option(
        metavar="S", help="What the sample may take; then what is not measured is said to be so.", min=1.0)] = 30.0,
    gpus: Annotated[int | None, typer.Option(
        metavar="N", help="Plan the pre-training for so many GPUs.", min=1)] = None,
    gpu: Annotated[str, typer.Option(metavar="NAME", help="Their kind, with --gpus.")] = "H100",
    mfu: Annotated[float, typer.Option(
        metavar="X", help="Model FLOPs utilisation taken for granted, with --gpus.", min=0.01,
        max=1.0)] = 0.4,
    peak_tflops: Annotated[float | None, typer.Option(
        metavar="X", help="Of a GPU that is not in the table, with --memory-gb.",
        min=0.001)] = None,
    memory_gb: Annotated[float | None, typer.Option(metavar="X", help="The same.", min=0.001)] = None,
    prices: Annotated[Path | None, typer.Option(
        metavar="FILE", help="A table of prices per GPU and hour (YAML).")] = None,
    measure: Annotated[int, typer.Option(
        metavar="N", help="With --gpus: train so many real steps here, and print how far off the "
        "figures are.", min=0)] = 0,
) -> None:
    """Show what a run would do, and why, without doing it; or what its pre-training needs of GPUs."""
    if gpus is None:
        refuse_without(context, "--gpus", ("gpu", "mfu", "peak_tflops", "memory_gb", "prices", "measure"))
    if not predict:
        refuse_without(context, "--predict", ("sample_mb", "sample_seconds"))
    session = open_or_exit(manifest, set_, store)
    if gpus is not None:
        from gristmill.flows.plan_gpus import GpuChoice, PlanError, measured_checks, plan_gpus
        from gristmill.flows.plan_tables import print_plan_for_gpus

        try:
            found = plan_gpus(session, gpus, GpuChoice(gpu, peak_tflops, memory_gb), mfu, prices)
            checks = measured_checks(session, measure, mfu) if measure else []
        except PlanError as error:
            fail(str(error), EXIT_USAGE)
        print_json({**found, "checks": checks}) if as_json else print_plan_for_gpus(found, checks)
        raise typer.Exit
    if predict:
        from gristmill.flows.predict import predict as predict_cost
        from gristmill.flows.predict import print_prediction

        prediction = predict_cost(session, int(sample_mb * 1e6), sample_seconds)
        print_json(prediction) if as_json else print_prediction(session, prediction)
        raise typer.Exit(EXIT_STAGE_FAILED if prediction["refusals"] else 0)
    show_plan(session, frozenset(), as_json)


def show_plan(session: Session, force: frozenset[str], as_json: bool) -> None:
    """Print what a run would do with every stage, and why."""
    from gristmill.flows.reasons import explain_plan
    from gristmill.flows.status import print_plan

    rows = explain_plan(session, force)
    print_json(rows) if as_json else print_plan(rows)


@app.command()
def status(
    manifest: ManifestArgument, set_: SetOption = None, store: StoreOption = None, as_json: JsonOption = False
) -> None:
    """Show every stage of a manifest as committed, unfinished or missing."""
    from gristmill.flows.status import print_status, stage_states

    session = open_or_exit(manifest, set_, store)
    rows = stage_states(session)
    print_json(rows) if as_json else print_status(session, rows)
