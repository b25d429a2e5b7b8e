"""The commands about tokens."""

from __future__ import annotations

from enum import StrEnum
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
    print_json,
    why_refused,
)


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
    form: Annotated[TokenFormat, typer.Option("--format", help=(
        "llmc (also modded-nanogpt), megatron, memmap (nanoGPT), olmo, or mds (MosaicML Streaming)."))],
    out: Annotated[str, typer.Option("--out", metavar="DIR", help="Folder or URL of the files.")],
    order: Annotated[RowOrder, typer.Option(help="As pre-training reads the rows, or as they are stored.")] = (
        RowOrder.TRAINED),
    split: Annotated[SplitName, typer.Option(help="Training rows, or the held-out ones.")] = SplitName.TRAIN,
    shard_tokens: Annotated[int, typer.Option(
        metavar="N", help="Most tokens per file of llmc and olmo.", min=1)] = 100_000_000,
    set_: SetOption = None, store: StoreOption = None, as_json: JsonOption = False,
) -> None:
    """Write the packed tokens as files that other trainers read, in our training order."""
    from gristmill.flows.export_tokens import NothingToExportError, export_from
    from gristmill.tokenize.exporting.export import ExportError
    from gristmill.tokenize.exporting.mds import MissingLibraryError

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
    typer.echo(f"{found['tokens']:,} tokens of {found['documents']:,} document pieces in {found['rows']:,} rows, order "
               f"{found['order']}, {found['dtype']}; {found['padding_left_out']:,} tokens of padding left out")
    typer.echo(f"{len(found['sha256'])} files in {out}; README.{form.value}.md says how to read them")
