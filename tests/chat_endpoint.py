"""A chat completions endpoint on the loopback address, in its own thread, with scripted
answers.

A behaviour decides about each request: a function (prompt, number of earlier requests
with it) -> a text, which becomes the answer, or one of `Refuse`, `Drop`, `Raw`, `Cut`
and `Late`. The endpoint counts its answers by prompt.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self


@dataclass(frozen=True)
class Refuse:
    """A response whose status is not 200."""

    status: int
    message: str = "no"
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Drop:
    """Close the connection without an answer."""


@dataclass(frozen=True)
class Raw:
    """A response with these bytes as its body."""

    body: bytes


@dataclass(frozen=True)
class Cut:
    """An answer whose connection is closed after half of its body."""

    text: str


@dataclass(frozen=True)
class Late:
    """An answer that waits for `Endpoint.release`."""

    text: str


@dataclass(frozen=True)
class Ended:
    """An answer that was truncated at the token limit."""

    text: str


Does = str | Refuse | Drop | Raw | Cut | Late | Ended
Behaviour = Callable[[str, int], Does]
PHRASES = {200: "OK"}


class Endpoint:
    """A context manager that serves until it exits.

    Attributes:
        asked: prompt -> number of its requests.
        answered: prompt -> number of its completions.
        bodies: the body of every request.
        headers: headers of the last request.
        most_at_once: largest number of concurrent requests.
    """

    def __init__(
        self,
        behaviour: Behaviour = lambda prompt, before: f"answer to {prompt}",
        port: int = 0,
    ) -> None:
        self.behaviour = behaviour
        self.asked: Counter[str] = Counter()
        self.answered: Counter[str] = Counter()
        self.bodies: list[dict[str, Any]] = []
        self.headers: dict[str, str] = {}
        self.most_at_once = self._now = 0
        self._port = port
        self._loop = asyncio.new_event_loop()
        self._released = asyncio.Event()

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._serve, "127.0.0.1", self._port), self._loop
        ).result()
        self._port = self._server.sockets[0].getsockname()[1]
        return self

    def __exit__(self, *error: object) -> None:
        async def close() -> None:
            self._server.close()
            tasks = [
                task
                for task in asyncio.all_tasks()
                if task is not asyncio.current_task()
            ]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def url(self) -> str:
        """Base URL for clients."""
        return f"http://127.0.0.1:{self._port}/v1"

    def release(self) -> None:
        """Send the answers that are `Late`."""
        self._loop.call_soon_threadsafe(self._released.set)

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            while await self._serve_one(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _serve_one(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {
            name.lower(): value
            for name, _, value in (line.partition(": ") for line in head[1:] if line)
        }
        body = json.loads(await reader.readexactly(int(headers["content-length"])))
        prompt = (
            body["messages"][-1]["content"]
            if "messages" in body
            else json.dumps(body["prompt"])
        )
        earlier_requests = self.asked[prompt]
        self.asked[prompt] += 1
        self.bodies.append(body)
        self.headers = headers
        self._now += 1
        self.most_at_once = max(self.most_at_once, self._now)
        try:
            return await self._answer(
                self.behaviour(prompt, earlier_requests), prompt, writer
            )
        finally:
            self._now -= 1

    async def _answer(
        self, action: Does, prompt: str, writer: asyncio.StreamWriter
    ) -> bool:
        if isinstance(action, Drop):
            return False
        if isinstance(action, Late):
            await self._released.wait()
        if isinstance(action, Refuse):
            content = json.dumps({"error": {"message": action.message}}).encode()
            return await self._send(writer, action.status, content, action.headers)
        if isinstance(action, Raw):
            return await self._send(writer, 200, action.body)
        text = action if isinstance(action, str) else action.text
        content = json.dumps(
            {
                "id": "1",
                "object": "chat.completion",
                "choices": [
                    {
                        "index": 0,
                        "message": {"role": "assistant", "content": text},
                        "finish_reason": "length"
                        if isinstance(action, Ended)
                        else "stop",
                    }
                ],
                "usage": {
                    "prompt_tokens": len(prompt.split()),
                    "completion_tokens": len(text.split()),
                },
            }
        ).encode()
        if isinstance(action, Cut):
            await self._send(writer, 200, content, half=True)
            return False
        self.answered[prompt] += 1
        return await self._send(writer, 200, content)

    async def _send(
        self,
        writer: asyncio.StreamWriter,
        status: int,
        content: bytes,
        headers: Mapping[str, str] | None = None,
        half: bool = False,
    ) -> bool:
        lines = [
            f"HTTP/1.1 {status} {PHRASES.get(status, 'No')}",
            "content-type: application/json",
            f"content-length: {len(content)}",
            *(f"{name}: {value}" for name, value in (headers or {}).items()),
        ]
        writer.write(
            "\r\n".join((*lines, "", "")).encode()
            + content[: len(content) // 2 if half else None]
        )
        await writer.drain()
        return True
