"""Guarded extraction: a page that hangs, crashes or eats memory costs only itself."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gristmill.dataprep.readers.extraction_guard import (
    ExtractorError,
    Guard,
    extract_pages,
)
from gristmill.dataprep.readers.html import EXTRACTORS
from gristmill.dataprep.readers.records import (
    Dropped,
    Page,
    Read,
    Reading,
    Record,
    Rejected,
    Skipped,
)
from gristmill.mixtures.schema.sources import ExtractOptions
from tests.dataprep.process_state import is_running
from tests.servers import wait_for

EXTRACTOR = '''
"""An extractor that obeys the page."""
import os, signal, sys, time

seen = []

def obey(html, options):
    print("noise on standard output")
    seen.append(html)
    if html.startswith("spin"):
        while True:
            pass
    if html == "sleep":
        time.sleep(3600)
    if html == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if html == "crash unless first" and len(seen) > 2:  # the first is the warm-up
        os.kill(os.getpid(), signal.SIGSEGV)
    if html == "exit":
        os._exit(3)
    if html == "raise":
        raise ValueError("two\\nlines")
    if html == "eat memory":
        bytes(1 << 30)  # the system would lend it, for nothing touches it
    if html == "surrogate":
        return "a\\ud800b", {}
    if html == "seen":
        return str(len(seen) - 1), {}
    return html.upper(), {"title": "T"}
'''


@pytest.fixture
def extractor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "obedient_extractor.py").write_text(EXTRACTOR)
    monkeypatch.setenv(
        "PYTHONPATH",
        os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]),
    )
    return "obedient_extractor:obey"


def page(content: str | bytes, number: int = 1, **metadata: str) -> Page:
    encoded = content.encode() if isinstance(content, str) else content
    return Page(number, f"url#{number}", encoded, "utf-8", metadata=metadata)


def run(
    extractor: str,
    items: list[Read],
    reading: Reading | None = None,
    **limits: Any,
) -> list[Read]:
    with Guard(extractor, {}, **limits) as guard:
        return list(extract_pages(items, guard, reading or Reading()))


def texts(records: list[Read]) -> list[str]:
    return [
        item.text if isinstance(item, Record) else getattr(item, "error", "?")
        for item in records
    ]


def test_pages_become_documents_in_place(extractor: str) -> None:
    document = Record(2, "b", "not a page", "{}")
    items: list[Read] = [
        page("a", 1, url="u"),
        document,
        Skipped("x"),
        page("c", 3),
        Rejected(4, "bad"),
        page("", 5),
    ]
    assert run(extractor, items) == [
        Record(1, "url#1", "A", '{"title": "T", "url": "u"}'),
        document,
        Skipped("x"),
        Record(3, "url#3", "C", '{"title": "T"}'),
        Rejected(4, "bad"),
        Dropped(5, "extract/empty", "url#5"),
    ]
    assert run(
        extractor, [page("a", 1, url="u")], reading=Reading(metadata=("url",))
    ) == [Record(1, "url#1", "A", '{"url": "u"}')]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ("spin", "timed out after 0.2 s"),
        ("sleep", "timed out after 0.2 s"),
        ("crash", "signal 11"),
        ("exit", "status 3"),
        ("raise", "ValueError: two lines"),
        ("surrogate", "surrogate \\ud800"),
        (b"\xff", "UTF-8: byte 0xff at position 0"),
        ("eat memory", "512 MiB"),
    ],
)
def test_failing_page_is_rejected_alone(
    extractor: str, bad: str | bytes, error: str
) -> None:
    items: list[Read] = [
        page("a", 1),
        page("b", 2),
        page(bad, 3),
        page("d", 4),
        page("e", 5),
    ]
    *before, rejected, fourth, fifth = run(
        extractor, items, seconds=0.2, memory_bytes=512 << 20
    )
    assert texts([*before, fourth, fifth]) == ["A", "B", "D", "E"]
    assert isinstance(rejected, Rejected)
    assert rejected.number == 3
    assert error in rejected.error


@pytest.mark.slow
def test_consecutive_failing_pages_keep_their_own_errors(extractor: str) -> None:
    items: list[Read] = [
        page("crash"),
        page("spin"),
        page("exit"),
        page("a"),
        page("raise"),
        page("crash"),
    ]
    facts = [
        "signal 11",
        "0.2 s",
        "status 3",
        "A",
        "ValueError: two lines",
        "signal 11",
    ]
    for text, fact in zip(
        texts(run(extractor, items, seconds=0.2)), facts, strict=True
    ):
        assert fact in text


def test_page_that_fails_after_others_is_retried_in_a_fresh_process(
    extractor: str,
) -> None:
    items: list[Read] = [page("a"), page("b"), page("crash unless first"), page("seen")]
    assert texts(run(extractor, items)) == ["A", "B", "CRASH UNLESS FIRST", "2"]


def test_many_and_large_pages_keep_their_order(extractor: str) -> None:
    sizes = [10, 3_000_000, 5, 200_000, 9_000_000, *range(1, 200)]
    contents = [chr(97 + number % 26) * size for number, size in enumerate(sizes)]
    records = run(
        extractor, [page(content, number) for number, content in enumerate(contents)]
    )
    assert texts(records) == [content.upper() for content in contents]


def test_reading_ahead_is_bounded(extractor: str) -> None:
    read_numbers = []

    def items() -> Iterator[Read]:
        for number in range(5000):
            read_numbers.append(number)
            yield page("x", number) if number % 100 == 0 else Skipped("s")

    with Guard(extractor, {}) as guard:
        results = extract_pages(items(), guard, Reading())
        next(results)
        assert len(read_numbers) <= 1024


def test_no_process_starts_without_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    assert run("resiliparse", [Skipped("x")]) == [Skipped("x")]


def test_extractor_that_does_not_start_is_named(
    extractor: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ExtractorError, match="'obedient_extractor:missing'"):
        run("obedient_extractor:missing", [page("a")])
    assert "has no attribute 'missing'" in capfd.readouterr().err


def test_guard_ends_its_process(extractor: str) -> None:
    with Guard(extractor, {}) as guard:
        guard.submit(page("spin"))
        assert guard._child is not None
        pid = guard._child.pid
    assert not is_running(pid)


@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux ends children with their parent"
)
def test_extractor_ends_with_its_parent(extractor: str) -> None:
    code = f"""
from gristmill.dataprep.readers.extraction_guard import Guard
from gristmill.dataprep.readers.records import Page
guard = Guard({extractor!r}, {{}}, 1e6)
guard.submit(Page(1, "l", b"spin", "utf-8"))
print(guard._child.pid, flush=True)
guard.collect()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_running(pid)
        parent.kill()
    wait_for(lambda: not is_running(pid), "the end of the extractor")


def test_built_in_extractors_run_guarded() -> None:
    html = (
        b"<html><head><title>T</title></head><body><p>"
        + b"Some sentence of the text. " * 20
        + b"</p></body></html>"
    )
    options = ExtractOptions().model_dump()
    for extractor in EXTRACTORS:
        with Guard(extractor, options) as guard:
            (record,) = extract_pages([Page(1, "l", html)], guard, Reading())
        assert isinstance(record, Record)
        assert record.text == ("Some sentence of the text. " * 20).strip()
        assert '"title": "T"' in record.metadata
