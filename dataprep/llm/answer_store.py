"""Store of answers by key, so that no stage or attempt asks for an answer again.

    STORE/answers/<settings>/
        settings.json             model and settings of all answers in the folder
        <owner>~<unique>.jsonl    a line per answer: the key, a space, the answer as
                                  JSON with the id of the document that the prompt is
                                  about as `of`; for another document with the same
                                  prompt: the key, ` of `, its id

Each process appends to its own file, one write per answer, so that killing it loses
only the answer being written. An incomplete last line is skipped. Prompts are not
stored. The index takes about 300 bytes of memory per answer. Object stores cannot
append: there, a file is written after every UNSAVED_ANSWERS answers and at the end.
`forget_answers` overwrites answers with blanks in place, so that offsets stay valid for
concurrent readers and writers.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import uuid
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from gristmill.core.files import (
    as_path,
    file_names,
    is_local,
    json_digest,
    write_bytes,
    write_json,
)
from gristmill.dataprep.llm.budget import Spending, spending_on
from gristmill.dataprep.llm.response_parsing import Completion

SETTINGS_CHARACTERS = 16
UNSAVED_ANSWERS = 100
SETTINGS = "settings.json"
END = ".jsonl"
KEY_CHARACTERS = 64
Settings = Mapping[str, object]
"""Model, its identity and its sampling, as JSON."""
_WHOLE = re.compile(rb"[0-9a-f]{%d} \{.*\}\n\Z" % KEY_CHARACTERS, re.DOTALL)
_DOCUMENT_LINE = re.compile(
    rb'([0-9a-f]{%d}) (?:\{"of":"|of )([0-9a-f]{32})' % KEY_CHARACTERS
)
"""Line that names a document: an answer or a note."""
_NOTE_LINE = re.compile(rb"[0-9a-f]{%d} of [0-9a-f]{32}\n\Z" % KEY_CHARACTERS)


def key_of(settings: bytes, body: bytes, number: int) -> str:
    """Key of an answer: 64 hexadecimal digits.

    Args:
        settings: model and its identity, as `canonical_json`.
        body: of the request, as sent.
        number: index among several answers to the same request.
    """
    digest = hashlib.sha256(b"%d %d " % (number, len(settings)))
    digest.update(settings)
    digest.update(body)
    return digest.hexdigest()


class KeptAnswers:
    """Answers of one model with the same settings. One thread writes; any may read.

    Args:
        root: `STORE/answers`.
        settings: the model and its settings, as JSON.
        owner: output that asks; its requests count as its spending.
    """

    def __init__(self, root: Path, settings: Settings, owner: str) -> None:
        self._folder = _folder_of(root, settings)
        self._folder.mkdir(parents=True, exist_ok=True)
        if not (self._folder / SETTINGS).exists():
            write_json(self._folder / SETTINGS, dict(settings))
        self._is_local = is_local(self._folder)
        self._places: dict[bytes, tuple[Path, int]] = {}
        self._unsaved: dict[str, bytes] = {}
        self._unsaved_notes: list[bytes] = []
        self._noted: set[bytes] = set()
        self._owner = owner
        self._own_path = self._folder / self._new_file_name()
        self._own: BinaryIO | None = None
        self.spent = Spending()
        """Spending of the owner in earlier attempts."""
        for path in _files(self._folder):
            is_own = path.name.startswith(f"{owner}~")
            offset = 0
            for line in _lines(path):
                if _WHOLE.match(line):
                    key = bytes.fromhex(line[:KEY_CHARACTERS].decode())
                    self._places[key] = path, offset
                    if is_own:
                        self.spent += spending_on(json.loads(line[KEY_CHARACTERS:]))
                elif _NOTE_LINE.match(line):
                    self._noted.add(line)
                offset += len(line)

    def __len__(self) -> int:
        return len(self._places) + len(self._unsaved)

    def find(self, key: str) -> Completion | None:
        """Answer of a key; None if it is unknown or has been forgotten meanwhile."""
        line = self._unsaved.get(key)
        if line is None:
            place = self._places.get(bytes.fromhex(key))
            if place is None:
                return None
            path, offset = place
            with path.open("rb") as stream:
                stream.seek(offset)
                line = stream.readline()
        return json.loads(line[KEY_CHARACTERS:]) if _WHOLE.match(line) else None

    def keep(
        self, key: str, answer: Completion, about: str | None = None
    ) -> Completion:
        """Store an answer; it survives a crash of the process once this returns.

        Args:
            key: see `key_of`.
            answer: as the endpoint gave it.
            about: ids of the documents that the prompt is about, in hexadecimal,
                separated by blanks.

        Returns:
            stored record: the answer, with the first id as `of`.
        """
        first, _, more_documents = (about or "").partition(" ")
        record: Completion = {"of": first, **answer} if first else answer
        line = f"{key} {json.dumps(record, ensure_ascii=False, separators=(',', ':'))}\n".encode(
            "utf-8", "replace"
        )
        if self._is_local:
            self._places[bytes.fromhex(key)] = self._append(line)
        else:
            self._unsaved[key] = line
        self.note(key, more_documents)
        return record

    def note(self, key: str, about: str) -> None:
        """Record that an answer is also about further documents."""
        for document in about.split():
            line = f"{key} of {document}\n".encode()
            if line in self._noted:
                continue
            self._noted.add(line)
            if self._is_local:
                self._append(line)
            else:
                self._unsaved_notes.append(line)
        if len(self._unsaved) + len(self._unsaved_notes) >= UNSAVED_ANSWERS:
            self._save()

    def _append(self, line: bytes) -> tuple[Path, int]:
        """Append a line to the file of this process and return its place."""
        if self._own is None:
            self._own = self._own_path.open("xb")
        offset = self._own.tell()
        self._own.write(line)
        self._own.flush()
        return self._own_path, offset

    def close(self) -> None:
        """Save unsaved answers and close the file of this process."""
        self._save()
        if self._own is not None:
            os.fsync(self._own.fileno())
            self._own.close()
            self._own = None

    def _new_file_name(self) -> str:
        return f"{self._owner}~{uuid.uuid4().hex[:12]}{END}"

    def _save(self) -> None:
        if not self._unsaved and not self._unsaved_notes:
            return
        path = self._folder / self._new_file_name()
        write_bytes(path, b"".join([*self._unsaved.values(), *self._unsaved_notes]))
        offset = 0
        for key, line in self._unsaved.items():
            self._places[bytes.fromhex(key)] = path, offset
            offset += len(line)
        self._unsaved = {}
        self._unsaved_notes = []


def _folder_of(root: Path, settings: Settings) -> Path:
    return root / json_digest(settings)[:SETTINGS_CHARACTERS]


def has_answers(root: Path, settings: Settings) -> bool:
    """Return True if the store has an answer of the model with these settings."""
    folder = _folder_of(root, settings)
    return folder.exists() and bool(_files(folder))


def forget_answers(
    root: Path, documents: Collection[str], remove: bool
) -> dict[str, int]:
    """Forget the answers about some documents, even if further documents share the
    prompt.

    Args:
        root: `STORE/answers`.
        documents: ids, in hexadecimal.
        remove: overwrite the answers; otherwise only count them.

    Returns:
        `answers`, the number about these documents, and `unknown`, the number of
        answers that name no document.
    """
    folders = sorted(root.iterdir()) if root.exists() else []
    files = [path for folder in folders if folder.is_dir() for path in _files(folder)]
    ids = {document.encode() for document in documents}
    forgotten = set[bytes]()
    named_keys = set[bytes]()
    unnamed = set[bytes]()
    for path in files:
        for line in _lines(path):
            if (match := _DOCUMENT_LINE.match(line)) is not None:
                named_keys.add(match[1])
                if match[2] in ids:
                    forgotten.add(match[1])
            elif _WHOLE.match(line):
                unnamed.add(line[:KEY_CHARACTERS])
    answer_count = (
        sum(_blank(path, forgotten, remove) for path in files) if forgotten else 0
    )
    return {"answers": answer_count, "unknown": len(unnamed - named_keys)}


def _blank(path: Path, keys: Collection[bytes], remove: bool) -> int:
    """Overwrite the lines of some keys with blanks and return the number of answers
    among them.
    """
    lines = list(_lines(path))
    answer_count = 0
    offset = 0
    blanked = list[tuple[int, int]]()
    for number, line in enumerate(lines):
        if line[:KEY_CHARACTERS] in keys:
            answer_count += _WHOLE.match(line) is not None
            lines[number] = b" " * (len(line) - 1) + line[-1:]
            blanked.append((offset, number))
        offset += len(line)
    if not remove or not blanked:
        return answer_count
    if not is_local(path):
        write_bytes(path, b"".join(lines))
        return answer_count
    descriptor = os.open(path, os.O_WRONLY)
    try:
        for place, number in blanked:
            os.pwrite(descriptor, lines[number], place)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return answer_count


def _files(folder: Path) -> list[Path]:
    """Files of answers in a folder, in order."""
    names = sorted(file_names(folder))
    return [folder / name for name in names if name.endswith(END)]


def _lines(path: Path) -> Iterator[bytes]:
    with as_path(path).open("rb") as stream:
        yield from stream
