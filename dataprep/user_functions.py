"""Loading and calling user code that a manifest contains by value
(`mixtures/user_code.py`).

Its modules are created from their sources under unique names, so that equally named
files of two manifests do not collide. Their imports are resolved among these sources
first.
"""

from __future__ import annotations

import builtins
import importlib
import inspect
import linecache
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from types import ModuleType
from typing import Any

from gristmill.core.arrays import admit_pandas
from gristmill.dataprep.user_code.time_limits import Function, TimeLimit
from gristmill.mixtures.user_code import (
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
"""Prefix of the names of modules created from sources."""
_loading_lock = threading.RLock()


def load_own(own: Own, *given: str, by_name: Sequence[str] = ()) -> Function:
    """Load a user's function with its options bound.

    Args:
        own: the function and its options.
        given: names of its positional arguments, in order.
        by_name: parameters that it gets by name.

    Returns:
        a function of the arguments `given` followed by those of `by_name`, all
        positional.

    Raises:
        OwnCodeError: the code cannot be loaded, or cannot be called with these
            arguments and options.
    """
    function = load_function(own.use)
    check_call(own.use, function, given, {**dict.fromkeys(by_name), **own.options})
    num_positional = len(given)
    options = own.options
    if by_name:
        return lambda *arguments: function(
            *arguments[:num_positional],
            **dict(zip(by_name, arguments[num_positional:], strict=True)),
            **options,
        )
    return (lambda *arguments: function(*arguments, **options)) if options else function


def load_function(own: OwnFunction) -> Function:
    """Load a user's function or class.

    Raises:
        OwnCodeError: the code raises on import, the object is not callable, or another
            version of its distribution is installed.
    """
    admit_pandas()
    if own.files:
        with _loading_lock:
            module = _ModuleLoader(own).make(own.module)
    else:
        _check_version(own.module, own.reference, own.distribution)
        try:
            module = importlib.import_module(own.module)
        except Exception as error:
            raise OwnCodeError(
                f"{own.module} cannot be imported: {type(error).__name__}: {error}"
            ) from error
    try:
        attribute = getattr(module, own.name)
    except AttributeError:
        raise OwnCodeError(f"{own.file} defines no {own.name!r}") from None
    if not callable(attribute):
        raise OwnCodeError(
            f"{own.reference} is {type(attribute).__name__}, which "
            "cannot be called; name a function"
        )
    return attribute


def blame(own: OwnFunction, error: BaseException) -> str:
    """`ValueError: too long (steps.py, line 12)`: an error with the innermost line of
    user code in its traceback.
    """
    message = f"{type(error).__name__}: {error}"
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error.msg} (line {error.lineno})"
    files = {_traceback_name(own, file): file for file in own.files}
    user_frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename in files
    ]
    if not user_frames:
        return f"{message} ({own.reference})"
    return (
        f"{message} ({files[user_frames[-1].filename]}, line {user_frames[-1].lineno})"
    )


@contextmanager
def blaming(own: OwnFunction) -> Iterator[None]:
    """Run user code in a block.

    Raises:
        OwnCodeError: the code raised; names the error, its file and line.
    """
    try:
        yield
    except OwnCodeError:
        raise
    except (Exception, SystemExit) as error:
        raise OwnCodeError(f"{own.reference} failed: {blame(own, error)}") from error


def call_own(own: OwnCall, function: Function, *arguments: Any, **named: Any) -> Any:
    """Call user code within its time limit.

    Raises:
        OwnCodeError: the code raised or timed out; names the error and its place.
    """
    with blaming(own.use), TimeLimit(own.time_limit_seconds) as limit:
        return limit.call(function, *arguments, **named)


def wrong(own: Own, what: str) -> OwnCodeError:
    """Make an error such as `steps.py, line 3: count_word returned nothing`."""
    return OwnCodeError(f"{own.use.place}: {own.use.name} {what}")


def check_call(
    own: OwnFunction,
    function: Function,
    given: Sequence[str],
    options: Mapping[str, object],
    method: str = "",
) -> None:
    """Check that a function, or a method of a class, accepts a call; arguments as in
    `check_signature`.

    Raises:
        OwnCodeError: the signature does not match.
    """
    signature = call_signature(function)
    if signature is not None:
        check_signature(own, signature, given, options, method)


def taken_by_name(function: Function, names: Sequence[str]) -> list[str]:
    """Names of the arguments that a function takes by name; all if its signature is
    unknown.
    """
    signature = call_signature(function)
    return [name for name in names if signature is None or takes_name(signature, name)]


def call_signature(function: Function) -> inspect.Signature | None:
    """Signature of a callable; None for built-ins without one."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


@cache
def _check_version(module: str, reference: str, distribution: str) -> None:
    """Raise if a worker has another version of a distribution than the manifest was
    read with.
    """
    installed = installed_distribution(module)
    if installed != distribution:
        raise OwnCodeError(
            f"{reference} is of {distribution}, but here is "
            f"{installed or 'no such module'}; install the same everywhere"
        )


def _traceback_name(user_function: OwnFunction, file: str) -> str:
    """Unique name of a file in tracebacks, so that its lines can be shown."""
    return f"<{user_function.sha256[:12]}>/{file}"


class _ModuleLoader:
    """Loader of the modules of one function's sources, each once."""

    def __init__(self, own: OwnFunction) -> None:
        self._own = own
        self._prefix = f"{PREFIX}{own.sha256[:16]}"
        self._builtins = {**vars(builtins), "__import__": self._import}

    def make(self, name: str) -> ModuleType | None:
        """Load a module by name; None if the sources have no such file."""
        full = f"{self._prefix}.{name}"
        if full in sys.modules:
            return sys.modules[full]
        file = next(
            (file for file in module_files(name) if file in self._own.files), None
        )
        if file is None:
            return None
        source = self._own.files[file]
        traced = _traceback_name(self._own, file)
        linecache.cache[traced] = (
            len(source),
            None,
            source.splitlines(keepends=True),
            traced,
        )
        module = ModuleType(full)
        module.__dict__.update({"__builtins__": self._builtins, "__file__": file})
        sys.modules[full] = module  # needed by pickle, dataclasses and circular imports
        try:
            exec(compile(source, traced, "exec"), module.__dict__)
        except BaseException as error:
            del sys.modules[full]
            # A SystemExit would end the stage silently.
            if isinstance(error, Exception | SystemExit) and not isinstance(
                error, OwnCodeError
            ):
                raise OwnCodeError(
                    f"{file} cannot be loaded: {blame(self._own, error)}"
                ) from error
            raise
        return module

    def _import(
        self,
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        """`import` in user files: modules among the sources come first."""
        absolute_name = absolute_module(name, str((globals or {})["__file__"]), level)
        parts = absolute_name.split(".")
        modules = [self.make(".".join(parts[:end])) for end in range(1, len(parts) + 1)]
        if modules[0] is None and not level:
            return builtins.__import__(name, globals, locals, fromlist or (), level)
        module = modules[-1]
        if module is None:
            raise ModuleNotFoundError(
                f"no module {absolute_name!r} lies beside {self._own.file}"
            )
        for part, (outer, inner) in zip(parts[1:], pairwise(modules), strict=True):
            setattr(outer, part, inner)
        for each in fromlist or ():
            inner = self.make(f"{absolute_name}.{each}")
            if inner is not None:
                setattr(module, each, inner)
        return module if fromlist else modules[0] or module
