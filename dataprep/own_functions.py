"""Runs code of the user's, which a manifest took by value (`mixtures/own_code.py`).

Its modules are made from their sources under names of their own, so that two manifests' files of one name never meet,
and what they import from beside them is found among the sources and nowhere else.
"""

from __future__ import annotations

import builtins
import importlib
import inspect
import linecache
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from types import ModuleType
from typing import Any

from gristmill.dataprep.own.time_limits import TimeLimit
from gristmill.mixtures.own_code import (
    Own,
    OwnCall,
    OwnCodeError,
    OwnFunction,
    absolute_module,
    check_signature,
    installed_distribution,
    module_files,
    takes_name,
)

PREFIX = "gristmill_own_"
"""Of the names of modules that are made from sources."""
_LOADING = threading.RLock()


def load_own(own: Own, *given: str, by_name: Sequence[str] = ()) -> Callable[..., Any]:
    """What the manifest names, with its options filled in.

    Args:
        own: the function and its options.
        given: the names that its place calls the arguments by which it is called, in their order.
        by_name: parameters of the function that it is given besides.

    Returns:
        what takes the arguments of `given`, and after them those of `by_name`, all by place.

    Raises:
        OwnCodeError: the code cannot be loaded, or cannot be called with these arguments and options.
    """
    function = load_function(own.use)
    check_call(own.use, function, given, {**dict.fromkeys(by_name), **own.options})
    placed, options = len(given), own.options
    if by_name:
        return lambda *arguments: function(
            *arguments[:placed], **dict(zip(by_name, arguments[placed:], strict=True)), **options
        )
    return (lambda *arguments: function(*arguments, **options)) if options else function


def load_function(own: OwnFunction) -> Callable[..., Any]:
    """The function or class itself, from code that was taken by value.

    Raises:
        OwnCodeError: the code raises while it is loaded, what it names is nothing that can be called, or another
            version of its distribution is installed here.
    """
    module = _load_module(own)
    try:
        found = getattr(module, own.name)
    except AttributeError:
        raise OwnCodeError(f"{own.file} defines no {own.name!r}") from None
    if not callable(found):
        raise OwnCodeError(f"{own.reference} is {type(found).__name__}, which cannot be called; name a function")
    called: Callable[..., Any] = found
    return called


def blame(own: OwnFunction, error: BaseException) -> str:
    """`ValueError: too long (steps.py, line 12)`: an error, and the last line of the user's code that it passed."""
    said = f"{type(error).__name__}: {error}"
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error.msg} (line {error.lineno})"
    files = {_traced_name(own, file): file for file in own.files}
    own_lines = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files]
    if not own_lines:
        return f"{said} ({own.reference})"
    return f"{said} ({files[own_lines[-1].filename]}, line {own_lines[-1].lineno})"


@contextmanager
def blaming(own: OwnFunction) -> Iterator[None]:
    """A block that runs code of the user's.

    Raises:
        OwnCodeError: names what that code raised, its file and its line.
    """
    try:
        yield
    except OwnCodeError:
        raise
    except (Exception, SystemExit) as error:
        raise OwnCodeError(f"{own.reference} failed: {blame(own, error)}") from error


def call_own(own: OwnCall, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """What a call of code of the user's gives within its time.

    Raises:
        OwnCodeError: names what that code raised, or where it was when its time was over.
    """
    with blaming(own.use), TimeLimit(own.time_limit_seconds) as limit:
        return limit.call(function, *arguments, **named)


def check_call(
    own: OwnFunction, function: Callable[..., Any], given: Sequence[str], options: Mapping[str, Any], method: str = ""
) -> None:
    """See that a function, or a method of a class, can be called; arguments as of `check_signature`.

    Raises:
        OwnCodeError: it takes other arguments.
    """
    signature = _signature(function)
    if signature is not None:
        check_signature(own, signature, given, options, method)


def taken_by_name(function: Callable[..., Any], names: Sequence[str]) -> list[str]:
    """Those of some arguments that a function takes by name; all where nothing is known of it."""
    signature = _signature(function)
    return [name for name in names if signature is None or takes_name(signature, name)]


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    """How something is called; None of what is built in, of which nothing may be known."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def _load_module(own: OwnFunction) -> ModuleType:
    if own.files:
        with _LOADING:
            module = _Maker(own).make(own.module)
        assert module is not None
        return module
    _check_version(own.module, own.reference, own.distribution)
    try:
        return importlib.import_module(own.module)
    except Exception as error:
        raise OwnCodeError(f"{own.module} cannot be imported: {type(error).__name__}: {error}") from error


@cache
def _check_version(module: str, reference: str, distribution: str) -> None:
    """Raise where a worker has another version of a distribution than the manifest was read with."""
    found = installed_distribution(module)
    if found != distribution:
        raise OwnCodeError(
            f"{reference} is of {distribution}, but here is {found or 'no such module'}; install the same everywhere"
        )


def _traced_name(own: OwnFunction, file: str) -> str:
    """What a file is called in tracebacks: unique, so that its lines can be shown."""
    return f"<{own.sha256[:12]}>/{file}"


class _Maker:
    """Makes the modules of one function's sources, each once."""

    def __init__(self, own: OwnFunction) -> None:
        self._own = own
        self._prefix = f"{PREFIX}{own.sha256[:16]}"
        self._builtins = {**vars(builtins), "__import__": self._import}

    def make(self, name: str) -> ModuleType | None:
        """The module of a name, or None where no file of that name was taken."""
        full = f"{self._prefix}.{name}"
        if full in sys.modules:
            return sys.modules[full]
        file = next((file for file in module_files(name) if file in self._own.files), None)
        if file is None:
            return None
        source, traced = self._own.files[file], _traced_name(self._own, file)
        linecache.cache[traced] = (len(source), None, source.splitlines(keepends=True), traced)
        module = ModuleType(full)
        module.__dict__.update({"__builtins__": self._builtins, "__file__": file})
        sys.modules[full] = module  # pickle, dataclasses and modules that import each other look for it there
        try:
            exec(compile(source, traced, "exec"), module.__dict__)
        except BaseException as error:
            del sys.modules[full]
            # A SystemExit would end the stage in silence.
            if isinstance(error, Exception | SystemExit) and not isinstance(error, OwnCodeError):
                raise OwnCodeError(f"{file} cannot be loaded: {blame(self._own, error)}") from error
            raise
        return module

    def _import(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        """`import` as the user's files see it: what lies beside them comes first."""
        wanted = absolute_module(name, str((globals or {})["__file__"]), level)
        parts = wanted.split(".")
        made = [self.make(".".join(parts[:end])) for end in range(1, len(parts) + 1)]
        if made[0] is None and not level:
            return builtins.__import__(name, globals, locals, fromlist or (), level)
        module = made[-1]
        if module is None:
            raise ModuleNotFoundError(f"no module {wanted!r} lies beside {self._own.file}")
        for part, (outer, inner) in zip(parts[1:], pairwise(made), strict=True):
            setattr(outer, part, inner)
        for each in fromlist or ():
            inner = self.make(f"{wanted}.{each}")
            if inner is not None:
                setattr(module, each, inner)
        return module if fromlist else made[0] or module
