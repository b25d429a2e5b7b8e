"""The program that holds a model's code, run as `python sandbox_child.py SECONDS MEMORY_MB FOLDER`, the code on stdin.

It takes its own rights away, then runs the code. It imports the standard library alone, so that nothing of this
package, and nothing that is installed, is in the process. See `sandbox.py`.
"""

from __future__ import annotations

import ast
import ctypes
import os
import platform
import resource
import sys
import sysconfig
from typing import Any

EPERM, ENOSYS = 1, 38
SET_NO_NEW_PRIVS, SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
NEW_USER, NEW_NETWORK = 0x10000000, 0x40000000
LOAD, EQUAL, AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
ALLOW, ERRNO, KILL = 0x7FFF0000, 0x00050000, 0x80000000
MOST_FILE_BYTES, MOST_FILES = 16 * 2**20, 64
X32 = 0x40000000
"""Calls of x86_64's other form have this bit; all of them fail."""
MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""The kernel's numbers of machines (linux/audit.h)."""
CLONE3 = 435
"""Said to be missing, so that the C library asks for `clone`, which is refused."""
FORBIDDEN = {
    # Of each machine: processes, threads and programs; signals and other processes' memory; sockets; limits,
    # namespaces, mounts; the kernel's own; memory that outlives the process; owners, modes, times and sizes of files;
    # scheduling. Numbers of linux/unistd.h.
    "x86_64": (
        56,
        57,
        58,
        59,
        322,
        62,
        200,
        234,
        129,
        297,
        101,
        310,
        311,
        312,
        434,
        424,
        438,
        440,
        448,
        41,
        42,
        43,
        44,
        46,
        49,
        50,
        53,
        288,
        307,
        160,
        302,
        272,
        308,
        165,
        166,
        155,
        161,
        169,
        164,
        227,
        159,
        305,
        167,
        168,
        179,
        175,
        313,
        176,
        246,
        320,
        103,
        172,
        173,
        170,
        171,
        163,
        153,
        428,
        429,
        430,
        431,
        432,
        433,
        442,
        321,
        323,
        298,
        248,
        249,
        250,
        425,
        426,
        427,
        29,
        30,
        31,
        64,
        65,
        66,
        68,
        69,
        70,
        71,
        240,
        241,
        319,
        447,
        135,
        303,
        304,
        300,
        90,
        91,
        92,
        93,
        94,
        260,
        268,
        452,
        188,
        189,
        190,
        197,
        198,
        199,
        132,
        235,
        261,
        280,
        76,
        203,
        144,
        142,
        141,
        314,
        251,
        133,
        259,
    ),
    "aarch64": (
        220,
        221,
        281,
        129,
        130,
        131,
        138,
        240,
        117,
        270,
        271,
        272,
        434,
        424,
        438,
        440,
        448,
        198,
        199,
        200,
        201,
        202,
        203,
        206,
        211,
        242,
        269,
        164,
        261,
        97,
        268,
        40,
        39,
        41,
        51,
        142,
        170,
        112,
        171,
        266,
        224,
        225,
        60,
        105,
        273,
        106,
        104,
        294,
        116,
        161,
        162,
        89,
        58,
        428,
        429,
        430,
        431,
        432,
        433,
        442,
        280,
        282,
        241,
        217,
        218,
        219,
        425,
        426,
        427,
        194,
        195,
        196,
        190,
        191,
        192,
        193,
        186,
        187,
        188,
        189,
        180,
        181,
        279,
        447,
        92,
        264,
        265,
        262,
        52,
        53,
        54,
        55,
        452,
        5,
        6,
        7,
        14,
        15,
        16,
        88,
        45,
        122,
        119,
        118,
        140,
        274,
        30,
        33,
    ),
}
READ_FILES, WRITE_FILES, ALL_OF_LANDLOCK = 0b1100, 0b0001111111110, {1: 2**13 - 1, 2: 2**14 - 1}
"""Landlock's rights: to read files and folders; to write, make and remove them; and all that a version knows."""
TRUNCATE_TOO = 2**15 - 1
"""All rights since its third version."""


class Instruction(ctypes.Structure):
    """struct sock_filter"""

    _fields_ = [("code", ctypes.c_uint16), ("yes", ctypes.c_uint8), ("no", ctypes.c_uint8), ("value", ctypes.c_uint32)]


class Program(ctypes.Structure):
    """struct sock_fprog"""

    _fields_ = [("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(Instruction))]


class Ruleset(ctypes.Structure):
    """struct landlock_ruleset_attr of the first version: rights on files"""

    _fields_ = [("handled", ctypes.c_uint64)]


class Beneath(ctypes.Structure):
    """struct landlock_path_beneath_attr"""

    _pack_ = 1
    _fields_ = [("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32)]


def limit(seconds: int, memory_mb: int) -> None:
    """Bound what the kernel counts of this process."""
    for what, most in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, memory_mb * 2**20),
        (resource.RLIMIT_FSIZE, MOST_FILE_BYTES),
        (resource.RLIMIT_NOFILE, MOST_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (most, most))


def forbid_files(libc: Any, folder: str) -> None:
    """Let the process read Python's own files, write in a folder, and see no other file (Landlock)."""
    version = libc.syscall(444, None, ctypes.c_size_t(0), 1)
    if version < 1:
        raise OSError("the kernel has no Landlock")
    handled = ALL_OF_LANDLOCK.get(version, TRUNCATE_TOO)
    ruleset = libc.syscall(444, ctypes.byref(Ruleset(handled)), ctypes.c_size_t(ctypes.sizeof(Ruleset)), 0)
    if ruleset < 0:
        raise OSError("Landlock takes no rules")
    own = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), "/usr/lib", "/lib", "/lib64", "/usr/lib64"}
    for path, allowed in [
        *((one, READ_FILES) for one in sorted(own)),
        (folder, (READ_FILES | WRITE_FILES | TRUNCATE_TOO ^ 2**14 ^ 2**13 ^ 1) & handled),
    ]:
        if not os.path.isdir(path):
            continue
        parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = Beneath(allowed & handled, parent)
        if libc.syscall(445, ruleset, 1, ctypes.byref(rule), 0):
            raise OSError(f"Landlock takes no rule for {path}")
        os.close(parent)
    if libc.syscall(446, ruleset, 0):
        raise OSError("Landlock cannot be switched on")
    os.close(ruleset)


def forbid_calls(libc: Any) -> None:
    """Let the calls of FORBIDDEN fail from now on (seccomp)."""
    machine = platform.machine()
    if machine not in MACHINES:
        raise OSError(f"no list of system calls for {machine}")
    numbers = FORBIDDEN[machine]
    # Of struct seccomp_data: the call's number is at 0, the machine's at 4.
    steps = [
        (LOAD, 0, 0, 4),
        (EQUAL, 1, 0, MACHINES[machine]),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, 0),
        (AT_LEAST, 0, 1, X32),
        (RETURN, 0, 0, ERRNO | EPERM),
        (EQUAL, 0, 1, CLONE3),
        (RETURN, 0, 0, ERRNO | ENOSYS),
    ]
    for number in numbers:
        steps += [(EQUAL, 0, 1, number), (RETURN, 0, 0, ERRNO | EPERM)]
    steps.append((RETURN, 0, 0, ALLOW))
    made = (Instruction * len(steps))(*(Instruction(*step) for step in steps))
    program = Program(len(steps), made)
    if libc.prctl(SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0):
        raise OSError("seccomp takes no filter")


def run(code: str) -> None:
    """Run a program; print the value of its last line where that is an expression."""
    tree = ast.parse(code, "<program>")
    names = {"__name__": "__main__", "__builtins__": __builtins__}
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<program>", "exec"), names)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), "<program>", "eval"), names)
        if value is not None:
            print(value if isinstance(value, str) else repr(value))


def say(error: BaseException) -> str:
    """`ZeroDivisionError: division by zero (line 3)`"""
    line, trace = getattr(error, "lineno", None), error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<program>":
            line = trace.tb_lineno
        trace = trace.tb_next
    told = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {told}".rstrip(": ") + (f" (line {line})" if line else "")


def main() -> int:
    """Hold this process, then run the code from stdin; 1 where that raised, or it could not be held."""
    seconds, memory_mb, folder = sys.argv[1:]
    code = sys.stdin.buffer.read().decode(errors="replace")
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        if libc.prctl(SET_NO_NEW_PRIVS, 1, 0, 0, 0):
            raise OSError("rights cannot be given up")
        # Where namespaces are not given to everybody, the filter alone keeps it from sockets.
        libc.unshare(NEW_USER | NEW_NETWORK)
        limit(int(seconds), int(memory_mb))
        forbid_files(libc, folder)
        forbid_calls(libc)
    except (OSError, ValueError) as error:
        print(error, flush=True)
        return 1
    try:
        run(code)
        sys.stdout.flush()
    except SystemExit as ended:
        return 0 if ended.code in (None, 0) else 1
    except BaseException as error:  # noqa: BLE001 - whatever it is, the model is told of it
        del code
        print(say(error), flush=True)
        return 1
    return 0


if __name__ == "__main__":
    os._exit(main())
