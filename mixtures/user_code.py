"""User code in a manifest: `use: ./steps.py:keep_recipes`, a file beside it, or `use:
acme.filters:keep`.

A manifest captures such code by value when it is read, without running it: the source
of the function's file and of the files beside it that it imports, or the name and
version of an installed distribution. The code is therefore part of every recipe, which
is hashed, stored and sent to workers; `dataprep/user_code/` runs it.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar, TypedDict

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from gristmill.mixtures.base import (
    Location,
    Omissible,
    Options,
    PositiveFloat,
    Section,
    parts_of,
)
from gristmill.mixtures.yaml_text import did_you_mean, unknown_name

FILE_FORM = "./FILE.py:NAME"
MODULE_FORM = "PACKAGE.MODULE:NAME"
_WRITTEN = re.compile(r"^(?P<path>.+):(?P<name>[A-Za-z_]\w*)$")
_MODULE = re.compile(r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")


class OwnCodeError(ValueError):
    """User code that is missing, or does not do what its place requires; names the file
    and the line.
    """


class CodeRecipe(TypedDict):
    """User code in a recipe, independent of its folder."""

    function: str
    files: dict[str, str]
    """Source of each file by name; empty for an installed function."""
    distribution: str


@dataclass(frozen=True)
class OwnFunction:
    """A function, or a class, written by a user.

    Attributes:
        written: the reference in the manifest.
        module: the module that defines it; for a file its name without `.py`.
        name: its name in that module.
        files: name -> source, of the function's file and of those in its folder that it
            imports. Empty if it is installed.
        distribution: `acme 1.2` if it is installed, which then identifies it.
    """

    written: str
    module: str = ""
    name: str = ""
    files: Mapping[str, str] = field(default_factory=dict, hash=False)
    distribution: str = ""

    @property
    def taken(self) -> bool:
        """True if the code has been captured by value; before that only its name is
        known.
        """
        return bool(self.files or self.distribution)

    @property
    def reference(self) -> str:
        """`steps:keep_recipes`: its name, independent of its folder."""
        return f"{self.module}:{self.name}"

    @property
    def called(self) -> str:
        """`keep_recipes`: the function's own name, even before the code has been
        captured.
        """
        return self.name or self.written.rpartition(":")[2]

    @cached_property
    def sha256(self) -> str:
        """64 hexadecimal digits that identify the code."""
        return hashlib.sha256(
            json.dumps(self.by_value(), sort_keys=True).encode()
        ).hexdigest()

    def by_value(self) -> CodeRecipe:
        """Return the part of a recipe that identifies it."""
        return {
            "function": self.reference,
            "files": dict(self.files),
            "distribution": self.distribution,
        }

    @property
    def file(self) -> str:
        """`steps.py`: name of its file in messages; for an installed one the module."""
        return f"{self.module}.py" if self.files else self.module

    def describe(self) -> str:
        """Return `./steps.py:keep (sha256 0123456789ab)`, or `acme.filters:keep of acme
        1.2 (...)`: the code that would run.
        """
        # Code without a distribution is identified by a hash, like code in a file.
        suffix = ""
        if self.distribution and not self.distribution.startswith("sha256 "):
            suffix = f" of {self.distribution}"
        return f"{self.written_again}{suffix} (sha256 {self.sha256[:12]})"

    @property
    def written_again(self) -> str:
        """Reference as a manifest has it: `./steps.py:keep`, `acme.filters:keep`."""
        return f"./{self.file}:{self.name}" if self.files else self.reference

    @property
    def place(self) -> str:
        """`steps.py, line 3`: place of its definition, as far as that is known."""
        definition = self.definition()
        return (
            self.file
            if definition is None
            else f"{self.file}, line {definition.lineno}"
        )

    @cached_property
    def source(self) -> str | None:
        """Text of the file in its reference; None if that is not available, or not
        Python.
        """
        if self.files:
            return self.files.get(self.file)
        file = _find_module(self.module) if self.distribution else None
        return (
            file.read_text(encoding="utf-8")
            if file is not None and file.suffix == ".py"
            else None
        )

    def definition(
        self,
    ) -> ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | None:
        """Return its definition by `def` or `class`; None if its source is not
        available or defines it otherwise.
        """
        if self.source is None:
            return None
        statement = _named(ast.parse(self.source), self.name)
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            return statement
        return None

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls._validate,
            serialization=core_schema.plain_serializer_function_ser_schema(
                cls._serialize
            ),
        )

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"type": "string", "pattern": _WRITTEN.pattern}

    @classmethod
    def _validate(cls, value: Any) -> OwnFunction:
        if isinstance(value, OwnFunction):
            return value
        if isinstance(value, Mapping):  # by value, as in recipes and on workers
            module, _, name = str(value["function"]).partition(":")
            return cls(
                value["function"], module, name, value["files"], value["distribution"]
            )
        written = _WRITTEN.match(value) if isinstance(value, str) else None
        if written is None:
            raise ValueError(
                f"write a function as {FILE_FORM} (a file beside the manifest) or "
                f"{MODULE_FORM} (installed)"
            )
        path = written["path"]
        if "://" in path:
            raise ValueError(
                "code must come from a file beside the manifest or an installed "
                f"package; download it, read it, and write {FILE_FORM}"
            )
        if not path.endswith(".py") and not _MODULE.match(path):
            raise ValueError(
                f"{path!r} is neither a file that ends in .py nor a module; write "
                f"{FILE_FORM} or {MODULE_FORM}"
            )
        return cls(value)

    def _serialize(self) -> Any:
        return self.by_value() if self.taken else self.written


CODE_KEYS = CodeRecipe.__annotations__.keys()


def is_code(value: Any) -> bool:
    """Return True if a part of a recipe is code by value."""
    return isinstance(value, Mapping) and value.keys() == CODE_KEYS


def code_in(recipe: Any) -> Iterator[OwnFunction]:
    """Yield all code by value inside a recipe, or inside a stage's settings."""
    if is_code(recipe):
        yield OwnFunction._validate(recipe)
    elif isinstance(recipe, Mapping | list | tuple):
        for inner in recipe.values() if isinstance(recipe, Mapping) else recipe:
            yield from code_in(inner)


def name_code(recipe: Any) -> Any:
    """Return a recipe, or a manifest as recorded by a run, with each code by value
    replaced by one line that names it.
    """
    if is_code(recipe):
        return OwnFunction._validate(recipe).describe()
    if isinstance(recipe, Mapping):
        return {key: name_code(inner) for key, inner in recipe.items()}
    return (
        [name_code(inner) for inner in recipe]
        if isinstance(recipe, list | tuple)
        else recipe
    )


class OwnPlace(Section):
    """A place in the manifest for user code, which may define how the code is
    called.
    """

    takes: ClassVar[tuple[str, ...] | None] = None
    """Names of the positional arguments; None if they depend on more than the place."""
    offers: ClassVar[tuple[str, ...]] = ()
    """Names of optional keyword arguments, passed if the code has such a parameter."""

    @property
    def options(self) -> Options:
        """Keyword arguments of the function."""
        options: Options = getattr(self, "with")
        return options

    def check_code(self, code: OwnFunction) -> None:
        """Check that the code can be called here, as far as its source shows; the code
        is not run.

        Raises:
            OwnCodeError: it takes other arguments.
        """
        signature = stated_signature(code)
        if self.takes is not None and signature is not None:
            by_name = dict.fromkeys(
                name for name in self.offers if takes_name(signature, name)
            )
            check_signature(code, signature, self.takes, {**by_name, **self.options})


class Own(OwnPlace):
    """A place for user code: `{use: ./steps.py:keep_recipes, with: {word: xyzzy}}`."""

    use: OwnFunction
    """Function to use: `./FILE.py:NAME`, a file beside the manifest, or
    `PACKAGE.MODULE:NAME`, installed.
    """
    # `with` is a Python keyword, so a class cannot declare it in the usual way.
    __annotations__["with"] = "dict[str, object]"
    vars()["with"] = Field(
        default_factory=dict, description="Further arguments of the function, by name."
    )


class OwnCall(Own):
    """User code for which a stage waits."""

    time_limit_seconds: PositiveFloat = 600.0
    """Time limit per call; a longer call ends the stage. Native code is not
    interrupted: the limit applies when it returns. All ranks of a training wait for the
    call, so the limit is less than the 30 minutes after which PyTorch gives up.
    """


def name_of(part: Any) -> str:
    """Name of a reward in the metrics, or of a tool for the model: its `name`, else
    that of its function, else its kind.
    """
    if part.name is None and isinstance(part, OwnCall):
        return part.use.called
    return str(part.name or part.kind)


class BuiltInOrOwn(OwnPlace):
    """A part that is either one of the built-in kinds or user code."""

    use: Omissible[OwnFunction | None] = None
    """Code of your own instead of a kind: `./FILE.py:NAME`, a file beside the manifest,
    or `PACKAGE.MODULE:NAME`, installed. Examples are in docs/own-training.md.
    """
    __annotations__["with"] = "dict[str, object]"
    vars()["with"] = Field(
        default_factory=dict,
        exclude_if=lambda value: not value,
        description="Its options, by name.",
    )

    @property
    def own(self) -> Own | None:
        """The user's code with its options, if it replaces a kind."""
        return (
            None
            if self.use is None
            else Own.model_validate({"use": self.use, "with": getattr(self, "with")})
        )

    def _problems(self) -> Iterator[str]:
        if self.use is None and getattr(self, "with"):
            yield (
                "`with` holds the options of code of your own: name it "
                "under `use`, or remove `with`"
            )

    def unused_beside_own(self, section: str, *used: str) -> Iterator[str]:
        """Yield a problem for each changed key that user code ignores.

        Args:
            section: name of this section.
            used: keys that the user's code does use.
        """
        for key in self.changed_keys() if self.use is not None else ():
            if key not in ("use", "with", *used):
                yield (
                    f"{section}.{key} has no effect on code of your own; give it as "
                    "an option, under `with`, or remove it"
                )


def stated_signature(own: OwnFunction) -> inspect.Signature | None:
    """Return the signature of a function or class as its source states it, without
    default values and without running it.

    None if the source does not state it: for installed or decorated code, or a
    constructor that a class inherits.
    """
    definition = function = own.definition()
    if isinstance(definition, ast.ClassDef):
        methods = {
            node.name: node
            for node in definition.body
            if isinstance(node, ast.FunctionDef)
        }
        has_other = "__new__" in methods or definition.keywords
        function = None if has_other else methods.get("__init__")
    if (
        definition is None
        or definition.decorator_list
        or not isinstance(function, ast.FunctionDef)
        or function.decorator_list
    ):
        return None
    arguments, none = deepcopy(function.args), ast.Constant(None)
    for node in ast.walk(arguments):
        if isinstance(node, ast.arg):
            node.annotation = None
    arguments.defaults = [none for _ in arguments.defaults]
    arguments.kw_defaults = [default and none for default in arguments.kw_defaults]
    stated = inspect.signature(eval(ast.unparse(ast.Lambda(arguments, none))))
    parameters = list(stated.parameters.values())
    if isinstance(definition, ast.ClassDef):
        del parameters[0]
    return stated.replace(parameters=parameters)


def takes_name(signature: inspect.Signature, name: str) -> bool:
    """Return True if a signature accepts an argument of this name."""
    return name in signature.parameters or any(
        parameter.kind is parameter.VAR_KEYWORD
        for parameter in signature.parameters.values()
    )


def check_signature(
    own: OwnFunction,
    signature: inspect.Signature,
    given: Sequence[str],
    options: Mapping[str, object],
    method: str = "",
) -> None:
    """Check that a function, or a method of a class, can be called.

    Args:
        own: the function or the class, for the message.
        signature: signature of the function or method.
        given: names of the positional arguments.
        options: the keyword arguments.
        method: the method's name, if it is one.

    Raises:
        OwnCodeError: it takes other arguments.
    """
    try:
        signature.bind(*given, **options)
    except TypeError as error:
        by_name = (
            f"{' and with' if given else ''}: {', '.join(options)}" if options else ""
        )
        name = f"{own.name}.{method}" if method else own.name
        by_place = f" ({', '.join(given)})" if given else ""
        raise OwnCodeError(
            f"{own.place}: {name}{signature} cannot be called "
            f"with{by_place}{by_name}: {error}"
        ) from error


OWN_TAG, NAME_TAG = "(own)", "(name)"


def own_or_name(value: Any) -> str:
    """Return the tag of a value that is either the name of a built-in or user code."""
    return OWN_TAG if isinstance(value, Mapping | Own) else NAME_TAG


def own_functions(value: Any) -> Iterator[tuple[Location, OwnFunction]]:
    """Yield all user code inside a section or a manifest, with its location."""
    return parts_of(value, OwnFunction)


def take_code(own: OwnFunction, folder: Path) -> OwnFunction:
    """Return the function with its code by value, without running it.

    Args:
        own: the function as written in the manifest.
        folder: the manifest's folder; files are relative to it.

    Raises:
        OwnCodeError: the file, its function or the module does not exist, or the file
            is not Python. Loading shows later if an installed module has the function,
            since many define their names when imported.
    """
    if own.taken:
        return own
    path, _, name = own.written.rpartition(":")
    if path.endswith(".py"):
        file = folder / path
        files: dict[str, str] = {}
        _take_file(file.parent, file.name, files)
        tree = _parse(files[file.name], file.name)
        if _named(tree, name) is None and not any(
            isinstance(node, ast.ImportFrom) and node.names[0].name == "*"
            for node in tree.body
        ):
            defined = [
                node.name
                for node in tree.body
                if isinstance(node, ast.FunctionDef | ast.ClassDef)
                and not node.name.startswith("_")
            ]
            raise OwnCodeError(
                f"{file.name} defines no {unknown_name(name, defined, 'it defines')}"
            )
        return OwnFunction(own.written, file.stem, name, files)
    distribution = installed_distribution(path)
    if distribution is None:
        raise OwnCodeError(
            f"there is no module {path!r} in this environment; install it, or name a "
            f"file beside the manifest: {FILE_FORM}"
        )
    return OwnFunction(own.written, path, name, {}, distribution)


def _take_file(folder: Path, file: str, files: dict[str, str]) -> None:
    """Capture a file, and those in the same folder, or below it, that it imports."""
    path = folder / file
    try:
        files[file] = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        near = sorted(sibling.name for sibling in path.parent.glob("*.py"))
        raise OwnCodeError(
            f"there is no file {path.name} in {path.parent}"
            f"{did_you_mean(path.name, near)}"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise OwnCodeError(f"{path}: cannot be read: {error}") from error
    for imported in sorted(imported_modules(_parse(files[file], file), file)):
        parts = imported.split(".")
        for end in range(1, len(parts) + 1):
            module_file = next(
                (
                    candidate
                    for candidate in module_files(".".join(parts[:end]))
                    if (folder / candidate).is_file()
                ),
                None,
            )
            if module_file is None:
                break
            if module_file not in files:
                _take_file(folder, module_file, files)


def module_files(module: str) -> tuple[str, str]:
    """Return the two files that may define a module: `a/b.py` and `a/b/__init__.py`."""
    stem = module.replace(".", "/")
    return f"{stem}.py", f"{stem}/__init__.py"


def package_of(file: str) -> str:
    """Return the package that relative imports in a file refer to: "" for one at the
    top.
    """
    return ".".join(file.split("/")[:-1])


def absolute_module(name: str, file: str, level: int) -> str:
    """Return the module that an import statement in a file names; `level` is its number
    of leading dots.
    """
    if not level:
        return name
    package = package_of(file).split(".")
    return ".".join(
        part for part in [*package[: len(package) - level + 1], name] if part
    )


def imported_modules(tree: ast.Module, file: str) -> Iterator[str]:
    """Yield the modules that the import statements anywhere in a file may refer to."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = absolute_module(node.module or "", file, node.level)
            names = [alias.name for alias in node.names if alias.name != "*"]
            yield from (
                part
                for part in [
                    base,
                    *(f"{base}.{name}" if base else name for name in names),
                ]
                if part
            )


def installed_distribution(module: str) -> str | None:
    """Return name and version of an importable module's distribution, with the hash of
    its file if it is editable.

    Only the hash if no distribution has the module, and None if there is no such
    module.
    """
    file = _find_module(module)
    if file is None:
        return None
    names = metadata.packages_distributions().get(module.partition(".")[0], [])
    digest = f"sha256 {hashlib.sha256(file.read_bytes()).hexdigest()}"
    if not names:
        return digest
    distribution = metadata.distribution(names[0])
    name = f"{distribution.metadata['Name']} {distribution.version}"
    editable = (
        json.loads(distribution.read_text("direct_url.json") or "{}")
        .get("dir_info", {})
        .get("editable", False)
    )
    return f"{name} {digest}" if editable else name


def _find_module(module: str) -> Path | None:
    """Return the file of a module, found without running any code of its packages."""
    file: Path | None = None
    search: list[str] | None = None
    for end in range(1, module.count(".") + 2):
        dotted = ".".join(module.split(".")[:end])
        specs = (
            finder.find_spec(dotted, search)
            for finder in sys.meta_path
            if hasattr(finder, "find_spec")  # else importlib skips it too
        )
        spec = next(filter(None, specs), None)
        if spec is None:
            return None
        file = Path(spec.origin) if spec.origin else None
        # A package that is already imported may have other folders by now.
        search = list(
            getattr(
                sys.modules.get(dotted), "__path__", spec.submodule_search_locations
            )
            or []
        )
    return file


def _parse(source: str, file: str) -> ast.Module:
    try:
        return ast.parse(source)
    except SyntaxError as error:
        raise OwnCodeError(
            f"{file}, line {error.lineno}: not valid Python: {error.msg}"
        ) from error


def _named(tree: ast.Module, name: str) -> ast.stmt | None:
    """Return the last statement of a module that defines a name."""
    definition: ast.stmt | None = None
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if node.name == name and node in tree.body:
                definition = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(
                isinstance(target, ast.Name) and target.id == name for target in targets
            ):
                definition = node
        elif isinstance(node, ast.Import | ast.ImportFrom) and any(
            (alias.asname or alias.name) == name for alias in node.names
        ):
            definition = node
    return definition
