"""The commands about manifests, mixtures and what leaves: `new`, `schema`, `mixtures sweep`, `export-tokens`,
`export-documents`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gristmill.core.secrets import mask_text
from gristmill.flows.cli.application import (
    EXIT_INTERRUPTED,
    EXIT_STAGE_FAILED,
    EXIT_USAGE,
    JsonOption,
    ManifestArgument,
    SetOption,
    StoreOption,
    WholeSentences,
    app,
    fail,
    open_or_exit,
    print_json,
    training_several,
    why_refused,
)
from gristmill.flows.cli.completion import complete_recipe

if TYPE_CHECKING:
    from gristmill.flows.authoring.look_at_data import Look


@app.command()
def new(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE]", help="The manifest to write.  [default: NAME.yaml]", show_default=False),
    ] = None,
    source: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]PATH",
            help=(
                "Data to look at: a file, glob, folder or URL; may be given several times. Without it you are asked."
            ),
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Name of the run.")] = None,
    language: Annotated[
        list[str] | None, typer.Option(metavar="CODE", help="A language to keep (en, de, ...); all if absent.")
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(metavar="N", help="Tokens to train on; by default an estimate of what the data has.", min=20_000),
    ] = None,
    train: Annotated[bool, typer.Option(help="Whether to train a model, or only prepare documents.")] = True,
    fineweb2: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help=(
                "FineWeb-2's settings of a language to keep, such as configs/deu_Latn.yml of huggingface/fineweb-2; may be "
                "given several times, in place of --language."
            ),
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=(
                "Write a copy of a recipe (see: gristmill recipes) instead; --source NAME=PATH sets its sources' paths."
            ),
            autocompletion=complete_recipe,
        ),
    ] = None,
    language_model: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="A fastText language identification model; by default lid.176, with --fineweb2 glotlid.bin.",
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="An existing tokenizer.json, instead of one that is trained on the data."),
    ] = None,
) -> None:
    """Write a manifest for your data: it looks at the files and proposes format, fields, weights and sizes."""
    from gristmill.dataprep.reading.sources import SourceError
    from gristmill.flows.authoring.fineweb2_settings import SettingsError, read_settings
    from gristmill.flows.authoring.look_at_data import look_at
    from gristmill.flows.authoring.new_manifest import Wishes, read_tokenizer, source_name, write_manifest
    from gristmill.mixtures.load import ManifestError
    from gristmill.tokenize.encoding.tokenizer import TokenizerError

    if recipe is not None:
        write_recipe(recipe, file, source or [])
        return
    asked = not source
    looks: dict[str, Look] = {}
    paths: dict[str, str] = {}

    def take(given: str) -> str:
        """Look at one source, and return its name."""
        before, equals, after = given.partition("=")
        # `s3://bucket/a=b/*` has an equals sign too, but no name before it.
        named = bool(equals) and "/" not in before
        path = after if named else given
        if not path or (named and not before):
            raise SourceError(f"--source {given!r}: give a path, or NAME=PATH")
        chosen = before if named else source_name(path, list(looks))
        if chosen in looks:
            raise SourceError(f"source {chosen!r} is given twice; give one of them another name: NAME=PATH")
        looks[chosen], paths[chosen] = look_at(chosen, anchored(path)), path
        typer.echo(f"{chosen}: {describe(looks[chosen])}")
        return chosen

    try:
        if fineweb2 and language:
            raise SettingsError("--fineweb2 says which languages are kept, and so does --language; give one of them")
        settings = read_settings(fineweb2 or [])
        for given in source or []:
            take(given)
        if asked:
            ask_for_sources(take)
            name = name or typer.prompt("Name of the run", default=next(iter(looks)))
            if not language and not settings:
                language = typer.prompt(
                    "Languages to keep, e.g. en de (empty for all)", default="", show_default=False
                ).split()
            train = train and typer.confirm("Train a model?", default=True)
        name = name or next(iter(looks))
        target = file or Path(f"{name}.yaml")
        wishes = Wishes(
            name,
            language or [],
            tokens,
            train,
            settings,
            language_model and anchored(language_model),
            None if tokenizer is None else read_tokenizer(tokenizer.expanduser(), path_in(target, str(tokenizer))),
        )
        text = write_manifest(
            wishes, {one: place_in(target, given, looks[one]) for one, given in paths.items()}, str(target)
        )
    except typer.Abort:
        fail("nothing was written; without answers, say where the data is: gristmill new --source PATH", EXIT_USAGE)
    except (SourceError, SettingsError, TokenizerError, ManifestError) as error:
        fail(f"{error}\nnothing was written", EXIT_USAGE)
    save_manifest(target, text)
    typer.echo(f"\nwritten: {target}\nlook at it, then: gristmill plan {target}\n{'':17} gristmill run {target}")


def write_recipe(recipe: str, file: Path | None, sources: Sequence[str]) -> None:
    """Write a copy of a recipe with the sources' paths as they are given, or exit with code 2."""
    from gristmill.flows.authoring.manifest_text import ManifestTextError, set_keys
    from gristmill.mixtures.load import ManifestError, parse_manifest
    from gristmill.mixtures.recipes.named_recipes import needs_of_recipe, recipe_file
    from gristmill.mixtures.yaml_text import did_you_mean, parse_yaml

    try:
        found = recipe_file(recipe)
        text = found.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        fail(f"--recipe: {error}", EXIT_USAGE)
    target, known = file or Path(found.name), list(parse_yaml(text).get("sources", {}))
    values: dict[tuple[str, ...], str] = {}
    for given in sources:
        name, _, path = given.partition("=")
        if not path or name not in known:
            fail(
                f"--source {given!r}: write NAME=PATH{did_you_mean(name, known) or ';'} the recipe "
                + (f"has the sources {', '.join(known)}" if known else "has no sources"),
                EXIT_USAGE,
            )
        values["sources", name, "path"] = path_in(target, path)
    try:
        text = set_keys(text, values)
        parse_manifest(text, str(target))
    except (ManifestTextError, ManifestError) as error:
        fail(str(error), EXIT_USAGE)
    save_manifest(target, text)
    typer.echo(
        f"written: {target}\nneeds: {needs_of_recipe(found.stem)}\n"
        f"look at it, then: gristmill plan {target}\n{'':17} gristmill run {target}"
    )


def anchored(path: str) -> str:
    """A path as a manifest in any folder may have it."""
    return path if "://" in path else str(Path(path).expanduser().resolve())


def place_in(manifest: Path, given: str, look: Look) -> Look:
    """What was seen, with the path as the manifest is to have it."""
    return replace(look, path=path_in(manifest, given))


def path_in(manifest: Path, given: str) -> str:
    """A path as a manifest is to have it: a relative one is relative to the manifest's folder.

    An absolute path and a URL stay as they were given, so that a folder with data and manifest can be moved whole.
    """
    if "://" in given or given.startswith(("/", "~")):
        return anchored(given)
    return os.path.relpath(anchored(given), manifest.expanduser().resolve().parent)


def save_manifest(target: Path, text: str) -> None:
    """Write a manifest where no file is yet, or exit with code 2."""
    try:
        with target.open("x", encoding="utf-8") as sink:
            sink.write(text)
    except FileExistsError:
        fail(f"{target} exists and was not changed; name another file", EXIT_USAGE)
    except OSError as error:
        fail(f"{target} cannot be written: {(error.strerror or str(error)).lower()}; name another file", EXIT_USAGE)


def ask_for_sources(take: Callable[[str], str]) -> None:
    """Ask for paths until there is one and no more come; what cannot be read is asked for again."""
    from gristmill.dataprep.reading.sources import SourceError

    found = 0
    while True:
        question = "Where is your data? (file, glob, folder or URL)" if not found else "More data? (empty: no)"
        given = typer.prompt(question, default=None if not found else "", show_default=False)
        if not given:
            return
        try:
            take(given)
            found += 1
        except SourceError as error:
            typer.echo(f"  {error}")


def describe(look: Look) -> str:
    """What was seen of a source, in one line."""
    from gristmill.flows.authoring.look_at_data import size

    parts = [f"{look.files:,} file{'s' if look.files != 1 else ''}, {size(look.stored_bytes)}"]
    parts += [f"format {look.format}"] if look.format != "auto" else []
    parts += [f"text in field {look.text_field!r}"] if look.text_field else []
    parts += [f"ids in field {look.id_field!r}"] if look.id_field else []
    parts += ["HTML, to be extracted"] if look.extract else []
    parts += ["source code"] if look.is_code else []
    parts += [f"about {size(look.text_bytes)} of text"] if look.text_bytes else []
    return ", ".join([*parts, *look.remarks])


@app.command()
def schema(
    markdown: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write the reference to this folder instead, a Markdown page per section."),
    ] = None,
) -> None:
    """Print the manifest's JSON Schema, for editors."""
    from gristmill.flows.authoring.manifest_reference import write_pages
    from gristmill.mixtures.manifest import Manifest

    if markdown is not None:
        write_pages(markdown)
        raise typer.Exit
    print_json(Manifest.model_json_schema())


mixtures = typer.Typer(
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
        Path,
        typer.Option(
            metavar="GRID", help="YAML: a list of weights, or a mapping with `mixtures`, `grid` and `dirichlet`."
        ),
    ],
    steps: Annotated[int, typer.Option(metavar="N", help="Training steps of every proxy.", min=1)],
    seeds: Annotated[
        int, typer.Option(metavar="N", help="Proxies per mixture, to measure the spread between runs.", min=1)
    ] = 1,
    model: Annotated[
        str,
        typer.Option(
            metavar="KEY=VALUE,...",
            help="The proxy's model, where it differs from 2 layers of width 128 with 4 heads.",
        ),
    ] = "",
    target: Annotated[
        str,
        typer.Option(
            metavar="NAME=SHARE,...",
            help="How much each source, or task of pretrain.tasks, counts.  [default: weights]",
        ),
    ] = "",
    set_: SetOption = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
    no_ui: Annotated[bool, typer.Option("--no-ui", help="Do not record the sweep in Prefect (starts faster).")] = False,
) -> None:
    """Train a small model on every mixture, compare bits per byte, and suggest a mixture."""
    from gristmill.flows.sweeps.proxies import plan_sweep
    from gristmill.flows.sweeps.results import analyse
    from gristmill.flows.sweeps.sweep_flow import launch_sweep
    from gristmill.flows.sweeps.sweep_report import print_results, write_results

    session = open_or_exit(manifest, set_, store)
    with training_several():
        chosen = pairs("--model", model)
        planned = plan_sweep(manifest, weights, steps, seeds, chosen, set_ or [], store, pairs("--target", target))
        outcomes = launch_sweep(
            planned, weights, steps, chosen, set_ or [], tracked=not no_ui, output=sys.stderr if as_json else sys.stdout
        )
        found = analyse(planned, outcomes)
    written = write_results(session.manifest_file, found)
    print_json(found) if as_json else print_results(found)
    for path in written:
        typer.echo(path, err=as_json)
    raise typer.Exit(EXIT_STAGE_FAILED if found["failed"] else 0)


def pairs(option: str, text: str) -> dict[str, Any]:
    """`a=1,b=2` as a mapping of numbers (true and false too), or exit with code 2."""
    import yaml

    from gristmill.mixtures.yaml_text import parse_yaml

    found: dict[str, Any] = {}
    for part in text.split(",") if text else ():
        name, equals, value = part.partition("=")
        try:
            number = parse_yaml(value) if value else None
        except yaml.YAMLError:
            number = None
        if not equals or not isinstance(number, int | float):
            fail(f"{option}: {part!r} is not written NAME=NUMBER", EXIT_USAGE)
        found[name.strip()] = number
    return found


class TokenFormat(StrEnum):
    """What other trainers read."""

    LLMC = "llmc"
    MEGATRON = "megatron"
    MEMMAP = "memmap"
    OLMO = "olmo"
    MDS = "mds"


class RowOrder(StrEnum):
    """In which rows are written."""

    TRAINED = "trained"
    STORED = "stored"


class SplitName(StrEnum):
    """Sides of a packed set."""

    TRAIN = "train"
    VALIDATION = "validation"


@app.command("export-tokens")
def export_tokens(
    manifest: ManifestArgument,
    form: Annotated[
        TokenFormat,
        typer.Option(
            "--format",
            help=("llmc (also modded-nanogpt), megatron, memmap (nanoGPT), olmo, or mds (MosaicML Streaming)."),
        ),
    ],
    out: Annotated[str, typer.Option("--out", metavar="DIR", help="Folder or URL of the files.")],
    order: Annotated[
        RowOrder, typer.Option(help="The order in which pre-training reads the rows, or in which they are stored.")
    ] = (RowOrder.TRAINED),
    split: Annotated[SplitName, typer.Option(help="Training rows, or the held-out ones.")] = SplitName.TRAIN,
    shard_tokens: Annotated[
        int, typer.Option(metavar="N", help="Maximum tokens per file of llmc and olmo.", min=1)
    ] = 100_000_000,
    set_: SetOption = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write the packed tokens in the formats of other trainers, in training order."""
    from gristmill.flows.export_tokens import NothingToExportError, export_from
    from gristmill.tokenize.exporting.exported_files import ExportError
    from gristmill.tokenize.exporting.formats import MissingLibraryError

    session = open_or_exit(manifest, set_, store)
    try:
        found = export_from(session, form.value, out, order.value, split.value, shard_tokens)
    except (NothingToExportError, ExportError, MissingLibraryError) as error:
        fail(str(error), EXIT_USAGE)
    except OSError as error:
        fail(why_refused(error) or f"{out}: {error}", EXIT_STAGE_FAILED)
    if as_json:
        print_json(found)
        return
    typer.echo(
        f"{found['tokens']:,} tokens of {found['documents']:,} document pieces in {found['rows']:,} rows, order "
        f"{found['order']}, {found['dtype']}; {found['padding_left_out']:,} tokens of padding left out"
    )
    typer.echo(f"{len(found['sha256'])} files in {out}; README.{form.value}.md says how to read them")


class DocumentFormat(StrEnum):
    """What documents are written as."""

    PARQUET = "parquet"
    JSONL = "jsonl"
    HF = "hf"


@app.command("export-documents")
def export_documents(
    manifest: ManifestArgument,
    form: Annotated[
        DocumentFormat,
        typer.Option(
            "--format",
            help=(
                "parquet, jsonl (compressed by zstd), or hf: a folder for datasets.load_dataset, with a dataset card."
            ),
        ),
    ],
    out: Annotated[
        str,
        typer.Option(
            "--out", metavar="DIR_OR_URL", help=("Folder, s3://... or hf://datasets/USER/NAME (a new one is private).")
        ),
    ],
    where: Annotated[
        str | None,
        typer.Option(
            metavar="SQL", help=("Only documents that meet a condition over the columns, e.g. \"language = 'de'\".")
        ),
    ] = None,
    columns: Annotated[
        str | None, typer.Option(metavar="A,B,...", help="Only these columns.  [default: all but original_text]")
    ] = None,
    dropped: Annotated[
        bool, typer.Option("--dropped", help="Export the dropped documents, each with its reason.")
    ] = False,
    shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Maximum text per file, e.g. 500MB.")] = "256MB",
    set_: SetOption = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write the kept documents, with all edits, scores and reasons."""
    from pydantic import ValidationError

    from gristmill.dataprep.conservation import ConservationError
    from gristmill.dataprep.exporting.export_documents import ExportError
    from gristmill.flows.questions.find_documents import NothingIngestedError
    from gristmill.flows.questions.publish_documents import publish
    from gristmill.flows.running.terminal import TerminalObserver, plain_console
    from gristmill.mixtures.evaluation import Documents

    names = None if columns is None else [name.strip() for name in columns.split(",")]
    try:
        section = Documents.model_validate(
            {
                "format": form.value,
                "where": where,
                "columns": names,
                "dropped": dropped,
                "shard_bytes": parse_bytes("--shard-size", shard_size),
            }
        )
    except ValidationError as error:
        fail(f"--{error.errors()[0]['msg'].removeprefix('Value error, ')}", EXIT_USAGE)
    session, observer = open_or_exit(manifest, set_, store), TerminalObserver(plain_console(stderr=True))
    try:
        found = publish(session, section, out, observer)
    except (NothingIngestedError, ExportError) as error:
        fail(str(error), EXIT_USAGE)
    except ConservationError as error:
        fail(str(error), EXIT_STAGE_FAILED)
    except KeyboardInterrupt:
        fail("interrupted; the same command resumes it", EXIT_INTERRUPTED)
    except OSError as error:
        fail(why_refused(error) or f"{out}: {error}", EXIT_STAGE_FAILED)
    finally:
        observer.stop_bar()
    if as_json:
        print_json(found)
        return
    size = sum(one["bytes"] for one in found["files"].values())
    typer.echo(
        f"{found['documents']:,} documents with {found['text_bytes'] / 1e6:,.1f} MB of text in "
        f"{len(found['files']):,} file{'s' if len(found['files']) != 1 else ''} ({size / 1e6:,.1f} MB)"
        + ("" if found["is_new"] else "; they were written before, and nothing was done")
    )
    read = "README.md describes them" if form is DocumentFormat.HF else "_documents.json lists them"
    typer.echo(mask_text(f"{out}: {read}"))


SIZE_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def parse_bytes(option: str, text: str) -> int:
    """`256MB` as a number of bytes, or exit with code 2."""
    import re

    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text.strip())
    unit = SIZE_UNITS.get(found[2].upper()) if found is not None else None
    if found is None or unit is None or float(found[1]) * unit < 1:
        fail(
            f"{option}: {text!r} is no size; write a number of bytes, or one with kB, MB or GB, such as 500MB",
            EXIT_USAGE,
        )
    return int(float(found[1]) * unit)
