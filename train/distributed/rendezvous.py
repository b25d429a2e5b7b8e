"""Rendezvous of a training on several hosts, and messages about lost hosts.

The leading host writes WORK/rendezvous.json and the others read it. Each of them runs
torchrun with these options, to which `torchrun.py` adds the host's own address. Hosts
that joined an attempt are recorded in WORK/hosts/ID/, and all attempts in
WORK/hosts/attempts.json.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from gristmill.core.files import create_exclusively, find_json, read_json, write_json
from gristmill.core.stage_context import Context, print_failure
from gristmill.core.store import Attempt
from gristmill.mixtures.schema.engine import Engine

LOOPBACK = "lo"
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Environment variables that select the network interface of gloo and NCCL."""
TIMEOUT = "GRISTMILL_NETWORK_TIMEOUT"
"""Environment variable of the ranks of a training on several hosts: timeout of
collectives in seconds.
"""
HOSTS_CHANGED = "HostsChanged"
"""`type` in error.json if hosts of a training were lost, or one waits to join: it can
restart with the hosts that are there.
"""
ATTEMPTS = "hosts/attempts.json"
"""File in the working folder of a training on several hosts: a list of `Attempt`."""
BACKEND = "gristmill"
"""torchrun's name of our rendezvous (see elastic_rendezvous.py)."""
ELSEWHERE = ("192.0.2.1", 9)
"""Reserved address (RFC 5737) behind the default route; no packet is sent."""


class HostsError(ValueError):
    """A training cannot start on several hosts; the message has the reason."""


@dataclass(frozen=True)
class Rendezvous:
    """Rendezvous of the hosts of one attempt.

    Attributes:
        name: of the attempt; torchrun's run id.
        endpoint: HOST:PORT on which the leading host listens.
        least_nodes: smallest number of hosts.
        nodes: largest number of hosts.
        processes: number of processes per host.
        join_seconds: time limit for `least_nodes` hosts to join.
        last_call_seconds: time for further hosts to join.
        timeout_seconds: timeout of collectives.
        host: name of the leading host.
    """

    name: str
    endpoint: str
    least_nodes: int
    nodes: int
    processes: int
    join_seconds: float
    last_call_seconds: float
    timeout_seconds: float
    host: str

    def command(self, folder: Path, leads: bool) -> list[str]:
        """Command that a host runs for the training of a stage folder."""
        times = (self.join_seconds, self.last_call_seconds, self.timeout_seconds)
        join, last_call, read = (max(1, round(seconds)) for seconds in times)
        return [
            sys.executable,
            "-m",
            "gristmill.train.torchrun",
            f"--nnodes={self.least_nodes}:{self.nodes}",
            f"--nproc-per-node={self.processes}",
            f"--rdzv-backend={BACKEND}",
            f"--rdzv-endpoint={self.endpoint}",
            f"--rdzv-id={self.name}",
            f"--rdzv-conf=is_host={int(leads)},join_timeout={join},"
            f"last_call_timeout={last_call},read_timeout={read}",
            "-m",
            "gristmill.train.worker_main",
            str(folder),
        ]


def hosts_of(engine: Engine) -> int:
    """Number of hosts of a training; 1 for a single process."""
    return engine.nodes if engine.num_ranks > 1 else 1


def has_several_hosts() -> bool:
    """True if this rank's attempt at a training has several hosts."""
    return int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1


def lead(folder: Path, engine: Engine) -> Rendezvous:
    """Write the rendezvous, with the command of the other hosts, for a training that
    this host leads.

    Args:
        folder: of the training's stage.
        engine: of the run.

    Raises:
        HostsError: the other hosts cannot reach this one.
    """
    nodes, network = hosts_of(engine), engine.network
    address = address_of(network.interface) if network.interface else default_address()
    rendezvous = Rendezvous(
        uuid.uuid4().hex[:12],
        f"{address}:{network.port}",
        engine.least_nodes,
        nodes,
        engine.num_ranks // nodes,
        network.join_seconds,
        network.last_call_seconds,
        network.timeout_seconds,
        socket.gethostname(),
    )
    write_json(
        folder / "work" / "rendezvous.json",
        {
            **vars(rendezvous),
            "command": shlex.join(rendezvous.command(folder, leads=False)),
        },
    )
    return rendezvous


def read_rendezvous(folder: Path) -> Rendezvous | None:
    """Latest rendezvous of a training, or None if no host leads it yet."""
    content = find_json(folder / "work" / "rendezvous.json")
    if content is None:
        return None
    del content["command"]
    return Rendezvous(**content)


def use_network(endpoint: str) -> str:
    """Select the interface of gloo and NCCL that reaches the leading host, unless set;
    returns its local address.

    Args:
        endpoint: HOST:PORT.

    Raises:
        HostsError: no interface reaches it.
    """
    host, _, port = endpoint.rpartition(":")
    interface = os.environ.get(INTERFACES[0], LOOPBACK)
    if interface == LOOPBACK:
        address = address_towards(host.strip("[]"), int(port))
        matching = [
            name
            for name, own in addresses().items()
            if own == address or own[:4] == address[:4] == "127."
        ]
        if not matching:
            raise HostsError(
                f"{socket.gethostname()} has no interface with the address {address}; "
                "name the one that reaches the other hosts: engine.network.interface"
            )
        interface = os.environ[INTERFACES[0]] = matching[0]
    else:
        address = address_of(interface)
    os.environ.setdefault(INTERFACES[1], interface)
    return address


def address_of(interface: str) -> str:
    """IPv4 address of a network interface of this host.

    Raises:
        HostsError: the interface does not exist, or has no IPv4 address.
    """
    by_interface = addresses()
    if interface not in by_interface:
        raise HostsError(
            f"engine.network.interface: {socket.gethostname()} has no interface "
            f"{interface} with an IPv4 address; it has "
            f"{', '.join(by_interface) or 'none'}"
        )
    return by_interface[interface]


def addresses() -> dict[str, str]:
    """Interface -> IPv4 address of this host's interfaces that have one."""
    import psutil

    return {
        name: address.address
        for name, addresses_of_name in psutil.net_if_addrs().items()
        for address in addresses_of_name
        if address.family == socket.AF_INET
    }


def address_towards(host: str, port: int) -> str:
    """Local address from which this host reaches another host; no packet is sent.

    Raises:
        HostsError: there is no route to the host.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as connection:
        try:
            connection.connect((host, port))
        except OSError as error:
            raise HostsError(
                f"{socket.gethostname()} has no way to {host}, which leads "
                f"({error.strerror or error}); "
                "name the interface that reaches it: engine.network.interface"
            ) from error
        return str(connection.getsockname()[0])


def default_address() -> str:
    """Address by which other hosts most likely reach this host.

    Raises:
        HostsError: there is no default route, and not exactly one address.
    """
    try:
        return address_towards(*ELSEWHERE)
    except HostsError:
        candidates = {
            name: address
            for name, address in addresses().items()
            if not address.startswith("127.")
        }
    if len(candidates) != 1:
        raise HostsError(
            f"by which address other hosts reach {socket.gethostname()} is not "
            "known: it has no default "
            f"route, and {', '.join(candidates) or 'no interface but the loopback one'}; name one: "
            "engine.network.interface"
        )
    return next(iter(candidates.values()))


def note_arrival(work: Path) -> None:
    """Record that this host joined an attempt, so that other hosts can name it; only
    its first rank does.
    """
    if os.environ["LOCAL_RANK"] == "0":
        write_json(
            attempt_folder(work) / f"{os.environ['GROUP_RANK']}.json",
            {"host": socket.gethostname(), "first_rank": os.environ["RANK"]},
        )


def attempt_folder(work: Path, name: str | None = None) -> Path:
    """Folder with a file for each host of an attempt, by default of this rank's."""
    return work / "hosts" / (name or os.environ.get("TORCHELASTIC_RUN_ID", "-"))


def waiting_file(work: Path, name: str | None = None) -> Path:
    """File that exists on the leading host once another host waits to join an
    attempt.
    """
    return attempt_folder(work, name) / "waiting"


def record_attempt(context: Context, work: Path, step: int) -> None:
    """Append this attempt to those of a training on several hosts, and warn if it has
    other hosts than the previous one.

    Called by the first rank, when all ranks of the attempt have met.

    Args:
        context: of the training.
        work: its working folder, or the folder in a store that follows it.
        step: last step before this attempt.
    """
    file = work / ATTEMPTS
    attempts: list[Attempt] = find_json(file, [])
    hosts = {read_json(path)["host"] for path in attempt_folder(work).glob("*.json")}
    earlier = set(attempts[-1]["hosts"]) if attempts else hosts
    attempts.append(
        {
            "started": time.time(),
            "after_step": step,
            "hosts": sorted(hosts),
            "lost": sorted(earlier - hosts),
        }
    )
    write_json(file, attempts)
    if hosts != earlier:
        context.warn(
            f"{context.stage}: it goes on after step {step} on "
            f"{', '.join(sorted(hosts))}; before, it ran on "
            f"{', '.join(sorted(earlier))}"
        )


def report_change(folder: Path, message: str) -> None:
    """Report HOSTS_CHANGED to the parent process and to the leading host, unless there
    is an error already.

    Args:
        folder: of the stage.
        message: one sentence.
    """
    print_failure(message, is_consequence=True)
    content = {"type": HOSTS_CHANGED, "message": message}
    create_exclusively(folder / "work" / "error.json", json.dumps(content).encode())


def why_lost(work: Path, said: str) -> str:
    """Message on a host that lost the ranks of other hosts.

    Args:
        work: working folder of the training.
        said: error of gloo or NCCL.
    """
    hostname, own_rank = socket.gethostname(), os.environ.get("GROUP_RANK")
    try:
        host_files = sorted(attempt_folder(work).glob("*.json"))
        lost_hosts = [read_json(path) for path in host_files if path.stem != own_rank]
    except OSError:  # the store is unreachable too
        lost_hosts = []
    names = [f"{host['host']} (rank {host['first_rank']})" for host in lost_hosts]
    seconds = float(os.environ.get(TIMEOUT, "0"))
    late = "timed out" in said.lower() or "timeout" in said.lower()
    failure = (
        f"did not answer for {seconds:g} s (engine.network.timeout_seconds)"
        if late
        else "closed the connection"
    )
    return (
        f"{' and '.join(names) or 'another host'} {failure}, as seen from "
        f"{hostname}: that host or the network to it is gone. The training resumes "
        "from its last checkpoint: by itself with engine.min_nodes, or if it is run "
        "again on all hosts or, with --set engine.nodes=N (and engine.ranks, where "
        "they have fewer GPUs), on those that are left"
    )
