"""What every command shares: the application, its common options, how a manifest is opened, how an error ends.

The commands are in `<subject>_commands.py` and register themselves on `app`; `main.py` brings them together. Everything
heavy is imported inside the commands, so that `gristmill --help` answers at once.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TextIO, cast

import typer
from typer.core import TyperGroup

from gristmill.core.secrets import MaskedStream, mask_text
from gristmill.flows.cli.command_groups import EXAMPLES, GROUPS
from gristmill.flows.cli.completion import complete_manifest, complete_setting

if TYPE_CHECKING:
    from gristmill.flows.running.session import Session

EXIT_STAGE_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
STORAGE_LIBRARIES = ("adlfs", "aiobotocore", "aiohttp", "azure", "botocore", "gcsfs", "google", "requests", "s3fs")
"""Libraries behind fsspec's URLs, whose errors say what the store refused."""


class WholeSentences(TyperGroup):
    """A group whose help shows what each command does to the end of its sentence, on several lines if need be, under
    the headings of `command_groups`."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; what the machine around it refuses (a path, a disk, a network) ends it with a sentence."""
        try:
            with masked_output():
                return super().invoke(ctx)
        except BrokenPipeError:
            raise
        except Exception as error:
            sentence = why_refused(error)
            if sentence is None:
                raise
            fail(sentence, EXIT_USAGE)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A command, whose help ends in an example."""
        command = super().get_command(ctx, cmd_name)
        if command is not None and cmd_name in EXAMPLES:
            command.epilog = f"\b\nExample:\n  {EXAMPLES[cmd_name]}"
        return command

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands, by groups if they are in any. Typer keeps the classes of both arguments to itself."""
        names = self.list_commands(ctx)
        found = {name: command for name in names if (command := self.get_command(ctx, name)) and not command.hidden}
        grouped = {title: [name for name in commands if name in found] for title, commands in GROUPS.items()}
        others = [name for name in found if not any(name in of_one for of_one in grouped.values())]
        for title, of_one in (*grouped.items(), ("Commands", others)):
            if of_one:
                with formatter.section(title):
                    formatter.write_dl([(name, found[name].get_short_help_str(limit=1000)) for name in of_one])


@contextmanager
def masked_output() -> Iterator[None]:
    """Print nothing inside that is a credential of this command's manifest, settings or store."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = cast(TextIO, MaskedStream(sys.stdout)), cast(TextIO, MaskedStream(sys.stderr, True))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


app = typer.Typer(
    cls=WholeSentences,
    help="Turn raw text into a trained language model: one manifest, one command, every token traceable.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def show_version(wanted: bool) -> None:
    """Print the version and exit."""
    if wanted:
        from gristmill import __version__

        typer.echo(f"gristmill {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=show_version, is_eager=True)
    ] = False,
) -> None:
    """What comes before a command."""


ManifestArgument = Annotated[
    str,
    typer.Argument(
        metavar="MANIFEST", help="The YAML manifest, `demo`, or `recipe:NAME`.", autocompletion=complete_manifest
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Replace a setting of the manifest, e.g. pretrain.steps=50.",
        autocompletion=complete_setting,
    ),
]
StoreOption = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="PATH",
        help="Folder or URL of the outputs.  [default: $GRISTMILL_STORE or ./gristmill-store]",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]


def open_or_exit(
    manifest: str,
    overrides: list[str] | None,
    store: str | None,
    until: str | None = None,
    exactly: bool = False,
    verify_inputs: bool = False,
    allow_code: bool = False,
) -> Session:
    """Open a manifest, or print everything that is wrong with it and exit with code 2."""
    from gristmill.core.store import StoreLocationError
    from gristmill.dataprep.reading.sources import SourceError
    from gristmill.flows.running.session import open_session
    from gristmill.flows.stages.plan import UnknownStageError
    from gristmill.mixtures.load import ManifestError

    try:
        return open_session(manifest, overrides or [], store, until, exactly, verify_inputs, allow_code)
    except ManifestError as error:
        many = len(error.problems)
        typer.echo(mask_text(str(error)), err=True)
        fail(f"{many} problem{'s' if many > 1 else ''} in {manifest}; nothing was run", EXIT_USAGE)
    except (UnknownStageError, SourceError, StoreLocationError, FileNotFoundError) as error:
        fail(str(error), EXIT_USAGE)


def open_store(location: str | None) -> Any:
    """The store that an option, the environment or the default names, or exit with code 2."""
    from gristmill.core.store import StoreLocationError, store_at

    try:
        return store_at(location)
    except StoreLocationError as error:
        fail(str(error), EXIT_USAGE)


def out_file(option: str, path: Path) -> Path:
    """A file to write, or exit with code 2 before any work where a folder is in its place."""
    if path.is_dir():
        fail(f"{option} {path}: that is a folder; name a file, such as {path / 'FILE'}", EXIT_USAGE)
    return path


def refuse_without(context: typer.Context, needed: str, options: Sequence[str]) -> None:
    """Exit with code 2 where options are given that mean nothing without another one, which is not."""
    given = [name for name in options if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"]
    if given:
        fail(
            f"{', '.join('--' + name.replace('_', '-') for name in given)}: this belongs to {needed}; give that too",
            EXIT_USAGE,
        )


def why_refused(error: Exception) -> str | None:
    """What to tell of an error of a file system, network or object store, or of a library that an extra of this package
    brings and nobody has installed; None for any other error."""
    if isinstance(error, ImportError):
        from gristmill.flows.running.missing_libraries import EXTRA_OF, sentence_of

        library = (error.name or "").partition(".")[0]
        return sentence_of(library, "this command") if library in EXTRA_OF else None
    if isinstance(error, OSError) and error.strerror:
        from gristmill.core.files import TEMPORARY_MARK

        name = error.filename2 or error.filename
        # What is written aside is of no interest; what it is for is.
        place = f"{os.fsdecode(name).partition(TEMPORARY_MARK)[0]}: " if isinstance(name, str | bytes) else ""
        return (
            f"{place}{error.strerror.lower()}; correct the path, its permissions or what is in its way, and start again"
        )
    if isinstance(error, OSError) or type(error).__module__.partition(".")[0] in STORAGE_LIBRARIES:
        said = " ".join(str(error).split()) or type(error).__name__
        return f"a file or store cannot be used: {said}; correct the address or the access to it, and start again"
    return None


@contextmanager
def training_several() -> Iterator[None]:
    """Within it what ends several trainings becomes a sentence and an exit code."""
    from gristmill.core.lease import LeaseLostError
    from gristmill.flows.running.run import StageFailedError
    from gristmill.flows.sweeps.grid import SweepError
    from gristmill.mixtures.load import ManifestError

    try:
        yield
    except ManifestError as error:
        fail(f"{error}\nnothing was run", EXIT_USAGE)
    except SweepError as error:
        fail(str(error), EXIT_USAGE)
    except (StageFailedError, LeaseLostError) as error:
        fail(str(error), EXIT_STAGE_FAILED)
    except KeyboardInterrupt:
        fail("interrupted; the same command resumes it", EXIT_INTERRUPTED)


def fail(message: str, code: int) -> NoReturn:
    """Print an error and exit."""
    typer.echo(mask_text(message), err=True)
    raise typer.Exit(code)


def print_json(value: Any) -> None:
    """Print a value as JSON; characters that a terminal might obey are escaped, which a reader undoes."""
    typer.echo(json.dumps(value, indent=1, ensure_ascii=False, default=str).translate(_ESCAPES))


_ESCAPES = {code: f"\\u{code:04x}" for code in (*range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A))}
