"""The reader of a packed set."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from gristmill.core.files import as_path, read_json, write_json
from gristmill.mixtures.schema.engine import Stream
from gristmill.tokenize.packed import PackedSet
from gristmill.tokenize.packed_files import PackedSetError
from gristmill.tokenize.shuffle import ReadOnceError
from tests.packed_sets import piece_table, verify, write_packed_set

TOKENIZER = {"vocab_size": 1000, "eos": 0, "pad": 1, "sha256": "0" * 64}
ROWS = np.arange(12 * 8).reshape(12, 8)
SOURCES = np.array([0, 1, 0, 0, 1, 0] * 2)
"""Of each row, if rows of 8 and 4 lie evenly."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A set of 12 rows of 8 tokens in shards of 5, 5 and 2; document k fills row k."""
    write_packed_set(
        tmp_path,
        ROWS,
        {"prose": 8, "a/b c": 4},
        TOKENIZER,
        {"prose": ROWS[:2], "a/b c": ROWS[:0]},
        piece_table(
            row=range(12),
            start=[0] * 12,
            length=[8] * 12,
            id=[bytes([row] * 16) for row in range(12)],
            source=SOURCES,
        ),
        shard_rows=5,
    )
    return tmp_path


def test_rows_are_read_in_any_order_across_shards(folder: Path) -> None:
    packed, rows = PackedSet(folder), np.array([11, 0, 4, 5, 4, 10])
    tokens = packed.read(rows)
    assert tokens.dtype == np.int64
    assert np.array_equal(tokens, ROWS[rows])
    assert packed.read(np.array([], dtype=np.int64)).shape == (0, 8)
    assert np.array_equal(packed.source_of(rows), SOURCES[rows])
    assert (packed.rows, packed.rows_per_source, packed.sequence_length) == (
        12,
        [8, 4],
        8,
    )
    packed.order(5).check_reads(1000)
    assert np.array_equal(pickle.loads(pickle.dumps(packed)).read(rows), tokens)


def test_phased_set_is_read_phase_by_phase_with_the_sources_of_its_rows(
    folder: Path,
) -> None:
    """Stages of 6 + 0 and 2 + 4 rows: `a/b c` lies in the last six rows only."""
    manifest = read_json(folder / "packed.json")
    staged = {**manifest["train"], "stages": [[6, 0], [2, 4]]}
    write_json(folder / "packed.json", {**manifest, "format": 5, "train": staged})
    packed = PackedSet(folder)
    sources = [0] * 6 + [1, 0, 1, 1, 0, 1]
    assert packed.phases == [[6, 0], [2, 4]]
    assert packed.source_of(np.arange(12)).tolist() == sources
    rows = packed.order(5).rows(np.arange(12))
    assert [sorted(part) for part in (rows[:6].tolist(), rows[6:].tolist())] == [
        [*range(6)],
        [*range(6, 12)],
    ]
    assert packed.source_of(rows).tolist() == sources
    packed.order(5).check_reads(12)
    with pytest.raises(ReadOnceError, match=r"13 rows .* 12"):
        packed.order(5).check_reads(13)


def test_remote_set_reads_the_same(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    remote = as_path("memory://packed-set")
    for path in folder.iterdir():
        (remote / path.name).write_bytes(path.read_bytes())
    packed = PackedSet(
        remote, Stream(cache_folder=str(tmp_path_factory.mktemp("cache")))
    )
    verify(packed, deep=True)
    assert np.array_equal(packed.read(np.arange(12)), ROWS)
    assert packed.rows_of_documents([bytes([3] * 16)])["row"].to_pylist() == [3]


def test_fingerprint_depends_on_training_rows_only(tmp_path: Path) -> None:
    def fingerprint(name: str, rows: np.ndarray, validation: np.ndarray) -> str:
        write_packed_set(
            tmp_path / name,
            rows,
            {"prose": len(rows)},
            TOKENIZER,
            {"prose": validation},
        )
        return PackedSet(tmp_path / name).fingerprint

    first = fingerprint("first", ROWS, ROWS[:1])
    assert first == fingerprint("again", ROWS, ROWS[:0])
    changed_rows = ROWS.copy()
    changed_rows[11, 7] = 5
    fingerprints = {
        first,
        fingerprint("other token", changed_rows, ROWS[:0]),
        fingerprint("fewer", ROWS[:11], ROWS[:0]),
        fingerprint("shorter", ROWS.reshape(24, 4), ROWS[:0]),
    }
    assert len(fingerprints) == 4


def test_validation_rows_belong_to_named_sources(folder: Path) -> None:
    packed = PackedSet(folder)
    assert np.array_equal(packed.validation("prose"), ROWS[:2])
    assert packed.validation("a/b c").shape == (0, 8)
    assert (folder / "val-a%2Fb%20c-00000.bin").exists()
    with pytest.raises(
        PackedSetError, match=r"no held-out rows of 'web' \(sources: a/b c, prose\)"
    ):
        packed.validation("web")


def test_pieces_name_the_documents_of_rows(folder: Path) -> None:
    packed = PackedSet(folder)
    assert packed.pieces(np.array([11, 3, 3]))["row"].to_pylist() == [3, 11]
    assert packed.pieces(np.array([11]))["id"].to_pylist() == [bytes([11] * 16)]
    assert packed.rows_of_documents([bytes([7] * 16)])["row"].to_pylist() == [7]
    assert packed.rows_of_documents([bytes([99] * 16)]).num_rows == 0
    assert packed.validation_pieces("prose").num_rows == 0


def test_boundaries_follow_selected_rows_across_shards(folder: Path) -> None:
    """Row k of the second shard has a piece of k - 2 tokens, one of a token, and
    padding; the other shards have no pieces.
    """
    rows = np.arange(5, 10)
    pieces = piece_table(
        row=np.repeat(rows, 2),
        start=np.stack([rows * 0, rows - 2], 1).ravel(),
        length=np.stack([rows - 2, rows * 0 + 1], 1).ravel(),
        id=[b"d" * 16] * 10,
    )
    write_packed_set(
        folder, ROWS, {"a": 12}, TOKENIZER, {"prose": ROWS[:2]}, pieces, shard_rows=5
    )
    packed, selected = PackedSet(folder), np.array([11, 6, 0, 9, 6])
    expected = [
        [*range(8)],
        [0, 1, 2, 3, 0, -1, -1, -1],
        [*range(8)],
        [*range(7), 0],
        [0, 1, 2, 3, 0, -1, -1, -1],
    ]
    assert packed.positions(selected).tolist() == expected
    assert packed.boundaries(selected).filled().tolist() == [8, 5, 8, 8, 5]
    assert packed.positions(selected[:0]).shape == (0, 8)
    assert packed.validation_boundaries("prose").filled().tolist() == [8, 8]


def test_pieces_read_only_the_shards_of_their_rows(folder: Path) -> None:
    (folder / "train-00002.docs.parquet").unlink()
    assert PackedSet(folder).pieces(np.array([0, 9]))["row"].to_pylist() == [0, 9]


def test_damaged_file_is_named_in_the_error(folder: Path) -> None:
    packed = PackedSet(folder)
    verify(packed, deep=True)
    path = folder / "train-00001.bin"
    content = path.read_bytes()
    path.write_bytes(b"\xff" + content[1:])
    verify(packed)
    with pytest.raises(PackedSetError, match=r"train-00001\.bin: SHA-256 is"):
        verify(packed, deep=True)
    path.write_bytes(content)
    beside = folder / "train-00001.cu"
    boundaries = beside.read_bytes()
    beside.write_bytes(boundaries[:-1] + b"\x07")
    with pytest.raises(PackedSetError, match=r"train-00001\.cu: SHA-256 is"):
        verify(packed, deep=True)
    beside.write_bytes(boundaries)
    path.write_bytes(content[:-1])
    with pytest.raises(
        PackedSetError, match=r"train-00001\.bin: has 79 bytes, but 5 rows take 80"
    ):
        verify(packed)
    with pytest.raises(PackedSetError, match=r"train-00001\.bin: has 79 bytes"):
        PackedSet(folder).read(np.array([5]))
    path.unlink()
    with pytest.raises(PackedSetError, match=r"train-00001\.bin: is missing"):
        verify(packed)


def flip(path: Path, byte: int) -> None:
    """Flip one bit of a file."""
    content = bytearray(path.read_bytes())
    content[byte] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("file", ["train-00001.bin", "train-00001.sums"])
def test_flipped_bit_of_a_row_is_detected_on_reading(folder: Path, file: str) -> None:
    # of row 2 in the shard, so 7 of the set
    flip(folder / file, 2 * (16 if file.endswith(".bin") else 8) + 1)
    packed = PackedSet(folder)
    undamaged = np.setdiff1d(np.arange(12), [7])
    assert np.array_equal(packed.read(undamaged), ROWS[undamaged])
    for _ in range(2):
        with pytest.raises(
            PackedSetError,
            match=r"train-00001\.bin: row 2 .*train-00001\.sums .*gristmill verify MANIFEST --repair",
        ):
            packed.tokens(np.array([3, 7]))
    assert np.array_equal(
        pickle.loads(pickle.dumps(packed)).read(undamaged), ROWS[undamaged]
    )


def test_flipped_bits_of_other_files_are_detected_on_reading(folder: Path) -> None:
    for file in ("train-00002.cu", "val-prose-00000.bin", "train-00000.bin"):
        flip(folder / file, 9)
    packed = PackedSet(folder)
    with pytest.raises(PackedSetError, match=r"train-00002\.cu: SHA-256 is"):
        packed.boundaries(np.array([11]))
    with pytest.raises(PackedSetError, match=r"val-prose-00000\.bin: SHA-256 is"):
        packed.validation("prose")
    with pytest.raises(PackedSetError, match=r"train-00000\.bin: SHA-256 is"):
        packed.open_training()


def test_missing_set_and_unknown_format_are_rejected(
    folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(PackedSetError, match=r"no packed\.json there"):
        PackedSet(tmp_path / "nowhere")
    write_json(
        folder / "packed.json", {**read_json(folder / "packed.json"), "format": 9}
    )
    with pytest.raises(PackedSetError, match=r"format 9.* 4, 5"):
        PackedSet(folder)


def test_rows_out_of_range_are_rejected(folder: Path) -> None:
    for rows in ([12], [-1]):
        with pytest.raises(PackedSetError, match=r"rows are in \[0, 12\)"):
            PackedSet(folder).read(np.array(rows))


def test_tokens_outside_the_vocabulary_are_never_written(tmp_path: Path) -> None:
    with pytest.raises(
        PackedSetError, match="tokens 0 to 1000 in a vocabulary of 1000"
    ):
        write_packed_set(tmp_path, np.array([[0, 1000]]), {"a": 1}, TOKENIZER)
    with pytest.raises(PackedSetError, match="1 rows, but"):
        write_packed_set(tmp_path, np.array([[0, 1]]), {"a": 2}, TOKENIZER)


def test_batch_memory_is_reused_only_when_unreferenced() -> None:
    from gristmill.tokenize.packed_rows import Buffers

    buffers, dtype = Buffers(), np.dtype("<u2")
    first = buffers.array((4, 1 << 20), dtype)
    first[:] = 7
    part, address = first[1:3], first.ctypes.data
    del first
    second = buffers.array((4, 1 << 20), dtype)
    second[:] = 9
    assert (part == 7).all()  # a view keeps its array alive
    assert second.ctypes.data != address
    del part
    assert buffers.array((4, 1 << 20), dtype).ctypes.data == address


def test_batches_of_similar_size_share_memory() -> None:
    from gristmill.tokenize.packed_rows import Buffers

    buffers, dtype = Buffers(), np.dtype("<u4")
    large = buffers.array((1000, 2000), dtype).ctypes.data
    assert buffers.array((900, 2000), dtype).ctypes.data == large
    small = buffers.array((3, 100), dtype)
    assert small.shape == (3, 100)
    assert small.ctypes.data != large
    assert buffers.array((0, 100), dtype).shape == (0, 100)


def test_threads_opening_shards_concurrently_read_the_same(tmp_path: Path) -> None:
    """No thread reads memory that another has released, while eight open each of many
    sets.
    """
    from concurrent.futures import ThreadPoolExecutor

    tokens = np.random.default_rng(0).integers(0, 300, (64, 2048))
    write_packed_set(
        tmp_path,
        tokens,
        {"a": 64},
        {"vocab_size": 300, "eos": 0, "pad": 1, "sha256": ""},
    )
    rows = np.arange(64)[::-1].copy()
    with ThreadPoolExecutor(8) as pool:
        for _ in range(25):
            packed = PackedSet(tmp_path)
            for tokens_read in pool.map(
                lambda _, packed=packed: packed.tokens(rows), range(16)
            ):
                assert (tokens_read == tokens[::-1]).all()
