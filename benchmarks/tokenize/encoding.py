"""`gristmill bench tokenize`: encoding documents against `tokenizers` (and tiktoken)
with the same merges, one core.

Text: see `texts.py`. Warm: the encoder has encoded as much other text of the kind.
Cold: it has encoded nothing. Against gigatoken: the cost of our interface, with columns
of text, and with the scan of all texts.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from benchmarks.dataprep.stage_runs import shard_name, write_shard
from benchmarks.installed_texts import documentation
from benchmarks.measuring import Row, fastest, row, text_megabytes
from benchmarks.tokenize.texts import (
    TEXT_BYTES,
    books,
    code,
    declarations,
    first_texts,
    languages,
)
from gristmill.dataprep.text.kernels import text_buffers
from gristmill.tokenize.encoding.bpe import train
from gristmill.tokenize.encoding.encode import BATCH_BYTES, batches
from gristmill.tokenize.encoding.fast_encode import FastEncoder, unlike
from gristmill.tokenize.encoding.pretokens import GPT2, LLAMA3, byte_characters
from gristmill.tokenize.encoding.tokenizer import write_tokenizer
from gristmill.tokenize.encoding.utf8_counts import scan_texts
from gristmill.tokenize.encoding.vocabulary_sample import TokenizerSample

if TYPE_CHECKING:
    from tokenizers import Tokenizer

VOCAB_SIZE = 32_000
LIBRARY_BYTES = 2_000_000
"""The library gets the first documents only; rates are per byte."""
LEAST_BYTES = 8000
"""Least text of a language: with less, the half millisecond of a call would count,
which the stage makes for megabytes.
"""
REPEATS = 3
CLOSE_REPEATS = 24
"""Repeats of sides whose difference is smaller than the noise of a single call of 20
ms.
"""
FLOOR_PIECES = 2000
METASPACE = "metaspace"
"""Words with the blank before them, as in sentencepiece; unknown characters become
bytes.
"""
MISSING = "the public test data is not here"


def rows() -> Iterator[Row]:
    """Measure MB per second of processor time: all sides have one thread."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        english, source, multilingual = books(), code(), languages()
        yield from text_rows("english", english, GPT2, cold=True)
        yield from text_rows("english_llama3", english, LLAMA3, cold=True)
        yield from text_rows("english_metaspace", english, METASPACE)
        yield from text_rows("code", source, GPT2, cold=True)
        yield from text_rows("code_llama3", source, LLAMA3)
        yield from text_rows("multilingual", multilingual, GPT2, cold=True)
        yield worst_language_row()
        yield scan_row("english", english)
        yield scan_row("multilingual", multilingual)
        yield from stage_rows(english)
    finally:
        os.environ.pop("TOKENIZERS_PARALLELISM")
        if before is not None:
            os.environ["TOKENIZERS_PARALLELISM"] = before


def floor_rows() -> Iterator[Row]:
    """Measure English alone, on less text."""
    yield from text_rows("documentation", documentation(FLOOR_PIECES), GPT2)


class Corpus(NamedTuple):
    """Text of a kind with a tokenizer that learnt from it.

    Attributes:
        name: of the kind.
        tokenizer: as the library has it.
        encoder: ours for the same tokenizer.
        seen, measured: batches of the first and the second half of the documents.
        megabytes: of the second half.
    """

    name: str
    tokenizer: Tokenizer
    encoder: FastEncoder
    seen: list[pa.Array]
    measured: list[pa.Array]
    megabytes: float


def text_rows(
    name: str, texts: Sequence[str], pattern: str, cold: bool = False
) -> Iterator[Row]:
    """Measure a kind of text against each peer."""
    if not texts:
        yield row(f"encode_{name}_vs_tokenizers", None, None, "MB/s", MISSING)
        return
    tokenizer = _learn(texts, pattern)
    encoder = FastEncoder.for_tokenizer(tokenizer)
    half = len(texts) // 2
    corpus = Corpus(
        name,
        tokenizer,
        encoder,
        _batches(texts[:half]),
        _batches(texts[half:]),
        text_megabytes(texts[half:]),
    )
    library_texts = first_texts(texts[half:], LIBRARY_BYTES)
    library = _rate(
        text_megabytes(library_texts),
        lambda: tokenizer.encode_batch_fast(library_texts, add_special_tokens=False),
    )
    if cold:
        (cold_seconds,) = fastest(
            1, lambda: [*map(encoder.encode, corpus.measured)], clock=time.process_time
        )
        yield row(
            f"encode_{name}_cold_vs_tokenizers",
            corpus.megabytes / cold_seconds,
            library,
            "MB/s",
        )
        encoder.forget()
    for batch in corpus.seen:
        encoder.encode(batch)
    ours = _rate(corpus.megabytes, lambda: [*map(encoder.encode, corpus.measured)])
    # 115 on documentation, 2026-11-24 19:41, 2 busy cores; least of other text 22, the
    # same day, load 1.
    yield row(f"encode_{name}_vs_tokenizers", ours, library, "MB/s", floor=18)
    yield gigatoken_row(corpus)
    if pattern != METASPACE:
        yield tiktoken_row(name, tokenizer, pattern, library_texts, ours)


def _batches(texts: Sequence[str]) -> list[pa.Array]:
    """Batch texts as the stage does."""
    column = pa.array(texts, pa.large_string())
    return [
        column[batch]
        for batch in batches(
            np.array([len(text.encode()) for text in texts]), BATCH_BYTES
        )
    ]


def _learn(texts: Sequence[str], pattern: str) -> Tokenizer:
    sample = texts[::7]
    if pattern == METASPACE:
        tokenizer = _learn_sentencepiece(sample)
    else:
        name = "gpt2" if pattern == GPT2 else "llama3"
        tokenizer = train(TokenizerSample({"text": sample}, {}), VOCAB_SIZE, name)
    tokenizer.encode_special_tokens = True
    return tokenizer


def _learn_sentencepiece(texts: Sequence[str]) -> Tokenizer:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE, special_tokens=byte_tokens, show_progress=False
        ),
    )
    return tokenizer


def gigatoken_row(corpus: Corpus) -> Row:
    """Measure the faster of gigatoken's calls, with lists of texts or arrays of text,
    beside ours as in the stage.

    The stage has found characters that only gigatoken knows while it counted
    (`scan_row`); the note has the ratio with a search of our own. All sides have their
    input ready, and have encoded the same texts.
    """
    import awkward as ak
    import gigatoken

    # A tokenizer for each call: a second call would find the first one's memory in the
    # processor's cache.
    peers = [gigatoken.Tokenizer.from_json(corpus.tokenizer.to_str()) for _ in range(2)]
    for peer, batch in product(peers, corpus.seen):
        peer.encode_batch(batch.to_pylist(), parallel=False)
    calls = [
        [batch.to_pylist() for batch in corpus.measured],
        [ak.from_arrow(batch) for batch in corpus.measured],
    ]
    peer_works: list[Callable[[], object]] = [
        lambda peer=peer, call=call: [
            peer.encode_batch(batch, parallel=False) for batch in call
        ]  # type: ignore[misc]
        for peer, call in zip(peers, calls, strict=True)
    ]
    buffers = [text_buffers(batch) for batch in corpus.measured]
    no_unlike = [np.zeros(len(batch), bool) for batch in corpus.measured]

    def encode() -> None:
        for batch, is_unlike in zip(buffers, no_unlike, strict=True):
            corpus.encoder.encode_buffers(*batch, is_unlike)

    def search_and_encode() -> None:
        for batch in buffers:
            corpus.encoder.encode_buffers(*batch)

    # Two rounds: the second of two calls of ours in a row would profit from the cache
    # of the first.
    ours, lists, arrays = fastest(
        CLOSE_REPEATS, encode, *peer_works, clock=time.process_time
    )
    searching, *peer_seconds = fastest(
        CLOSE_REPEATS, search_and_encode, *peer_works, clock=time.process_time
    )
    note = (
        f"{'lists of texts' if lists < arrays else 'arrays of text'}; with a look: "
        f"{min(peer_seconds) / searching:.2f}"
    )
    rates = corpus.megabytes / ours, corpus.megabytes / min(lists, arrays)
    # 0.97 on documentation, 2026-11-24 19:41, 2 busy cores; 0.90 to 1.01 on other text,
    # the same day, load 1.
    return row(f"encode_{corpus.name}_vs_gigatoken", *rates, "MB/s", note, floor=0.85)


def tiktoken_row(
    name: str, tokenizer: Any, pattern: str, texts: Sequence[str], ours: float
) -> Row:
    """Measure tiktoken with the same merges."""
    try:
        import tiktoken
    except ImportError:
        return row(
            f"encode_{name}_vs_tiktoken",
            None,
            None,
            "MB/s",
            "tiktoken is not installed",
        )
    byte_of = {character: byte for byte, character in enumerate(byte_characters())}
    ranks = {
        bytes(byte_of[character] for character in token): number
        for token, number in tokenizer.get_vocab(with_added_tokens=False).items()
        if all(character in byte_of for character in token)
        and not token.startswith("<|")
    }
    encoding = tiktoken.Encoding(
        "peer", pat_str=pattern, mergeable_ranks=ranks, special_tokens={}
    )
    peer = _rate(
        text_megabytes(texts),
        lambda: [encoding.encode_ordinary(text) for text in texts],
    )
    return row(f"encode_{name}_vs_tiktoken", ours, peer, "MB/s")


def worst_language_row() -> Row:
    """Measure the lowest ratio of all languages, of prose and of words that never occur
    twice; ours with no memory.
    """
    name = "encode_worst_language_vs_tokenizers"
    all_texts = declarations()
    texts = {
        language: text
        for language, text in all_texts.items()
        if len(text.encode()) >= LEAST_BYTES
    }
    if not texts:
        return row(name, None, None, "MB/s", MISSING)
    tokenizer = _learn([*texts.values()], GPT2)
    encoder = FastEncoder.for_tokenizer(tokenizer)
    short_text = pa.array(["a"], pa.large_string())

    def forget() -> None:
        encoder.forget()
        encoder.encode(short_text)  # makes the tables

    rows_by_language = {}
    for language, text in {
        **texts,
        "words that never occur twice": _unique_words(),
    }.items():
        ours, peer = fastest(
            REPEATS,
            partial(encoder.encode, pa.array([text], pa.large_string())),
            partial(tokenizer.encode_batch_fast, [text], add_special_tokens=False),
            clock=time.process_time,
            before=forget,
        )
        megabytes = text_megabytes([text])
        rows_by_language[language] = row(
            name, megabytes / ours, megabytes / peer, "MB/s"
        )
    worst = min(
        rows_by_language, key=lambda language: rows_by_language[language].ratio or 0.0
    )
    note = (
        f"{worst}; the lowest of {len(texts) + 1}; {len(all_texts) - len(texts)} "
        "texts are too short to measure"
    )
    return replace(rows_by_language[worst], note=note)


def scan_row(name: str, texts: Sequence[str]) -> Row:
    """Measure the scan beside encoding, against the part of it that Arrow does:
    validity of UTF-8.
    """
    if not texts:
        return row(f"scan_{name}_vs_arrow", None, None, "MB/s", MISSING)
    column = pa.array(texts, pa.large_string())
    data, offsets = text_buffers(column)
    results = [np.empty(len(texts), kind) for kind in (np.int64, np.int64, np.bool_)]
    ours, peer = fastest(
        CLOSE_REPEATS,
        lambda: scan_texts(data, offsets, unlike(nfc=False), *results),
        lambda: column.validate(full=True),
        clock=time.process_time,
    )
    megabytes = text_megabytes(texts)
    note = (
        "ours: UTF-8, characters, words, characters that only gigatoken knows; "
        "peer: UTF-8"
    )
    return row(
        f"scan_{name}_vs_arrow", megabytes / ours, megabytes / peer, "MB/s", note
    )


def stage_rows(texts: Sequence[str]) -> Iterator[Row]:
    """Measure a worker's part of the stage `tokenize`, from Parquet to files of tokens,
    against encoding alone: by processor time of both of its threads, and by the clock,
    since it reads and encodes at the same time.

    The bound by processor time is the least work: reading and encoding the column of
    texts.
    """
    from gristmill.dataprep.documents import open_table
    from gristmill.dataprep.runners.tasks import Task
    from gristmill.tokenize.encoding.encode import encode_shard

    texts = first_texts(texts, TEXT_BYTES)
    tokenizer = _learn(texts, GPT2)
    encoder = FastEncoder.for_tokenizer(tokenizer)
    column = pa.array(texts, pa.large_string())
    with tempfile.TemporaryDirectory() as folder:
        inputs = {
            "ingest": Path(folder) / "ingest",
            "tokenizer": Path(folder) / "tokenizer",
        }
        write_tokenizer(tokenizer, inputs["tokenizer"])
        write_shard(inputs["ingest"], 0, texts)
        shard, out = shard_name(0), Path(folder) / "out"
        task = Task(Path(shard).stem, {"shard": shard})

        def stage() -> None:
            encode_shard(task, inputs, out)

        def read() -> None:
            with open_table(inputs["ingest"] / shard) as file:
                for number in range(file.num_row_groups):
                    file.read_row_group(number, columns=["text"], use_threads=False)

        stage()  # loads the tokenizer and fills its memory, as the first shard of a run
        encoder.encode(column)
        works = {"alone": lambda: encoder.encode(column), "stage": stage, "read": read}
        cpu, wall = (
            dict.fromkeys(works, float("inf")),
            dict.fromkeys(works, float("inf")),
        )
        for _ in range(CLOSE_REPEATS):
            # so that the stage replaces no files, whose removal is work of the disk
            shutil.rmtree(out)
            for name, work in works.items():
                cpu_start, start = time.process_time(), time.perf_counter()
                work()
                cpu[name] = min(cpu[name], time.process_time() - cpu_start)
                wall[name] = min(wall[name], time.perf_counter() - start)
    size = text_megabytes(texts)
    bound = cpu["alone"] / (cpu["alone"] + cpu["read"])
    yield row(
        "tokenize_stage_vs_encoder",
        size / cpu["stage"],
        size / cpu["alone"],
        "MB/s",
        "one worker, by processor time, of its thread that encodes and the one that "
        f"reads ahead; bound: {bound:.2f}, for Arrow reads the text from Parquet at "
        f"{size / cpu['read']:.0f} MB/s",
    )
    yield row(
        "tokenize_stage_vs_reading_and_encoding",
        size / cpu["stage"],
        size / (cpu["alone"] + cpu["read"]),
        "MB/s",
        "the same against that bound: Arrow's reading and the encoder alone, one "
        "after the other",
    )
    yield row(
        "tokenize_stage_vs_encoder_by_the_clock",
        size / wall["stage"],
        size / wall["alone"],
        "MB/s",
        "one worker, by the clock: it reads ahead where a core is free",
    )


def _unique_words() -> str:
    source = random.Random(0)
    return " ".join(
        "".join(source.choices("abcdefghijklmnopqrstuvwxyz", k=source.randint(4, 14)))
        for _ in range(20_000)
    )


def _rate(megabytes: float, work: Callable[[], object]) -> float:
    (seconds,) = fastest(REPEATS, work, clock=time.process_time)
    return megabytes / seconds
