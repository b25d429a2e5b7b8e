"""The Typer application, the options that commands share, the opening of manifests, and
the handling of errors.

The commands are in `<subject>.py` and register themselves on `app`; `main.py`
imports them all. Heavy modules are imported inside the commands, so that `gristmill
--help` answers at once.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    NoReturn,
    TextIO,
    cast,
    get_type_hints,
)

from typer import Argument, Context, Exit, Option, Typer, echo
from typer.core import TyperGroup

from gristmill.core.secrets import MaskedStream, mask_text
from gristmill.flows.cli.command_groups import EXAMPLES, GROUPS
from gristmill.flows.cli.completion import (
    complete_manifest,
    complete_stage,
)

if TYPE_CHECKING:
    from gristmill.flows.running.session import Session

EXIT_STAGE_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
STORAGE_LIBRARIES = tuple(
    "adlfs aiobotocore aiohttp azure botocore gcsfs google httpx2 "
    "huggingface_hub requests s3fs".split()
)
"""Libraries of fsspec's object stores; their errors are shown as messages, without a
traceback.
"""


class WholeSentences(TyperGroup):
    """Command group whose help wraps the description of each command instead of
    truncating it, under the headings of `command_groups`.
    """

    def invoke(self, ctx: Any) -> Any:
        """Run the command; an error that the user can mend ends it with a message
        instead of a traceback: a RuntimeError with the exit code of a failure, any
        other error with that of wrong input.
        """
        try:
            # Credentials of the manifest, settings and store are masked.
            with (
                redirect_stdout(cast(TextIO, MaskedStream(sys.stdout))),
                redirect_stderr(cast(TextIO, MaskedStream(sys.stderr, True))),
            ):
                return super().invoke(ctx)
        except BrokenPipeError:
            raise
        except Exception as error:
            message = why_refused(error)
            if message is None:
                raise
            is_failure = isinstance(error, RuntimeError)
            fail(message, EXIT_STAGE_FAILED if is_failure else EXIT_USAGE)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command, with an example at the end of its help."""
        command = super().get_command(ctx, cmd_name)
        if command is not None and cmd_name in EXAMPLES:
            command.epilog = f"\b\nExample:\n  {EXAMPLES[cmd_name]}"
        return command

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands under the headings of their groups. The types of both
        arguments are private to Typer.
        """
        headings: Mapping[str, Iterable[str]] = GROUPS
        if ctx.parent:
            headings = {"Commands": self.commands}
        for heading, names in headings.items():
            with formatter.section(heading):
                formatter.write_dl(
                    [
                        (name, self.commands[name].get_short_help_str(limit=1000))
                        for name in names
                    ]
                )


app = Typer(
    cls=WholeSentences,
    help="Turn raw text into a trained language model: one manifest, one command, "
    "every token traceable.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def show_version(wanted: bool) -> None:
    """Print the version and exit."""
    if wanted:
        from gristmill import __version__

        echo(f"gristmill {__version__}")
        raise Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        Option(
            "--version",
            help="Show the version and exit.",
            callback=show_version,
            is_eager=True,
        ),
    ] = False,
) -> None:
    """Define the options that precede a command."""


ManifestArgument = Annotated[
    str,
    Argument(
        metavar="MANIFEST",
        help="The YAML manifest, `demo`, or `recipe:NAME`.",
        autocompletion=complete_manifest,
    ),
]
SetOption = Annotated[
    list[str] | None,
    Option(
        "--set",
        metavar="KEY=VALUE",
        help="Replace a setting of the manifest, e.g. pretrain.steps=50.",
    ),
]
StoreOption = Annotated[
    str | None,
    Option(
        "--store",
        metavar="PATH",
        help="Folder or URL of the outputs.  [default: $GRISTMILL_STORE or "
        "./gristmill-store]",
    ),
]
JsonOption = Annotated[bool, Option("--json", help="Print JSON for scripts.")]


NoUiOption = Annotated[
    bool,
    Option("--no-ui", help="Do not record the run in Prefect (starts faster)."),
]
UntilOption = Annotated[
    str | None,
    Option(
        metavar="STAGE", help="The last stage to run.", autocompletion=complete_stage
    ),
]
PortOption = Annotated[
    int,
    Option(
        metavar="N",
        help="Port of the loopback address; 0 takes a free one.",
        min=0,
        max=65535,
    ),
]


def open_or_exit(
    manifest: str,
    overrides: list[str] | None,
    store: str | None,
    until: str | None = None,
    exactly: bool = False,
    verify_inputs: bool = False,
    allow_code: bool = False,
) -> Session:
    """Open a manifest, or print all its problems and exit with code 2."""
    from gristmill.flows.running.session import open_session
    from gristmill.mixtures.loader import ManifestError

    try:
        return open_session(
            manifest, overrides or [], store, until, exactly, verify_inputs, allow_code
        )
    except ManifestError as error:
        num_problems = len(error.problems)
        fail(
            f"{error}\n{num_problems} problem{'s' if num_problems > 1 else ''} in "
            f"{manifest}; nothing was run"
        )


def about_manifest(function: Callable[..., None]) -> Callable[..., None]:
    """Register a command about a manifest: the function gets the opened session first.

    The command has MANIFEST, --set and --store besides the options of the function.
    """

    @wraps(function)
    def command(
        manifest: str, set_: list[str] | None, store: str | None, **options: Any
    ) -> None:
        function(open_or_exit(manifest, set_, store), **options)

    hints = get_type_hints(function, localns={"Session": Any}, include_extras=True)
    _, *own = (
        parameter.replace(annotation=hints[name])
        for name, parameter in signature(function).parameters.items()
    )
    kind = Parameter.POSITIONAL_OR_KEYWORD
    parameters = [
        Parameter("manifest", kind, annotation=ManifestArgument),
        *own,
        Parameter("set_", kind, default=None, annotation=SetOption),
        Parameter("store", kind, default=None, annotation=StoreOption),
    ]
    command.__annotations__ = {}
    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return app.command()(command)


def out_file(option: str, path: Path) -> Path:
    """Return the path of a file to write, or exit with code 2 if it is a folder."""
    if path.is_dir():
        fail(f"{option} {path} is a folder; name a file, such as {path / 'FILE'}")
    return path


def refuse_without(
    context: Context, required_option: str, options: Sequence[str]
) -> None:
    """Exit with code 2 if one of `options`, which have no effect without
    `required_option`, was given.
    """
    given_options = []
    for name in options:
        if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE":
            given_options.append("--" + name.replace("_", "-"))
    if given_options:
        fail(f"{', '.join(given_options)}: only valid with {required_option}; add it")


def why_refused(error: Exception) -> str | None:
    """Return the message of an error of this package, of a file system, network or
    object store, or of a missing library of an extra; None for any other error.
    """
    if type(error).__module__.startswith("gristmill."):
        return str(error)
    if isinstance(error, ImportError):
        from gristmill.flows.running.missing_libraries import EXTRA_OF, sentence_of

        library = (error.name or "").partition(".")[0]
        return sentence_of(library, ["this command"]) if library in EXTRA_OF else None
    if isinstance(error, OSError) and error.strerror:
        from gristmill.core.files import TEMPORARY_MARK

        name = error.filename2 or error.filename
        location = ""
        if isinstance(name, str | bytes):
            # Name the target file, not the temporary file that stands in for it.
            location = f"{os.fsdecode(name).partition(TEMPORARY_MARK)[0]}: "
        return (
            f"{location}{error.strerror.lower()}; correct the path, its permissions "
            "or what blocks it, and run it again"
        )
    if (
        isinstance(error, OSError)
        or type(error).__module__.partition(".")[0] in STORAGE_LIBRARIES
    ):
        detail = " ".join(str(error).split()) or type(error).__name__
        return (
            f"a file or store cannot be used: {detail}; correct its address or "
            "your access to it, and run it again"
        )
    return None


@contextmanager
def resumable() -> Iterator[None]:
    """Exit with the code of an interrupt, and say that the command can be repeated."""
    try:
        yield
    except KeyboardInterrupt:
        fail("interrupted; the same command resumes it", EXIT_INTERRUPTED)


def fail(message: str, code: int = EXIT_USAGE) -> NoReturn:
    """Print an error and exit."""
    echo(mask_text(message), err=True)
    raise Exit(code)


def pairs(option: str, arguments: Sequence[str] | None) -> dict[str, object]:
    """Parse `NAME=VALUE` options into a mapping, or exit with code 2."""
    import yaml

    from gristmill.mixtures.yaml_text import parse_yaml

    values: dict[str, object] = {}
    for argument in arguments or ():
        name, equals, value = argument.partition("=")
        if not equals or not name:
            fail(f"{option} {argument!r}: write {option} NAME=VALUE")
        try:
            values[name] = parse_yaml(value)
        except yaml.YAMLError:
            values[name] = value
    return values


def print_json(value: Any) -> None:
    """Print a value, or a dataclass, as JSON; control characters that a terminal would
    interpret are escaped. The field `from_` becomes the key `from`.
    """

    def plain(value: Any) -> Any:
        if is_dataclass(value) and not isinstance(value, type):
            return {
                field.name.rstrip("_"): getattr(value, field.name)
                for field in fields(value)
            }
        return str(value)

    text = json.dumps(value, indent=1, ensure_ascii=False, default=plain)
    echo(text.translate(_ESCAPES))


def print_answer(answer: Any, as_json: bool) -> None:
    """Print an answer as JSON, or with its method `show`."""
    if as_json:
        print_json(answer)
    else:
        answer.show()


_ESCAPES = {
    code: f"\\u{code:04x}"
    for code in (*range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
}
