"""Perplexities by n-gram models: ARPA files and binaries, and scores of the stage."""

from __future__ import annotations

import ctypes
import math
import random
import struct
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from gristmill.dataprep.documents import read_table
from gristmill.dataprep.quality import quality
from gristmill.dataprep.quality.perplexity import (
    PerplexityError,
    load_scores,
    normalise,
    perplexities,
)
from gristmill.mixtures.steps.quality import Quality
from tests.dataprep.back_off_model import BackOffModel
from tests.dataprep.document_shards import MakeContext, WriteIngest

WORDS = "the a cat dog sat ran on mat big red".split()


def random_texts(seed: int, count: int) -> list[str]:
    rng = random.Random(seed)
    weights = [1 / (rank + 1) for rank in range(len(WORDS))]
    return [
        "\n".join(
            " ".join(rng.choices(WORDS, weights, k=rng.randint(0, 8))) for _ in range(3)
        )
        for _ in range(count)
    ]


def as_array(texts: Sequence[str]) -> pa.Array:
    return pa.array(texts, pa.large_string())


def test_texts_are_normalised_like_ccnet() -> None:
    text = "  Élan “Vital”, № 12…\n\t３ — it's\x07 fine\u00a0\n\n"
    assert normalise([text], "ccnet") == ['elan "vital", № 00...\n0  -  it\'s fine\n\n']
    assert normalise([text], "lower") == [text.lower()]
    assert normalise([text], "none", 4) == ["  Él"]


def test_perplexity_is_ten_to_the_mean_and_nan_without_words() -> None:
    values = perplexities(
        lambda texts: (np.array([-4.0, 0.0]), np.array([2, 0])), as_array(["a", " "])
    )
    assert values[0] == 100.0
    assert math.isnan(values[1])


def test_unreadable_kenlm_model_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kenlm = pytest.importorskip("kenlm")
    path = tmp_path / "m.arpa"
    path.write_text("some text\n")
    with pytest.raises(PerplexityError, match=r"m\.arpa.*KenLM.*some text"):
        load_scores(str(path), "broken")
    with pytest.raises(PerplexityError, match=r"m\.arpa: KenLM .*local"):
        load_scores("memory://models/m.arpa", "elsewhere")
    monkeypatch.setitem(sys.modules, "kenlm", None)
    with pytest.raises(
        PerplexityError, match=r"3\.12.*pip install 'gristmill\[kenlm\]'"
    ):
        load_scores(str(path), "none")
    assert kenlm.Model is not None


def test_arpa_file_scores_equal_the_definition_without_empty_lines(
    tmp_path: Path,
) -> None:
    pytest.importorskip("kenlm")
    path, plain = tmp_path / "model.arpa", BackOffModel(random_texts(3, 50), 4)
    path.write_text(plain.arpa())
    scored_texts = [
        *random_texts(4, 20),
        "an unknown word",
        "a\tcat \n\n  sat",
        "",
        "\n \n",
        "the\u00a0cat",
    ]
    logs, sizes = load_scores(str(path), "x")(as_array(scored_texts))
    words = [
        [line.split() for line in text.encode().split(b"\n") if line.split()]
        for text in scored_texts
    ]
    assert sizes.tolist() == [sum(len(line) + 1 for line in lines) for lines in words]
    assert sizes.tolist()[-3:] == [0, 0, 2], (
        "only ASCII white space separates words, as in KenLM"
    )
    expected = [
        *(plain.score(text) for text in scored_texts[:-1]),
        plain.score("unknown"),
    ]
    assert logs.tolist() == pytest.approx(expected, abs=1e-3)


def write_kenlm_binary(arpa: Path, binary: Path) -> None:
    """Have KenLM's own library write the binary form of an ARPA file, like its program
    build_binary.

    The Python package loads models and does not build them; the library beside it does
    both. Of its `lm::ngram::Config` (lm/config.hh) in version 0.3.0, `write_mmap` names
    the file to write.
    """
    kenlm = pytest.importorskip("kenlm")
    place = Path(kenlm.__file__).with_name("libkenlm.so")
    if not place.exists():
        pytest.skip("this kenlm has its library inside the Python module")
    library = ctypes.CDLL(str(place))
    config = ctypes.create_string_buffer(512)
    library._ZN2lm5ngram6ConfigC1Ev(config)
    probing_multiplier, building_memory = struct.unpack_from("<f4xQ", config, 40)
    (write_mmap,) = struct.unpack_from("<Q", config, 96)
    if (probing_multiplier, building_memory, write_mmap) != (1.5, 1 << 30, 0):
        pytest.skip("this kenlm lays its settings out in another way")
    name = ctypes.create_string_buffer(str(binary).encode())
    struct.pack_into("<8xQ", config, 0, 0)  # show_progress and messages: silence
    struct.pack_into("<Q", config, 96, ctypes.addressof(name))
    load = library._ZN2lm5ngram11LoadVirtualEPKcRKNS0_6ConfigENS0_9ModelTypeE
    load.restype, probing = ctypes.c_void_p, 0
    assert load(str(arpa).encode(), config, probing)


def test_binary_kenlm_model_scores_like_its_arpa_file(tmp_path: Path) -> None:
    arpa, binary = tmp_path / "model.arpa", tmp_path / "model.bin"
    arpa.write_text(BackOffModel(random_texts(3, 50), 4).arpa())
    write_kenlm_binary(arpa, binary)
    assert binary.read_bytes().startswith(b"mmap lm http://kheafield.com/code")
    scored_texts = as_array(
        [*random_texts(4, 20), "an unknown word", "a\tcat \n\n  sat", "", "\n \n"]
    )
    (logs, sizes), (expected_logs, expected_sizes) = (
        load_scores(str(path), "x")(scored_texts) for path in (binary, arpa)
    )
    assert logs.tolist() == pytest.approx(expected_logs.tolist(), abs=1e-4)
    assert sizes.tolist() == expected_sizes.tolist()
    assert min(logs) < -10 < 0 == logs[-1]


FIELDS = (
    "the cat sat on the mat and the dog ran to the big red house by the sea".split()
)
SHOUT = "buy cheap pills now click here best offer win cash prize today only".split()


def corpus() -> Iterator[tuple[str, str, str]]:
    for number in range(60):
        rng = random.Random(number)
        yield "wiki", f"w{number}", " ".join(rng.choices(FIELDS, k=30))
        yield (
            "web",
            f"g{number}",
            " ".join(rng.choices(FIELDS, k=20))
            + "\n"
            + " ".join(rng.choices(FIELDS, k=9)),
        )
        yield "web", f"b{number}", " ".join(rng.choices(SHOUT, k=30))


def test_stage_scores_and_buckets_for_any_shards(
    write_ingest: WriteIngest,
    tmp_path: Path,
    make_context: MakeContext,
) -> None:
    pytest.importorskip("kenlm")
    documents = [*corpus(), ("web", "empty", " ")]
    model = tmp_path / "wiki.arpa"
    wiki = [text for source, _, text in documents if source == "wiki"]
    model.write_text(BackOffModel(wiki, 3).arpa())
    config: dict[str, Any] = {
        "perplexity": {"kenlm": str(model), "buckets": [0.3, 0.6]},
        "sources": ["web"],
        "keep_top": 0.6,
        "max_perplexity": 5000,
        "seed": 3,
    }
    results = []
    for name, shards in (
        ("one", [documents]),
        ("three", [documents[100:], documents[:7], documents[7:100]]),
    ):
        ingest = write_ingest(f"ingest {name}", shards)
        out = tmp_path / name
        summary = quality.run(
            {"ingest": ingest}, config, out, make_context(f"work {name}", workers=2)
        )
        rows = [
            {**document, **judged}
            for path in sorted(ingest.iterdir())
            for document, judged in zip(
                read_table(path).to_pylist(),
                read_table(out / path.name).to_pylist(),
                strict=True,
            )
        ]
        kept = {
            row["locator"]: (
                row["keep"],
                row["perplexity"],
                row.get("perplexity_bucket"),
            )
            for row in rows
        }
        results.append((kept, summary))
    assert results[0] == results[1]
    kept, summary = results[0]
    good, bad = ([kept[f"{kind}{number}"] for number in range(60)] for kind in "gb")
    assert max(score for _, score, _ in good) < min(score for _, score, _ in bad)
    assert [kept[f"w{number}"][1] for number in range(60)] == [None] * 60
    assert kept["empty"] == (True, None, None)
    assert Counter(bucket for _, _, bucket in kept.values()) == {
        "head": 36,
        "middle": 36,
        "tail": 48,
        None: 61,
    }
    assert sum(keep for keep, score, _ in kept.values() if score is not None) == 72
    assert summary.counts["dropped"] == {"quality/keep_top": 48}
    assert summary.buckets["head"]["all"].kept == 36


@pytest.mark.parametrize(
    ("perplexity", "message"),
    [
        ({}, "perplexity"),
        ({"model": "m", "buckets": [0.3, 0.6]}, "`kenlm`"),
        ({"kenlm": "m", "buckets": [0.6, 0.3]}, "ascending"),
    ],
)
def test_section_needs_a_model(perplexity: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Quality.model_validate({"perplexity": perplexity})
