"""Commands for manifests, mixtures and exports: `new`, `schema`, `mixtures sweep`,
`export-tokens`, `export-documents`.
"""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Exit, Option, Typer, echo

from gristmill.core.files import write_text
from gristmill.core.secrets import mask_text
from gristmill.flows.cli.application import (
    EXIT_STAGE_FAILED,
    JsonOption,
    ManifestArgument,
    SetOption,
    StoreOption,
    WholeSentences,
    about_manifest,
    app,
    fail,
    open_or_exit,
    pairs,
    print_json,
    resumable,
)
from gristmill.mixtures.hub_paths import HUB

if TYPE_CHECKING:
    from gristmill.flows.authoring.look_at_data import Look
    from gristmill.flows.running.session import Session


@app.command()
def new(
    file: Annotated[
        Path | None,
        Argument(
            metavar="FILE",
            help="The manifest to write.  [default: NAME.yaml]",
            show_default=False,
        ),
    ] = None,
    source: Annotated[
        list[str] | None,
        Option(
            metavar="[NAME=]PATH",
            help=(
                "Data to look at: a file, glob, folder or URL; may be given several "
                "times."
            ),
        ),
    ] = None,
    name: Annotated[str | None, Option(metavar="NAME", help="Name of the run.")] = None,
    language: Annotated[
        list[str] | None,
        Option(metavar="CODE", help="A language to keep (en, de, ...); all if absent."),
    ] = None,
    tokens: Annotated[
        int | None,
        Option(
            metavar="N",
            help="Tokens to train on; by default the estimated size of the data.",
            min=20_000,
        ),
    ] = None,
    train: Annotated[
        bool, Option(help="Whether to train a model, or only prepare documents.")
    ] = True,
    language_model: Annotated[
        str | None,
        Option(
            metavar="PATH",
            help="A fastText language identification model; by default lid.176.",
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="An existing tokenizer.json, instead of one trained on the data.",
        ),
    ] = None,
) -> None:
    """Write a manifest for your data, with the formats, fields, weights and sizes found
    by looking at the files.
    """
    from gristmill.dataprep.readers.sources import SourceError, outside_files
    from gristmill.flows.authoring.look_at_data import look_at
    from gristmill.flows.authoring.new_manifest import (
        Wishes,
        read_tokenizer,
        source_name,
        write_manifest,
    )
    from gristmill.flows.running.session import program
    from gristmill.flows.stages.langid import unknown_languages
    from gristmill.mixtures.steps.langid import LanguageId

    if not source:
        fail("nothing was written; give the data: gristmill new --source PATH")
    paths: dict[str, str] = {}
    for path_option in source:
        prefix, equals, given_path = path_option.partition("=")
        # `s3://bucket/a=b/*` has an equals sign too, but no name before it.
        has_name = bool(equals) and "/" not in prefix
        path = given_path if has_name else path_option
        if not path or (has_name and not prefix):
            raise SourceError(f"--source {path_option!r}: give a path, or NAME=PATH")
        label = prefix if has_name else source_name(path, list(paths))
        if label in paths:
            raise SourceError(
                f"source {label!r} is given twice; rename one of them: NAME=PATH"
            )
        paths[label] = path
    if language_model is not None:
        language_model = anchored(language_model)
        outside_files("--language-model", language_model)
    langid = LanguageId.model_validate(
        {"keep": language or ["*"], "model": language_model}
    )
    for _, problem in unknown_languages(langid, ()):
        fail(f"nothing was written; --language: {problem}")
    name = name or next(iter(paths))
    target = new_file(file or Path(f"{name}.yaml"))
    sources = {}
    for label, path in paths.items():
        look = look_at(label, anchored(path))
        echo(f"{label}: {look.describe()}")
        sources[label] = place_in(target, path, look)
    vocabulary = None
    if tokenizer is not None:
        vocabulary = read_tokenizer(
            tokenizer.expanduser(), path_in(target, str(tokenizer))
        )
    wishes = Wishes(
        name,
        language or [],
        tokens,
        train,
        language_model,
        vocabulary,
    )
    text = write_manifest(wishes, sources, str(target))
    write_text(target, text)
    quoted = shlex.quote(str(target))
    echo(
        f"\nwritten: {target}\nlook at it, then: {program()} plan {quoted}\n"
        f"                  {program()} run {quoted}"
    )


def anchored(path: str) -> str:
    """Return a path that is valid in a manifest in any folder."""
    if path.startswith(HUB):
        from gristmill.core.hub import at_commit

        return at_commit(path)
    return path if "://" in path else str(Path(path).expanduser().resolve())


def place_in(manifest: Path, path: str, look: Look) -> Look:
    """Return a look with its path as written in the manifest."""
    return replace(look, path=path_in(manifest, path))


def path_in(manifest: Path, path: str) -> str:
    """Return a path as written in a manifest: a relative path becomes relative to the
    manifest's folder.

    Absolute paths and URLs stay absolute; a folder with both data and manifest can be
    moved.
    """
    if "://" in path or path.startswith(("/", "~")):
        return anchored(path)
    return os.path.relpath(anchored(path), manifest.expanduser().resolve().parent)


def new_file(path: Path) -> Path:
    """Return the path of a file to create, or exit with code 2 if it exists."""
    if path.exists():
        fail(f"{path} exists and was not changed; name another file")
    return path


@app.command()
def lock(manifest: ManifestArgument) -> None:
    """Write the commits that branches and tags of the Hugging Face Hub point to now
    into a manifest.
    """
    from gristmill.flows.authoring.manifest_text import lock_revisions
    from gristmill.mixtures.yaml_text import read_yaml

    path = Path(manifest).resolve()
    read_yaml(path)
    text = path.read_bytes().decode()
    locked = lock_revisions(text)
    write_text(path, locked)
    for line in locked.splitlines():
        if line not in text:
            echo(line)


@app.command()
def schema() -> None:
    """Print the manifest's JSON Schema, for editors and as a list of every key."""
    import gristmill.flows.stages.registry  # noqa: F401 - registers the steps of `prepare` in the schema
    from gristmill.mixtures.manifest import Manifest

    print_json(Manifest.model_json_schema())


mixtures = Typer(
    cls=WholeSentences,
    help="Compare mixtures of the sources.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(mixtures, name="mixtures")


@mixtures.callback()
def group() -> None:
    """Compare mixtures of the sources."""


@mixtures.command()
def sweep(
    manifest: ManifestArgument,
    weights: Annotated[
        Path | None,
        Option(
            metavar="GRID",
            help="YAML: a list of weights, or a mapping with "
            "`mixtures`, `grid` and `dirichlet`.",
        ),
    ] = None,
    steps: Annotated[
        int | None,
        Option(metavar="N", help="Training steps of every proxy.", min=1),
    ] = None,
    seeds: Annotated[
        int,
        Option(
            metavar="N",
            help="Proxies per mixture, to measure the spread between runs.",
            min=1,
        ),
    ] = 1,
    model: Annotated[
        str,
        Option(
            metavar="KEY=VALUE,...",
            help="Settings of the proxy's model that differ from 2 layers of width "
            "128 with 4 heads.",
        ),
    ] = "",
    target: Annotated[
        str,
        Option(
            metavar="NAME=SHARE,...",
            help="Share of each source, or task of pretrain.tasks, in the objective. "
            " [default: weights]",
        ),
    ] = "",
    runs: Annotated[
        Path | None,
        Option(
            metavar="FOLDER",
            help="Also use the runs of Olmix's ratios.csv and metrics.csv in a "
            "folder; without --weights nothing is trained.",
        ),
    ] = None,
    write_runs: Annotated[
        Path | None,
        Option(metavar="FOLDER", help="Write all runs as ratios.csv and metrics.csv."),
    ] = None,
    set_: SetOption = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train a small model on every mixture, compare bits per byte, and suggest a
    mixture.
    """
    from gristmill.flows.sweeps import run_tables
    from gristmill.flows.sweeps.proxies import plan_sweep, train_mixtures
    from gristmill.flows.sweeps.results import analyse
    from gristmill.flows.sweeps.sweep_report import print_results, write_results

    if weights is None and runs is None:
        fail("give --weights with mixtures to train, or --runs with measured ones")
    if weights is not None and steps is None:
        fail("--weights needs --steps, the training steps of every proxy")
    session = open_or_exit(manifest, set_, store)
    with resumable():
        planned = plan_sweep(
            manifest,
            weights,
            steps or 1,
            seeds,
            shares_of("--model", model),
            set_ or [],
            store,
            shares_of("--target", target),
        )
        outcomes = [] if runs is None else run_tables.read_runs(runs, planned)
        if weights is not None:
            output = sys.stderr if as_json else sys.stdout
            outcomes = train_mixtures(planned, output) + outcomes
        results = analyse(planned, outcomes)
    written = write_results(session.manifest_file, results)
    if write_runs is not None:
        written += run_tables.write_runs(write_runs, results)
    print_json(results) if as_json else print_results(results)
    for path in written:
        echo(path, err=as_json)
    raise Exit(EXIT_STAGE_FAILED if results.failed else 0)


def shares_of(option: str, text: str) -> dict[str, float]:
    """Parse `a=1,b=2` into a mapping of numbers (true and false too), or exit with code
    2.
    """
    numbers: dict[str, float] = {}
    for name, number in pairs(option, text.split(",") if text else ()).items():
        if not isinstance(number, int | float):
            fail(f"{option}: {name}={number} is not of the form NAME=NUMBER")
        numbers[name.strip()] = number
    return numbers


TokenFormat = Literal["llmc", "megatron", "memmap", "olmo"]
SplitName = Literal["train", "validation"]


@about_manifest
def export_tokens(
    session: Session,
    form: Annotated[
        TokenFormat,
        Option(
            "--format",
            help="llmc (also modded-nanogpt), megatron, memmap (nanoGPT), or olmo.",
        ),
    ],
    out: Annotated[
        str, Option("--out", metavar="DIR", help="Folder or URL of the files.")
    ],
    order: Annotated[
        Literal["trained", "stored"],
        Option(
            help="Order in which pre-training reads the rows, or "
            "in which they are stored."
        ),
    ] = "trained",
    split: Annotated[
        SplitName, Option(help="Training rows, or held-out rows.")
    ] = "train",
    shard_tokens: Annotated[
        int,
        Option(metavar="N", help="Maximum tokens per file of llmc and olmo.", min=1),
    ] = 100_000_000,
    as_json: JsonOption = False,
) -> None:
    """Write the packed tokens in the formats of other trainers, in training order."""
    from gristmill.flows.export_tokens import export_from

    summary = export_from(session, form, out, order, split, shard_tokens)
    if as_json:
        print_json(summary)
        return
    echo(
        f"{summary['tokens']:,} tokens of {summary['documents']:,} document pieces in "
        f"{summary['rows']:,} rows, order {summary['order']}, {summary['dtype']}; "
        f"{summary['padding_left_out']:,} tokens of padding left out"
    )
    echo(
        f"{len(summary['sha256'])} files in {out}; README.{form}.md "
        "says how to read them"
    )


def num_bytes(size: str | int) -> int:
    """Parse a size such as `256MB`."""
    from pydantic import ByteSize, TypeAdapter

    return TypeAdapter(ByteSize).validate_python(size)


@about_manifest
def publish(
    session: Session,
    cards: Annotated[
        Path,
        Option(
            metavar="DIR",
            help="Folder for the cards, such as one of `export-documents --format hf`.",
        ),
    ],
    as_json: JsonOption = False,
) -> None:
    """Write the cards that a publication needs: of the data set and the model,
    Croissant, and the summary of training content.
    """
    from gristmill.flows.report.cards import write_cards

    written = write_cards(session, cards)
    if as_json:
        print_json({"folder": str(cards), "files": written})
        return
    echo(f"{cards}: {', '.join(written)}")


@about_manifest
def export_documents(
    session: Session,
    form: Annotated[
        Literal["parquet", "jsonl", "hf"],
        Option(
            "--format",
            help=(
                "parquet, jsonl (compressed by zstd), or hf: a folder for "
                "datasets.load_dataset, with a dataset card."
            ),
        ),
    ],
    out: Annotated[
        str,
        Option(
            "--out",
            metavar="DIR_OR_URL",
            help=(
                "Folder, s3://..., gs://..., az://... or hf://datasets/USER/NAME (a new "
                "one is private)."
            ),
        ),
    ],
    where: Annotated[
        str | None,
        Option(
            metavar="SQL",
            help=(
                "Only documents that satisfy a condition on the "
                "columns, e.g. \"language = 'de'\"."
            ),
        ),
    ] = None,
    columns: Annotated[
        str | None,
        Option(
            metavar="A,B,...",
            help="Only these columns.  [default: all but original_text]",
        ),
    ] = None,
    dropped: Annotated[
        bool,
        Option("--dropped", help="Export the dropped documents, each with its reason."),
    ] = False,
    shard_size: Annotated[
        int,
        Option(
            metavar="SIZE",
            help="Maximum text per file, e.g. 500MB.",
            parser=num_bytes,
            show_default="256MB",
        ),
    ] = 256_000_000,
    as_json: JsonOption = False,
) -> None:
    """Write the kept documents, with all edits, scores and reasons."""
    from pydantic import ValidationError

    from gristmill.flows.questions.publish_documents import publish
    from gristmill.flows.running.terminal import TerminalObserver, plain_console
    from gristmill.mixtures.schema.evaluation import Documents

    column_names = (
        None if columns is None else [name.strip() for name in columns.split(",")]
    )
    try:
        section = Documents.model_validate(
            {
                "format": form,
                "where": where,
                "columns": column_names,
                "dropped": dropped,
                "shard_bytes": shard_size,
            }
        )
    except ValidationError as error:
        fail(f"--{error.errors()[0]['msg'].removeprefix('Value error, ')}")
    observer = TerminalObserver(plain_console(stderr=True))
    try:
        with resumable():
            summary = publish(session, section, out, observer)
    finally:
        observer.stop_bars()
    if as_json:
        print_json(summary)
        return
    file_bytes = sum(file_info["bytes"] for file_info in summary["files"].values())
    num_files = len(summary["files"])
    reused = (
        "" if summary["is_new"] else "; they were already written, so nothing changed"
    )
    echo(
        f"{summary['documents']:,} documents with {summary['text_bytes'] / 1e6:,.1f} "
        f"MB of text in {num_files:,} file{'s' if num_files != 1 else ''} "
        f"({file_bytes / 1e6:,.1f} MB){reused}"
    )
    hint = "README.md describes them" if form == "hf" else "_documents.json lists them"
    echo(mask_text(f"{out}: {hint}"))
