"""What a step of the user's own costs: `annotate` against the same function in a plain loop without gristmill.

Both read the same document shards, call the same function on the same batches (or documents), decide by the same
threshold, and write a table of the same columns with the same encoding, one shard after the other on one thread. The
loop keeps no record of what is finished, checks no types, sets nothing aside that raises, and calls nothing twice.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from benchmarks.dataprep.texts import DOCUMENT_CHARACTERS, REPEATS
from benchmarks.installed_texts import documentation
from benchmarks.measuring import Row, fastest, row
from gristmill.core.stage_context import Context
from gristmill.dataprep.documents import DOCUMENT_SCHEMA, document_id, write_table
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


def rows(shards: int = SHARDS, documents: int = DOCUMENTS_PER_SHARD) -> Iterator[Row]:
    """Measure both forms of a function: MB of text per second."""
    with tempfile.TemporaryDirectory(prefix="gristmill-bench-") as place:
        folder = Path(place)
        (folder / "steps.py").write_text(SOURCE)
        write_documents(folder / "ingest", shards, documents)
        megabytes = (
            sum(pc.sum(pc.binary_length(pq.read_table(path)["text"])).as_py() for path in (folder / "ingest").iterdir())
            / 1e6
        )
        for name, form in FORMS.items():
            use = take_code(OwnFunction(f"./steps.py:{name}"), folder)
            step = Annotate(use=use, max={"words": MOST_WORDS})
            ours, loop = fastest(REPEATS, stage(step, folder), plain_loop(step, folder, name == "batch"))
            yield row(f"own_step_vs_plain_loop, {form}", megabytes / ours, megabytes / loop, "MB/s")


def write_documents(folder: Path, shards: int, documents: int) -> None:
    """Write shards of documents, all with other texts but for a repeat of the first ones."""
    texts = itertools.cycle(documentation(min(documents, DOCUMENT_CHARACTERS)))
    for shard in range(shards):
        write_shard(folder, shard, list(itertools.islice(texts, documents)))


def write_shard(folder: Path, shard: int, texts: Sequence[str]) -> None:
    """Write a shard of documents of one source."""
    n = len(texts)
    ids = [document_id("web", f"{shard}/{number}", text) for number, text in enumerate(texts)]
    write_table(
        folder / f"part-{shard:05d}.parquet",
        pa.table(
            {
                "id": pa.array(ids, DOCUMENT_SCHEMA.field("id").type),
                "source": ["web"] * n,
                "locator": [f"{shard}/{number}" for number in range(n)],
                "text": texts,
                "metadata": ["{}"] * n,
            }
        ).cast(DOCUMENT_SCHEMA),
    )


def stage(step: Annotate, folder: Path) -> Callable[[], None]:
    """The whole stage, from the shards to its tables; what this process has loaded for it stays loaded."""
    numbers = itertools.count()

    def run() -> None:
        work = folder / f"work{next(numbers)}"
        work.mkdir()
        context = Context(work=work, stage="annotate", mode="memory", emit=lambda event: None)
        annotate.run({"ingest": folder / "ingest"}, step.model_dump(mode="json"), work / "out", context)
        shutil.rmtree(work)

    return run


def plain_loop(step: Annotate, folder: Path, is_batch: bool) -> Callable[[], None]:
    """The same work by a loop over files."""
    call = load_own(step.function, "text")

    def measure(texts: pa.ChunkedArray) -> dict[str, pa.Array]:
        if is_batch:
            parts = [
                call(pa.record_batch({"text": texts.slice(start, BATCH_ROWS).combine_chunks()}))
                for start in range(0, len(texts), BATCH_ROWS)
            ]
            return {name: pa.concat_arrays([part[name] for part in parts]) for name in parts[0]}
        found = [call(text) for text in texts.to_pylist()]
        return {name: pa.array([one[name] for one in found]) for name in found[0]}

    def run() -> None:
        out = folder / "loop"
        out.mkdir()
        for path in sorted((folder / "ingest").iterdir()):
            table = pq.read_table(path, columns=["id", "source", "text"], use_threads=False)
            columns = measure(table["text"])
            keep = pc.less_equal(columns["words"], MOST_WORDS)
            reason = pc.if_else(keep, None, "max_words").dictionary_encode()
            pq.write_table(
                pa.table({"id": table["id"], "keep": keep, "reason": reason, **columns}),
                out / path.name,
                compression="zstd",
                write_page_checksum=True,
            )
        shutil.rmtree(out)

    return run
