"""Reader of Parquet and Arrow files in a child process: a damaged file only loses
itself.

The process is reused for further files. Earlier files may have corrupted a failing
process, so a file that crashes it or needs too much memory is read again in a fresh
one: the result of a file depends on that file alone.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gristmill.core.files import is_local
from gristmill.core.processes import kill_child
from gristmill.dataprep.reading import compression, guarded
from gristmill.dataprep.reading.compression import CorruptFileError, RecordTooLongError
from gristmill.dataprep.reading.guarded import frame, read_frame
from gristmill.dataprep.reading.table_protocol import (
    TableAnswer,
    TableRequest,
    TableSettings,
)

if TYPE_CHECKING:
    import pyarrow as pa

MEMORY_BYTES = 2 << 30
"""Memory limit per file: a decoded batch and its copies."""
BATCH_SECONDS = 60.0
"""CPU limit per batch of rows."""


@dataclass(frozen=True)
class LostRows:
    """Unreadable rows in the middle of a file.

    Attributes:
        rows: their number; None if unknown.
        error: description.
    """

    rows: int | None
    error: str


class _EndedError(Exception):
    """The process ended without an answer, or lacked memory."""


@dataclass
class TableReader:
    """A process that reads tables, started for the first one and killed by the context
    manager.

    To be used by the thread that created it (Linux ends the process with that thread).

    Attributes:
        memory_bytes: limit of the memory on top of that at the start.
        seconds: CPU limit per batch of rows.
    """

    memory_bytes: int = MEMORY_BYTES
    seconds: float = BATCH_SECONDS
    rows: int | None = None
    """Number of rows in the current file's footer; None if it has no number."""
    _child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> TableReader:
        return self

    def __exit__(self, *error: object) -> None:
        self._kill()

    def batches(
        self,
        path: Path,
        form: str,
        columns: Sequence[str] | None = None,
        scalars: bool = False,
    ) -> Iterator[pa.RecordBatch | RecordTooLongError | LostRows]:
        """Yield the rows of a file in small validated batches; a row that is too long
        is replaced by its error.

        Args:
            path: a remote file is copied to this machine first.
            form: `parquet` or `arrow`.
            columns: names, or `a.b` for the column `a`; None for all.
            scalars: also read all columns that are neither nested nor bytes.

        Raises:
            CorruptFileError: the file is damaged, after all batches before the damage.
            OSError: the storage failed.
        """
        with _as_file(path) as file:
            request = TableRequest(
                path=str(file),
                form=form,
                columns=None if columns is None else list(columns),
                scalars=scalars,
            )
            num_yielded = 0
            is_fresh = self._child is None
            while True:
                try:
                    for number, batch in enumerate(self._answers(request), start=1):
                        if number > num_yielded:
                            num_yielded = number
                            yield batch
                    return
                except _EndedError as error:
                    if is_fresh:
                        raise CorruptFileError(
                            f"the {form.capitalize()} file is damaged: {error}"
                        ) from error
                    is_fresh = True

    def _answers(
        self, request: TableRequest
    ) -> Iterator[pa.RecordBatch | RecordTooLongError | LostRows]:
        """Yield the answers to a request; kills the process unless all were read.
        Raises _EndedError if the process ended.
        """
        import pyarrow as pa

        is_complete, self.rows = False, None
        try:
            self._send(request)
            while not is_complete:
                answer: TableAnswer = json.loads(self._frame())
                if "rows" in answer:
                    self.rows = answer["rows"]
                elif "lost" in answer:
                    yield LostRows(
                        answer["lost"],
                        f"the {request['form'].capitalize()} file is "
                        f"damaged: {answer['error']}",
                    )
                elif "batch" in answer:
                    yield (
                        pa.ipc.open_stream(self._frame()).read_next_batch()
                        if answer["batch"]
                        else (
                            RecordTooLongError(
                                "the row is longer than "
                                f"{compression.MAX_RECORD_BYTES >> 20} MiB"
                            )
                        )
                    )
                elif "errno" in answer:
                    raise OSError(answer["errno"], answer["error"])
                elif "memory" in answer:
                    raise _EndedError(
                        "reading it needed more than "
                        f"{self.memory_bytes >> 20} MiB of memory"
                    )
                elif "damage" in answer:
                    raise CorruptFileError(
                        f"the {request['form'].capitalize()} file "
                        f"is damaged: {answer['damage']}"
                    )
                else:
                    is_complete = True
        finally:
            if not is_complete:
                self._kill()

    def _send(self, request: TableRequest) -> None:
        if self._child is None:
            settings = TableSettings(
                memory_bytes=self.memory_bytes,
                seconds=self.seconds,
                row_bytes=compression.MAX_RECORD_BYTES,
            )
            self._child = guarded.start(
                "gristmill.dataprep.reading.table_child", settings
            )
        assert self._child.stdin is not None
        # the process died, which the missing answer reports
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.write(frame(request))
            self._child.stdin.flush()

    def _frame(self) -> bytes:
        assert self._child is not None
        assert self._child.stdout is not None
        content = read_frame(self._child.stdout)  # type: ignore[arg-type]
        if content is None:
            raise _EndedError(self._obituary(self._child.wait()))
        return content

    def _obituary(self, status: int) -> str:
        if status == -signal.SIGPROF:
            return f"a batch of its rows took more than {self.seconds:g} s"
        return (
            f"it crashed its reader (signal {-status})"
            if status < 0
            else f"its reader ended (status {status})"
        )

    def _kill(self) -> None:
        if self._child is not None:
            kill_child(self._child)
            self._child = None


@contextlib.contextmanager
def _as_file(path: Path) -> Iterator[Path]:
    """Yield a local path: the file itself, or a temporary copy of a remote file."""
    if is_local(path):
        yield path
        return
    with tempfile.NamedTemporaryFile(prefix="gristmill-table-") as copy:
        with path.open("rb") as stream:
            shutil.copyfileobj(stream, copy, compression.READ_BYTES)
        copy.flush()
        yield Path(copy.name)
