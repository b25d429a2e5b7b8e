"""A training on several hosts: at which address they find the one that leads, and what is said where one is gone.

The host that leads writes WORK/rendezvous.json; the others read it there. What each of them runs is torchrun with these
options, which `torchrun.py` completes by the host's own address. Which hosts came is noted in WORK/hosts/ID/.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import socket
import struct
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gristmill.dataprep.files import read_json, write_json
from gristmill.mixtures.engine import Network

SIOCGIFADDR = 0x8915
"""Linux: the IPv4 address of a network interface; see netdevice(7)."""
LOOPBACK = "lo"
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables by which gloo and NCCL are told which network to use."""
TIMEOUT = "GRISTMILL_NETWORK_TIMEOUT"
"""Holds, for the ranks of a training on several hosts, after how many seconds an exchange has failed."""
ELSEWHERE = ("192.0.2.1", 9)
"""An address of no host (RFC 5737), which the default route leads to; nothing is sent there."""


class HostsError(ValueError):
    """A training cannot be begun on several hosts; the message says why."""


@dataclass(frozen=True)
class Rendezvous:
    """How the hosts of one attempt find each other.

    Attributes:
        name: of this attempt; torchrun's run id.
        endpoint: HOST:PORT where the host that leads listens.
        nodes: how many hosts.
        processes: of each.
        join_seconds: so long they wait for each other.
        timeout_seconds: an exchange that takes longer has failed.
        host: the name of the one that leads.
    """

    name: str
    endpoint: str
    nodes: int
    processes: int
    join_seconds: float
    timeout_seconds: float
    host: str

    def options(self, leads: bool) -> list[str]:
        """Torchrun's options for one of the hosts."""
        read_seconds = max(1, round(self.timeout_seconds))
        return [
            f"--nnodes={self.nodes}",
            f"--nproc-per-node={self.processes}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={self.endpoint}",
            f"--rdzv-id={self.name}",
            f"--rdzv-conf=is_host={int(leads)},join_timeout={max(1, round(self.join_seconds))},"
            f"read_timeout={read_seconds}",
        ]

    def command(self, folder: Path, leads: bool) -> list[str]:
        """What one of the hosts runs for a training that a folder describes."""
        return [
            sys.executable,
            "-m",
            "gristmill.train.torchrun",
            *self.options(leads),
            "-m",
            "gristmill.train.rank",
            str(folder),
        ]


def hosts_of(engine: Mapping[str, Any]) -> int:
    """On how many hosts a training runs: one of a single process on one of them."""
    return int(engine.get("nodes", 1)) if engine.get("ranks", 1) > 1 else 1


def lead(folder: Path, engine: Mapping[str, Any]) -> Rendezvous:
    """Write down for the others how to find this host, and what to run there.

    Args:
        folder: of the training's stage.
        engine: the section `engine`, as JSON.

    Raises:
        HostsError: they could not find it.
    """
    nodes, ranks = hosts_of(engine), engine["ranks"]
    network = Network.model_validate(engine.get("network", {}))
    address = address_of(network.interface) if network.interface else default_address()
    found = Rendezvous(
        uuid.uuid4().hex[:12],
        f"{address}:{network.port}",
        nodes,
        ranks // nodes,
        network.join_seconds,
        network.timeout_seconds,
        socket.gethostname(),
    )
    write_json(
        folder / "work" / "rendezvous.json", {**vars(found), "command": shlex.join(found.command(folder, leads=False))}
    )
    return found


def read_rendezvous(folder: Path) -> Rendezvous | None:
    """How to find the host that leads a training, once one does; the last one that did."""
    try:
        said = read_json(folder / "work" / "rendezvous.json")
    except FileNotFoundError:
        return None
    return Rendezvous(**{name: value for name, value in said.items() if name != "command"})


def use_network(endpoint: str) -> str:
    """Tell gloo and NCCL which interface reaches the host that leads, unless somebody has; returns our address there.

    Args:
        endpoint: HOST:PORT.

    Raises:
        HostsError: no interface does.
    """
    host, _, port = endpoint.rpartition(":")
    named = os.environ.get(INTERFACES[0])
    if named is None or named == LOOPBACK:
        address = address_towards(host.strip("[]"), int(port))
        named = interface_of(address)
        os.environ[INTERFACES[0]] = named
    else:
        address = address_of(named)
    os.environ.setdefault(INTERFACES[1], named)
    return address


def address_of(interface: str) -> str:
    """The IPv4 address of a network interface of this host.

    Raises:
        HostsError: there is no such interface, or it has none.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            answer = fcntl.ioctl(asking, SIOCGIFADDR, struct.pack("256s", interface[:15].encode()))
        except OSError as error:
            raise HostsError(
                f"engine.network.interface: {socket.gethostname()} has no interface {interface} with an "
                f"IPv4 address; it has {', '.join(addresses()) or 'none'}"
            ) from error
    return socket.inet_ntoa(answer[20:24])


def addresses() -> dict[str, str]:
    """Interface -> IPv4 address of this host, of those that have one."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asking, SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # it has none
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def interface_of(address: str) -> str:
    """The interface that has an address.

    Raises:
        HostsError: none has it.
    """
    for name, one in addresses().items():
        if one == address or (address.startswith("127.") and one.startswith("127.")):
            return name
    raise HostsError(
        f"{socket.gethostname()} has no interface with the address {address}; name the one that reaches "
        "the other hosts: engine.network.interface"
    )


def address_towards(host: str, port: int) -> str:
    """The address by which this host reaches another one; nothing is sent.

    Raises:
        HostsError: there is no way there.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect((host, port))
        except OSError as error:
            raise HostsError(
                f"{socket.gethostname()} has no way to {host}, which leads ({error.strerror or error}); "
                "name the interface that reaches it: engine.network.interface"
            ) from error
        return str(asking.getsockname()[0])


def default_address() -> str:
    """The address that others most likely reach this host by.

    Raises:
        HostsError: it has none, or several, and no default route.
    """
    try:
        return address_towards(*ELSEWHERE)
    except HostsError:
        found = {name: one for name, one in addresses().items() if not one.startswith("127.")}
    if len(found) != 1:
        raise HostsError(
            f"by which address other hosts reach {socket.gethostname()} is not known: it has no default "
            f"route, and {', '.join(found) or 'no interface but the loopback one'}; name one: "
            "engine.network.interface"
        )
    return next(iter(found.values()))


def note_arrival(work: Path) -> None:
    """Write down that this host takes part in an attempt, so that the others can name it; by its first rank."""
    if int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1 and os.environ["LOCAL_RANK"] == "0":
        ranks = [int(os.environ["RANK"]) + place for place in range(int(os.environ["LOCAL_WORLD_SIZE"]))]
        write_json(
            work / "hosts" / os.environ["TORCHELASTIC_RUN_ID"] / f"{os.environ['GROUP_RANK']}.json",
            {"host": socket.gethostname(), "ranks": ranks},
        )


def why_lost(work: Path, said: str) -> str:
    """What is said on a host whose ranks have lost those of others.

    Args:
        work: of the training's folder.
        said: by gloo or NCCL.
    """
    here, own = socket.gethostname(), os.environ.get("GROUP_RANK")
    try:
        noted = sorted((work / "hosts" / os.environ.get("TORCHELASTIC_RUN_ID", "-")).glob("*.json"))
        others = [_name(read_json(path)) for path in noted if path.stem != own]
    except OSError:  # the network to the store is gone too
        others = []
    seconds = float(os.environ.get(TIMEOUT, "0"))
    late = "timed out" in said.lower() or "timeout" in said.lower()
    what = f"did not answer for {seconds:g} s (engine.network.timeout_seconds)" if late else "closed the connection"
    return (
        f"{' and '.join(others) or 'another host'} {what}, as seen from {here}: that host or the network to it is "
        "gone. The training resumes from its last checkpoint: run it on all hosts again, or on those that are left "
        "with --set engine.nodes=N (and engine.ranks, where they have fewer GPUs)"
    )


def _name(noted: Mapping[str, Any]) -> str:
    ranks: Sequence[int] = noted["ranks"]
    which = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
    return f"{noted['host']} ({which})"
