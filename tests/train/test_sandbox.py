"""Programs written by a model: attacks on machine and training, and answers for the
model.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from gristmill.flows.stages.rl import preflight
from gristmill.mixtures.manifest import Manifest
from gristmill.mixtures.objectives.rl_tools import PythonTool
from gristmill.train.rl.tools import sandbox, seccomp_filter
from gristmill.train.rl.tools.sandbox import (
    MAX_OUTPUT_BYTES,
    ProgramResult,
    SandboxError,
    check_sandbox,
    run_python,
)
from gristmill.train.rl.tools.seccomp_filter import seccomp_program
from tests.needs_sandbox import skip_without_sandbox

STOPPED = "stopped: it computes for more than 1 s, or waits"
LIMITS = PythonTool(kind="python", seconds=1, memory_mb=128)
SECRET = "secret-of-the-mill"
SYSCALL = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
"""Opening of attacks that call the kernel without Python's own checks."""


@pytest.fixture(autouse=True)
def _needs_sandbox() -> None:
    skip_without_sandbox()


def syscalls(*calls: str) -> str:
    """A program that makes system calls and prints the error number of each; 0 is
    success.
    """
    lines = [f"print(ctypes.get_errno() if libc.{call} == -1 else 0)" for call in calls]
    return SYSCALL + "\n".join(lines)


@dataclass(frozen=True)
class Outside:
    """Targets outside the sandbox, and evidence that an attack reached one."""

    folder: Path
    victim: subprocess.Popen[bytes]
    listeners: dict[str, socket.socket]
    signals: list[int]

    @property
    def names(self) -> dict[str, object]:
        """Placeholders of attacks."""
        return {
            "pid": os.getpid(),
            "victim": self.victim.pid,
            "folder": self.folder,
            "secret": self.folder / "secret.txt",
            "port": self.listeners["tcp"].getsockname()[1],
            "abstract": self.listeners["abstract"].getsockname()[1:].decode(),
            "unix": self.listeners["path"].getsockname(),
        }

    def check_untouched(self) -> None:
        """Assert that no process, file or listener was reached."""
        assert self.victim.poll() is None
        assert self.signals == []
        assert {path.name for path in self.folder.iterdir()} == {"secret.txt", "socket"}
        assert (self.folder / "secret.txt").read_text() == SECRET
        assert (self.folder / "secret.txt").stat().st_mode & 0o777 == 0o644
        for listener in self.listeners.values():
            with pytest.raises(BlockingIOError):
                listener.accept()


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outside]:
    folder = tmp_path_factory.mktemp("outside")
    folder.chmod(0o777)
    (folder / "secret.txt").write_text(SECRET)
    (folder / "secret.txt").chmod(0o644)
    signals: list[int] = []
    with ExitStack() as stack:
        listeners = {"tcp": stack.enter_context(socket.create_server(("127.0.0.1", 0)))}
        for name, address in (
            ("abstract", f"\0gristmill-{os.getpid()}"),
            ("path", str(folder / "socket")),
        ):
            listeners[name] = stack.enter_context(socket.socket(socket.AF_UNIX))
            listeners[name].bind(address)
            listeners[name].listen()
        for listener in listeners.values():
            listener.setblocking(False)
        victim = stack.enter_context(subprocess.Popen(["sleep", "infinity"]))
        stack.callback(victim.kill)
        for number in (signal.SIGUSR1, signal.SIGIO, signal.SIGTERM):
            stack.callback(
                signal.signal,
                number,
                signal.signal(number, lambda number, _: signals.append(number)),
            )
        yield Outside(folder, victim, listeners, signals)


ATTACKS = {
    # Signals to processes outside.
    "signal by file owner": (
        "import fcntl, os\nr, w = os.pipe()\nfcntl.fcntl(r, fcntl.F_SETOWN, "
        "{pid})\nfcntl.fcntl(r, 10, 10)\n"
        "fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)\nos.write(w, b'x')",
        "ProcessLookupError",
    ),
    "signal by file owner of stdout": (
        "import fcntl, os\nfcntl.fcntl(1, fcntl.F_SETOWN, -{pid})\nfcntl.fcntl(1, "
        "10, 10)\n"
        "fcntl.fcntl(1, fcntl.F_SETFL, os.O_ASYNC)",
        "ProcessLookupError",
    ),
    "kill the training": ("import os\nos.kill({pid}, 10)", "ProcessLookupError"),
    "kill a process of the user": (
        "import os\nos.kill({victim}, 9)",
        "ProcessLookupError",
    ),
    "kill everything": ("import os\nos.kill(-1, 9)", "ProcessLookupError"),
    "kill the parent": ("import os\nos.kill(os.getppid(), 9)\nos.getppid()", "1"),
    "kill the process group": ("import os\nos.killpg(0, 9)", STOPPED),
    "signal by timer": (
        SYSCALL + "class Event(ctypes.Structure):\n"
        "    _fields_ = [('value', ctypes.c_long), ('signal', ctypes.c_int), "
        "('notify', ctypes.c_int),"
        " ('thread', ctypes.c_int), ('rest', ctypes.c_char * 44)]\n"
        "event = Event(0, 10, 4, {pid})\n"
        "print(libc.timer_create(1, ctypes.byref(event), "
        "ctypes.byref(ctypes.c_long())))",
        "-1",
    ),
    "pidfd": ("import os\nos.pidfd_open({pid})", "ProcessLookupError"),
    # Memory and files of processes outside.
    "ptrace": (syscalls("ptrace(16, {pid}, 0, 0)", "ptrace(16, 1, 0, 0)"), "1\n1"),
    "process_vm_readv": (
        syscalls("process_vm_readv(1, 0, 0, 0, 0, 0)", "syscall(438, 3, 0, 0)"),
        "1\n1",
    ),
    "memory of the training": ("open('/proc/{pid}/mem', 'rb')", "FileNotFoundError"),
    "environment of the training": (
        "open('/proc/{pid}/environ', 'rb')",
        "FileNotFoundError",
    ),
    "root of the parent": (
        "import os\nos.listdir('/proc/1/root')",
        "FileNotFoundError",
    ),
    "environment": ("import os\nsorted(os.environ.items())", "[('LD_LIBRARY_PATH', "),
    "command line of the parent": ("open('/proc/1/cmdline')", "FileNotFoundError"),
    # Files.
    "passwd": ("open('/etc/passwd')", "FileNotFoundError"),
    "shadow": ("open('/etc/shadow')", "FileNotFoundError"),
    "ssh keys": ("import os\nos.listdir('/root/.ssh')", "FileNotFoundError"),
    "secret file": ("open('{secret}').read()", "FileNotFoundError"),
    "secret file by symlink": (
        "import os\nos.symlink('{secret}', 'link')\nopen('link').read()",
        "FileNotFoundError",
    ),
    "secret file by hard link": (
        "import os\nos.link('{secret}', 'link')",
        "FileNotFoundError",
    ),
    "secret file by handle": (syscalls("open_by_handle_at(3, 0, 0)"), "1"),
    "change a file": ("import os\nos.chmod('{secret}', 0)", "FileNotFoundError"),
    "new file": ("open('{folder}/new', 'w')", "FileNotFoundError"),
    "installed packages": ("import numpy", "ModuleNotFoundError"),
    "site-packages": (
        "import glob, sysconfig\nglob.glob(sysconfig.get_path('stdlib') + "
        "'/*-packages/*')",
        "[]",
    ),
    "change the standard library": (
        "import os\nopen(os.__file__, 'a')",
        "OSError: [Errno 30]",
    ),
    "change its own first program": ("open('/program.py', 'a')", "OSError: [Errno 30]"),
    "write to the root": ("open('/new', 'w')", "OSError: [Errno 30]"),
    "shared memory": ("open('/dev/shm/new', 'w')", "FileNotFoundError"),
    "devices": (
        "import os\nos.path.exists('/dev'), os.path.exists('/sys'), "
        "os.path.exists('/proc')",
        "(False, False",
    ),
    "make a device": (
        "import os, stat\nos.mknod('disk', stat.S_IFBLK | 0o600, os.makedev(8, 0))",
        "PermissionError",
    ),
    "other programs": ("import os\nos.execv('/bin/sh', ['sh'])", "FileNotFoundError"),
    # Networks.
    "connect": (
        "import socket\nsocket.create_connection(('127.0.0.1', {port}))",
        "PermissionError",
    ),
    "abstract socket": (
        "import socket\nsocket.socket(socket.AF_UNIX).connect('\\0{abstract}')",
        "PermissionError",
    ),
    "path socket": (
        "import socket\nsocket.socket(socket.AF_UNIX).connect('{unix}')",
        "PermissionError",
    ),
    "raw and netlink sockets": (
        syscalls("socket(17, 3, 0)", "socket(16, 3, 0)", "socketpair(1, 1, 0, 0)"),
        "1\n1\n1",
    ),
    "name lookup": ("import socket\nsocket.getaddrinfo('localhost', 80)", "gaierror"),
    # Processes and threads.
    "fork": ("import os\nos.fork()", "PermissionError"),
    "fork bomb": (
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        STOPPED,
    ),
    "thread": (
        "import threading\nthreading.Thread(target=print).start()",
        "RuntimeError: can't start new thread",
    ),
    "subprocess": (
        "import subprocess, sys\nsubprocess.run([sys.executable, '-c', ''])",
        "PermissionError",
    ),
    "spawn": (
        "import os, sys\nos.posix_spawn(sys.executable, ['python'], {{}})",
        "PermissionError",
    ),
    "clone": (
        syscalls(
            "fork()", "vfork()", "syscall(56, 17, 0, 0, 0, 0)", "syscall(435, 0, 0)"
        ),
        "1\n1\n1\n38",
    ),
    "survive the parent": (SYSCALL + "libc.prctl(1, 0)\nwhile True: pass", STOPPED),
    "ignore signals": (
        "import signal\nfor number in signal.valid_signals() - {{9, 19, 32, 33}}:\n"
        "    signal.signal(number, signal.SIG_IGN)\nwhile True: pass",
        STOPPED,
    ),
    # Processor time and waiting.
    "endless loop": ("while True: pass", STOPPED),
    "caught interrupt": (
        "try:\n    while True: pass\nexcept BaseException: pass",
        STOPPED,
    ),
    "closed output": ("import os\nos.close(1)\nos.close(2)\nwhile True: pass", STOPPED),
    "sleep": ("import time\ntime.sleep(100)", STOPPED),
    "stop itself": ("import os\nos.kill(os.getpid(), 19)", STOPPED),
    "pipe without a writer": ("import os\nos.mkfifo('pipe')\nopen('pipe')", STOPPED),
    "raise limits": (
        "import resource as r\nr.setrlimit(r.RLIMIT_CPU, (99, 99))",
        "ValueError",
    ),
    "limits of the training": (
        "import resource as r\nr.prlimit({pid}, r.RLIMIT_CPU, (1, 1))",
        "ProcessLookupError",
    ),
    "priority": ("import os\nos.nice(-5)", "PermissionError"),
    "priority of the training": (
        "import os\nos.setpriority(os.PRIO_PROCESS, {pid}, 19)",
        "ProcessLookupError",
    ),
    "real-time": (
        "import os\nos.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))",
        "PermissionError",
    ),
    "processors of the training": (
        "import os\nos.sched_setaffinity({pid}, {{0}})",
        "ProcessLookupError",
    ),
    # Memory and space.
    "memory at once": ("x = [0] * 10**10", "MemoryError"),
    "memory in parts": (
        "x = []\nwhile True:\n    x.append(bytearray(10**6))",
        "MemoryError",
    ),
    "shared mapping": ("import mmap\nmmap.mmap(-1, 2**30)", "OSError: [Errno 12]"),
    "memory file": ("import os\nos.memfd_create('x')", "PermissionError"),
    "System V memory": (
        syscalls("shmget(0, 4096, 512)", "msgget(0, 512)", "semget(0, 1, 512)"),
        "1\n1\n1",
    ),
    "open files": ("import os\nwhile True: os.pipe()", "OSError: [Errno 24]"),
    "full disk": ("open('big', 'wb').write(bytes(30 * 2**20))", "OSError: [Errno 28]"),
    "many files": (
        "for number in range(10**6):\n    open(str(number), 'wb').write(bytes(2**16))",
        "OSError: [Errno 28]",
    ),
    "deep folders": (
        "import os\nfor _ in range(5000):\n    os.mkdir('x')\n    "
        "os.chdir('x')\nprint('deep')",
        "deep",
    ),
    "symlink circle": (
        "import os\nos.symlink('x', 'x')\nopen('x')",
        "OSError: [Errno 40]",
    ),
    # Rights.
    "setuid": ("import os\nos.setuid(0)", "OSError: [Errno 22]"),
    "setgroups": ("import os\nos.setgroups([0])", "PermissionError"),
    "capabilities": (
        SYSCALL + "print([libc.prctl(23, number) for number in range(41)].count(1))",
        "0",
    ),
    "new privileges": (SYSCALL + "libc.prctl(39, 0, 0, 0, 0)", "1"),
    "mount": (
        syscalls("mount(b'x', b'/tmp', b'tmpfs', 0, 0)", "umount2(b'/tmp', 2)"),
        "1\n1",
    ),
    "namespaces": (syscalls("unshare(0x10000000)", "setns(3, 0)"), "1\n1"),
    "chroot": ("import os\nos.chroot('/tmp')", "PermissionError"),
    "pivot_root": (syscalls("syscall(155, b'/', b'/')"), "1"),
    "kernel keys": (
        syscalls("syscall(250, 0, -3, 0)", "syscall(248, b'user', b'x', b'x', 1, -3)"),
        "1\n1",
    ),
    "io_uring": (syscalls("syscall(425, 8, 0)"), "1"),
    "bpf": (syscalls("syscall(321, 0, 0, 0)"), "1"),
    "perf_event_open": (syscalls("syscall(298, 0, 0, -1, -1, 0)"), "1"),
    "userfaultfd": (syscalls("syscall(323, 0)"), "1"),
    "kernel modules": (
        syscalls("syscall(175, 0, 0, 0)", "syscall(313, 3, b'', 0)"),
        "1\n1",
    ),
    "reboot": (syscalls("reboot(0)"), "1"),
    "clock": (
        "import time\ntime.clock_settime(time.CLOCK_REALTIME, 0)",
        "PermissionError",
    ),
    "host name": ("import socket\nsocket.sethostname('x')", "PermissionError"),
    "type into the terminal": (
        "import fcntl\nfcntl.ioctl(0, 0x5412, b'x')",
        "OSError: [Errno 25]",
    ),
    "terminal": ("open('/dev/tty', 'w')", "FileNotFoundError"),
    # Programs that break the interpreter.
    "recursion": (
        "def f(): return f()\n\nf()",
        "RecursionError: maximum recursion depth exceeded (line 1)",
    ),
    "deep source": ("(" * 100_000, "SyntaxError"),
    "null in the source": ("1\0", "SyntaxError"),
    "surrogate in the source": ("'\ud800'", "?"),
    "segmentation fault": ("import ctypes\nctypes.string_at(0)", "ended by signal 11"),
    "abort": ("import os\nos.abort()", "ended by signal 6"),
    "error without a text": (
        "class E(Exception):\n    def __str__(self): 1 / 0\nraise E",
        "E (line 3)",
    ),
    "exit": ("raise SystemExit(3)", ""),
}
X86_64_ONLY = {name for name, (code, _) in ATTACKS.items() if "libc.syscall(" in code}
"""Attacks with the system call numbers of x86_64."""


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTACKS)
def test_attack_gets_an_answer_and_leaves_the_machine_untouched(
    name: str, outside: Outside, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name in X86_64_ONLY and os.uname().machine != "x86_64":
        pytest.skip("the numbers of its system calls are those of x86_64")
    monkeypatch.setenv("GRISTMILL_TEST_KEY", SECRET)
    monkeypatch.setattr(sandbox, "WALL_SECONDS_PER_SECOND", 2)
    code, answer = ATTACKS[name]
    began = time.monotonic()
    result = run_python(
        code if code.startswith("(((") else code.format(**outside.names), LIMITS
    )
    assert time.monotonic() - began < 2 * LIMITS.seconds + 30
    assert result.output.startswith(answer)
    assert SECRET not in result.output
    outside.check_untouched()


@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("1 + 1", "2"),
        ("print(sum(range(10)))\n'a' * 3", "45\naaa"),
        ("x = 3", ""),
        (
            "import fractions, itertools, json, math, re, statistics\nmath.comb(5, 2)",
            "10",
        ),
        (
            "import bz2, ctypes, decimal, hashlib, lzma, sqlite3, ssl, uuid, zlib\n1",
            "1",
        ),
        (
            "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int = "
            "1\nA()",
            "A(x=1)",
        ),
        ("import tempfile\ntempfile.TemporaryFile().write(b'grist')", "5"),
    ],
)
def test_program_computes_and_prints(code: str, output: str) -> None:
    assert run_python(code, LIMITS) == ProgramResult(output, True)


def test_program_output_is_reproducible() -> None:
    code = "{str(n) for n in range(50)}"
    assert run_python(code, LIMITS) == run_python(code, LIMITS)


@pytest.mark.parametrize("print_call", ["print('grist')", "os.write(2, bytes(100))"])
def test_endless_output_is_stopped(print_call: str) -> None:
    result = run_python(f"import os\nwhile True: {print_call}", LIMITS)
    assert result.output.startswith(
        f"stopped: it printed more than {MAX_OUTPUT_BYTES} bytes\n"
    )
    assert len(result.output) < MAX_OUTPUT_BYTES + 100
    assert not result.succeeded


def test_each_program_has_its_own_empty_folder() -> None:
    code = (
        "import os\nprint(os.getcwd(), os.listdir())\nopen('a', "
        "'w').write('x')\nos.listdir()"
    )
    for _ in range(2):
        assert run_python(code, LIMITS).output == "/tmp []\n['a']"


def test_stopped_program_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "WALL_SECONDS_PER_SECOND", 1)
    # The memory limit appears in the command lines of bubblewrap's processes and of the
    # program.
    limits = PythonTool(kind="python", seconds=1, memory_mb=int(f"1{os.getpid()}"))
    assert run_python("import time\ntime.sleep(500)", limits).output == STOPPED
    deadline = time.monotonic() + 30
    while remaining := [
        path
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if has_argument(path, limits.memory_mb)
    ]:
        assert time.monotonic() < deadline, remaining


def has_argument(cmdline: Path, argument: int) -> bool:
    try:
        return cmdline.read_bytes().endswith(f"\0{argument}\0".encode())
    except OSError:
        return False


@pytest.fixture
def fresh_check() -> Iterator[None]:
    """Clear cached checks of this machine, before and after."""
    for function in (check_sandbox, seccomp_program):
        function.cache_clear()
    yield
    for function in (check_sandbox, seccomp_program):
        function.cache_clear()


def hide_bubblewrap(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("PATH", str(folder))


def deny_namespaces(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    script = folder / "bwrap"
    script.write_text(
        "#!/bin/sh\necho 'bwrap: No permissions to create new namespace'\nexit 1\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def hide_libseccomp(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(seccomp_filter, "LIBRARY", "libabsent.so.2")


def pretend_darwin(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(sandbox.platform, "system", lambda: "Darwin")


@pytest.mark.usefixtures("fresh_check")
@pytest.mark.parametrize(
    ("break_sandbox", "fact"),
    [
        (hide_bubblewrap, "apt-get install bubblewrap"),
        (deny_namespaces, "No permissions to create new namespace"),
        (hide_libseccomp, "libabsent.so.2"),
        (pretend_darwin, "Linux"),
    ],
)
def test_machine_without_sandbox_is_rejected_in_preflight(
    break_sandbox: Callable[[pytest.MonkeyPatch, Path], None],
    fact: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    manifest = Manifest.model_validate(
        {
            "name": "x",
            "model": {"path": "base"},
            "rl": {
                "data": [{"path": "x.jsonl"}],
                "rewards": [{"kind": "number"}],
                "tools": [{"use": "json:loads"}, "python"],
                "steps": 1,
            },
        }
    )
    break_sandbox(monkeypatch, tmp_path)
    ((place, message),) = preflight(manifest, "rl", {})
    assert place == ("rl", "tools", 1)
    assert fact in message
    with pytest.raises(SandboxError):
        check_sandbox()


def test_sandbox_that_cannot_start_is_a_failed_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hide_bubblewrap(monkeypatch, tmp_path)
    assert not run_python("1", LIMITS).succeeded
