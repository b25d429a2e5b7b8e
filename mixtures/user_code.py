"""Code of the user's in a manifest: `use: ./steps.py:keep_recipes`, a file beside it, or `use: acme.filters:keep`.

A manifest takes such code by value when it is read, without running it: the source of the function's file and of the
files beside it that it imports, or the name and version of an installed distribution. So the code is a part of every
recipe, which is hashed, stored and handed to workers; what runs, runs `dataprep/user_functions.py`.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.machinery
import inspect
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from gristmill.mixtures.base import PositiveFloat, Section
from gristmill.mixtures.yaml_text import did_you_mean

FILE_FORM = "./FILE.py:NAME"
MODULE_FORM = "PACKAGE.MODULE:NAME"
_WRITTEN = re.compile(r"^(?P<path>.+):(?P<name>[A-Za-z_]\w*)$")
_MODULE = re.compile(r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")


class OwnCodeError(ValueError):
    """Code of the user's that cannot be had, or does not do what its place asks for; names the file and the line."""


@dataclass(frozen=True)
class OwnFunction:
    """A function, or a class, that a user has written.

    Attributes:
        written: as the manifest has it.
        module: the module that defines it; of a file its name without `.py`.
        name: what it is called there.
        files: name -> source, of the function's file and of those in its folder that it imports. Empty where it is
            installed.
        distribution: `acme 1.2` where it is installed, by which it is known then.
    """

    written: str
    module: str = ""
    name: str = ""
    files: Mapping[str, str] = field(default_factory=dict, hash=False)
    distribution: str = ""

    @property
    def taken(self) -> bool:
        """Whether the code has been taken by value; before that only its name is known."""
        return bool(self.files or self.distribution)

    @property
    def reference(self) -> str:
        """`steps:keep_recipes`: what it is called wherever it lies."""
        return f"{self.module}:{self.name}"

    @property
    def called(self) -> str:
        """`keep_recipes`: the function's own name, whether or not the code has been taken."""
        return self.name or self.written.rpartition(":")[2]

    @cached_property
    def sha256(self) -> str:
        """64 hexadecimal digits that name the code."""
        return hashlib.sha256(json.dumps(self.by_value(), sort_keys=True).encode()).hexdigest()

    def by_value(self) -> dict[str, Any]:
        """What recipes hold of it; whatever folder it lies in."""
        return {"function": self.reference, "files": dict(self.files), "distribution": self.distribution}

    @property
    def file(self) -> str:
        """`steps.py`: what its file is called in messages; of an installed one the module."""
        return f"{self.module}.py" if self.files else self.module

    def describe(self) -> str:
        """`./steps.py:keep (sha256 0123456789ab)`, or `acme.filters:keep of acme 1.2 (...)`: what would run."""
        # Without a distribution it is known by a hash, as code in a file is.
        of = f" of {self.distribution}" if self.distribution and not self.distribution.startswith("sha256 ") else ""
        return f"{self.written_again}{of} (sha256 {self.sha256[:12]})"

    @property
    def written_again(self) -> str:
        """As a manifest has it: `./steps.py:keep`, `acme.filters:keep`."""
        return f"./{self.file}:{self.name}" if self.files else self.reference

    @property
    def place(self) -> str:
        """`steps.py, line 3`: where it is defined, as far as that is known."""
        found = self.definition()
        return self.file if found is None else f"{self.file}, line {found.lineno}"

    @cached_property
    def source(self) -> str | None:
        """The text of the file that it is named in; None where that is not at hand, or not Python."""
        if self.files:
            return self.files.get(self.file)
        file = _find_module(self.module) if self.distribution else None
        return file.read_text(encoding="utf-8") if file is not None and file.suffix == ".py" else None

    def definition(self) -> ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | None:
        """Where its source is at hand and its file defines it by `def` or `class`, that definition."""
        found = _named(ast.parse(self.source), self.name) if self.source is not None else None
        return found if isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) else None

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls._validate, serialization=core_schema.plain_serializer_function_ser_schema(cls._serialize)
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"type": "string", "pattern": _WRITTEN.pattern}

    @classmethod
    def _validate(cls, value: Any) -> OwnFunction:
        if isinstance(value, OwnFunction):
            return value
        if isinstance(value, Mapping):  # by value, as recipes and workers have it
            module, _, name = str(value["function"]).partition(":")
            return cls(value["function"], module, name, value["files"], value["distribution"])
        written = _WRITTEN.match(value) if isinstance(value, str) else None
        if written is None:
            raise ValueError(
                f"a function is written {FILE_FORM} (a file beside the manifest) or {MODULE_FORM} (installed)"
            )
        path = written["path"]
        if "://" in path:
            raise ValueError(
                "code is taken from files beside the manifest and from installed packages only; download "
                f"it, read it, and write {FILE_FORM}"
            )
        if not path.endswith(".py") and not _MODULE.match(path):
            raise ValueError(
                f"{path!r} is neither a file that ends in .py nor a module; write {FILE_FORM} or {MODULE_FORM}"
            )
        return cls(value)

    def _serialize(self) -> Any:
        return self.by_value() if self.taken else self.written


CODE_KEYS = frozenset(("function", "files", "distribution"))


def is_code(value: Any) -> bool:
    """Whether a part of a recipe is code by value."""
    return isinstance(value, Mapping) and value.keys() == CODE_KEYS


def code_in(recipe: Any) -> Iterator[OwnFunction]:
    """All code by value inside of a recipe, or of what a stage is given."""
    if is_code(recipe):
        yield OwnFunction._validate(recipe)
    elif isinstance(recipe, Mapping | list | tuple):
        for inner in recipe.values() if isinstance(recipe, Mapping) else recipe:
            yield from code_in(inner)


def name_code(recipe: Any) -> Any:
    """A recipe, or a manifest as a run recorded it, with code by value named in one line each."""
    if is_code(recipe):
        return OwnFunction._validate(recipe).describe()
    if isinstance(recipe, Mapping):
        return {key: name_code(inner) for key, inner in recipe.items()}
    return [name_code(inner) for inner in recipe] if isinstance(recipe, list | tuple) else recipe


class OwnPlace(Section):
    """A place where code of the user's stands, which may say how it is called."""

    takes: ClassVar[tuple[str, ...] | None] = None
    """What the code gets by place; None where that depends on more than the place."""
    offers: ClassVar[tuple[str, ...]] = ()
    """What it gets by name, if it has such a parameter."""

    @property
    def options(self) -> dict[str, Any]:
        """What the function is given by name."""
        options: dict[str, Any] = getattr(self, "with")
        return options

    def check_code(self, code: OwnFunction) -> None:
        """See that the code can be called here, as far as its source says; nothing of it is run.

        Raises:
            OwnCodeError: it takes other arguments.
        """
        signature = stated_signature(code)
        if self.takes is not None and signature is not None:
            by_name = dict.fromkeys(name for name in self.offers if takes_name(signature, name))
            check_signature(code, signature, self.takes, {**by_name, **self.options})


class Own(OwnPlace):
    """A point at which code of the user's may stand: `{use: ./steps.py:keep_recipes, with: {word: xyzzy}}`."""

    use: OwnFunction
    """`./FILE.py:NAME`, a file beside the manifest, or `PACKAGE.MODULE:NAME`, installed."""
    # `with` is a word of Python's own, so that a class cannot declare it in the usual way.
    __annotations__["with"] = "dict[str, Any]"
    vars()["with"] = Field(default_factory=dict, description="Further arguments of the function, by name.")


class OwnCall(Own):
    """Code of the user's that a stage waits for."""

    time_limit_seconds: PositiveFloat = 600.0
    """For one call; what takes longer ends the stage. Native code is not interrupted: it is seen when it returns. All
    ranks of a training wait for it, which is why it is less than the 30 minutes after which PyTorch gives up."""


class BuiltInOrOwn(OwnPlace):
    """A part that may be code of the user's in place of one of the built-in kinds."""

    use: Annotated[OwnFunction | None, Field(exclude_if=lambda value: value is None)] = None
    """Code of your own in place of a kind: `./FILE.py:NAME`, a file beside the manifest, or `PACKAGE.MODULE:NAME`,
    installed. Examples are in docs/own-training.md."""
    __annotations__["with"] = "dict[str, Any]"
    vars()["with"] = Field(
        default_factory=dict, exclude_if=lambda value: not value, description="Its options, by name."
    )

    @property
    def own(self) -> Own | None:
        """The user's code with its options, if it takes the place of a kind."""
        return None if self.use is None else Own.model_validate({"use": self.use, "with": getattr(self, "with")})

    @model_validator(mode="after")
    def _has_options_of_something(self) -> Self:
        if self.use is None and getattr(self, "with"):
            raise ValueError("`with` holds the options of code of your own: name it under `use`, or remove `with`")
        return self

    def unused_beside_own(self, *used: str) -> list[str]:
        """The keys that have another value than their defaults although code of the user's takes no notice of them.

        Args:
            used: those that it does take notice of.
        """
        fields = type(self).model_fields
        return (
            []
            if self.use is None
            else [
                name
                for name, field in fields.items()
                if name not in ("use", "with", *used)
                and getattr(self, name) != field.get_default(call_default_factory=True)
            ]
        )


def stated_signature(own: OwnFunction) -> inspect.Signature | None:
    """What the source says of how a function, or a class, is called, without default values; nothing of it is run.

    None where it does not say: of what is installed, decorated, or made by a class that it inherits from.
    """
    definition = own.definition()
    made: ast.stmt | None = definition
    if isinstance(definition, ast.ClassDef):
        methods = {node.name: node for node in definition.body if isinstance(node, ast.FunctionDef)}
        made = None if "__new__" in methods or definition.keywords else methods.get("__init__")
    if definition is None or definition.decorator_list or not isinstance(made, ast.FunctionDef) or made.decorator_list:
        return None
    stated = made.args
    nothing: ast.expr = ast.Constant(None)

    def bare(one: ast.arg) -> ast.arg:
        return ast.arg(one.arg)

    arguments = ast.arguments(
        [bare(one) for one in stated.posonlyargs],
        [bare(one) for one in stated.args],
        stated.vararg and bare(stated.vararg),
        [bare(one) for one in stated.kwonlyargs],
        [None if one is None else nothing for one in stated.kw_defaults],  # type: ignore[misc]
        stated.kwarg and bare(stated.kwarg),
        [nothing] * len(stated.defaults),
    )
    expression = ast.fix_missing_locations(ast.Expression(ast.Lambda(arguments, nothing)))
    parameters = list(inspect.signature(eval(compile(expression, own.file, "eval"))).parameters.values())
    return inspect.Signature(parameters[1:] if isinstance(definition, ast.ClassDef) else parameters)


def takes_name(signature: inspect.Signature, name: str) -> bool:
    """Whether something takes an argument by this name."""
    return name in signature.parameters or any(one.kind is one.VAR_KEYWORD for one in signature.parameters.values())


def check_signature(
    own: OwnFunction, signature: inspect.Signature, given: Sequence[str], options: Mapping[str, Any], method: str = ""
) -> None:
    """See that a function, or a method of a class, can be called.

    Args:
        own: the function or the class, for the message.
        signature: of what would be called.
        given: names of the arguments by place.
        options: those by name.
        method: the method's name, if it is one.

    Raises:
        OwnCodeError: it takes other arguments.
    """
    try:
        signature.bind(*given, **options)
    except TypeError as error:
        by_name = f"{' and with' if given else ''}: {', '.join(options)}" if options else ""
        name = f"{own.name}.{method}" if method else own.name
        by_place = f" ({', '.join(given)})" if given else ""
        raise OwnCodeError(
            f"{own.place}: {name}{signature} cannot be called with{by_place}{by_name}: {error}"
        ) from error


OWN_TAG, NAME_TAG = "(own)", "(name)"


def own_or_name(value: Any) -> str:
    """Which of two a value is where either the name of something built in may stand, or code of the user's."""
    return OWN_TAG if isinstance(value, Mapping | Own) else NAME_TAG


def own_functions(value: Any, at: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], OwnFunction]]:
    """Yield all code of the user's inside a section or a manifest, with its location."""
    if isinstance(value, OwnFunction):
        yield at, value
    elif isinstance(value, Section):
        for name in type(value).model_fields:
            yield from own_functions(getattr(value, name), (*at, name))
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from own_functions(inner, (*at, name))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from own_functions(inner, (*at, index))


def take_code(own: OwnFunction, folder: Path) -> OwnFunction:
    """The function with its code by value. Nothing of it is run.

    Args:
        own: as it was written.
        folder: the manifest's; files are relative to it.

    Raises:
        OwnCodeError: the file, its function or the module is not there, or the file is not Python. Whether an
            installed module has the function shows when it is loaded: many make their names as they are imported.
    """
    if own.taken:
        return own
    path, _, name = own.written.rpartition(":")
    return _of_file(own.written, folder / path, name) if path.endswith(".py") else _installed(own.written, path, name)


def _of_file(written: str, file: Path, name: str) -> OwnFunction:
    files: dict[str, str] = {}
    _take_file(file.parent, file.name, files)
    _check_named(files[file.name], file.name, name)
    return OwnFunction(written, file.stem, name, files)


def _take_file(folder: Path, file: str, files: dict[str, str]) -> None:
    """Take a file, and those in the same folder, or below it, that it imports."""
    files[file] = _read(folder / file)
    for imported in sorted(imported_modules(_parse(files[file], file), file)):
        parts = imported.split(".")
        for end in range(1, len(parts) + 1):
            found = next((path for path in module_files(".".join(parts[:end])) if (folder / path).is_file()), None)
            if found is None:
                break
            if found not in files:
                _take_file(folder, found, files)


def module_files(module: str) -> tuple[str, str]:
    """The two files that may define a module: `a/b.py` and `a/b/__init__.py`."""
    stem = module.replace(".", "/")
    return f"{stem}.py", f"{stem}/__init__.py"


def package_of(file: str) -> str:
    """What relative imports in a file are relative to: "" for one at the top."""
    return ".".join(file.split("/")[:-1])


def absolute_module(name: str, file: str, level: int) -> str:
    """The module that an import statement in a file names; `level` is its number of leading dots."""
    if not level:
        return name
    package = package_of(file).split(".")
    return ".".join(part for part in [*package[: len(package) - level + 1], name] if part)


def imported_modules(tree: ast.Module, file: str) -> Iterator[str]:
    """The modules that a file's import statements may mean, wherever they stand in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = absolute_module(node.module or "", file, node.level)
            names = [alias.name for alias in node.names if alias.name != "*"]
            yield from (part for part in [base, *(f"{base}.{name}" if base else name for name in names)] if part)


def _installed(written: str, module: str, name: str) -> OwnFunction:
    file = _find_module(module)
    if file is None:
        raise OwnCodeError(
            f"there is no module {module!r} in this environment; install it, or name a file beside the "
            f"manifest: {FILE_FORM}"
        )
    return OwnFunction(written, module, name, {}, _distribution(module, file))


def installed_distribution(module: str) -> str | None:
    """Name and version of what a module of this environment belongs to; None where there is no such module."""
    file = _find_module(module)
    return None if file is None else _distribution(module, file)


def _find_module(module: str) -> Path | None:
    """The file of a module, found without running any code of its packages."""
    found: Path | None = None
    search: list[str] | None = None
    for end in range(1, module.count(".") + 2):
        dotted = ".".join(module.split(".")[:end])
        spec = _spec(dotted, search)
        if spec is None:
            return None
        found = Path(spec.origin) if spec.origin else None
        # A package that is imported already may have other folders by now.
        search = list(getattr(sys.modules.get(dotted), "__path__", spec.submodule_search_locations) or [])
    return found


def _spec(module: str, search: list[str] | None) -> importlib.machinery.ModuleSpec | None:
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        spec: importlib.machinery.ModuleSpec | None = find(module, search) if find else None
        if spec is not None:
            return spec
    return None


def _distribution(module: str, file: Path) -> str:
    """Name and version of what a module belongs to; of one that can be edited in place the hash of its file besides."""
    names = metadata.packages_distributions().get(module.partition(".")[0], [])
    digest = f"sha256 {hashlib.sha256(file.read_bytes()).hexdigest()}"
    if not names:
        return digest
    found = metadata.distribution(names[0])
    shown = f"{found.metadata['Name']} {found.version}"
    editable = json.loads(found.read_text("direct_url.json") or "{}").get("dir_info", {}).get("editable", False)
    return f"{shown} {digest}" if editable else shown


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        near = sorted(path.name for path in file.parent.glob("*.py")) if file.parent.is_dir() else []
        raise OwnCodeError(f"there is no file {file.name} in {file.parent}{did_you_mean(file.name, near)}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise OwnCodeError(f"{file}: cannot be read: {error}") from error


def _parse(source: str, file: str) -> ast.Module:
    try:
        return ast.parse(source)
    except SyntaxError as error:
        raise OwnCodeError(f"{file}, line {error.lineno}: not valid Python: {error.msg}") from error


def _check_named(source: str, file: str, name: str) -> None:
    tree = _parse(source, file)
    if _named(tree, name) is None and not any(
        isinstance(node, ast.ImportFrom) and node.names[0].name == "*" for node in tree.body
    ):
        defined = [
            node.name
            for node in tree.body
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
        ]
        raise OwnCodeError(
            f"{file} defines no {name!r}{did_you_mean(name, defined)}"
            + (f"; it defines {', '.join(defined)}" if defined else "")
        )


def _named(tree: ast.Module, name: str) -> ast.stmt | None:
    """The statement of a module that gives a name its meaning, the last one of several."""
    found: ast.stmt | None = None
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if node.name == name and node in tree.body:
                found = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                found = node
        elif isinstance(node, ast.Import | ast.ImportFrom) and any(
            (alias.asname or alias.name) == name for alias in node.names
        ):
            found = node
    return found
