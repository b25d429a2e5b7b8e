"""The command `bench`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Exit, Option

from gristmill.flows.cli.application import JsonOption, app, fail, out_file


@app.command()
def bench(
    area: Annotated[
        str,
        Argument(
            help="Area to measure: dataprep, quality, tokenize, "
            "train, ...; or floors, see below."
        ),
    ],
    as_json: JsonOption = False,
    markdown: Annotated[
        Path | None,
        Option(metavar="FILE", help="Also write the rows as a Markdown page."),
    ] = None,
    points: Annotated[
        int | None,
        Option(metavar="N", help="For chaos: number of kills; 200 if absent.", min=1),
    ] = None,
    seed: Annotated[
        int | None,
        Option(metavar="N", help="For chaos: seed of the points and kinds of kills."),
    ] = None,
    folder: Annotated[
        Path | None,
        Option(
            metavar="DIR",
            help="For bounds, chain, scale, chaos and engines: working folder; chaos "
            "resumes in it.",
        ),
    ] = None,
    at_once: Annotated[
        int | None,
        Option(
            metavar="N",
            help="For chaos: number of concurrent points; 2 if absent.",
            min=1,
        ),
    ] = None,
    documents: Annotated[
        list[int] | None,
        Option(
            metavar="N",
            help="For bounds: number of documents of 200 bytes; 30 million if "
            "absent. For chain and scale: documents of a "
            "corpus, may be given several times; 29,600 and 121,500, or 650,000 and "
            "6,500,000 of 4.8 kB if absent.",
            min=10,
        ),
    ] = None,
    megabytes: Annotated[
        list[int] | None,
        Option(
            metavar="N",
            help="For engines: size of a corpus, may be given several times; 60 if "
            "absent.",
            min=1,
        ),
    ] = None,
    engines: Annotated[
        list[str] | None,
        Option(
            "--engine",
            metavar="NAME",
            help="For engines: only this one, may be given several times.",
        ),
    ] = None,
    model: Annotated[
        Path | None,
        Option(
            metavar="DIR",
            help="For sizes: folder of a model to measure in place of the table's "
            "sizes.",
        ),
    ] = None,
    flame: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="For chain: also draw a flame graph (SVG; needs py-spy).",
        ),
    ] = None,
) -> None:
    """Measure speed and quality against a named peer or bound in the same run.

    The area `chaos` kills and damages a tiny pipeline, and measures the share of runs
    that still end with the same bytes. The area `bounds` takes an hour; `--documents
    1000000` takes minutes. The area `chain` compares raw JSONL to packed shards with
    others' chains; `scale` runs the chain over gigabytes, on one host and on two.

    Some rows have a floor, which stands beside their measurement: the rows below theirs
    are listed at the end, and the exit code is 1 if there are any. `floors` measures a
    short form of the areas.
    """
    from gristmill.mixtures.yaml_text import unknown_name

    areas = areas_of_checkout()
    if markdown is not None:
        out_file("--markdown", markdown)
    if area not in areas.AREAS:
        fail(f"no such area: {unknown_name(area, areas.AREAS, 'areas are')}")
    sizes = documents[-1] if area == "bounds" and documents else documents
    area_options = {
        "points": points,
        "seed": seed,
        "folder": folder,
        "at_once": at_once,
        "documents": sizes,
        "megabytes": megabytes,
        "engines": engines,
        "model": model,
        "flame": flame,
    }
    options = {name: value for name, value in area_options.items() if value is not None}
    for name in options:
        if name not in areas.OPTIONS.get(area, ()):
            owners = [owner for owner, names in areas.OPTIONS.items() if name in names]
            fail(
                f"--{name.replace('_', '-')} belongs to the area {' and '.join(owners)}"
            )
    if flame is not None:
        out_file("--flame", flame)
    raise Exit(0 if areas.print_rows(area, as_json, markdown, **options) else 1)


def areas_of_checkout() -> Any:
    """Import the module `benchmarks.areas`, which is in a checkout and not in the
    installed package.
    """
    import gristmill.mixtures

    root = Path(gristmill.mixtures.__path__[0]).parent
    if not (root / "benchmarks" / "areas.py").is_file():
        fail(
            "`gristmill bench` needs a checkout: benchmarks are not part of the "
            "installed package"
        )
    sys.path.append(str(root))
    return importlib.import_module("benchmarks.areas")
