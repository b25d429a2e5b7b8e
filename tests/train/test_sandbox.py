"""Programs that models write run in a fence: what they cannot do, and that they end."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from gristmill.mixtures.objectives.rl_tools import PythonTool
from gristmill.train.reinforcement.tools import sandbox
from gristmill.train.reinforcement.tools.sandbox import MOST_OUTPUT_BYTES, Ran, SandboxError, check_sandbox, run_python

STOPPED = "stopped: it computes for more than 1 s, or waits"
LIMITS = PythonTool(kind="python", seconds=1, memory_mb=128)


def ran(code: str) -> Ran:
    """What came of a program; it must have ended within its time, and half a minute for a busy machine."""
    began = time.monotonic()
    found = run_python(code, LIMITS)
    assert time.monotonic() - began < sandbox.CLOCK * LIMITS.seconds + 30
    return found


@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("1 + 1", "2"),
        ("print(sum(range(10)))\n'a' * 3", "45\naaa"),
        ("x = 3", ""),
        ("import fractions, itertools, json, math, re, statistics\nmath.comb(5, 2)", "10"),
        ("from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int = 1\nA()", "A(x=1)"),
    ],
)
def test_a_program_computes_and_prints(code: str, output: str) -> None:
    assert ran(code) == Ran(output, True)


def test_a_program_prints_the_same_each_time() -> None:
    assert ran("{str(n) for n in range(50)}") == ran("{str(n) for n in range(50)}")


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero (line 1)"),
        ("x = (", "SyntaxError: '(' was never closed (line 1)"),
        ("def f(): return f()\n\nf()", "RecursionError: maximum recursion depth exceeded (line 1)"),
        ("x = [0] * 10**10", "MemoryError (line 1)"),
        ("x = []\nwhile True:\n    x.append(bytearray(10**6))", "MemoryError (line 3)"),
        ("while True: pass", STOPPED),
        ("import time\ntime.sleep(100)", STOPPED),
        ("import os\nos.close(1)\nos.close(2)\nwhile True: pass", STOPPED),
        ("try:\n    while True: pass\nexcept BaseException: pass", STOPPED),
        ("import os\nos.fork()", "PermissionError: [Errno 1] Operation not permitted (line 2)"),
        ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", STOPPED),
        ("import threading\nthreading.Thread(target=print).start()", "RuntimeError: can't start new thread (line 2)"),
        ("import subprocess\nsubprocess.run(['true'])", "PermissionError: [Errno 1] Operation not permitted (line 2)"),
        ("import os\nos.execv('/bin/true', ['true'])", "PermissionError: [Errno 1] Operation not permitted (line 2)"),
        (
            "import socket\nsocket.create_connection(('127.0.0.1', 80))",
            "PermissionError: [Errno 1] Operation not permitted (line 2)",
        ),
        ("import os\nos.kill(os.getppid(), 9)", "PermissionError: [Errno 1] Operation not permitted (line 2)"),
        (
            "import resource as r\nr.setrlimit(r.RLIMIT_CPU, (99, 99))",
            "ValueError: not allowed to raise maximum limit (line 2)",
        ),
        ("open('/etc/passwd')", "PermissionError: [Errno 13] Permission denied: '/etc/passwd' (line 1)"),
        ("open('big', 'wb').write(bytes(30 * 2**20))", "OSError: [Errno 27] File too large (line 1)"),
        ("import numpy", "ModuleNotFoundError: No module named 'numpy' (line 1)"),
        ("raise SystemExit(3)", ""),
    ],
)
def test_what_a_program_may_not_do_ends_as_its_error(code: str, says: str) -> None:
    found = ran(code)
    assert (found.output, found.succeeded) == (says, False)


def test_a_program_that_prints_without_end_is_stopped() -> None:
    found = ran("while True: print('grist')")
    assert found.output.startswith(f"stopped: it printed more than {MOST_OUTPUT_BYTES} bytes\ngrist\n")
    assert len(found.output) < MOST_OUTPUT_BYTES + 100
    assert not found.succeeded


def test_a_program_writes_in_an_empty_folder_that_goes_and_nowhere_else(tmp_path: Path) -> None:
    kept = tmp_path / "kept.txt"
    kept.write_text("mill")
    folder = ran("import os\nprint(os.listdir())\nopen('a', 'w').write('x')\nprint(os.listdir())\nos.getcwd()").output
    assert folder.splitlines()[:2] == ["[]", "['a']"]
    assert not Path(folder.splitlines()[2]).exists()
    for code in (
        f"open({str(kept)!r}, 'w')",
        f"import os\nos.unlink({str(kept)!r})",
        f"import os\nos.truncate({str(kept)!r}, 0)",
        f"import os\nos.chmod({str(kept)!r}, 0)",
        f"import os\nos.rename({str(kept)!r}, 'here')",
        f"open({str(tmp_path / 'new')!r}, 'w')",
        f"import os\nos.symlink('/', {str(tmp_path / 'link')!r})",
    ):
        assert "PermissionError" in ran(code).output, code
    assert kept.read_text() == "mill"
    assert [path.name for path in tmp_path.iterdir()] == ["kept.txt"]


def test_a_program_knows_neither_the_environment_nor_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRISTMILL_TEST_KEY", "secret-of-the-mill")
    assert "secret" not in ran("import os\ndict(os.environ)").output
    for path in (f"/proc/{os.getpid()}/environ", "/proc/self/environ", f"/proc/{os.getpid()}/mem"):
        assert ran(f"open({path!r}, 'rb').read()").output == (
            f"PermissionError: [Errno 13] Permission denied: {path!r} (line 1)"
        )


def test_the_way_past_python_is_closed_too() -> None:
    assert ran(
        "import ctypes\nc = ctypes.CDLL(None, use_errno=True)\nprint(c.fork(), c.socket(2, 1, 0), "
        "c.kill(1, 0), c.syscall(435, 0, 0))"
    ) == Ran("-1 -1 -1 -1", True)


def test_a_machine_that_cannot_hold_programs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_sandbox()
    check_sandbox.cache_clear()
    monkeypatch.setattr(sandbox, "run_python", lambda code, limits: Ran("the kernel has no Landlock", False))
    with pytest.raises(SandboxError, match=r"cannot be held here: the kernel has no Landlock; it needs Linux 5\.13"):
        check_sandbox()
    monkeypatch.setattr(sandbox.platform, "system", lambda: "Darwin")
    with pytest.raises(SandboxError, match="this is another system"):
        check_sandbox()
