"""Commands that run a manifest, plan a run, or inspect the outputs of runs in a
store.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

from typer import Argument, Context, Exit, Option, echo

from gristmill.flows.cli.application import (
    EXIT_STAGE_FAILED,
    JsonOption,
    ManifestArgument,
    NoUiOption,
    SetOption,
    StoreOption,
    UntilOption,
    about_manifest,
    app,
    fail,
    open_or_exit,
    out_file,
    print_json,
    refuse_without,
)
from gristmill.flows.cli.completion import (
    complete_manifest,
    complete_stage,
)
from gristmill.mixtures.recipes.named_recipes import is_manifest

if TYPE_CHECKING:
    from gristmill.flows.running.session import Session


LogFormat = Literal["text", "json"]
LogFormatOption = Annotated[
    LogFormat,
    Option(
        "--log-format",
        help="json: every line is a JSON object with time, level and event, for a "
        "log collector.",
        envvar="GRISTMILL_LOG_FORMAT",
    ),
]


@app.command()
def run(
    manifest: ManifestArgument,
    until: UntilOption = None,
    force: Annotated[
        list[str] | None,
        Option(
            metavar="STAGE",
            help="A stage to rebuild even if it is committed.",
            autocompletion=complete_stage,
        ),
    ] = None,
    keep: Annotated[
        list[str] | None,
        Option(
            metavar="STAGE",
            help="A stage whose committed output is kept even if its version changed.",
            autocompletion=complete_stage,
        ),
    ] = None,
    set_: SetOption = None,
    store: StoreOption = None,
    no_ui: NoUiOption = False,
    verify_inputs: Annotated[
        bool, Option("--verify-inputs", help="Hash the content of all inputs.")
    ] = False,
    log_format: LogFormatOption = "text",
) -> None:
    """Run a manifest: committed stages are reused, unfinished ones resumed."""
    from gristmill.flows.running.stage_server import early_server

    with early_server(manifest, set_ or [], store):
        session = open_or_exit(
            manifest,
            set_,
            store,
            until=until,
            exactly=True,
            verify_inputs=verify_inputs,
            allow_code=True,
        )
        session.check_stages([*(force or []), *(keep or [])])
        if keep and set(keep) & set(force or []):
            fail("--keep excludes --force of the same stage")
        refuse_force_on_hosts(session, bool(force))
        session.keep(keep or [])
        launch_and_exit(
            session, list(session.plan), force or [], not no_ui, log_format, True
        )


@app.command()
def stage(
    name: Annotated[
        str,
        Argument(
            metavar="STAGE", help="The stage to run.", autocompletion=complete_stage
        ),
    ],
    manifest: ManifestArgument,
    force: Annotated[
        bool, Option("--force", help="Rebuild the stage even if it is committed.")
    ] = False,
    set_: SetOption = None,
    store: StoreOption = None,
    no_ui: NoUiOption = False,
    log_format: LogFormatOption = "text",
) -> None:
    """Run one stage; the stages before it must be committed."""
    session = open_or_exit(
        manifest, set_, store, until=name, exactly=True, allow_code=True
    )
    refuse_force_on_hosts(session, force)
    forced = [name] if force else []
    launch_and_exit(session, [name], forced, not no_ui, log_format)


def launch_and_exit(
    session: Session,
    stages: list[str],
    force: list[str],
    tracked: bool,
    log_format: LogFormat,
    summarise: bool = False,
) -> NoReturn:
    """Run stages whose libraries are installed, and exit with the code of the run."""
    from gristmill.flows.cli.launch import launch
    from gristmill.flows.running.missing_libraries import check_libraries

    forced = frozenset(force)
    check_libraries(session, stages, forced)
    json_lines = log_format == "json"
    raise Exit(launch(session, stages, forced, tracked, summarise, json_lines))


def refuse_force_on_hosts(session: Session, force: bool) -> None:
    """Exit with code 2 if several hosts would each rebuild a stage, one after the
    other.
    """
    if force and session.manifest.engine.nodes > 1:
        fail(
            "--force needs a single host: each of engine.nodes would rebuild the "
            "stage; add --set engine.nodes=1"
        )


@app.command()
def plan(
    context: Context,
    manifest: ManifestArgument,
    set_: SetOption = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
    allow_code: Annotated[
        bool,
        Option(
            "--allow-code",
            help="Run the manifest's own code to list the files of sources.",
        ),
    ] = False,
    predict: Annotated[
        bool,
        Option(
            "--predict",
            help="Run a small sample, and predict the "
            "time, memory and disk of each stage.",
        ),
    ] = False,
    sample_mb: Annotated[
        float,
        Option(
            metavar="X",
            help="With --predict: size of the sample, in MB of input.",
            min=0.1,
        ),
    ] = 16.0,
    sample_seconds: Annotated[
        float,
        Option(
            metavar="S",
            help="With --predict: time limit of the sample; stages that it does not "
            "reach are marked.",
            min=1.0,
        ),
    ] = 30.0,
    engines: Annotated[
        bool,
        Option(
            "--engines",
            help="Compare clusters with this machine: the size of text and the number "
            "of cores from which one takes less time.",
        ),
    ] = False,
    gpus: Annotated[
        int | None,
        Option(metavar="N", help="Plan the pre-training for N GPUs.", min=1),
    ] = None,
    gpu: Annotated[
        str, Option(metavar="NAME", help="With --gpus: GPU model.")
    ] = "H100",
    mfu: Annotated[
        float,
        Option(
            metavar="X",
            help="With --gpus: assumed model FLOPs utilisation (MFU).",
            min=0.01,
            max=1.0,
        ),
    ] = 0.4,
    peak_tflops: Annotated[
        float | None,
        Option(
            metavar="X",
            help="With --gpus: peak TFLOP/s of a GPU that is not in the table; needs "
            "--memory-gb.",
            min=0.001,
        ),
    ] = None,
    memory_gb: Annotated[
        float | None,
        Option(metavar="X", help="With --peak-tflops: memory of that GPU.", min=0.001),
    ] = None,
    price: Annotated[
        float | None,
        Option(metavar="X", help="With --gpus: price of a GPU hour.", min=0.0),
    ] = None,
) -> None:
    """Show what a run would do, and why, without running it; or plan its pre-training
    on GPUs, or its engine.
    """
    if gpus is None:
        refuse_without(
            context,
            "--gpus",
            ("gpu", "mfu", "peak_tflops", "memory_gb", "price"),
        )
    if not predict:
        refuse_without(context, "--predict", ("sample_mb", "sample_seconds"))
    session = open_or_exit(manifest, set_, store, allow_code=allow_code)
    if engines:
        from gristmill.flows.planning.plan_engines import plan_engines, print_engines

        engine_plans = plan_engines(session.manifest.engine.workers)
        print_json(engine_plans) if as_json else print_engines(engine_plans)
        raise Exit
    if gpus is not None:
        from gristmill.flows.planning.plan_gpus import (
            GpuChoice,
            plan_gpus,
            print_plan_for_gpus,
        )

        gpu_plan = plan_gpus(
            session, gpus, GpuChoice(gpu, peak_tflops, memory_gb), mfu, price
        )
        print_json(gpu_plan) if as_json else print_plan_for_gpus(gpu_plan)
        raise Exit
    if predict:
        from gristmill.flows.planning.predict import predict as predict_cost
        from gristmill.flows.planning.predict import print_prediction

        prediction = predict_cost(session, int(sample_mb * 1e6), sample_seconds)
        print_json(prediction) if as_json else print_prediction(prediction)
        raise Exit(EXIT_STAGE_FAILED if prediction.refusals else 0)
    from gristmill.flows.questions.what_changed import explain_plan, print_plan

    rows = explain_plan(session)
    print_json(rows) if as_json else print_plan(rows)


@about_manifest
def status(
    session: Session,
    as_json: JsonOption = False,
) -> None:
    """Show every stage of a manifest as committed, unfinished or missing; --json also
    shows the last run, with its exit code and report.
    """
    from gristmill.flows.questions.status import last_run, print_status, stage_states

    rows = stage_states(session)
    if as_json:
        print_json({"run": last_run(session), "stages": rows})
    else:
        print_status(session, rows)


@about_manifest
def logs(
    session: Session,
    stage: Annotated[
        str | None,
        Argument(
            metavar="STAGE",
            help="By default the running stage, otherwise an unfinished one, "
            "otherwise the last one.",
            show_default=False,
            autocompletion=complete_stage,
        ),
    ] = None,
    lines: Annotated[
        int,
        Option(
            "--lines", "-n", metavar="N", help="Number of last lines; 0 for all.", min=0
        ),
    ] = 50,
    follow: Annotated[
        bool,
        Option("--follow", "-f", help="Keep printing until the attempt has ended."),
    ] = False,
) -> None:
    """Show the output of a stage's process, even while it runs."""
    from gristmill.flows.questions.status import find_log, read_log

    log = find_log(session, stage)
    echo(f"{log}:", err=True)
    printed = False
    for text in read_log(log, lines or None, follow):
        printed = True
        echo(text, nl=False)
    if not printed:
        echo("(this attempt printed nothing)", err=True)


@app.command()
def compare(
    first: Annotated[
        str,
        Argument(
            metavar="RUN",
            help="A run's name or a unique part of it, `last`, or `last-1` for the "
            "run before it.",
        ),
    ],
    second: Annotated[str, Argument(metavar="RUN", help="Another run.")],
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show two runs side by side: manifests, outputs, funnels, mixtures, losses and
    held-out text.
    """
    from gristmill.core.store import store_at
    from gristmill.flows.questions.compare import (
        compare_runs,
        find_run,
        print_comparison,
    )

    opened_store = store_at(store)
    records = [find_run(opened_store, run_name) for run_name in (first, second)]
    comparison = compare_runs(opened_store, *records)
    print_json(comparison) if as_json else print_comparison(comparison)


@about_manifest
def report(
    session: Session,
    out: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="File of the report.  [default: report.html or report.md]",
        ),
    ] = None,
    form: Annotated[
        Literal["html", "md"] | None,
        Option(
            "--format",
            help="md is Markdown for a pull request, with tables but no pictures.  "
            "[default: by FILE's suffix, or html]",
        ),
    ] = None,
    training_summary: Annotated[
        bool,
        Option(
            "--training-summary",
            help="Instead write a summary of training content by the European "
            "Commission's "
            "template: sources, sizes, languages, licences, domain names, opt-outs.",
        ),
    ] = False,
) -> None:
    """Write a report of the committed stages as one self-contained file: HTML or
    Markdown.
    """
    from gristmill.core.files import write_text
    from gristmill.core.secrets import mask_known
    from gristmill.flows.pages.markdown import markdown_page
    from gristmill.flows.pages.page_html import html_file
    from gristmill.flows.report.report import render_report
    from gristmill.flows.report.training_content import training_content

    if form is None:
        form = "md" if out is not None and out.suffix == ".md" else "html"
    out = out or Path(f"{'training-content' if training_summary else 'report'}.{form}")
    target = out_file("--out", out)
    write = markdown_page if form == "md" else html_file
    if training_summary:
        text = write(training_content(session))
    else:
        text = render_report(session, None, write)
    write_text(target, mask_known(text))
    echo(out)


@app.command()
def runs(
    store: StoreOption = None,
    as_json: JsonOption = False,
    prometheus: Annotated[
        bool,
        Option(
            "--prometheus",
            help="Print the newest run of each manifest as metrics, for node_exporter "
            "or a Pushgateway.",
        ),
    ] = False,
) -> None:
    """List the runs of a store."""
    from gristmill.core.store import read_runs, store_at
    from gristmill.flows.questions.status import print_runs

    if prometheus:
        from gristmill.flows.prefect.run_metrics import metrics_text

        echo(metrics_text(store_at(store)), nl=False)
        return
    records = [record for _, record in read_runs(store_at(store))]
    print_json(records) if as_json else print_runs(records)


@app.command()
def verify(
    subject: Annotated[
        str,
        Argument(
            metavar="MANIFEST|MODEL",
            help="A manifest (*.yaml), or the folder of a model.",
            autocompletion=complete_manifest,
        ),
    ],
    set_: SetOption = None,
    store: StoreOption = None,
    repair: Annotated[
        bool,
        Option(
            "--repair",
            help="Remove the damaged files, so that the next run rebuilds only them.",
        ),
    ] = False,
    tokenizer: Annotated[
        str | None,
        Option(
            metavar="DIR",
            help="For a MODEL: folder with tokenizer.json; "
            "the model's folder if absent.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare every committed file of a manifest with its checksum; or a MODEL's
    outputs with those of transformers.
    """
    if not is_manifest(subject):
        from gristmill.flows.cli.models import verify_model

        raise Exit(verify_model(subject, tokenizer, as_json))
    from gristmill.flows.questions.status import find_damage, repair_damage

    session = open_or_exit(subject, set_, store)
    damage = find_damage(session)
    committed = [
        stage
        for stage in session.plan
        if stage in damage or session.committed(stage) is not None
    ]
    if as_json:
        print_json({"committed": committed, "damage": damage})
    for sentences in damage.values():
        echo("\n".join(sentences), err=as_json)
    if not committed:
        echo(f"no stage is committed yet; run: {session.command('run')}", err=as_json)
        return
    if not damage:
        echo(
            f"all committed files of {len(committed)} stages match their checksums",
            err=as_json,
        )
        return
    if not repair:
        fail(
            f"repair it with: {session.command('verify', '--repair')}",
            EXIT_STAGE_FAILED,
        )
    repair_damage(session, damage)
    echo(
        "the damaged stages are no longer committed; rebuild them with: "
        f"{session.command('run')}",
        err=as_json,
    )


@app.command()
def gc(
    store: StoreOption = None,
    keep_runs: Annotated[
        int,
        Option(
            metavar="N",
            help="Keep the outputs of the last N runs of each stage of a manifest.",
            min=1,
        ),
    ] = 10,
    delete: Annotated[
        bool, Option("--delete", help="Delete; without it, only list.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Delete outputs that no recent run refers to, and models' answers about documents
    that were taken down.
    """
    from gristmill.core.store import store_at
    from gristmill.flows.questions.takedown import forget_taken_down
    from gristmill.flows.running.run_records import collect

    opened_store = store_at(store)
    garbage = collect(opened_store, keep_runs, delete)
    answers = forget_taken_down(opened_store.root, delete)
    if as_json:
        outputs = [{"path": str(path), "bytes": size} for path, size in garbage]
        print_json({"deleted": delete, "answers": answers, "outputs": outputs})
        return
    outcome = "deleted" if delete else "can be deleted (with --delete)"
    if answers:
        echo(f"answers about documents that were taken down: {answers:,} {outcome}")
    if not garbage:
        echo(
            f"nothing to delete: the last {keep_runs} runs of each stage "
            "refer to every output"
        )
        return
    for path, size in garbage:
        echo(f"{size / 1e6:10.1f} MB  {path}")
    total = sum(size for _, size in garbage) / 1e6
    echo(f"{total:10.1f} MB in {len(garbage)} outputs {outcome}")
