"""`gristmill bench defaults`: held-out bits per byte of the training that `gristmill
new` proposes, beside those of a tuned script after equal process time.

The text is documentation of installed packages, of which some documents are held out.
Ours is the manifest as `gristmill new` writes it, run by the command; the peer
(`tuned_script.py`) reads the same ids for the process time that the stage `pretrain`
took, the start of Python included. Each has one thread, so that process time depends
little on other load. A seed draws first weights and the order of the text; seeds are
measured side by side.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.chain.our_chain import Chain
from benchmarks.checkout import ROOT
from benchmarks.installed_texts import CORPUS, documentation
from benchmarks.measuring import Row, cost_row, row
from benchmarks.public_data import language_model
from benchmarks.train.held_out_bits import HELD_OUT, bits_per_byte
from benchmarks.train.tuned_script import TRAIN, Settings
from gristmill.core.files import write_json, write_json_lines, write_text
from gristmill.core.processes import ONE_THREAD, in_environment
from gristmill.flows.authoring.look_at_data import look_at
from gristmill.flows.authoring.new_manifest import Wishes, write_manifest
from gristmill.tokenize.encoding.tokenizer import load
from gristmill.tokenize.packed import PackedSet
from gristmill.train.models.weights import load_model

DOCUMENTS, HELD_OUT_DOCUMENTS = 1500, 40
"""Pieces of documentation, 2 MB."""
SEEDS = (1, 2)
FLOOR = 1.0
"""Of the ratio, which was 1.03 with both seeds (2026-11-30, 2 cores)."""
TEXTS = "texts.jsonl"


@dataclass(frozen=True)
class Outcome:
    """A side's training.

    Attributes:
        tokens: read.
        seconds: of process time.
        bits_per_byte: of the held-out documents.
    """

    tokens: int
    seconds: float
    bits_per_byte: float


def rows() -> Iterator[Row]:
    """Measure each seed."""
    model = language_model()
    if model is None:
        note = "there is no language model here, and none can be fetched"
        yield row("defaults_vs_reference", None, None, "bits/byte", note)
        return
    with (
        tempfile.TemporaryDirectory(prefix="gristmill-defaults-") as name,
        in_environment(dict.fromkeys(ONE_THREAD, "1")),
        ThreadPoolExecutor(len(SEEDS)) as pool,
    ):
        folder = Path(name)
        held_out = write_texts(folder / TEXTS)
        train = partial(train_both, folder, held_out, model)
        for seed, (ours, peer) in zip(SEEDS, pool.map(train, SEEDS), strict=True):
            yield from rows_of(seed, ours, peer)


def write_texts(file: Path) -> list[str]:
    """Write the documents to train on; returns those held out: every so many of
    all.
    """
    documents = documentation(DOCUMENTS)
    every = DOCUMENTS // HELD_OUT_DOCUMENTS
    write_json_lines(
        file,
        ({"text": text} for number, text in enumerate(documents) if number % every),
    )
    return documents[::every]


def train_both(
    folder: Path, held_out: Sequence[str], language_model: str, seed: int
) -> tuple[Outcome, Outcome]:
    """Train both sides with a seed, one after the other."""
    chain = propose(folder, language_model, seed)
    chain.run("--no-ui")
    session = chain.session()
    tokenizer = load(session.folder("tokenizer").data)
    write_json(
        chain.folder / HELD_OUT,
        {
            "documents": [
                [tokenizer.eos, *encoding.ids]
                for encoding in tokenizer.encode(held_out)
            ],
            "bytes": sum(len(text.encode()) for text in held_out),
        },
    )
    pretrain = session.folder("pretrain")
    manifest = pretrain.manifest()
    model = load_model(pretrain.data / "model")
    ours = Outcome(
        manifest["summary"]["tokens"],
        manifest["cost"]["cpu_seconds"],
        bits_per_byte(model, chain.folder / HELD_OUT),
    )
    packed = PackedSet(session.folder("mix").data)
    np.save(chain.folder / TRAIN, packed.read(np.arange(packed.rows)).ravel())
    settings = Settings(
        model.shape.vocab_size,
        model.shape.layers,
        model.shape.width,
        model.shape.heads,
        seed,
        ours.seconds,
    )
    return ours, train_script(chain.folder, settings)


def propose(folder: Path, language_model: str, seed: int) -> Chain:
    """Write the manifest that `gristmill new` proposes for the texts, with a seed."""
    chain_folder = folder / f"seed-{seed}"
    chain_folder.mkdir()
    file = chain_folder / "proposed.yaml"
    text = write_manifest(
        Wishes("proposed", language_model=language_model),
        {"documentation": look_at("documentation", str(folder / TEXTS))},
        str(file),
    )
    write_text(file, text.replace("\nseed: 1\n", f"\nseed: {seed}\n"))
    return Chain(file, chain_folder)


def train_script(folder: Path, settings: Settings) -> Outcome:
    """Run the peer.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    command = [sys.executable, "-m", "benchmarks.train.tuned_script"]
    done = subprocess.run(
        [*command, str(folder), json.dumps(asdict(settings))],
        check=True,
        text=True,
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    return Outcome(**json.loads(done.stdout.splitlines()[-1]))


def rows_of(seed: int, ours: Outcome, peer: Outcome) -> Iterator[Row]:
    """Compare the sides of a seed."""
    yield cost_row(
        f"defaults_vs_reference, seed {seed}",
        ours.bits_per_byte,
        peer.bits_per_byte,
        "bits/byte",
        f"{HELD_OUT_DOCUMENTS} held-out documents of {DOCUMENTS:,}, {CORPUS}",
        floor=FLOOR,
    )
    yield row(f"tokens read, seed {seed}", ours.tokens, peer.tokens, "tokens")
    yield cost_row(
        f"process time, seed {seed}", ours.seconds, peer.seconds, "s", "one thread each"
    )
