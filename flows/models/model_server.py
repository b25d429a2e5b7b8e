"""Server of a model folder, a child process of the stage that asks the model
(gristmill.dataprep.llm.local_endpoint).

    python -m gristmill.flows.models.model_server FOLDER PORT BATCH

It answers POST /v1/chat/completions on the loopback address with the fields that
gristmill's client sends, up to BATCH requests at a time. All users of a machine can
reach its loopback address, so each request needs the API key in the environment
variable GRISTMILL_API_KEY. GET /health needs no key.
"""

from __future__ import annotations

import hmac
import json
import os
import queue
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gristmill.dataprep.examples.conversations import Message, Role
from gristmill.dataprep.llm.local_endpoint import API_KEY_VARIABLE
from gristmill.flows.models.find_model import find_model
from gristmill.train.generation.language_model import LanguageModel, open_language_model
from gristmill.train.generation.sampling import Sampling
from gristmill.train.generation.scheduler import Progress, Request, Scheduler
from gristmill.train.generation.scheduler_thread import Engine, EngineStoppedError

CHECK_SECONDS = 1.0
"""A request that waits for its turn checks this often if its client is still
connected.
"""


class ChatMessage(BaseModel):
    """Message of a request."""

    model_config = ConfigDict(extra="forbid")

    role: Role
    content: str


class ChatRequest(BaseModel):
    """Body of a request. A field that would have no effect is an error."""

    model_config = ConfigDict(extra="forbid")

    model: str
    messages: list[ChatMessage] = Field(min_length=1)
    temperature: float
    top_p: float
    max_tokens: int = Field(ge=1)
    seed: int | None = None


class ModelServer(ThreadingHTTPServer):
    """HTTP server of one model.

    Args:
        language: the model with its tokenizer.
        scheduler: of that model; owned by the server.
        port: of the loopback address.
        api_key: required of each request.
    """

    request_queue_size = 4096  # a client opens up to `concurrency` connections at once

    def __init__(
        self, language: LanguageModel, scheduler: Scheduler, port: int, api_key: str
    ) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.authorization = f"Bearer {api_key}".encode()
        self._language = language
        self._engine = Engine(scheduler)
        # one prompt at a time, so that generation keeps its cores
        self._tokenizing = threading.Lock()

    def server_close(self) -> None:
        """Close the socket and stop generation."""
        super().server_close()
        self._engine.close()

    def complete(
        self, body: ChatRequest, client_left: Callable[[], bool]
    ) -> dict[str, object] | None:
        """Answer a conversation; None if the client leaves first.

        Raises:
            ValueError: the chat template refuses the conversation, it is too long, or
                the sampling is invalid.
            EngineStoppedError: generation failed.
        """
        messages: list[Message] = [
            {"role": message.role, "content": message.content}
            for message in body.messages
        ]
        language = self._language
        with self._tokenizing:
            prompt = language.chat_prompt(messages)
        seed = secrets.randbits(63) if body.seed is None else body.seed
        sampling = Sampling(body.temperature, body.top_p, seed)
        events: queue.SimpleQueue[Progress | BaseException] = queue.SimpleQueue()
        request = Request(prompt, body.max_tokens, language.stops, sampling)
        ticket = self._engine.submit(request, events.put)
        ids: list[int] = []
        finish_reason = None
        while finish_reason is None:
            if client_left():
                self._engine.cancel(ticket)
                return None
            try:
                event = events.get(timeout=CHECK_SECONDS)
            except queue.Empty:
                continue
            if isinstance(event, BaseException):
                raise EngineStoppedError(str(event)) from event
            ids += event.tokens
            finish_reason = event.finish
        message = {"role": "assistant", "content": language.decode(ids)}
        return {
            "object": "chat.completion",
            "model": body.model,
            "choices": [
                {"index": 0, "message": message, "finish_reason": finish_reason}
            ],
            "usage": {
                "prompt_tokens": len(prompt),
                "completion_tokens": len(ids),
                "total_tokens": len(prompt) + len(ids),
            },
        }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        """Answer /health."""
        self._send(
            HTTPStatus.OK if self.path == "/health" else HTTPStatus.NOT_FOUND, {}
        )

    def do_POST(self) -> None:
        """Answer a chat completion."""
        server = cast(ModelServer, self.server)
        if not hmac.compare_digest(
            self.headers.get("authorization", "").encode(), server.authorization
        ):
            self.close_connection = True  # without reading the body
            self._refuse(HTTPStatus.FORBIDDEN, "the API key is missing or wrong")
            return
        content = self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.path != "/v1/chat/completions":
            self._refuse(
                HTTPStatus.NOT_FOUND,
                f"{self.path} is not served; POST to /v1/chat/completions",
            )
            return
        try:
            completion = server.complete(
                ChatRequest.model_validate_json(content), self._client_left
            )
        except ValidationError as error:
            problem = error.errors()[0]
            field = ".".join(map(str, problem["loc"])) or "body"
            self._refuse(HTTPStatus.BAD_REQUEST, f"{field}: {problem['msg']}")
        except ValueError as error:
            self._refuse(HTTPStatus.BAD_REQUEST, str(error))
        except EngineStoppedError as error:
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
        else:
            if completion is not None:
                self._send(HTTPStatus.OK, completion)

    def _client_left(self) -> bool:
        """True if the client has closed the connection."""
        try:
            return self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except ConnectionError:
            return True

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        self._send(status, {"error": {"message": message}})

    def _send(self, status: HTTPStatus, content: Mapping[str, object]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Keep requests out of the log, of which errors show the last lines."""


def main(argv: Sequence[str]) -> None:
    """Serve a model folder until the process is ended."""
    folder, port, batch = argv
    try:
        folders = find_model(folder, None)
        language = open_language_model(folders.weights, folders.tokenizer)
    except (FileNotFoundError, ValueError) as error:
        sys.exit(str(error))
    scheduler = Scheduler(language.model, int(batch))
    with ModelServer(
        language, scheduler, int(port), os.environ[API_KEY_VARIABLE]
    ) as server:
        server.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1:])
