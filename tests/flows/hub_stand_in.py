"""A fake Hugging Face hub on the loopback address with the HTTP endpoints that uploads
use.
"""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit


class Hub:
    """In-memory data sets: name -> path -> content.

    Attributes:
        files: content by data set and path.
        private: names of private data sets.
        commits: paths of each commit, in order.
        tokens: credentials sent with requests.
    """

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.private: set[str] = set()
        self.commits: list[list[str]] = []
        self.tokens: set[str] = set()
        self.unknown: list[str] = []
        self.url = ""

    def create(self, request: dict[str, Any]) -> tuple[int, Any]:
        name = f"{request.get('organization') or 'user'}/{request['name'].rpartition('/')[2]}"
        if name in self.files:
            return 409, {
                "error": "You already created this dataset repo",
                "url": f"{self.url}/datasets/{name}",
            }
        self.files[name] = {".gitattributes": b""}
        if request.get("private") or request.get("visibility") == "private":
            self.private.add(name)
        return 200, {"url": f"{self.url}/datasets/{name}", "name": name, "id": name}

    def commit(self, name: str, body: bytes) -> tuple[int, Any]:
        entries = [json.loads(line) for line in body.splitlines()]
        paths = []
        for entry in entries:
            if entry["key"] == "file":
                assert entry["value"]["encoding"] == "base64"
                self.files[name][entry["value"]["path"]] = base64.b64decode(
                    entry["value"]["content"]
                )
                paths.append(entry["value"]["path"])
        self.commits.append(paths)
        return 200, {
            "commitOid": f"{len(self.commits):040x}",
            "commitUrl": f"{self.url}/datasets/{name}/commit/x",
            "success": True,
            "hookOutput": "",
        }

    def infos(self, name: str, paths: list[str]) -> list[dict[str, Any]]:
        entries = []
        for path in paths:
            path = path.strip("/")
            if path in self.files[name]:
                entries.append(self.info(name, path))
            elif any(
                file_path.startswith(f"{path}/") for file_path in self.files[name]
            ):
                entries.append(
                    {"type": "directory", "path": path, "oid": "0" * 40, "size": 0}
                )
        return entries

    def info(self, name: str, path: str) -> dict[str, Any]:
        return {
            "type": "file",
            "path": path,
            "size": len(self.files[name][path]),
            "oid": "0" * 40,
        }

    def tree(self, name: str, folder: str) -> tuple[int, Any]:
        inside = [
            path
            for path in self.files[name]
            if not folder or path.startswith(f"{folder}/")
        ]
        if folder and not inside:
            return 404, {"error": "EntryNotFound"}
        skip = len(folder) + 1 if folder else 0
        folders = sorted(
            {
                path[: skip + path[skip:].index("/")]
                for path in inside
                if "/" in path[skip:]
            }
        )
        return 200, [
            *self.infos(name, folders),
            *(self.info(name, path) for path in inside if "/" not in path[skip:]),
        ]

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        parts = unquote(urlsplit(path).path).strip("/").split("/")
        if parts == ["api", "repos", "create"]:
            return self.create(json.loads(body))
        if parts == ["api", "validate-yaml"]:
            return 200, {"errors": [], "warnings": []}
        if parts[:2] != ["api", "datasets"] or len(parts) < 4:
            return 404, {"error": "not found"}
        name, verb = f"{parts[2]}/{parts[3]}", parts[4] if len(parts) > 4 else ""
        if name not in self.files:
            return 404, {"error": "Repository not found"}
        if verb == "preupload":
            return 200, {
                "files": [
                    {
                        "path": file["path"],
                        "uploadMode": "regular",
                        "shouldIgnore": False,
                    }
                    for file in json.loads(body)["files"]
                ]
            }
        if verb == "commit":
            return self.commit(name, body)
        if verb == "paths-info":
            request = json.loads(body)
            return 200, self.infos(name, request["paths"])
        if verb == "tree":
            return self.tree(name, "/".join(parts[6:]))
        if verb in ("", "revision"):
            return 200, {
                "id": name,
                "sha": "0" * 40,
                "private": name in self.private,
                "siblings": [{"rfilename": path} for path in self.files[name]],
            }
        return 404, {"error": "not found"}


@contextmanager
def serve_hub() -> Iterator[Hub]:
    """Serve an empty hub until the end of the block."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def respond(self) -> None:
            if token := self.headers.get("Authorization"):
                hub.tokens.add(token.removeprefix("Bearer "))
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, reply = self.content() or hub.answer(self.command, self.path, body)
            if status == 404:
                hub.unknown.append(f"{self.command} {self.path}")
            data = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
            self.send_response(status)
            for name, value in (
                ("Content-Length", str(len(data))),
                ("Content-Type", "application/json"),
                ("X-Repo-Commit", "0" * 40),
                ("ETag", '"0"'),
                ("X-Error-Code", "EntryNotFound"),
            ):
                if name != "X-Error-Code" or status == 404:
                    self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def content(self) -> tuple[int, bytes] | None:
            """Return the status and bytes if the path is that of a file."""
            parts = unquote(urlsplit(self.path).path).strip("/").split("/")
            if parts[0] != "datasets" or len(parts) < 6 or parts[3] != "resolve":
                return None
            file_content = hub.files.get("/".join(parts[1:3]), {}).get(
                "/".join(parts[5:])
            )
            return (404, b"") if file_content is None else (200, file_content)

        do_GET = do_POST = do_HEAD = respond

        def log_message(self, format: str, *args: Any) -> None:
            """Discard the message."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
