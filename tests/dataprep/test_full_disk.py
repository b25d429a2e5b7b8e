"""Full disks: every writer raises, or has written the same bytes.

`no_file_beyond` simulates a full disk: the kernel writes a file up to a limit, then
refuses, whichever library asks.
"""

from __future__ import annotations

import ast
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from upath import UPath

from gristmill.core.files import (
    IncompleteFileError,
    array_bytes,
    atomic_write,
    foreign_file,
    reserve,
)
from gristmill.dataprep.fasttext.fasttext_files import UnknownModelError
from gristmill.dataprep.fasttext.fasttext_predict import load_model
from gristmill.dataprep.quality import classifier
from gristmill.dataprep.runners.worker_bootstrap import SUBPACKAGES
from gristmill.dataprep.semantic.vector_jobs import CENTROIDS, write_centroids
from gristmill.mixtures.steps.quality import Classifier

ROOT = Path(__file__).resolve().parents[2]
SHARES = (0.0, 0.15, 0.5, 0.98, 0.9999)
"""Shares of a file's bytes that fit on the disk."""
SECTION = Classifier(positive=("a",), negative=("b",), dimensions=4, buckets=2000)
LINES = [
    (number % 2 == 0, f"{'good' if number % 2 == 0 else 'bad'} words {number % 7}")
    for number in range(40)
]


@contextmanager
def no_file_beyond(size: int) -> Iterator[None]:
    """Limit each file that this process and its children write to `size` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    pytest.importorskip("fasttext")
    return classifier.train(LINES, SECTION, 1, tmp_path_factory.mktemp("model"))


@pytest.mark.slow
@pytest.mark.parametrize("share", SHARES)
def test_classifier_training_fails_on_a_full_disk(
    tmp_path: Path, model: bytes, share: float
) -> None:
    lines = sum(len(f"__label__positive {line}\n") for _, line in LINES)
    with (
        no_file_beyond(max(lines, int(share * len(model)))),
        pytest.raises(classifier.ClassifierError),
    ):
        classifier.train(LINES, SECTION, 1, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("share", SHARES[1:])
def test_truncated_classifier_is_rejected_before_fasttext_reads_it(
    tmp_path: Path, model: bytes, share: float
) -> None:
    (tmp_path / "cut.bin").write_bytes(model[: int(share * len(model))])
    with pytest.raises(UnknownModelError):
        load_model(str(tmp_path / "cut.bin"), f"cut at {share}")


@pytest.mark.parametrize("share", SHARES)
def test_writing_an_array_fails_on_a_full_disk(tmp_path: Path, share: float) -> None:
    centroids = np.arange(6000, dtype=np.float32).reshape(60, 100)
    with (
        no_file_beyond(int(share * len(array_bytes(centroids)))),
        pytest.raises(OSError, match="too large"),
    ):
        write_centroids(tmp_path, centroids)
    assert list(tmp_path.iterdir()) == []
    write_centroids(tmp_path, centroids)
    assert np.array_equal(np.load(tmp_path / CENTROIDS), centroids)


def test_memory_mapped_file_reserves_its_space(tmp_path: Path) -> None:
    np.lib.format.open_memmap(
        tmp_path / "a.npy", mode="w+", dtype=np.int64, shape=(5000,)
    )
    assert (tmp_path / "a.npy").stat().st_blocks * 512 < 40_000
    reserve(tmp_path / "a.npy")
    assert (tmp_path / "a.npy").stat().st_blocks * 512 >= 40_000


def expect(content: bytes) -> Callable[[Path], None]:
    def check(file: Path) -> None:
        if file.read_bytes() != content:
            raise ValueError("cut")

    return check


@pytest.mark.parametrize("store", ["disk", "memory"])
def test_foreign_file_gets_its_name_only_if_it_reads_back(
    tmp_path: Path, store: str
) -> None:
    folder = tmp_path / "out" if store == "disk" else UPath(f"memory://{tmp_path.name}")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with foreign_file(folder / "a.bin", expect(b"complete"), scratch) as file:
        assert file.parent == folder or file.is_relative_to(scratch)
        file.write_bytes(b"complete")
    assert (folder / "a.bin").read_bytes() == b"complete"
    for written in (b"comp", b"complete and more"):
        with (
            pytest.raises(IncompleteFileError),
            foreign_file(folder / "a.bin", expect(b"complete"), scratch) as file,
        ):
            file.write_bytes(written)
    with (
        pytest.raises(IncompleteFileError),
        foreign_file(folder / "b.bin", expect(b"complete"), scratch),
    ):
        pass
    assert [path.name for path in folder.iterdir()] == ["a.bin"]
    assert (folder / "a.bin").read_bytes() == b"complete"
    assert list(scratch.iterdir()) == []


def test_failed_write_uploads_nothing() -> None:
    uploads: list[bytes] = []

    class Remote:
        protocol = "s3"
        name = "key"
        path = "bucket/key"
        parent = None

        def put_file(self, file: str, path: str, **options: int) -> None:
            uploads.append(Path(file).read_bytes())

    Remote.parent = Remote  # type: ignore[assignment]
    Remote.fs = Remote()  # type: ignore[attr-defined]

    def write(content: bytes, error: Exception | None) -> None:
        with atomic_write(Remote()) as sink:  # type: ignore[arg-type]
            sink.write(content)
            if error is not None:
                raise error

    with pytest.raises(ValueError, match="half"):
        write(b"half", ValueError("half"))
    assert uploads == []
    write(b"complete", None)
    assert uploads == [b"complete"]


WRITERS = {
    "save",
    "savez",
    "savefig",
    "save_file",
    "save_model",
    "tofile",
    "to_parquet",
    "to_csv",
    "save_pretrained",
}
"""Library functions that open or fill a file themselves."""
CHECKED = {
    "core/files.py": "into memory",
    "dataprep/quality/classifier.py": "foreign_file",
    "train/stages/trained_models.py": "our own writer",
    "train/resuming.py": "our own checkpoints",
    "train/checkpoint.py": "checked by its checksums",
    "train/models/transformers_decoder.py": "safetensors raises its errors",
}
"""Callers of WRITERS, and the reason why each is safe."""


@pytest.mark.slow
def test_callers_of_library_writers_are_known_to_be_safe() -> None:
    callers = set()
    for folder in SUBPACKAGES:
        for path in (ROOT / folder).rglob("*.py"):
            calls = [
                node.func
                for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, ast.Call)
            ]
            if any(_writes(call) for call in calls):
                callers.add(path.relative_to(ROOT).as_posix())
    assert callers <= {*CHECKED}


def _writes(call: ast.expr) -> bool:
    """Return True if a function is one of WRITERS; `self.save()` is a method of
    gristmill.
    """
    if not isinstance(call, ast.Attribute) or call.attr not in WRITERS:
        return False
    return not (
        call.attr == "save"
        and isinstance(call.value, ast.Name)
        and call.value.id in ("self", "record", "attempt")
    )
