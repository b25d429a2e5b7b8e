"""`gristmill bench tokenize`: encoding documents against `tokenizers` (and tiktoken) with the same merges, one core.

Text: see `texts.py`. Warm: the encoder has seen as much other text of the kind. Cold: it has seen nothing. Against
gigatoken: what our interface costs, with columns of text and with all that is looked at beside it.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from benchmarks.installed_texts import documentation
from benchmarks.measuring import Row, row
from benchmarks.tokenize.texts import (
    TEXT_BYTES,
    books,
    code,
    declarations,
    first_texts,
    languages,
    text_bytes,
)
from gristmill.dataprep.text.kernels import text_buffers
from gristmill.tokenize.encoding.encode import BATCH_BYTES, batches
from gristmill.tokenize.encoding.fast_encode import FastEncoder, unlike
from gristmill.tokenize.encoding.pretokens import GPT2, LLAMA3, byte_characters
from gristmill.tokenize.encoding.tokenizer import write_tokenizer
from gristmill.tokenize.encoding.utf8_counts import scan_texts
from gristmill.tokenize.encoding.vocabulary import train
from gristmill.tokenize.encoding.vocabulary_sample import TokenizerSample

if TYPE_CHECKING:
    from tokenizers import Tokenizer

VOCAB_SIZE = 32_000
LIBRARY_BYTES = 2_000_000
"""The library gets the first documents only; rates are per byte."""
LEAST_BYTES = 8000
"""Of a language's text. Of a shorter one the half millisecond would be measured that a call takes, which the stage
makes for megabytes."""
REPEATS = 3
CLOSE_REPEATS = 24
"""Of sides that differ by less than other processes disturb a single call of 20 ms."""
FLOOR_PIECES = 2000
MEGA = 1e6


def rows() -> Iterator[Row]:
    """Rows of name, ours, peer, unit, ratio (ours / peer)."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        english, source, multilingual = books(), code(), languages()
        yield from _measure("english", english, GPT2, cold=True)
        yield from _measure("english_llama3", english, LLAMA3, cold=True)
        yield from _measure("english_metaspace", english, METASPACE)
        yield from _measure("code", source, GPT2, cold=True)
        yield from _measure("code_llama3", source, LLAMA3)
        yield from _measure("multilingual", multilingual, GPT2, cold=True)
        yield _worst_language()
        yield from (_scan(name, texts) for name, texts in (("english", english), ("multilingual", multilingual)))
        yield from _stage(english)
    finally:
        os.environ.pop("TOKENIZERS_PARALLELISM")
        if before is not None:
            os.environ["TOKENIZERS_PARALLELISM"] = before


def floor_rows() -> Iterator[Row]:
    """English alone, on less text."""
    yield from _measure("documentation", documentation(FLOOR_PIECES), GPT2)


def _measure(name: str, texts: Sequence[str], pattern: str, cold: bool = False) -> Iterator[Row]:
    if not texts:
        yield row(f"encode_{name}_vs_tokenizers", None, None, "MB/s", "the public test data is not here")
        return
    tokenizer = _learn(texts, pattern)
    half = len(texts) // 2
    seen, measured = (_batches(part) for part in (texts[:half], texts[half:]))
    size, some = text_bytes(texts[half:]), first_texts(texts[half:], LIBRARY_BYTES)
    library = _rate(text_bytes(some), lambda: tokenizer.encode_batch_fast(some, add_special_tokens=False), REPEATS)
    encoder = FastEncoder.for_tokenizer(tokenizer)
    if cold:
        yield row(
            f"encode_{name}_cold_vs_tokenizers",
            _rate(size, lambda: [*map(encoder.encode, measured)], 1),
            library,
            "MB/s",
        )
        encoder.forget()
    for batch in seen:
        encoder.encode(batch)
    ours = _rate(size, lambda: [*map(encoder.encode, measured)], REPEATS)
    # 115 on documentation, 2026-11-24 19:41, 2 busy cores; least of other text 22, the same day, load 1.
    yield row(f"encode_{name}_vs_tokenizers", ours, library, "MB/s", floor=18)
    yield _against_gigatoken(name, tokenizer, encoder, seen, measured, size)
    if pattern != METASPACE:
        yield _against_tiktoken(name, tokenizer, pattern, some, ours)


def _batches(texts: Sequence[str]) -> list[pa.Array]:
    """Texts as the stage hands them over."""
    column = pa.array(texts, pa.large_string())
    return [column[batch] for batch in batches(np.array([len(text.encode()) for text in texts]), BATCH_BYTES)]


METASPACE = "metaspace"
"""Words with the blank before them, as sentencepiece has them; a character that is not learnt becomes bytes."""


def _learn(texts: Sequence[str], pattern: str) -> Tokenizer:
    if pattern == METASPACE:
        return _learn_sentencepiece(texts[::7])
    name = "gpt2" if pattern == GPT2 else "llama3"
    tokenizer = train(TokenizerSample({"text": texts[::7]}, {}), VOCAB_SIZE, name)
    tokenizer.encode_special_tokens = True
    return tokenizer


def _learn_sentencepiece(texts: Sequence[str]) -> Tokenizer:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    single = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=VOCAB_SIZE, special_tokens=single, show_progress=False)
    )
    tokenizer.encode_special_tokens = True
    return tokenizer


def _against_gigatoken(
    name: str,
    tokenizer: Tokenizer,
    encoder: FastEncoder,
    seen: Sequence[pa.Array],
    measured: Sequence[pa.Array],
    size: int,
) -> Row:
    """The faster of gigatoken's calls, lists of texts or arrays of text, and ours as the stage makes it, which has
    looked for characters that only gigatoken knows while it counted (`_scan`); the note says what a look of its own
    makes of it. All have their input ready, and have seen the same."""
    import awkward as ak
    import gigatoken

    # One for each call: a second one would find what it needs of its memory in the processor's cache.
    peers = [gigatoken.Tokenizer.from_json(tokenizer.to_str()) for _ in range(2)]
    for peer, batch in product(peers, seen):
        peer.encode_batch(batch.to_pylist(), parallel=False)
    calls = [[batch.to_pylist() for batch in measured], [ak.from_arrow(batch) for batch in measured]]
    buffers = [text_buffers(batch) for batch in measured]
    none = [np.zeros(len(batch), bool) for batch in measured]
    ours: list[Callable[[], object]] = [
        lambda: [encoder.encode_buffers(*batch, found) for batch, found in zip(buffers, none, strict=True)],
        lambda: [encoder.encode_buffers(*batch) for batch in buffers],
    ]
    works: list[Callable[[], object]] = [
        lambda peer=peer, call=call: [peer.encode_batch(batch, parallel=False) for batch in call]  # type: ignore[misc]
        for peer, call in zip(peers, calls, strict=True)
    ]
    # Ours in two rounds: the second of two calls in a row would find in the cache what the first one left there.
    (ours_rate, *rates), (looking, *again) = (_rates(size, [work, *works], CLOSE_REPEATS) for work in ours)
    note = f"{'lists of texts' if rates[0] > rates[1] else 'arrays of text'}; with a look: {looking / max(again):.2f}"
    # 0.97 on documentation, 2026-11-24 19:41, 2 busy cores; 0.90 to 1.01 on other text, the same day, load 1.
    return row(f"encode_{name}_vs_gigatoken", ours_rate, max(rates), "MB/s", note, floor=0.85)


def _against_tiktoken(name: str, tokenizer: Any, pattern: str, texts: Sequence[str], ours: float) -> Row:
    try:
        import tiktoken
    except ImportError:
        return row(f"encode_{name}_vs_tiktoken", None, None, "MB/s", "tiktoken is not installed")
    spelt = {character: byte for byte, character in enumerate(byte_characters())}
    ranks = {
        bytes(spelt[character] for character in token): number
        for token, number in tokenizer.get_vocab(with_added_tokens=False).items()
        if all(character in spelt for character in token) and not token.startswith("<|")
    }
    encoding = tiktoken.Encoding("peer", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    peer = _rate(text_bytes(texts), lambda: [encoding.encode_ordinary(text) for text in texts], REPEATS)
    return row(f"encode_{name}_vs_tiktoken", ours, peer, "MB/s")


def _worst_language() -> Row:
    """The lowest ratio of all languages, of prose and of words that never occur twice; ours with an empty memory."""
    name = "encode_worst_language_vs_tokenizers"
    every = declarations()
    texts = {language: text for language, text in every.items() if len(text.encode()) >= LEAST_BYTES}
    if not texts:
        return row(name, None, None, "MB/s", "the public test data is not here")
    tokenizer = _learn([*texts.values()], GPT2)
    encoder = FastEncoder.for_tokenizer(tokenizer)
    nothing = pa.array(["a"], pa.large_string())

    def forget() -> None:
        encoder.forget()
        encoder.encode(nothing)  # makes the tables

    worst: tuple[float, str, float, float] | None = None
    for language, text in {**texts, "words that never occur twice": _unique_words()}.items():
        size, column = len(text.encode()), pa.array([text], pa.large_string())

        def cold(column: pa.Array = column) -> None:
            encoder.encode(column)

        def library(text: str = text) -> None:
            tokenizer.encode_batch_fast([text], add_special_tokens=False)

        peer = _rate(size, library, REPEATS)
        ours = max(_rate_after(forget, size, cold) for _ in range(REPEATS))
        if worst is None or ours / peer < worst[0]:
            worst = ours / peer, language, ours, peer
    assert worst is not None
    note = f"{worst[1]}; the lowest of {len(texts) + 1}; {len(every) - len(texts)} texts are too short to measure"
    return row(name, *worst[2:], "MB/s", note)


def _scan(name: str, texts: Sequence[str]) -> Row:
    """What is looked at beside encoding, against the part of it that Arrow does: whether texts are UTF-8."""
    if not texts:
        return row(f"scan_{name}_vs_arrow", None, None, "MB/s", "the public test data is not here")
    column = pa.array(texts, pa.large_string())
    data, offsets = text_buffers(column)
    filled = [np.empty(len(texts), kind) for kind in (np.int64, np.int64, np.bool_)]
    works: list[Callable[[], object]] = [
        lambda: scan_texts(data, offsets, unlike(nfc=False), *filled),
        lambda: column.validate(full=True),
    ]
    ours, peer = _rates(text_bytes(texts), works, CLOSE_REPEATS)
    return row(
        f"scan_{name}_vs_arrow",
        ours,
        peer,
        "MB/s",
        "ours: UTF-8, characters, words, characters that only gigatoken knows; peer: UTF-8",
    )


def _stage(texts: Sequence[str]) -> Iterator[Row]:
    """One worker's part of the stage `tokenize`, from Parquet to the files of tokens, against encoding alone: by
    processor time, of both of its threads, and by the clock, where it reads and encodes at the same time.

    Its bound by processor time is what it cannot do without: that the column of texts is read, and encoded.
    """
    from gristmill.dataprep.documents import DOCUMENT_SCHEMA, document_id, open_table, write_table
    from gristmill.dataprep.jobs.tasks import Task
    from gristmill.tokenize.encoding.encode import encode_shard

    texts = first_texts(texts, TEXT_BYTES)
    tokenizer = _learn(texts, GPT2)
    encoder = FastEncoder.for_tokenizer(tokenizer)
    column = pa.array(texts, pa.large_string())
    with tempfile.TemporaryDirectory() as folder:
        inputs = {"ingest": Path(folder) / "ingest", "tokenizer": Path(folder) / "tokenizer"}
        write_tokenizer(tokenizer, inputs["tokenizer"])
        documents = [
            {
                "id": document_id("books", str(number), text),
                "source": "books",
                "locator": str(number),
                "text": text,
                "metadata": "{}",
            }
            for number, text in enumerate(texts)
        ]
        shard = "part-00000.parquet"
        write_table(inputs["ingest"] / shard, pa.Table.from_pylist(documents, schema=DOCUMENT_SCHEMA))
        task, names = Task("part-00000", {"shard": shard}), {name: str(path) for name, path in inputs.items()}
        out = Path(folder) / "out"

        def stage() -> None:
            encode_shard(task, names, str(out))

        def read() -> None:
            with open_table(inputs["ingest"] / shard) as file:
                for number in range(file.num_row_groups):
                    file.read_row_group(number, columns=["text"], use_threads=False)

        stage()  # loads the tokenizer and fills its memory, as the first shard of a run
        encoder.encode(column)
        work: dict[str, Callable[[], object]] = {"alone": lambda: encoder.encode(column), "stage": stage, "read": read}
        used, took = dict.fromkeys(work, float("inf")), dict.fromkeys(work, float("inf"))
        for _ in range(CLOSE_REPEATS):
            shutil.rmtree(out)  # else the files are replaced: what the disk does with the old ones is not the stage's
            for name, call in work.items():
                processor, clock = time.process_time(), time.perf_counter()
                call()
                used[name] = min(used[name], time.process_time() - processor)
                took[name] = min(took[name], time.perf_counter() - clock)
    size = text_bytes(texts) / MEGA
    most = used["alone"] / (used["alone"] + used["read"])
    yield row(
        "tokenize_stage_vs_encoder",
        size / used["stage"],
        size / used["alone"],
        "MB/s",
        "one worker, by processor time, of its thread that encodes and the one that reads ahead; bound: "
        f"{most:.2f}, for Arrow reads the text from Parquet at {size / used['read']:.0f} MB/s",
    )
    yield row(
        "tokenize_stage_vs_reading_and_encoding",
        size / used["stage"],
        size / (used["alone"] + used["read"]),
        "MB/s",
        "the same against that bound: Arrow's reading and the encoder alone, one after the other",
    )
    yield row(
        "tokenize_stage_vs_encoder_by_the_clock",
        size / took["stage"],
        size / took["alone"],
        "MB/s",
        "one worker, by the clock: it reads ahead where a core is free",
    )


def _unique_words() -> str:
    source = random.Random(0)
    return " ".join(
        "".join(source.choices("abcdefghijklmnopqrstuvwxyz", k=source.randint(4, 14))) for _ in range(20_000)
    )


def _rate(size: int, work: Callable[[], object], repeats: int) -> float:
    """MB per second of processor time: all sides have one thread, and other processes do not count."""
    return max(_rate_after(lambda: None, size, work) for _ in range(repeats))


def _rates(size: int, works: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """The same of several, which take turns."""
    every = [[_rate(size, work, 1) for work in works] for _ in range(repeats)]
    return [max(rates) for rates in zip(*every, strict=True)]


def _rate_after(before: Callable[[], object], size: int, work: Callable[[], object]) -> float:
    before()
    begin = time.process_time()
    work()
    return size / MEGA / (time.process_time() - begin)
