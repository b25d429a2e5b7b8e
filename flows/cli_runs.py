"""Commands that look at what runs have left in a store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

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
    open_store,
    out_file,
    print_json,
)
from gristmill.flows.completion import complete_manifest, complete_run, complete_stage


@app.command()
def logs(
    manifest: ManifestArgument,
    stage: Annotated[str | None, typer.Argument(metavar="[STAGE]", help="Absent: the one that runs, else one that "
                                                "stopped half-way, else the last one.", show_default=False,
                                                autocompletion=complete_stage)] = None,
    attempt: Annotated[int | None, typer.Option(
        metavar="N", help="An earlier attempt of the stage, by its number.", min=1)] = None,
    lines: Annotated[int, typer.Option(
        "--lines", "-n", metavar="N", help="The last so many lines; 0 for all.", min=0)] = 50,
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
    printed = False
    for text in read_log(log, lines or None, follow):
        printed = True
        typer.echo(text, nl=False)
    if not printed:
        typer.echo("(this attempt printed nothing)", err=True)


@app.command()
def compare(
    first: Annotated[str, typer.Argument(metavar="RUN", help="A run's name or an unmistakable part of it, `last`, or "
                                         "`last-1` for the one before.", autocompletion=complete_run)],
    second: Annotated[str, typer.Argument(metavar="RUN", help="Another one.", autocompletion=complete_run)],
    store: StoreOption = None, as_json: JsonOption = False,
    html: Annotated[Path | None, typer.Option(
        metavar="FILE", help="Also write one HTML file with the losses as curves.")] = None,
) -> None:
    """Show two runs side by side: manifests, outputs, funnels, mixtures, losses, held-out text."""
    from gristmill.flows.compare import UnknownRunError, compare_runs, find_run, write_comparison
    from gristmill.flows.report.comparison_tables import print_comparison

    if html is not None:
        out_file("--html", html)
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


@app.command()
def report(
    manifest: ManifestArgument, set_: SetOption = None, store: StoreOption = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where to write it.")] = Path("report.html"),
) -> None:
    """Write the report of what is committed as one self-contained HTML file."""
    from gristmill.dataprep.files import atomic_write
    from gristmill.flows.report.page import render_report

    target = out_file("--out", out)
    session = open_or_exit(manifest, set_, store)
    with atomic_write(target) as sink:
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
                                           "model.", autocompletion=complete_manifest)],
    set_: SetOption = None, store: StoreOption = None,
    repair: Annotated[bool, typer.Option("--repair", help="Remove the damaged files, so that a run makes just them "
                                         "again.")] = False,
    tokenizer: Annotated[str | None, typer.Option(
        metavar="DIR", help="Of a MODEL: a folder with tokenizer.json; its own if absent.")
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
    committed = [stage for stage in session.plan if stage in damage or session.committed(stage) is not None]
    if as_json:
        print_json({"committed": committed, "damage": damage})
    for sentence in (sentence for sentences in damage.values() for sentence in sentences):
        typer.echo(sentence, err=as_json)
    if not damage:
        typer.echo(f"every committed file of {len(committed)} stages is as it was committed" if committed else
                   f"nothing is committed yet; make it with: {session.command('run')}", err=as_json)
        return
    if not repair:
        fail(f"mend it with: {session.command('verify', '--repair')}", EXIT_STAGE_FAILED)
    repair_damage(session, damage)
    typer.echo(f"damaged commits are withdrawn; make them again with: {session.command('run')}",
               err=as_json)


@app.command()
def gc(
    store: StoreOption = None,
    keep_runs: Annotated[int, typer.Option(
        metavar="N", help="Keep what the last so many runs of each manifest refer to.",
        min=1)] = 10,
    delete: Annotated[bool, typer.Option("--delete", help="Really delete; otherwise only list.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove outputs that no recent run refers to."""
    from gristmill.flows.gc import collect

    opened = open_store(store)
    garbage = collect(opened, keep_runs, delete)
    if as_json:
        print_json({"deleted": delete, "outputs": [{"path": str(path), "bytes": size} for path, size in garbage]})
        return
    if not garbage:
        if not any(opened.outputs()):
            typer.echo(f"nothing to remove: {opened.root} has no outputs")
            return
        typer.echo(f"nothing to remove: the last {keep_runs} runs of each manifest refer to every output")
        return
    for path, size in garbage:
        typer.echo(f"{size / 1e6:10.1f} MB  {path}")
    total = sum(size for _, size in garbage) / 1e6
    typer.echo(f"{total:10.1f} MB in {len(garbage)} outputs {'deleted' if delete else 'could go (--delete does it)'}")
