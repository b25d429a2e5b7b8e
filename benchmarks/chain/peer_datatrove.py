"""The chain as datatrove runs it, by the interpreter that has it: `python
peer_datatrove.py SETTINGS.json`.

Nothing of gristmill is imported. Its executor has one task per input file and two
workers; MinHash is its four steps. A step after the rules and at the end writes ids, to
compare verdicts. The last line of the output is JSON: the seconds of each step.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.dedup import (
    MinhashDedupBuckets,
    MinhashDedupCluster,
    MinhashDedupFilter,
    MinhashDedupSignature,
)
from datatrove.pipeline.dedup.minhash import MinhashConfig
from datatrove.pipeline.filters import (
    C4QualityFilter,
    FineWebQualityFilter,
    GopherQualityFilter,
    GopherRepetitionFilter,
)
from datatrove.pipeline.filters.base_filter import BaseFilter
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import DocumentTokenizer, DocumentTokenizerMerger
from datatrove.pipeline.writers.jsonl import JsonlWriter


class WriteIds(PipelineStep):
    """Step that passes documents on, and writes their ids into `FOLDER/RANK.ids`."""

    name = "ids"

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Iterator[Any]:
        """See PipelineStep."""
        Path(self.folder).mkdir(parents=True, exist_ok=True)
        with open(f"{self.folder}/{rank:05d}.ids", "w", encoding="ascii") as sink:
            for document in data:
                sink.write(f"{document.id}\n")
                yield document


class Classifier(BaseFilter):
    """Equivalent of datatrove's FastTextClassifierFilter for whole documents, which
    needs another build of fastText: `predict` of 0.9.3 fails on NumPy 2, and the
    function beneath it does not.
    """

    name = "fastText"

    def __init__(self, path: str, label: str, least: float) -> None:
        super().__init__()
        self.path, self.label, self.least = path, f"__label__{label}", least
        self._model: Any = None

    def filter(self, doc: Any) -> bool:
        """Return True if the label's score is high enough."""
        if self._model is None:
            import fasttext

            self._model = fasttext.load_model(self.path)
        line = doc.text.strip().replace("\n", " ") + "\n"
        return any(
            label == self.label and score >= self.least
            for score, label in self._model.f.predict(line, -1, 0.0, "strict")
        )


def main(settings: dict[str, Any]) -> None:
    """Run the steps one after another."""
    out, corpus, tasks = Path(settings["out"]), settings["corpus"], settings["tasks"]
    minhash = MinhashConfig(n_grams=5, num_buckets=14, hashes_per_bucket=8)
    ruled = str(out / "ruled")
    steps: dict[str, tuple[list[Any], int]] = {
        "rules": (
            [
                JsonlReader(corpus, glob_pattern="*.jsonl"),
                GopherRepetitionFilter(),
                GopherQualityFilter(),
                C4QualityFilter(
                    remove_citations=False,
                    filter_no_terminal_punct=False,
                    min_words_per_line=-1,
                    max_word_length=-1,
                    filter_javascript=False,
                    filter_policy=False,
                ),
                FineWebQualityFilter(),
                WriteIds(str(out / "ruled-ids")),
                JsonlWriter(ruled, output_filename="${rank}.jsonl", compression=None),
            ],
            tasks,
        ),
        "signatures": (
            [
                JsonlReader(ruled),
                MinhashDedupSignature(str(out / "signatures"), config=minhash),
            ],
            tasks,
        ),
        "buckets": (
            [
                MinhashDedupBuckets(
                    str(out / "signatures"), str(out / "buckets"), config=minhash
                )
            ],
            14,
        ),
        "cluster": (
            [
                MinhashDedupCluster(
                    str(out / "buckets"),
                    str(out / "removed"),
                    config=minhash,
                    save_cluster_id=True,
                )
            ],
            1,
        ),
        "filter and tokenise": (
            [
                JsonlReader(ruled),
                MinhashDedupFilter(str(out / "removed")),
                WriteIds(str(out / "single-ids")),
                Classifier(settings["language_model"], "en", 0.65),
                Classifier(settings["classifier"], "positive", settings["min_quality"]),
                WriteIds(str(out / "kept-ids")),
                DocumentTokenizer(
                    str(out / "tokens"),
                    settings["tokenizer"],
                    eos_token=settings["eos_token"],
                    seed=1,
                ),
            ],
            tasks,
        ),
        "merge": (
            [
                DocumentTokenizerMerger(
                    str(out / "tokens"),
                    str(out / "merged"),
                    "train",
                    seed=1,
                    progress=False,
                )
            ],
            1,
        ),
    }
    seconds = {}
    for name, (pipeline, number) in steps.items():
        start = time.perf_counter()
        LocalPipelineExecutor(
            pipeline,
            tasks=number,
            workers=min(settings["workers"], number),
            logging_dir=str(out / "logs" / name.replace(" ", "-")),
        ).run()
        seconds[name] = time.perf_counter() - start
    print(json.dumps(seconds), flush=True)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
