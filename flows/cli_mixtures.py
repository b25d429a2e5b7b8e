"""The commands about mixtures: `mixtures sweep`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from gristmill.flows.command_line import (
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
)

mixtures = typer.Typer(
    cls=WholeSentences, help="Compare mixtures of the sources.", no_args_is_help=True, rich_markup_mode=None,
)
app.add_typer(mixtures, name="mixtures")


@mixtures.callback()
def group() -> None:
    """Compare mixtures of the sources."""


@mixtures.command()
def sweep(
    manifest: ManifestArgument,
    weights: Annotated[Path, typer.Option(
        metavar="GRID", help="YAML: a list of weights, or a mapping with `mixtures`, `grid` and `dirichlet`.")],
    steps: Annotated[int, typer.Option(metavar="N", help="Training steps of every proxy.", min=1)],
    seeds: Annotated[int, typer.Option(
        metavar="N", help="Proxies per mixture, for the spread between runs.", min=1)] = 1,
    model: Annotated[str, typer.Option(
        metavar="KEY=VALUE,...", help="The proxy's model, where it differs from 2 layers of width 128 with 4 heads.",
    )] = "",
    target: Annotated[str, typer.Option(
        metavar="SOURCE=SHARE,...", help="How much each source counts in the mean.  [default: the manifest's weights]",
    )] = "",
    set_: SetOption = None, store: StoreOption = None, as_json: JsonOption = False,
    no_ui: Annotated[bool, typer.Option("--no-ui", help="Do not record the sweep in Prefect (starts faster).")] = False,
) -> None:
    """Train a small model on every mixture, compare bits per byte, and suggest a mixture."""
    from gristmill.flows.lease import LeaseLostError
    from gristmill.flows.run import StageFailedError
    from gristmill.flows.sweeps.grid import SweepError
    from gristmill.flows.sweeps.launch import launch_sweep
    from gristmill.flows.sweeps.proxies import plan_sweep
    from gristmill.flows.sweeps.results import analyse
    from gristmill.flows.sweeps.writing import print_results, write_results
    from gristmill.mixtures.load import ManifestError

    session = open_or_exit(manifest, set_, store)
    try:
        chosen = pairs("--model", model)
        planned = plan_sweep(manifest, weights, steps, seeds, chosen, set_ or [], store, pairs("--target", target))
        outcomes = launch_sweep(planned, weights, steps, chosen, set_ or [], tracked=not no_ui)
        found = analyse(planned, outcomes)
    except ManifestError as error:
        fail(f"{error}\nnothing was run", EXIT_USAGE)
    except SweepError as error:
        fail(str(error), EXIT_USAGE)
    except (StageFailedError, LeaseLostError) as error:
        fail(str(error), EXIT_STAGE_FAILED)
    except KeyboardInterrupt:
        fail("interrupted; the same command goes on", EXIT_INTERRUPTED)
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
