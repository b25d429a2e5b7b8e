"""What every command shares: the application, its common options, how a manifest is opened, how an error ends.

The commands are in `cli_<subject>.py` and register themselves on `app`; `cli.py` brings them together. Everything heavy
is imported inside the commands, so that `gristmill --help` answers at once.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from gristmill.flows.completion import complete_manifest, complete_setting

if TYPE_CHECKING:
    from gristmill.flows.session import Session

EXIT_STAGE_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


class WholeSentences(TyperGroup):
    """A group whose help shows what each command does to the end of its sentence, on several lines if need be."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands. Typer keeps the classes of both arguments to itself."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [(name, command.get_short_help_str(limit=1000)) for name, command in commands
                if command is not None and not command.hidden]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


app = typer.Typer(
    cls=WholeSentences,
    help="Grinds raw text into a trained language model: one manifest, one command, every token traceable.",
    no_args_is_help=True, add_completion=True, pretty_exceptions_enable=False, rich_markup_mode=None,
)

ManifestArgument = Annotated[str, typer.Argument(
    metavar="MANIFEST", help="The YAML manifest.", autocompletion=complete_manifest)]
SetOption = Annotated[list[str] | None, typer.Option(
    "--set", metavar="KEY=VALUE", help="Replace a setting of the manifest, e.g. pretrain.steps=50.",
    autocompletion=complete_setting)]
StoreOption = Annotated[str | None, typer.Option(
    "--store", metavar="PATH", help="Folder or URL of the outputs.  [default: $GRISTMILL_STORE or ./gristmill-store]")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]


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
