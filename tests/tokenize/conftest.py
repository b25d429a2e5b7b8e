"""Small committed stages as inputs of the tokenizing stages."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gristmill.core.stage_context import Context
from gristmill.dataprep.documents import DOCUMENT_SCHEMA, document_id, write_table
from gristmill.mixtures.schema.engine import BeamEngine
from gristmill.tokenize.encoding import encode, tokenizer
from gristmill.tokenize.mixing import mix, mix_summary

WORDS = tuple(
    f"{a}{b}{c}"
    for a in ("gr", "m", "st", "tr")
    for b in ("i", "a", "ou")
    for c in ("st", "nd", "ll", "in")
)


class Stages:
    """Runs stages in folders below one temporary folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def documents(
        self, source: str, num_documents: int, seed: int = 0, words: int = 60
    ) -> list[tuple[str, str, str]]:
        """Random documents: (source, locator, text)."""
        rng = random.Random(f"{source} {seed}")
        return [
            (
                source,
                f"{source}/{i}",
                " ".join(rng.choices(WORDS, k=rng.randint(words // 2, words)))
                + f" {i}.\n",
            )
            for i in range(num_documents)
        ]

    def ingest(
        self, name: str, documents: Sequence[tuple[str, str, str]], shards: int = 1
    ) -> Path:
        """Deal documents out to shards in turn."""
        for shard in range(shards):
            rows = [
                {
                    "id": document_id(*document),
                    "source": document[0],
                    "locator": document[1],
                    "text": document[2],
                    "metadata": "{}",
                }
                for document in documents[shard::shards]
            ]
            write_table(
                self.root / name / f"part-{shard:05d}.parquet",
                pa.Table.from_pylist(rows, schema=DOCUMENT_SCHEMA),
            )
        return self.root / name

    def annotate(
        self, name: str, ingest: Path, measure: Callable[[pa.Table], Mapping[str, Any]]
    ) -> Path:
        """One annotating stage; `measure(documents)` gives its columns; all are kept if
        none is `keep`.
        """
        for path in sorted(ingest.glob("part-*.parquet")):
            documents = pq.read_table(path)
            measured = {"keep": [True] * len(documents), **measure(documents)}
            reasons = pa.array(
                [None if keep else "rule" for keep in measured["keep"]], pa.string()
            )
            write_table(
                self.root / name / path.name,
                pa.table(
                    {
                        "id": documents["id"].combine_chunks(),
                        "reason": reasons.dictionary_encode(),
                        "error": pa.nulls(len(documents), pa.string()),
                        **measured,
                    }
                ),
            )
        return self.root / name

    def context(self, name: str, workers: int = 1) -> Context:
        """A context whose warnings go to `warnings(name)`."""
        folder = self.root / f"{name}.work"
        folder.mkdir(parents=True, exist_ok=True)

        def emit(event: dict[str, Any]) -> None:
            if event["event"] == "warning":
                with (folder / "warnings").open("a") as sink:
                    sink.write(json.dumps(event["message"]) + "\n")

        return Context(folder, name, BeamEngine(workers=workers), emit=emit)

    def warnings(self, name: str) -> list[str]:
        path = self.root / f"{name}.work" / "warnings"
        return (
            [json.loads(line) for line in path.read_text().splitlines()]
            if path.exists()
            else []
        )

    def tokenizer(
        self,
        name: str,
        inputs: Mapping[str, Path],
        sources: Sequence[str],
        published: bool = False,
        **section: Any,
    ) -> tokenizer.TokenizerSummary:
        config: tokenizer.TokenizerRecipe = {
            "tokenizer": {"vocab_size": 300, **section},
            "sources": list(sources),
            "seed": 1,
            "published": published,
        }
        return tokenizer.run(inputs, config, self.root / name, self.context(name))

    def tokenize(
        self, name: str, inputs: Mapping[str, Path], workers: int = 1
    ) -> encode.TokenizeSummary:
        return encode.run(inputs, {}, self.root / name, self.context(name, workers))

    def tokenized(
        self,
        inputs: Mapping[str, Path],
        sources: Sequence[str],
        prefix: str = "",
        **section: Any,
    ) -> dict[str, Path]:
        """Inputs with a tokenizer learnt from them, and their tokens."""
        name = f"{prefix}tokenizer"
        self.tokenizer(name, inputs, sources, **section)
        inputs = {**inputs, "tokenizer": self.root / name}
        self.tokenize(f"{prefix}tokenize", inputs)
        return {**inputs, "tokenize": self.root / f"{prefix}tokenize"}

    def mix(
        self,
        name: str,
        inputs: Mapping[str, Path],
        sources: Mapping[str, Mapping[str, Any]],
        workers: int = 1,
        seed: int = 3,
        **section: Any,
    ) -> mix_summary.MixSummary:
        return mix.run(
            inputs,
            {"mix": section, "sources": dict(sources), "seed": seed},
            self.root / name,
            self.context(name, workers),
        )

    def files(self, name: str) -> dict[str, bytes]:
        """Every file of an output folder."""
        return {
            path.name: path.read_bytes()
            for path in sorted((self.root / name).iterdir())
        }


@pytest.fixture
def stages(tmp_path: Path) -> Stages:
    return Stages(tmp_path)


@pytest.fixture(scope="module")
def module_stages(tmp_path_factory: pytest.TempPathFactory) -> Stages:
    """Stages whose outputs the tests of a module share."""
    return Stages(tmp_path_factory.mktemp("stages"))


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real data beside the checkout."""
    folder = Path(__file__).resolve().parents[2].parent / "shared" / "data"
    if not folder.exists():
        pytest.skip("there is no real data beside the checkout")
    return folder
