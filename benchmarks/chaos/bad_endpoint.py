"""Chat endpoint that is slow, drops connections, refuses, cuts answers and talks
nonsense, and records its answers.

Its final answer is a function of the request alone, and names it: kept answers show
their requests, and a disturbed run can be compared with an undisturbed one.
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
"""A cut connection, two refusals, half a body, a page instead of JSON, no answer within
the time limit.
"""
FAULTY = 0.35
NONSENSE = 0.08
"""Share of judgements that are not JSON, or cut: they are kept, and the model is asked
to repair them.
"""
TIMEOUT_SECONDS = 3.0
SLOW_SECONDS = 0.02
"""Longest delay of any other answer."""
NAME = re.compile(r"request-[0-9a-f]{24}")


class BadEndpoint(Ending):
    """The endpoint.

    Args:
        seed: of the faults.

    Attributes:
        faulty: share of requests with a fault.
        asked: names of the requests since `begin`, in their order.
        answered: name -> number of whole answers.
    """

    def __init__(self, *seed: int | str) -> None:
        super().__init__(_Handler)
        self.seed, self.faulty = seed, FAULTY
        self.answered: Counter[str] = Counter()
        self.seen: Counter[str] = Counter()
        self.begin()

    @property
    def address(self) -> str:
        """Address for a manifest."""
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def begin(
        self,
        at: int = 0,
        is_answered: bool = False,
        act: Callable[[], None] = lambda: None,
    ) -> None:
        """Count requests from now on.

        Args:
            at: request, counted from 1, at which `act` is called; 0 for none.
            is_answered: True if it is answered before that, unless a fault prevents it.
            act: called once.
        """
        with self.lock:
            self.asked: list[str] = []
            self.at, self.is_answered, self.act = at, is_answered, act

    def draw(self, *key: int | str) -> float:
        """Return a number in [0, 1) by hash."""
        return seeded_key(*self.seed, *key) / 2**64


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: BadEndpoint

    def handle_one_request(self) -> None:
        """Wait for a request and answer it; the client may be killed at any time."""
        try:
            super().handle_one_request()
        except ConnectionError:
            self.close_connection = True

    def do_POST(self) -> None:
        """Answer a request, or let it fail."""
        size = int(self.headers["Content-Length"])
        content = self.rfile.read(size)
        if len(content) < size:  # the client was killed
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
        self._reply(
            FAULTS[int(place * len(FAULTS))] if place < 1 else "",
            name,
            reply_to(content),
        )
        if is_now and server.is_answered:
            server.act()

    def _reply(self, fault: str, name: str, text: str) -> None:
        body = json.dumps(
            {
                "choices": [
                    {
                        "index": 0,
                        "message": {"role": "assistant", "content": text},
                        "finish_reason": "stop",
                    }
                ],
                "usage": {"prompt_tokens": 100, "completion_tokens": len(text.split())},
            }
        ).encode()
        if fault in ("drop", "hang"):
            if fault == "hang":
                self.server.done.wait(1.5 * TIMEOUT_SECONDS)
            self.connection.setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
            )
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
        head = (
            f"HTTP/1.1 {status} -\r\ncontent-type: "
            f"application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        self.close_connection = fault == "half"
        self.wfile.write(
            head.encode() + (body[: len(body) // 2] if fault == "half" else body)
        )

    def log_message(self, *arguments: Any) -> None:
        """Print nothing."""


def name_of(content: bytes) -> str:
    """Return the name of a request in its answer."""
    return f"request-{hashlib.sha256(content).hexdigest()[:24]}"


def reply_to(content: bytes) -> str:
    """Return the text of the answer to a request: of the requested form, by hash, with
    the request's name in it.
    """
    body, name = json.loads(content), name_of(content)
    prompt = "\n".join(message["content"] for message in body["messages"])
    key = seeded_key("reply", name)
    value: Any
    if '"better"' in prompt:
        field, value = "better", _better(prompt)
    elif '"score"' in prompt:
        field, value = "score", key % 6
    else:
        return (
            f"{name} says that "
            + " ".join(WORDS[key >> 5 * place & 15] for place in range(12))
            + "."
        )
    text = json.dumps({"reason": name, field: value})
    nonsense = (key >> 32) % 1000 / 1000 / NONSENSE
    if nonsense >= 1:
        return text
    return text[:-4] if nonsense < 0.5 else f"I would rather not, {name}."


def _better(prompt: str) -> str:
    """Return the preferred one of two answers: the same in either order."""
    first, second = (
        seeded_key(
            "better", prompt.partition(f"<{place}>")[2].partition(f"</{place}>")[0]
        )
        for place in ("first", "second")
    )
    return "first" if first > second else "second"


WORDS = """
rivers bridges letters winters carry follow remember measure old slow quiet green near beyond without under
""".split()


def kept_answers(store: Path, owner: str = "") -> Counter[str]:
    """Count the requests whose answers a store keeps: all, or those of a stage's
    folder.
    """
    names = Counter[str]()
    for path in (store / "answers").rglob(f"{owner.replace('~', '-')}*.jsonl"):
        for line in path.read_text().splitlines():
            names.update(NAME.findall(line)[:1])
    return names
