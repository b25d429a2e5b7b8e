"""The class of an error decides the exit code of a command: a RuntimeError is a failure,
any other error is wrong input.
"""

from __future__ import annotations

import pytest
from typer import Typer
from typer.testing import CliRunner

from gristmill.core.files import IncompleteFileError
from gristmill.core.lease import LeaseLostError
from gristmill.core.object_stores import StoreUnavailableError
from gristmill.core.store import CorruptError, StoreLocationError
from gristmill.dataprep.conservation import ConservationError
from gristmill.dataprep.documents import DamagedTableError, MisalignedError
from gristmill.dataprep.exporting.export_documents import (
    ExportError as DocumentExportError,
)
from gristmill.dataprep.readers.extraction_guard import ExtractorError
from gristmill.dataprep.readers.sources import SourceError
from gristmill.dataprep.runners.errors import KilledWorkerError, WorkerError
from gristmill.dataprep.words.language_words import NoTokenizerError
from gristmill.dataprep.words.spacy_words import NoSpacyError
from gristmill.flows.cli.application import WholeSentences
from gristmill.flows.prefect.serving import (
    NoServerError,
    OpenServerError,
    PortTakenError,
    ServerFailedError,
)
from gristmill.flows.running.missing_libraries import MissingLibraryError
from gristmill.flows.running.run import StageFailedError
from gristmill.tokenize.exporting.exported_files import ExportError
from gristmill.tokenize.packed_files import PackedSetError

EXIT_CODES: dict[type[Exception], int] = {
    StageFailedError: 1,
    LeaseLostError: 1,
    ConservationError: 1,
    CorruptError: 1,
    DamagedTableError: 1,
    MisalignedError: 1,
    PackedSetError: 1,
    WorkerError: 1,
    KilledWorkerError: 1,
    ServerFailedError: 1,
    NoServerError: 2,
    OpenServerError: 2,
    PortTakenError: 2,
    ExportError: 2,
    DocumentExportError: 2,
    MissingLibraryError: 2,
    NoSpacyError: 2,
    NoTokenizerError: 2,
    ExtractorError: 2,
    SourceError: 2,
    StoreLocationError: 2,
    IncompleteFileError: 2,
    StoreUnavailableError: 2,
}


@pytest.mark.parametrize(
    ("kind", "code"),
    EXIT_CODES.items(),
    ids=[f"{kind.__module__}.{kind.__name__}" for kind in EXIT_CODES],
)
def test_exit_code_of_an_error(kind: type[Exception], code: int) -> None:
    program = Typer(cls=WholeSentences)

    @program.callback()
    def group() -> None:
        """Make the only command a command of a group."""

    @program.command()
    def work() -> None:
        raise kind("the message")

    outcome = CliRunner().invoke(program, ["work"])

    assert (outcome.exit_code, outcome.output) == (code, "the message\n")
