"""Learning vocabularies: time, memory and merges against gigatoken's trainer, and the
models against each other.

Every training is a process of its own with one thread, whose memory is measured and
whose output is dropped. Bytes per token are of held-out documents of the kind.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import pyarrow as pa

from benchmarks.measuring import Row, row, text_megabytes
from benchmarks.tokenize.texts import books, code, first_texts, languages
from gristmill.mixtures.sections.tokenizer import CHARACTER_COVERAGE

TEXTS: dict[str, Callable[[], list[str]]] = {
    "english": books,
    "code": code,
    "multilingual": languages,
}
LEARNT_BYTES, MEASURED_BYTES = 5_000_000, 1_000_000
HELD_OUT = 5
"""One in HELD_OUT documents is measured and not learnt from."""
SIZES = (8_000, 32_000)
"""Vocabularies that are compared with another trainer's."""
MODEL_SIZE = 16_000
MODELS = ("unigram", "sentencepiece_bpe", "superbpe")
SEPARATOR = b"\0<|next|>\0"
MEGA = 1e6


def rows() -> Iterator[Row]:
    """Measure every kind of text; the peer is another trainer, or our `bpe`."""
    for kind, read in TEXTS.items():
        if not read():
            yield row(
                f"train_bpe_{kind}_vs_gigatoken",
                None,
                None,
                "MB/s",
                "the public test data is not here",
            )
            continue
        for size in SIZES:
            yield from gigatoken_rows(kind, size)
        yield from model_rows(kind)


def gigatoken_rows(kind: str, size: int) -> Iterator[Row]:
    """Measure our trainer against gigatoken's."""
    name = f"train_bpe_{kind}_{size // 1000}k_vs_gigatoken"
    ours, peer = in_process(kind, "bpe", size), in_process(kind, "gigatoken", size)
    if peer is None:
        yield row(name, None, None, "MB/s", "gigatoken is not installed")
        return
    assert ours is not None
    our_merges, peer_merges = ours.merges or [], peer.merges or []
    pairs = zip(our_merges, peer_merges, strict=False)
    agreeing = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    note = (
        f"merges equal: {'yes' if our_merges == peer_merges else 'no'}; the first "
        f"{agreeing:,} of {len(our_merges):,} agree, the peer has {len(peer_merges):,}"
    )
    yield row(name, ours.rate, peer.rate, "MB/s", note)
    yield row(f"{name}: memory", ours.memory, peer.memory, "MB")


def model_rows(kind: str) -> Iterator[Row]:
    """Measure the models against each other."""
    trainings = {
        model: in_process(kind, model, MODEL_SIZE)
        for model in ("bpe", *MODELS, "sentencepiece")
    }
    for model, peer in (
        *((model, "bpe") for model in MODELS),
        ("sentencepiece_bpe", "sentencepiece"),
    ):
        ours, theirs = trainings[model], trainings[peer]
        if ours is None or theirs is None:
            yield row(
                f"train_{model}_{kind}_vs_{peer}",
                None,
                None,
                "MB/s",
                "sentencepiece is not installed",
            )
            continue
        for measure, key, unit in (
            ("train", "rate", "MB/s"),
            ("memory", "memory", "MB"),
            ("compression", "bytes_per_token", "bytes/token"),
            ("encode", "encoding", "MB/s"),
        ):
            ours_value, peer_value = getattr(ours, key), getattr(theirs, key)
            if ours_value is not None and peer_value is not None:
                note = f"by {ours.encoder}, warm" if key == "encoding" else ""
                yield row(
                    f"{measure}_{model}_{kind}_vs_{peer}",
                    ours_value,
                    peer_value,
                    unit,
                    note,
                )


@dataclass(frozen=True)
class Training:
    """Measurements of a training, and of encoding by its vocabulary.

    Attributes:
        rate: MB of text per second.
        memory: MB.
        merges: learnt ones; None where they are not known.
        bytes_per_token: of text that was held out.
        encoder: of the stage `tokenize`.
        encoding: MB of text per second.
    """

    rate: float
    memory: float
    merges: list[list[str]] | None = None
    bytes_per_token: float | None = None
    encoder: str = ""
    encoding: float | None = None


def in_process(kind: str, trainer: str, size: int) -> Training | None:
    """Train in a process of its own, and return its measurements; None if its package
    is not installed.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "measurements.json"
        subprocess.run(
            [sys.executable, "-m", __name__, kind, trainer, str(size), str(path)],
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={
                **os.environ,
                "RAYON_NUM_THREADS": "1",
                "TOKENIZERS_PARALLELISM": "false",
            },
        )
        measurements = json.loads(path.read_text())
        return None if measurements is None else Training(**measurements)


def _measure(kind: str, trainer: str, size: int) -> Training | None:
    texts = TEXTS[kind]()
    held_out = first_texts(texts[::HELD_OUT], MEASURED_BYTES)
    learnt = first_texts(
        [text for number, text in enumerate(texts) if number % HELD_OUT], LEARNT_BYTES
    )
    try:
        train = _trainer(trainer, learnt, size)
    except ImportError:
        return None
    Path("/proc/self/clear_refs").write_text("5")  # the peak is from now on
    before, start = _peak_mb(), time.process_time()
    tokenizer = train()
    seconds = time.process_time() - start
    training = Training(text_megabytes(learnt) / seconds, _peak_mb() - before)
    if isinstance(tokenizer, list):
        return replace(training, merges=tokenizer)
    held_out_bytes = text_megabytes(held_out) * MEGA
    if trainer == "sentencepiece":
        tokens = sum(map(len, tokenizer.encode(held_out)))
        return replace(training, bytes_per_token=held_out_bytes / tokens)
    tokenizer.encode_special_tokens = True
    encoder, count_tokens = _encoder(tokenizer)
    count_tokens(learnt)
    start = time.process_time()
    tokens = count_tokens(held_out)
    seconds = time.process_time() - start
    return replace(
        training,
        merges=json.loads(tokenizer.to_str())["model"].get("merges", []),
        bytes_per_token=held_out_bytes / tokens,
        encoder=encoder,
        encoding=text_megabytes(held_out) / seconds,
    )


def _encoder(tokenizer: Any) -> tuple[str, Callable[[Sequence[str]], int]]:
    """Return the name of the encoder of the stage `tokenize`, and a function that
    counts the tokens of texts.
    """
    from gristmill.tokenize.encoding.fast_encode import FastEncoder
    from gristmill.tokenize.encoding.known_tokenizers import NotKnownError

    try:
        fast = FastEncoder.for_tokenizer(tokenizer)
    except NotKnownError:
        return "the library", lambda texts: sum(
            len(encoding.ids)
            for encoding in tokenizer.encode_batch_fast(
                list(texts), add_special_tokens=False
            )
        )
    return "gigatoken", lambda texts: len(
        fast.encode(pa.array(texts, pa.large_string()))[0]
    )


def _peak_mb() -> float:
    """Return the peak memory of this process, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return (
        int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
        * 1024
        / MEGA
    )


def _trainer(name: str, texts: Sequence[str], size: int) -> Callable[[], Any]:
    """Return a function that trains, with all imports done.

    Raises:
        ImportError: a package is not installed.
    """
    if name != "gigatoken":
        from gristmill.tokenize.encoding.vocabulary import train
        from gristmill.tokenize.encoding.vocabulary_sample import TokenizerSample

        if name in ("unigram", "sentencepiece"):
            import sentencepiece  # noqa: F401
        if name == "sentencepiece":
            return lambda: _sentencepiece(texts, size)
        return lambda: train(TokenizerSample({"text": texts}, {}), size, model=name)  # type: ignore[arg-type]
    import gigatoken

    from gristmill.tokenize.encoding.chat_templates import SPECIAL_TOKENS
    from gristmill.tokenize.encoding.pretokens import byte_characters

    content, characters = (
        SEPARATOR.join(text.encode() for text in texts),
        byte_characters(),
    )

    def work() -> list[list[str]]:
        _, merges = gigatoken.train_bpe(
            content, size, [*SPECIAL_TOKENS], separator=SEPARATOR
        )
        return [
            ["".join(characters[byte] for byte in side) for side in merge]
            for merge in merges
        ]

    return work


def _sentencepiece(texts: Sequence[str], size: int) -> Any:
    """Learn `sentencepiece_bpe` by the library itself, which takes lines."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for text in texts for line in text.split("\n")),
        model_writer=model,
        model_type="bpe",
        vocab_size=size,
        byte_fallback=True,
        character_coverage=CHARACTER_COVERAGE,
        split_digits=True,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        num_threads=1,
        max_sentence_length=1 << 20,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


if __name__ == "__main__":
    kind, trainer, size, path = sys.argv[1:]
    training = _measure(kind, trainer, int(size))
    Path(path).write_text(json.dumps(None if training is None else asdict(training)))
