"""The command line. Exit codes: 0 done, 1 a stage failed, 2 bad usage or manifest.

Everything heavy is imported inside the commands, so that `gristmill --help` answers at once.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from gristmill.flows.session import Session

EXIT_STAGE_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

app = typer.Typer(
    help="Grinds raw text into a trained language model: one manifest, one command, every token traceable.",
    no_args_is_help=True, add_completion=True, pretty_exceptions_enable=False, rich_markup_mode=None,
)

ManifestArgument = Annotated[str, typer.Argument(metavar="MANIFEST", help="The YAML manifest.")]
SetOption = Annotated[list[str] | None, typer.Option(
    "--set", metavar="KEY=VALUE", help="Replace a setting of the manifest, e.g. pretrain.steps=50.")]
StoreOption = Annotated[str | None, typer.Option(
    "--store", metavar="PATH", help="Folder or URL of the outputs.  [default: $GRISTMILL_STORE or ./gristmill-store]")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]


@app.command()
def run(
    manifest: ManifestArgument,
    until: Annotated[str | None, typer.Option(help="The last stage to run.")] = None,
    force: Annotated[list[str] | None, typer.Option(help="A stage to make anew although it is committed.")] = None,
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
    settings = [*(set_ or []), *(["engine.deterministic=true"] if deterministic else [])]
    session = open_or_exit(manifest, settings, store, until=until, exactly=True, verify_inputs=verify_inputs)
    unknown = [name for name in force or [] if name not in session.plan]
    if unknown:
        fail(f"--force {unknown[0]}: this run has no such stage; it has {', '.join(session.plan)}", EXIT_USAGE)
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
    name: Annotated[str, typer.Argument(metavar="STAGE", help="The stage to run.")],
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
    manifest: ManifestArgument, set_: SetOption = None, store: StoreOption = None, as_json: JsonOption = False,
    predict: Annotated[bool, typer.Option(
        "--predict", help="Run a small sample, and say what time, memory and disk the preparation needs.")] = False,
    sample_mb: Annotated[float, typer.Option(help="Size of that sample, in MB of input.", min=0.1)] = 16.0,
    gpus: Annotated[int | None, typer.Option(help="Plan the pre-training for so many GPUs.", min=1)] = None,
    gpu: Annotated[str, typer.Option(help="Their kind, with --gpus.")] = "H100",
    mfu: Annotated[float, typer.Option(help="Model FLOPs utilisation taken for granted, with --gpus.", min=0.01,
                                       max=1.0)] = 0.4,
    peak_tflops: Annotated[float | None, typer.Option(help="Of a GPU that is not in the table, with --memory-gb.",
                                                      min=0.001)] = None,
    memory_gb: Annotated[float | None, typer.Option(help="The same.", min=0.001)] = None,
    prices: Annotated[Path | None, typer.Option(help="A table of prices per GPU and hour (YAML).")] = None,
    measure: Annotated[int, typer.Option(help="With --gpus: train so many real steps here, and print how far off the "
                                         "figures are.", min=0)] = 0,
) -> None:
    """Show what a run would do, and why, without doing it; or what its pre-training needs of GPUs."""
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

        prediction = predict_cost(session, int(sample_mb * 1e6))
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


@app.command()
def explain(
    manifest: ManifestArgument,
    document: Annotated[str, typer.Argument(metavar="DOC_ID", help="A document's id (32 hexadecimal digits, or the "
                                            "first few) or its locator.")],
    set_: SetOption = None, store: StoreOption = None, as_json: JsonOption = False,
) -> None:
    """Show a document's journey: why it was kept or dropped, and which training steps read it."""
    from gristmill.flows.explain import journey, print_journey
    from gristmill.flows.lookup import DocumentNotFoundError

    session = open_or_exit(manifest, set_, store)
    try:
        found = journey(session, document)
    except DocumentNotFoundError as error:
        fail(str(error), EXIT_USAGE)
    print_json(found) if as_json else print_journey(found)


@app.command()
def whatif(
    manifest: ManifestArgument,
    set_: SetOption = None,
    samples: Annotated[int, typer.Option(help="Documents shown on each side of a cut.", min=0)] = 20,
    store: StoreOption = None, as_json: JsonOption = False,
) -> None:
    """Show what other thresholds would keep, from stored measurements: --set filter.gopher_quality.min_words=40."""
    from gristmill.dataprep.replay import NotReplayableError
    from gristmill.flows.whatif import compare, print_replay, replay

    before, after = open_or_exit(manifest, None, store), open_or_exit(manifest, set_, store)
    try:
        comparison = compare(before, after)
    except NotReplayableError as error:
        fail(str(error), EXIT_USAGE)
    tokenized = before.committed("tokenize")
    found = replay(comparison, samples, None if tokenized is None else tokenized.data)
    print_json(found) if as_json else print_replay(found)


@app.command()
def dialects(
    manifest: ManifestArgument,
    sample: Annotated[int, typer.Option(help="Documents to judge at most, chosen by the hash of their ids.",
                                        min=1)] = 20_000,
    set_: SetOption = None, store: StoreOption = None, as_json: JsonOption = False,
) -> None:
    """Show what the Gopher rules keep by each project's definitions, and documents on which they disagree."""
    from gristmill.flows.dialects import NothingIngestedError, compare_dialects, print_dialects

    session = open_or_exit(manifest, set_, store)
    try:
        found = compare_dialects(session, sample)
    except NothingIngestedError as error:
        fail(str(error), EXIT_USAGE)
    print_json(found) if as_json else print_dialects(found)


@app.command()
def report(
    manifest: ManifestArgument, set_: SetOption = None, store: StoreOption = None,
    out: Annotated[Path, typer.Option(help="Where to write it.")] = Path("report.html"),
) -> None:
    """Write the report of what is committed as one self-contained HTML file."""
    from gristmill.flows.report import render_report

    session = open_or_exit(manifest, set_, store)
    from gristmill.dataprep.files import atomic_write

    with atomic_write(out) as sink:
        sink.write(render_report(session, None).encode())
    typer.echo(out)


@app.command()
def runs(store: StoreOption = None, as_json: JsonOption = False) -> None:
    """List the runs of a store."""
    from gristmill.flows.status import print_runs
    from gristmill.flows.store import read_runs

    records = [record for _, record in read_runs(open_store(store))]
    print_json(records) if as_json else print_runs(records)


@app.command()
def verify(
    subject: Annotated[str, typer.Argument(metavar="MANIFEST|MODEL", help="A manifest (*.yaml), or the folder of a "
                                           "model.")],
    set_: SetOption = None, store: StoreOption = None,
    repair: Annotated[bool, typer.Option("--repair", help="Remove the damaged files, so that a run makes just them "
                                         "again.")] = False,
    tokenizer: Annotated[str | None, typer.Option(help="Of a MODEL: a folder with tokenizer.json; its own if absent.")
                         ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare every committed file of a manifest with its checksum; or a MODEL's numbers with those of transformers,
    lm-evaluation-harness and TRL.
    """
    if not subject.endswith((".yaml", ".yml")):
        from gristmill.flows.cli_models import verify_model

        raise typer.Exit(verify_model(subject, tokenizer, as_json))
    from gristmill.flows.status import find_damage, repair_damage

    session = open_or_exit(subject, set_, store)
    damage = find_damage(session)
    for sentence in (sentence for sentences in damage.values() for sentence in sentences):
        typer.echo(sentence)
    if not damage:
        typer.echo("every committed file is as it was committed")
        return
    if not repair:
        fail(f"mend it with: {session.command('verify', '--repair')}", EXIT_STAGE_FAILED)
    repair_damage(session, damage)
    typer.echo(f"damaged commits are withdrawn; make them again with: {session.command('run')}")


@app.command()
def gc(
    store: StoreOption = None,
    keep_runs: Annotated[int, typer.Option(help="Keep what the last so many runs of each manifest refer to.",
                                           min=1)] = 10,
    delete: Annotated[bool, typer.Option("--delete", help="Really delete; otherwise only list.")] = False,
) -> None:
    """Remove outputs that no recent run refers to."""
    from gristmill.flows.gc import collect

    opened = open_store(store)
    garbage = collect(opened, keep_runs, delete)
    for path, size in garbage:
        typer.echo(f"{size / 1e6:10.1f} MB  {path}")
    total = sum(size for _, size in garbage) / 1e6
    typer.echo(f"{total:10.1f} MB in {len(garbage)} outputs {'deleted' if delete else 'could go (--delete does it)'}")


@app.command()
def schema(
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the reference for people instead.")] = False,
) -> None:
    """Print the manifest's JSON Schema, for editors."""
    from gristmill.flows.reference import markdown as reference
    from gristmill.mixtures.manifest import Manifest

    if markdown:
        typer.echo(reference(), nl=False)
        raise typer.Exit
    print_json(Manifest.model_json_schema())


@app.command()
def serve(
    limit: Annotated[int, typer.Option(help="Flow runs at the same time.", min=1)] = 1,
) -> None:
    """Register the deployments at the Prefect server and run what is triggered there."""
    from gristmill.flows.serving import NoServerError, serve_deployments

    try:
        serve_deployments(limit)
    except NoServerError as error:
        fail(str(error), EXIT_USAGE)


@app.command()
def up(
    port: Annotated[int, typer.Option(help="Port of the Prefect server, on the loopback address.")] = 4200,
    limit: Annotated[int, typer.Option(help="Flow runs at the same time.", min=1)] = 1,
    database: Annotated[str | None, typer.Option(
        metavar="URL", help="PostgreSQL database of the server, postgresql://...  [default: a file, SQLite]",
        envvar="GRISTMILL_DATABASE")] = None,
) -> None:
    """Start the Prefect server with its UI on this machine, and serve the deployments."""
    from gristmill.flows.serving import NoServerError, up_and_serve

    try:
        up_and_serve(port, limit, database)
    except NoServerError as error:
        fail(str(error), EXIT_STAGE_FAILED)


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


def open_or_exit(
    manifest: str, overrides: list[str] | None, store: str | None, until: str | None = None, exactly: bool = False,
    verify_inputs: bool = False,
) -> Session:
    """Open a manifest, or print everything that is wrong with it and exit with code 2."""
    from gristmill.dataprep.reading.examples import ExamplesError
    from gristmill.dataprep.reading.sources import SourceError
    from gristmill.flows.session import open_session
    from gristmill.flows.stages import UnknownStageError
    from gristmill.mixtures.load import ManifestError

    try:
        return open_session(manifest, overrides or [], store, until, exactly, verify_inputs)
    except ManifestError as error:
        many = len(error.problems)
        typer.echo(str(error), err=True)
        fail(f"{many} problem{'s' if many > 1 else ''} in {manifest}; nothing was run", EXIT_USAGE)
    except (UnknownStageError, SourceError, ExamplesError, FileNotFoundError) as error:
        fail(str(error), EXIT_USAGE)


def open_store(location: str | None) -> Any:
    """The store that an option, the environment or the default names."""
    from gristmill.flows.session import DEFAULT_STORE
    from gristmill.flows.store import Store

    return Store.at(location or os.environ.get("GRISTMILL_STORE") or DEFAULT_STORE)


def fail(message: str, code: int) -> NoReturn:
    """Print an error and exit."""
    from gristmill.dataprep.secrets import mask_text

    typer.echo(mask_text(message), err=True)
    raise typer.Exit(code)


def print_json(value: Any) -> None:
    """Print a value as JSON."""
    typer.echo(json.dumps(value, indent=1, ensure_ascii=False, default=str))


def main() -> None:
    """The console script."""
    # A closed pipe (`| head`) ends the printing, not the run's record with a traceback.
    try:
        app(standalone_mode=True)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)


# The commands of these modules register themselves on `app`, which is whole by now.
import gristmill.flows.cli_evaluate  # noqa: E402
import gristmill.flows.cli_mixtures  # noqa: E402
import gristmill.flows.cli_models  # noqa: E402
import gristmill.flows.cli_new  # noqa: E402
import gristmill.flows.cli_provenance  # noqa: E402
import gristmill.flows.cli_runs  # noqa: E402
import gristmill.flows.cli_tokens  # noqa: E402, F401

if __name__ == "__main__":
    # Run as a script, this file is another module than the one that the others have registered with.
    from gristmill.flows import cli

    cli.main()
