"""Other whole chains, each run by an interpreter that has it, and the same steps of our
chain.

`make peers` makes an environment for each in build/peers (GRISTMILL_BENCH_PEERS names
another folder), for their pins conflict with ours and with each other's. A peer that is
installed beside gristmill, as datatrove by the extra `bench`, needs none.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from benchmarks.chain.our_chain import (
    CANDIDATES,
    END_OF_TEXT,
    ENGLISH,
    GOOD,
    MIN_QUALITY,
    VERDICTS,
    WORKERS,
    Models,
)
from benchmarks.chain.pages import Corpus
from benchmarks.checkout import ROOT
from gristmill.mixtures.base import RawSection

VARIABLE = "GRISTMILL_BENCH_PEERS"
BANDS, ROWS, NGRAM = 14, 8, 5
"""Parameters of MinHash on all sides."""
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "RAYON_NUM_THREADS": "1",
}
"""Environment of peers that have a process per core."""
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "PIP_NO_INDEX": "1",
    "UV_OFFLINE": "1",
}
"""Environment without downloads: Data-Juicer installs missing packages during its
run.
"""
GOPHER: RawSection = {"rules": ["gopher_repetition", "gopher_quality"]}


@dataclass(frozen=True)
class Done:
    """Work of a peer.

    Attributes:
        seconds: of each step.
        kept: documents that it kept.
    """

    seconds: dict[str, float]
    kept: int


@dataclass(frozen=True)
class Peer:
    """Chain of another project.

    Attributes:
        name: of its folder below VARIABLE, and in rows.
        module: of its package.
        does: its part of the chain, in words.
        same: the same steps of ours, with their sections.
        packed: True if it ends with tokens, False if with the documents that it keeps.
        work: (interpreter, corpus, models, folder) -> its work.
    """

    name: str
    module: str
    does: str
    same: RawSection
    packed: bool
    work: Callable[[str, Corpus, Models, Path], Done]

    def interpreter(self) -> str | None:
        """Return the Python that has it, or None."""
        own = (
            Path(os.environ.get(VARIABLE) or ROOT / "build" / "peers")
            / self.name
            / "bin"
            / "python"
        )
        if own.exists():
            return str(own)
        return (
            sys.executable
            if importlib.util.find_spec(self.module) is not None
            else None
        )


class PeerError(RuntimeError):
    """A peer failed; the message has the end of its output."""


def call(command: Sequence[str], folder: Path, **environment: str) -> str:
    """Run a command of a peer in a folder, and return its output.

    Raises:
        PeerError: it failed.
    """
    own = {"TMPDIR": str(folder), "HF_HOME": str(folder / "cache"), "COLUMNS": "200"}
    done = subprocess.run(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
        env={**os.environ, **ONE_THREAD, **OFFLINE, **own, **environment},
    )
    output = done.stdout.decode(errors="replace")
    (folder / "log").write_text(output)
    if done.returncode != 0:
        last = [line for line in output.splitlines() if line.strip()][-3:]
        raise PeerError(
            f"{Path(command[0]).name} ended with {done.returncode}: "
            f"{' / '.join(last)[-300:]}"
        )
    return output


def timed(steps: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Run steps; returns the seconds of each."""
    seconds = {}
    for name, step in steps.items():
        start = time.perf_counter()
        step()
        seconds[name] = time.perf_counter() - start
    return seconds


def by_datatrove(python: str, corpus: Corpus, models: Models, folder: Path) -> Done:
    """Run all of the chain; leaves its verdicts in the folder."""
    settings = {
        "out": str(folder),
        "corpus": str(corpus.folder),
        "tasks": len(list(corpus.folder.glob("*.jsonl"))),
        "workers": WORKERS,
        "language_model": str(models.language),
        "classifier": str(models.classifier),
        "min_quality": MIN_QUALITY,
        "tokenizer": str(models.tokenizer),
        "eos_token": END_OF_TEXT,
    }
    path = folder / "settings.json"
    path.write_text(json.dumps(settings))
    output = call(
        [python, str(Path(__file__).with_name("peer_datatrove.py")), str(path)], folder
    )
    seconds: dict[str, float] = json.loads(output.splitlines()[-1])
    return Done(
        seconds,
        sum(
            len(file.read_text().split())
            for file in (folder / "kept-ids").glob("*.ids")
        ),
    )


def by_dolma(python: str, corpus: Corpus, models: Models, folder: Path) -> Done:
    """Run Dolma's taggers, its Bloom filter for equal texts, its mixer, which drops by
    their results, and its tokenizer.
    """
    documents, dolma = folder / "documents", [python, "-m", "dolma.cli"]
    documents.mkdir()
    for file in sorted(corpus.folder.glob("*.jsonl")):  # it reads compressed files only
        with gzip.open(documents / f"{file.name}.gz", "wb", 1) as sink:
            sink.write(file.read_bytes())
    sources, processes = f"{documents}/*.gz", ["--processes", str(WORKERS)]
    configs = {
        "dedupe": {
            "documents": [sources],
            "processes": WORKERS,
            "dedupe": {
                "name": "equal",
                "documents": {"attribute_name": "equal", "key": "$.text"},
            },
            "bloom_filter": {
                "file": str(folder / "bloom"),
                "read_only": False,
                "estimated_doc_count": corpus.documents,
                "desired_false_positive_rate": 1e-6,
            },
        },
        "mix": {
            "processes": WORKERS,
            "streams": [
                {
                    "name": "mixed",
                    "documents": [sources],
                    "attributes": ["judged", "equal"],
                    "output": {
                        "path": str(folder / "mixed"),
                        "max_size_in_bytes": 1 << 28,
                    },
                    "filter": {
                        "syntax": "jq",
                        "include": [],
                        "exclude": [dolma_drops()],
                    },
                }
            ],
        },
    }
    for name, config in configs.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(config))
    taggers = ["gopher_v1", "c4_v2", "english", "classifier"]
    own_taggers = str(Path(__file__).with_name("peer_dolma.py"))
    tag = [
        "--experiment",
        "judged",
        "--taggers",
        *taggers,
        "--tagger_modules",
        own_taggers,
    ]
    tokenizer = [
        "--tokenizer.name_or_path",
        str(models.tokenizer),
        "--tokenizer.eos_token_id",
        "0",
    ]
    tokens = [*tokenizer, "--dtype", "uint16", "--destination", str(folder / "tokens")]
    model_files = {
        "BENCH_LANGUAGE_MODEL": str(models.language),
        "BENCH_CLASSIFIER": str(models.classifier),
    }
    seconds = timed(
        {
            "tag": lambda: call(
                [*dolma, "tag", "--documents", sources, *tag, *processes],
                folder,
                **model_files,
            ),
            "dedupe": lambda: call(
                [*dolma, "-c", str(folder / "dedupe.yaml"), "dedupe"], folder
            ),
            "mix": lambda: call(
                [*dolma, "-c", str(folder / "mix.yaml"), "mix"], folder
            ),
            "tokens": lambda: call(
                [
                    *dolma,
                    "tokens",
                    "--documents",
                    f"{folder}/mixed/*.gz",
                    *tokens,
                    *processes,
                ],
                folder,
            ),
        }
    )
    kept = 0
    for file in (folder / "mixed").glob("*.gz"):
        with gzip.open(file) as lines:
            kept += sum(1 for _ in lines)
    return Done(seconds, kept)


def dolma_drops() -> str:
    """Return the condition by which Dolma's mixer drops: Gopher's rules (Rae et al.
    2021, table A1) by its tagger's names, C4's two rules for documents, other
    languages, low quality, and repeated texts.
    """
    bounds: dict[str, tuple[float | None, float | None]] = {
        "word_count": (50, 100_000),
        "median_word_length": (3, 10),
        "required_word_count": (2, None),
        "fraction_of_words_with_alpha_character": (0.8, None),
        "symbol_to_word_ratio": (None, 0.1),
        "fraction_of_lines_starting_with_bullet_point": (None, 0.9),
        "fraction_of_lines_ending_with_ellipsis": (None, 0.3),
        "fraction_of_duplicate_lines": (None, 0.3),
        "fraction_of_characters_in_duplicate_lines": (None, 0.2),
    }
    for n, most in ((2, 0.2), (3, 0.18), (4, 0.16)):
        bounds[f"fraction_of_characters_in_most_common_{n}grams"] = (None, most)
    for n, most in ((5, 0.15), (6, 0.14), (7, 0.13), (8, 0.12), (9, 0.11), (10, 0.1)):
        bounds[f"fraction_of_characters_in_duplicate_{n}grams"] = (None, most)
    columns = {f"gopher_v1__{name}": limits for name, limits in bounds.items()}
    columns["english__en"] = (ENGLISH["threshold"], None)
    columns["classifier__positive"] = (MIN_QUALITY, None)
    drops = []
    for name, limits in columns.items():
        for sign, limit in zip("<>", limits, strict=True):
            if limit is not None:
                drops.append(
                    f"(.attributes.judged__{name} // [[0, 0, 0]])[0][2] {sign} {limit}"
                )
    drops += [
        f".attributes.{name} != null"
        for name in (
            "judged__c4_v2__has_curly_brace",
            "judged__c4_v2__has_lorem_ipsum",
            "equal",
        )
    ]
    return " or ".join(f"({drop})" for drop in drops)


def by_data_juicer(python: str, corpus: Corpus, models: Models, folder: Path) -> Done:
    """Run the filters of Data-Juicer's recipe for C4 (`redpajama-c4-refine.yaml`),
    without models, and its MinHash.
    """
    minhash = {
        "tokenization": "space",
        "window_size": NGRAM,
        "lowercase": True,
        "num_permutations": BANDS * ROWS,
        "num_bands": BANDS,
        "num_rows_per_band": ROWS,
        "jaccard_threshold": 0.75,
    }
    recipe = {
        "project_name": "chain",
        "dataset_path": str(corpus.folder),
        "export_path": str(folder / "out.jsonl"),
        "np": WORKERS,
        "text_keys": "text",
        "open_tracer": False,
        "use_cache": False,
        "process": [
            {
                "alphanumeric_filter": {
                    "tokenization": False,
                    "min_ratio": 0.65,
                    "max_ratio": 0.9,
                }
            },
            {"average_line_length_filter": {"max_len": 3000}},
            {"character_repetition_filter": {"rep_len": 10, "max_ratio": 0.3}},
            {"maximum_line_length_filter": {"max_len": 4000}},
            {"special_characters_filter": {"max_ratio": 0.4}},
            {
                "words_num_filter": {
                    "tokenization": False,
                    "min_num": 20,
                    "max_num": 10_000,
                }
            },
            {
                "word_repetition_filter": {
                    "tokenization": False,
                    "rep_len": 10,
                    "max_ratio": 0.231,
                }
            },
            {"document_minhash_deduplicator": minhash},
        ],
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    program = str(Path(python).with_name("dj-process"))
    seconds = timed(
        {
            "process": lambda: call(
                [program, "--config", str(folder / "recipe.yaml")], folder
            )
        }
    )
    with open(folder / "out.jsonl", "rb") as lines:
        return Done(seconds, sum(1 for _ in lines))


def by_text_dedup(python: str, corpus: Corpus, models: Models, folder: Path) -> Done:
    """Run text-dedup's MinHash."""
    command = [
        python,
        "-m",
        "text_dedup.minhash",
        "--path",
        "json",
        "--data_files",
        f"{corpus.folder}/*.jsonl",
    ]
    command += [
        "--split",
        "train",
        "--cache_dir",
        str(folder / "cache"),
        "--output",
        str(folder / "out"),
    ]
    command += [
        "--column",
        "text",
        "--ngram",
        str(NGRAM),
        "--num_perm",
        str(BANDS * ROWS),
    ]
    command += [
        "--b",
        str(BANDS),
        "--r",
        str(ROWS),
        "--num_proc",
        str(WORKERS),
        "--batch_size",
        "10000",
    ]
    seconds = timed({"minhash": lambda: call(command, folder)})
    kept = re.search(r"After\s+: (\d+)", (folder / "log").read_text())
    if kept is None:
        raise PeerError(
            f"its output has no number of kept documents; see {folder / 'log'}"
        )
    return Done(seconds, int(kept[1]))


PEERS = (
    Peer("datatrove", "datatrove", "all of the chain", VERDICTS, True, by_datatrove),
    Peer(
        "dolma",
        "dolma",
        "rules, equal texts, language, classifier, mixing, tokens; no near duplicates",
        {
            "filter": {"rules": [*GOPHER["rules"], {"c4": {"constants": "paper"}}]},
            "dedup": {"minhash": None, "index": False},
            "langid": ENGLISH,
            "quality": GOOD,
        },
        True,
        by_dolma,
    ),
    Peer(
        "data-juicer",
        "data_juicer",
        "seven filters and MinHash, to JSON lines; ours: Gopher's rules and MinHash",
        {"filter": GOPHER, "dedup": CANDIDATES},
        False,
        by_data_juicer,
    ),
    Peer(
        "text-dedup",
        "text_dedup",
        "MinHash alone, to Arrow files; ours: to JSON lines",
        {"dedup": CANDIDATES},
        False,
        by_text_dedup,
    ),
)


def fresh(folder: Path) -> Path:
    """Return an emptied folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
