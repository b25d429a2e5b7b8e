"""Hosts in a network of their own, and a store that all reach, out of Linux's network namespaces: only root can make
them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.servers import wait_for

NAMES = Path("/etc/netns")
"""Where iproute2 has files of namespaces."""


@dataclass(frozen=True)
class Host:
    """A host: its name, the namespace that is its network, and its interface and address there."""

    name: str
    namespace: str
    interface: str
    address: str

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], first: str = "", **options: Any
    ) -> subprocess.Popen[str]:
        """Start a command there, in a session of its own, under the host's name.

        Args:
            command: what runs; sees the host's network alone.
            environment: all of it.
            first: shell commands, each with its `&&`, that prepare what it sees of the file system.
            options: for Popen.
        """
        inside = [
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
        return subprocess.Popen(inside, env=dict(environment), text=True, start_new_session=True, **options)

    def cut_off(self) -> None:
        """Take its links down: nothing arrives there any more, nor is anybody told."""
        self._set_links("down")

    def connect(self) -> None:
        """Let it reach the others again."""
        self._set_links("up")

    def _set_links(self, state: str) -> None:
        listed = subprocess.run(["ip", "-n", self.namespace, "-o", "link"], check=True, capture_output=True, text=True)
        for line in listed.stdout.splitlines():
            if (name := line.split(": ")[1].partition("@")[0]) != "lo":
                _ip("-n", self.namespace, "link", "set", name, state)


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Make two hosts that reach each other and nobody else, and remove them at the end."""
    with hosts("host-a", "host-b") as (first, second):
        yield first, second


@contextmanager
def hosts(*names: str) -> Iterator[list[Host]]:
    """Make hosts that reach each other, by a bridge in the first one's namespace, and nobody else."""
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("network namespaces need the programs ip and unshare (iproute2, util-linux)")
    mark = f"gm{os.getpid() % 100_000}"
    made = [
        Host(name, f"{mark}n{number}", f"{mark}v{number}", f"10.203.0.{number + 1}")
        for number, name in enumerate(names)
    ]
    first = made[0]
    try:
        try:
            for host in made:
                _ip("netns", "add", host.namespace)
            _ip("-n", first.namespace, "link", "add", first.interface, "type", "bridge")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces need the rights of root: {error.stderr.strip()}")
        for host in made:
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
                _ip("-n", first.namespace, "link", "set", port, "master", first.interface, "up")
            _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", host.interface)
            for interface in ("lo", host.interface):
                _ip("-n", host.namespace, "link", "set", interface, "up")
        for host in made:  # which `ip netns exec` shows as /etc/hosts
            (NAMES / host.namespace).mkdir(parents=True)
            (NAMES / host.namespace / "hosts").write_text(
                "127.0.0.1 localhost\n" + "".join(f"{one.address} {one.name}\n" for one in made)
            )
        yield made
    finally:
        for host in made:
            shutil.rmtree(NAMES / host.namespace, ignore_errors=True)
            subprocess.run(["ip", "netns", "delete", host.namespace], check=False, capture_output=True)


@contextmanager
def store_beside(hosts: Sequence[Host], bucket: str) -> Iterator[dict[str, str]]:
    """An S3-compatible server that both hosts reach, each by a link of its own; yields its URLs by their names."""
    namespace = f"{hosts[0].namespace}s"
    server = None
    try:
        _ip("netns", "add", namespace)
        _ip("-n", namespace, "link", "set", "lo", "up")
        for number, host in enumerate(hosts):
            ends = (namespace, f"{host.interface}t", 1), (host.namespace, f"{host.interface}s", 2)
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
            for inside, interface, last in ends:
                _ip("-n", inside, "address", "add", f"10.204.{number}.{last}/24", "dev", interface)
                _ip("-n", inside, "link", "set", interface, "up")
        server = subprocess.Popen(
            ["ip", "netns", "exec", namespace, sys.executable, "-m", "moto.server", "-H", "0.0.0.0", "-p", "5000"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        make = f"import http.client as h; c = h.HTTPConnection('127.0.0.1', 5000); c.request('PUT', '/{bucket}')"
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
                        f"{make}; assert c.getresponse().status == 200",
                    ],
                    check=False,
                    capture_output=True,
                ).returncode
                == 0
            ),
            "the store's answer",
        )
        yield {host.name: f"http://10.204.{number}.1:5000" for number, host in enumerate(hosts)}
    finally:
        if server is not None:
            server.terminate()
            server.wait()
        subprocess.run(["ip", "netns", "delete", namespace], check=False, capture_output=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
