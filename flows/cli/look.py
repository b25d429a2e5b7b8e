"""The command `look`: a first look at data."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

from typer import Argument, Option, echo

from gristmill.core.files import write_text
from gristmill.flows.cli.application import (
    JsonOption,
    app,
    print_json,
)


@app.command()
def look(
    path: Annotated[str, Argument(metavar="PATH", help="A file, glob, folder or URL.")],
    documents: Annotated[
        int,
        Option(metavar="N", help="Maximum number of documents to read.", min=1),
    ] = 1000,
    seconds: Annotated[
        float,
        Option(
            metavar="S",
            help="Omit measurements whose kernels are not compiled after this time.",
            min=0,
        ),
    ] = 15.0,
    out: Annotated[
        Path | None,
        Option(metavar="FILE", help="Write the manifest to this file."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Look at data in seconds: formats, languages, duplicates, shares kept by rule
    sets, and a manifest for it.
    """
    from gristmill.flows.authoring.look_at_data import look_at
    from gristmill.flows.authoring.measured_sample import measure_sample, print_look
    from gristmill.flows.authoring.new_manifest import (
        Wishes,
        source_name,
        write_manifest,
    )
    from gristmill.flows.cli.data import (
        anchored,
        new_file,
        place_in,
    )
    from gristmill.flows.running.session import program

    name = source_name(path, [])
    target = Path(f"{name}.yaml") if out is None else new_file(out)
    source_look = look_at(name, anchored(path))
    measurements = measure_sample(anchored(path), source_look, documents, seconds)
    manifest = write_manifest(
        Wishes(name), {name: place_in(target, path, source_look)}, str(target)
    )
    if as_json:
        listing = {**vars(source_look), **vars(measurements)}
        print_json({"name": name, **listing, "manifest": manifest})
    else:
        print_look(name, source_look, measurements)
        echo(f"\nManifest\n{manifest}")
    if out is not None:
        write_text(out, manifest)
        echo(f"written: {out}", err=as_json)
    elif not as_json:
        command = shlex.join([program(), "look", path, "--out", str(target)])
        echo(f"write it to a file with: {command}")
