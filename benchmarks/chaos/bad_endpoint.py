"""A chat endpoint that is slow, drops connections, refuses, cuts answers and talks nonsense; it knows what it has said.

What it answers at last is a function of the request alone, and names it: so the kept answers say which requests they
are of, and a run that is disturbed can be compared with one that is not.
"""

from __future__ import annotations

import hashlib
import json
import re
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from benchmarks.chaos.network import Ending
from gristmill.core.seeds import seeded_key

FAULTS = ("drop", "429", "503", "half", "page") * 4 + ("hang",)
"""A connection that is cut, two refusals, half a body, a page instead of JSON, nothing until the time limit."""
FAULTY = 0.35
NONSENSE = 0.08
"""The share of judgements that are no JSON, or end in the midst of it: they are kept, and asked to be repaired."""
TIMEOUT_SECONDS = 3.0
SLOW_SECONDS = 0.02
"""The most that any other answer waits."""
NAME = re.compile(r"request-[0-9a-f]{24}")


class BadEndpoint(Ending):
    """The endpoint.

    Args:
        seed: of which requests are spoilt, and how.

    Attributes:
        faulty: the share of requests that meet a fault.
        asked: the names of the requests since `begin`, in their order.
        answered: name -> how often it was given a whole answer.
    """

    def __init__(self, *seed: int | str) -> None:
        super().__init__(_Handler)
        self.seed, self.faulty = seed, FAULTY
        self.answered: Counter[str] = Counter()
        self.seen: Counter[str] = Counter()
        self.begin()

    @property
    def address(self) -> str:
        """What a manifest names."""
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def begin(self, at: int = 0, is_answered: bool = False, act: Callable[[], None] = lambda: None) -> None:
        """Count requests from here.

        Args:
            at: the request, counted from 1, at which something is done; 0 for none.
            is_answered: whether it is answered before that, where no fault prevents it.
            act: what is done.
        """
        with self.lock:
            self.asked: list[str] = []
            self.at, self.is_answered, self.act = at, is_answered, act

    def draw(self, *what: int | str) -> float:
        """A number in [0, 1) by hash."""
        return seeded_key(*self.seed, *what) / 2**64


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: BadEndpoint

    def handle_one_request(self) -> None:
        """Wait for a request and answer it; whoever asks may be killed at any time."""
        try:
            super().handle_one_request()
        except ConnectionError:
            self.close_connection = True

    def do_POST(self) -> None:
        """Answer, or not."""
        content = self.rfile.read(size := int(self.headers["Content-Length"]))
        if len(content) < size:  # whoever asked was killed
            return
        name, server = name_of(content), self.server
        with server.lock:
            server.asked.append(name)
            number, is_now = server.seen[name], len(server.asked) == server.at
            server.seen[name] += 1
        if is_now and not server.is_answered:
            server.act()
        place = server.draw("fault", name, number) / max(server.faulty, 1e-9)
        time.sleep(SLOW_SECONDS * server.draw("slow", name, number))
        self._reply(FAULTS[int(place * len(FAULTS))] if place < 1 else "", name, reply_to(content))
        if is_now and server.is_answered:
            server.act()

    def _reply(self, fault: str, name: str, text: str) -> None:
        body = json.dumps(
            {
                "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}],
                "usage": {"prompt_tokens": 100, "completion_tokens": len(text.split())},
            }
        ).encode()
        if fault in ("drop", "hang"):
            if fault == "hang":
                self.server.done.wait(1.5 * TIMEOUT_SECONDS)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            return
        status = int(fault) if fault.isdecimal() else 200
        if status != 200:
            body = b'{"error": {"message": "busy"}}'
        elif fault == "page":
            body = b"<html>be back soon</html>"
        elif not fault:
            with self.server.lock:
                self.server.answered[name] += 1
        head = f"HTTP/1.1 {status} -\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        self.close_connection = fault == "half"
        self.wfile.write(head.encode() + (body[: len(body) // 2] if fault == "half" else body))

    def log_message(self, *arguments: Any) -> None:
        """Say nothing."""


def name_of(content: bytes) -> str:
    """What a request is called by its answer."""
    return f"request-{hashlib.sha256(content).hexdigest()[:24]}"


def reply_to(content: bytes) -> str:
    """The text of the answer to a request: what it asks for as far as a program can, by hash, with its name in it."""
    body, name = json.loads(content), name_of(content)
    asked = "\n".join(message["content"] for message in body["messages"])
    wanted = next((key for key in ("better", "score") if f'"{key}"' in asked), None)
    key = seeded_key("reply", name)
    if wanted is None:
        return f"{name} says that " + " ".join(WORDS[key >> 5 * at & 15] for at in range(12)) + "."
    value: Any = _better(asked) if wanted == "better" else key % 6
    text = json.dumps({"reason": name, wanted: value})
    nonsense = (key >> 32) % 1000 / 1000 / NONSENSE
    return text if nonsense >= 1 else text[:-4] if nonsense < 0.5 else f"I would rather not, {name}."


def _better(asked: str) -> str:
    """Which of two answers is preferred: the same one in either order."""
    first, second = (
        seeded_key("better", asked.partition(f"<{one}>")[2].partition(f"</{one}>")[0]) for one in ("first", "second")
    )
    return "first" if first > second else "second"


WORDS = (
    "rivers",
    "bridges",
    "letters",
    "winters",
    "carry",
    "follow",
    "remember",
    "measure",
    "old",
    "slow",
    "quiet",
    "green",
    "near",
    "beyond",
    "without",
    "under",
)


def kept_answers(store: Path, owner: str = "") -> Counter[str]:
    """Of which requests a store keeps answers, and how often: all, or those that the folder of a stage asked for."""
    return Counter(
        name
        for path in (store / "answers").rglob(f"{owner.replace('~', '-')}*.jsonl")
        for line in path.read_text().splitlines()
        for name in NAME.findall(line)[:1]
    )
