"""The first program inside the sandbox: limits its own resources, then runs the model's
code from stdin.

Started as `python sandbox_program.py SECONDS MEMORY_MB`. It imports the standard
library alone, because the sandbox has nothing else. See `sandbox.py`.
"""

from __future__ import annotations

import ast
import os
import resource
import sys

MAX_OPEN_FILES = 64
FILE_NAME = "<program>"


def run(code: str) -> None:
    """Run a program; print the value of its last line if that is an expression, as
    notebooks do.
    """
    tree = ast.parse(code, FILE_NAME)
    names = {"__name__": "__main__", "__builtins__": __builtins__}
    last = (
        tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    )
    exec(compile(tree, FILE_NAME, "exec"), names)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), FILE_NAME, "eval"), names)
        if value is not None:
            print(value if isinstance(value, str) else repr(value))


def describe(error: BaseException) -> str:
    """`ZeroDivisionError: division by zero (line 3)`"""
    line = getattr(error, "lineno", None)
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == FILE_NAME:
            line = trace.tb_lineno
        trace = trace.tb_next
    try:
        message = error.msg if isinstance(error, SyntaxError) else str(error)
    except BaseException:  # noqa: BLE001 - the program's own `__str__`
        message = ""
    return f"{type(error).__name__}: {message}".rstrip(": ") + (
        f" (line {line})" if line else ""
    )


def main() -> int:
    """Run the code from stdin; 1 if it raised."""
    seconds = int(sys.argv[1])
    memory_mb = int(sys.argv[2])
    for limit, value in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, memory_mb * 2**20),
        (resource.RLIMIT_NOFILE, MAX_OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))
    code = sys.stdin.buffer.read().decode(errors="replace")
    try:
        run(code)
        sys.stdout.flush()
    except SystemExit as end:
        return 0 if end.code in (None, 0) else 1
    except BaseException as error:  # noqa: BLE001 - the model is told of any error
        del code
        print(describe(error), flush=True)
        return 1
    return 0


if __name__ == "__main__":
    os._exit(main())
