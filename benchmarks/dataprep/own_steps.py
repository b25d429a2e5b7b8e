"""Cost of a user's own step: `annotate` against the same function in a plain loop
without gristmill.

Both read the same document shards, call the same function on the same batches (or
documents), decide by the same threshold, and write a table of the same columns with the
same encoding, one shard after the other on one thread. The loop keeps no record of
finished shards, checks no types, catches no errors, and calls nothing twice.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from benchmarks.dataprep.stage_runs import stage_runs, write_shard
from benchmarks.dataprep.texts import REPEATS
from benchmarks.installed_texts import documentation
from benchmarks.measuring import Row, fastest, row, text_megabytes
from gristmill.dataprep.user_code import annotate
from gristmill.dataprep.user_code.own_documents import BATCH_ROWS
from gristmill.dataprep.user_functions import load_own
from gristmill.mixtures.steps.own_steps import Annotate
from gristmill.mixtures.user_code import OwnFunction, take_code

SHARDS = 16
DOCUMENTS_PER_SHARD = 4000
MOST_WORDS = 600
SOURCE = r"""
import pyarrow as pa
import pyarrow.compute as pc

def batch(texts: pa.RecordBatch):
    words = pc.count_substring_regex(texts["text"], r"[a-z]+")
    letters = pc.count_substring_regex(texts["text"], r"[aeiou]")
    return {"words": words, "vowels": pc.divide(pc.cast(letters, pa.float64()), pc.utf8_length(texts["text"]))}

def document(text: str) -> dict:
    words = text.split()
    return {"words": len(words), "vowels": sum(map(text.count, "aeiou")) / len(text)}
"""
FORMS = {"batch": "a batch at a time", "document": "one document at a time"}


def rows() -> Iterator[Row]:
    """Measure both forms of a function, in MB of text per second."""
    with tempfile.TemporaryDirectory(prefix="gristmill-bench-") as place:
        folder = Path(place)
        (folder / "steps.py").write_text(SOURCE)
        texts = itertools.cycle(documentation(DOCUMENTS_PER_SHARD))
        megabytes = 0.0
        for shard in range(SHARDS):
            shard_texts = list(itertools.islice(texts, DOCUMENTS_PER_SHARD))
            write_shard(folder / "ingest", shard, shard_texts)
            megabytes += text_megabytes(shard_texts)
        inputs = {"ingest": folder / "ingest"}
        for name, form in FORMS.items():
            use = take_code(OwnFunction(f"./steps.py:{name}"), folder)
            step = Annotate(use=use, max={"words": MOST_WORDS})
            ours = stage_runs(
                annotate.run, inputs, step.model_dump(mode="json"), folder / name
            )
            our_seconds, loop_seconds = fastest(
                REPEATS, ours, plain_loop(step, folder, name == "batch")
            )
            yield row(
                f"own_step_vs_plain_loop, {form}",
                megabytes / our_seconds,
                megabytes / loop_seconds,
                "MB/s",
            )


def plain_loop(step: Annotate, folder: Path, is_batch: bool) -> Callable[[], None]:
    """Return the same work as a loop over files."""
    call = load_own(step.function, "text")

    def measure(texts: pa.ChunkedArray) -> dict[str, pa.Array]:
        if is_batch:
            parts = [
                call(
                    pa.record_batch(
                        {"text": texts.slice(start, BATCH_ROWS).combine_chunks()}
                    )
                )
                for start in range(0, len(texts), BATCH_ROWS)
            ]
            return {
                name: pa.concat_arrays([part[name] for part in parts])
                for name in parts[0]
            }
        values = [call(text) for text in texts.to_pylist()]
        return {name: pa.array([value[name] for value in values]) for name in values[0]}

    def run() -> None:
        out = folder / "loop"
        out.mkdir()
        for path in sorted((folder / "ingest").iterdir()):
            table = pq.read_table(
                path, columns=["id", "source", "text"], use_threads=False
            )
            columns = measure(table["text"])
            keep = pc.less_equal(columns["words"], MOST_WORDS)
            reason = pc.if_else(keep, None, "max_words").dictionary_encode()
            pq.write_table(
                pa.table(
                    {"id": table["id"], "keep": keep, "reason": reason, **columns}
                ),
                out / path.name,
                compression="zstd",
                write_page_checksum=True,
            )
        shutil.rmtree(out)

    return run
