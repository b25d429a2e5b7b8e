"""Hosts with networks of their own, and a store that all of them reach, made from Linux
network namespaces; needs root.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.servers import wait_for

NAMES = Path("/etc/netns")
"""Folder in which iproute2 keeps files of namespaces."""


@dataclass(frozen=True)
class Host:
    """A host: its name, its network namespace, and its interface and address there."""

    name: str
    namespace: str
    interface: str
    address: str

    def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        first: str = "",
        **options: Any,
    ) -> subprocess.Popen[str]:
        """Start a command on this host, in a new session and with the host's name.

        Args:
            command: the command; it sees only the host's network.
            environment: the complete environment.
            first: shell commands, each followed by `&&`, that prepare its view of the
                file system.
            options: arguments of Popen.
        """
        wrapped_command = [
            "ip",
            "netns",
            "exec",
            self.namespace,
            "unshare",
            "--uts",
            "sh",
            "-c",
            f'hostname "$0" && {first} exec "$@"',
            self.name,
            *command,
        ]
        return subprocess.Popen(
            wrapped_command,
            env=dict(environment),
            text=True,
            start_new_session=True,
            **options,
        )

    def kill(self) -> None:
        """Kill all processes of the host."""
        command = ["ip", "netns", "pids", self.namespace]
        while pids := subprocess.run(
            command, check=True, capture_output=True, text=True
        ).stdout.split():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)

    def cut_off(self) -> None:
        """Take the host's links down: packets are lost without an error."""
        self._set_links("down")

    def connect(self) -> None:
        """Bring the host's links up again."""
        self._set_links("up")

    def _set_links(self, state: str) -> None:
        links = subprocess.run(
            ["ip", "-n", self.namespace, "-o", "link"],
            check=True,
            capture_output=True,
            text=True,
        )
        for line in links.stdout.splitlines():
            if (name := line.split(": ")[1].partition("@")[0]) != "lo":
                _ip("-n", self.namespace, "link", "set", name, state)


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Create two hosts that reach only each other, and remove them at the end."""
    with hosts("host-a", "host-b") as (first, second):
        yield first, second


@contextmanager
def hosts(*names: str) -> Iterator[list[Host]]:
    """Create hosts that reach only each other, through a bridge in the first one's
    namespace.
    """
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip(
            "network namespaces need the programs ip and unshare (iproute2, util-linux)"
        )
    prefix = f"gm{os.getpid() % 100_000}"
    created_hosts = [
        Host(name, f"{prefix}n{number}", f"{prefix}v{number}", f"10.203.0.{number + 1}")
        for number, name in enumerate(names)
    ]
    first = created_hosts[0]
    try:
        try:
            for host in created_hosts:
                _ip("netns", "add", host.namespace)
            _ip("-n", first.namespace, "link", "add", first.interface, "type", "bridge")
        except subprocess.CalledProcessError as error:
            pytest.skip(
                f"network namespaces need the rights of root: {error.stderr.strip()}"
            )
        for host in created_hosts:
            if host is not first:
                port = f"{host.interface}p"
                _ip(
                    "link",
                    "add",
                    host.interface,
                    "netns",
                    host.namespace,
                    "type",
                    "veth",
                    "peer",
                    "name",
                    port,
                    "netns",
                    first.namespace,
                )
                _ip(
                    "-n",
                    first.namespace,
                    "link",
                    "set",
                    port,
                    "master",
                    first.interface,
                    "up",
                )
            _ip(
                "-n",
                host.namespace,
                "address",
                "add",
                f"{host.address}/24",
                "dev",
                host.interface,
            )
            for interface in ("lo", host.interface):
                _ip("-n", host.namespace, "link", "set", interface, "up")
        for host in created_hosts:  # `ip netns exec` mounts this file as /etc/hosts
            (NAMES / host.namespace).mkdir(parents=True)
            (NAMES / host.namespace / "hosts").write_text(
                "127.0.0.1 localhost\n"
                + "".join(f"{peer.address} {peer.name}\n" for peer in created_hosts)
            )
        yield created_hosts
    finally:
        for host in created_hosts:
            shutil.rmtree(NAMES / host.namespace, ignore_errors=True)
            subprocess.run(
                ["ip", "netns", "delete", host.namespace],
                check=False,
                capture_output=True,
            )


@contextmanager
def store_beside(hosts: Sequence[Host], bucket: str) -> Iterator[dict[str, str]]:
    """Run an S3-compatible server that each host reaches by its own link; yields its
    URL by host name.
    """
    namespace = f"{hosts[0].namespace}s"
    server = None
    try:
        _ip("netns", "add", namespace)
        _ip("-n", namespace, "link", "set", "lo", "up")
        for number, host in enumerate(hosts):
            ends = (
                (namespace, f"{host.interface}t", 1),
                (host.namespace, f"{host.interface}s", 2),
            )
            _ip(
                "link",
                "add",
                ends[0][1],
                "netns",
                namespace,
                "type",
                "veth",
                "peer",
                "name",
                ends[1][1],
                "netns",
                host.namespace,
            )
            for end_namespace, interface, last in ends:
                _ip(
                    "-n",
                    end_namespace,
                    "address",
                    "add",
                    f"10.204.{number}.{last}/24",
                    "dev",
                    interface,
                )
                _ip("-n", end_namespace, "link", "set", interface, "up")
        server = subprocess.Popen(
            [
                "ip",
                "netns",
                "exec",
                namespace,
                sys.executable,
                "-m",
                "moto.server",
                "-H",
                "0.0.0.0",
                "-p",
                "5000",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        create_bucket = (
            "import http.client as h; c = h.HTTPConnection('127.0.0.1', "
            f"5000); c.request('PUT', '/{bucket}')"
        )
        wait_for(
            lambda: (
                subprocess.run(
                    [
                        "ip",
                        "netns",
                        "exec",
                        namespace,
                        sys.executable,
                        "-c",
                        f"{create_bucket}; assert c.getresponse().status == 200",
                    ],
                    check=False,
                    capture_output=True,
                ).returncode
                == 0
            ),
            "the store's answer",
        )
        yield {
            host.name: f"http://10.204.{number}.1:5000"
            for number, host in enumerate(hosts)
        }
    finally:
        if server is not None:
            server.terminate()
            server.wait()
        subprocess.run(
            ["ip", "netns", "delete", namespace], check=False, capture_output=True
        )


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
