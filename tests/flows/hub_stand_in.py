"""A fake Hugging Face hub on the loopback address with the HTTP endpoints that uploads,
listings and downloads use.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

NO_COMMIT = "0" * 40
LFS = (".parquet", ".safetensors")
"""Endings of files that are stored by the SHA-256 of their content."""
KINDS = ("datasets", "models")


class Hub:
    """In-memory data sets and models: name -> path -> content.

    Attributes:
        files: newest content by name and path.
        trees: content by name, commit and path.
        branches: commit of each branch or tag by name.
        private: names of private data sets.
        commits: paths of each commit, in order.
        tokens: credentials sent with requests.
        requests: method and path of each request, in order.
        refusals: number of further requests that the rate limit refuses.
    """

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.trees: dict[tuple[str, str], dict[str, bytes]] = {}
        self.branches: dict[str, dict[str, str]] = {}
        self.requests: list[str] = []
        self.refusals = 0
        self.private: set[str] = set()
        self.commits: list[list[str]] = []
        self.tokens: set[str] = set()
        self.unknown: list[str] = []
        self.url = ""

    def push(self, name: str, files: dict[str, bytes], branch: str = "main") -> str:
        """Commit files to a branch of a data set or model, and return the commit."""
        commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.files[name] = self.trees[name, commit] = files
        self.branches.setdefault(name, {})[branch] = commit
        return commit

    def commit_of(self, name: str, revision: str) -> str | None:
        """Return the commit of a revision; None if there is none of that name."""
        if name not in self.branches:
            return NO_COMMIT
        commit = self.branches[name].get(revision, revision)
        return commit if (name, commit) in self.trees else None

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

    @staticmethod
    def infos(files: dict[str, bytes], paths: list[str]) -> list[dict[str, Any]]:
        entries = []
        for path in paths:
            path = path.strip("/")
            if path in files:
                entries.append(file_info(path, files[path]))
            elif any(file_path.startswith(f"{path}/") for file_path in files):
                entries.append(
                    {"type": "directory", "path": path, "oid": NO_COMMIT, "size": 0}
                )
        return entries

    def tree(
        self, files: dict[str, bytes], folder: str, recursive: bool
    ) -> tuple[int, Any]:
        inside = [path for path in files if not folder or path.startswith(f"{folder}/")]
        if folder and not inside:
            return 404, {"error": "EntryNotFound"}
        if recursive:
            parents = {
                str(parent) for path in inside for parent in PurePosixPath(path).parents
            }
            below = {name for name in parents if len(name) > len(folder or ".")}
            return 200, self.infos(files, sorted({*inside, *below}))
        skip = len(folder) + 1 if folder else 0
        folders = sorted(
            {
                path[: skip + path[skip:].index("/")]
                for path in inside
                if "/" in path[skip:]
            }
        )
        return 200, [
            *self.infos(files, folders),
            *self.infos(files, [path for path in inside if "/" not in path[skip:]]),
        ]

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        parts = [unquote(part) for part in urlsplit(path).path.strip("/").split("/")]
        if parts == ["api", "repos", "create"]:
            return self.create(json.loads(body))
        if parts == ["api", "validate-yaml"]:
            return 200, {"errors": [], "warnings": []}
        if parts[0] != "api" or parts[1] not in KINDS or len(parts) < 4:
            return 404, {"error": "not found"}
        name, verb = f"{parts[2]}/{parts[3]}", parts[4] if len(parts) > 4 else ""
        if name not in self.files:
            return 404, {"error": "Repository not found", "code": "RepoNotFound"}
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
        commit = self.commit_of(name, parts[5] if len(parts) > 5 else "main")
        if commit is None:
            return 404, {"error": "Revision not found", "code": "RevisionNotFound"}
        files = self.trees.get((name, commit), self.files[name])
        if verb == "paths-info":
            return 200, self.infos(files, json.loads(body)["paths"])
        if verb == "tree":
            return self.tree(
                files, "/".join(parts[6:]), "recursive=true" in path.lower()
            )
        if verb in ("", "revision"):
            return 200, {
                "id": name,
                "sha": commit,
                "private": name in self.private,
                "siblings": [{"rfilename": path} for path in self.files[name]],
            }
        return 404, {"error": "not found"}


def file_info(path: str, content: bytes) -> dict[str, Any]:
    """Return the entry of a file in a listing, as the Hub has it."""
    blob = hashlib.sha1(b"blob %d\0%b" % (len(content), content)).hexdigest()
    entry: dict[str, Any] = {
        "type": "file",
        "path": path,
        "size": len(content),
        "oid": blob,
    }
    if path.endswith(LFS):
        sha256 = hashlib.sha256(content).hexdigest()
        entry["lfs"] = {"oid": sha256, "size": len(content), "pointerSize": 130}
    return entry


@contextmanager
def serve_hub() -> Iterator[Hub]:
    """Serve an empty hub until the end of the block."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def respond(self) -> None:
            if token := self.headers.get("Authorization"):
                hub.tokens.add(token.removeprefix("Bearer "))
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            hub.requests.append(f"{self.command} {urlsplit(self.path).path}")
            headers = {
                "Content-Type": "application/json",
                "X-Repo-Commit": NO_COMMIT,
                "ETag": '"0"',
            }
            reply: Any
            if hub.refusals:
                hub.refusals -= 1
                status, reply = 429, {"error": "Too many requests"}
                headers["Retry-After"] = "0"
            else:
                status, reply = self.content(headers) or hub.answer(
                    self.command, self.path, body
                )
            if status == 404:
                hub.unknown.append(f"{self.command} {self.path}")
                headers["X-Error-Code"] = (
                    reply.get("code") if isinstance(reply, dict) else None
                ) or "EntryNotFound"
            data = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
            self.send_response(status)
            for name, value in {"Content-Length": str(len(data)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def content(self, headers: dict[str, str]) -> tuple[int, bytes] | None:
            """Return the status and bytes if the path is that of a file, and set its
            headers.
            """
            parts = unquote(urlsplit(self.path).path).strip("/").split("/")
            parts = parts[1:] if parts[0] == "datasets" else parts
            if len(parts) < 5 or parts[2] != "resolve":
                return None
            name, path = "/".join(parts[:2]), "/".join(parts[4:])
            commit = hub.commit_of(name, parts[3]) or NO_COMMIT
            files = hub.trees.get((name, commit), hub.files.get(name, {}))
            if path not in files:
                return 404, b""
            entry = file_info(path, files[path])
            headers["X-Repo-Commit"] = commit
            headers["ETag"] = f'"{entry.get("lfs", entry)["oid"]}"'
            span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
            if span is None:
                return 200, files[path]
            end = int(span[2]) + 1 if span[2] else None
            return 206, files[path][int(span[1]) : end]

        do_GET = do_POST = do_HEAD = respond

        def log_message(self, format: str, *args: Any) -> None:
            """Discard the message."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
