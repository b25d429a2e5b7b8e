"""System calls denied to sandboxed programs, compiled by libseccomp.

Bubblewrap's namespaces are the first wall: they hide files, processes and networks.
This filter is the second one. It also denies what namespaces do not bound: processes,
threads, and memory that the address-space limit does not count.
"""

from __future__ import annotations

import ctypes
import errno
import os
from functools import cache

LIBRARY = "libseccomp.so.2"
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
"""Actions of seccomp.h (SCMP_ACT_ALLOW, SCMP_ACT_ERRNO)."""
PROCESSES = ("clone", "fork", "vfork")
UNCOUNTED_MEMORY = (
    "memfd_create",
    "memfd_secret",
    "mq_open",
    "msgget",
    "semget",
    "shmget",
)
SOCKETS = ("socket", "socketpair")
FLATPAK = (
    "acct add_key chroot fsconfig fsmount fsopen fspick get_mempolicy keyctl mbind "
    "migrate_pages mount mount_setattr move_mount move_pages open_tree perf_event_open "
    "personality pivot_root ptrace quotactl request_key set_mempolicy setns syslog "
    "umount2 unshare uselib"
)
"""Calls that Flatpak denies in its sandboxes (`setup_seccomp` in
common/flatpak-run.c).
"""
DOCKER = (
    "bpf clock_adjtime clock_settime delete_module fanotify_init finit_module "
    "init_module io_uring_enter io_uring_register io_uring_setup ioperm iopl kcmp "
    "kexec_file_load kexec_load lookup_dcookie name_to_handle_at open_by_handle_at "
    "pidfd_getfd process_madvise process_vm_readv process_vm_writev reboot "
    "setdomainname sethostname settimeofday swapoff swapon userfaultfd vhangup"
)
"""Calls that Docker's default profile allows only with capabilities, or not at all
(moby/profiles/seccomp).
"""


class SeccompError(OSError):
    """libseccomp is missing or refused the filter."""


@cache
def seccomp_program() -> bytes:
    """The filter as a BPF program, as `bwrap --seccomp` reads it.

    Raises:
        SeccompError: libseccomp is missing, older than 2.5, or does not support this
            processor.
    """
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise SeccompError(f"{LIBRARY} cannot be loaded ({error})") from error
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(ALLOW)))
    try:
        for name in (
            *PROCESSES,
            *UNCOUNTED_MEMORY,
            *SOCKETS,
            *FLATPAK.split(),
            *DOCKER.split(),
        ):
            _deny(library, context, name, errno.EPERM)
        # The C library falls back from `clone3` to `clone` only if the kernel seems not
        # to have it.
        _deny(library, context, "clone3", errno.ENOSYS)
        file = os.memfd_create("seccomp-program")
        try:
            failure = library.seccomp_export_bpf(context, file)
            if failure:
                raise SeccompError(-failure, f"{LIBRARY} cannot compile the filter")
            return os.pread(file, os.fstat(file).st_size, 0)
        finally:
            os.close(file)
    finally:
        library.seccomp_release(context)


def _deny(library: ctypes.CDLL, context: ctypes.c_void_p, name: str, code: int) -> None:
    number = library.seccomp_syscall_resolve_name(name.encode())
    # Calls of other processors have numbers below -1, for which libseccomp writes no
    # rule.
    if number == -1:
        raise SeccompError(
            f"{LIBRARY} does not know the call {name}; it is older than 2.5"
        )
    failure = library.seccomp_rule_add_array(
        context, ctypes.c_uint32(ERRNO | code), number, 0, None
    )
    if failure:
        raise SeccompError(-failure, f"{LIBRARY} refuses a rule for {name}")
