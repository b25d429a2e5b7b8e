"""n-gram models: training by the definition, ARPA files, and scores equal to
KenLM's.
"""

from __future__ import annotations

import ctypes
import math
import random
import struct
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.core.stage_context import Context
from gristmill.dataprep.documents import read_table
from gristmill.dataprep.quality import quality
from gristmill.dataprep.quality.kneser_ney import (
    FALLBACK_DISCOUNTS,
    read_sentences,
    train_entries,
)
from gristmill.dataprep.quality.labelled_examples import QualityError
from gristmill.dataprep.quality.ngram_tables import (
    NgramTables,
    make_tables,
    read_entries,
    score_texts,
    write_entries,
)
from gristmill.dataprep.quality.perplexity import (
    NGRAM_FILES,
    PerplexityError,
    load_scores,
    normalise,
    perplexities,
)
from gristmill.mixtures.steps.quality import Quality

Gram = tuple[str, ...]
WORDS = "the a cat dog sat ran on mat big red".split()


def sentences_of(texts: Sequence[str]) -> list[Gram]:
    lines = [line.split() for text in texts for line in text.split("\n")]
    return [("<s>", *line, "</s>") for line in lines if line]


class PlainModel:
    """Interpolated modified Kneser-Ney as Chen & Goodman write it: dictionaries, one
    probability at a time.
    """

    def __init__(self, texts: Sequence[str], order: int) -> None:
        self.order = order
        raw: list[Counter[Gram]] = [Counter() for _ in range(order)]
        for sentence in sentences_of(texts):
            for size in range(1, order + 1):
                raw[size - 1].update(
                    sentence[at : at + size] for at in range(len(sentence) - size + 1)
                )
        self.counts: list[dict[Gram, int]] = []
        for size in range(1, order + 1):
            if size == order:
                self.counts.append(dict(raw[size - 1]))
                continue
            before = Counter(gram[1:] for gram in raw[size])
            self.counts.append(
                {
                    gram: raw[size - 1][gram] if gram[0] == "<s>" else before[gram]
                    for gram in raw[size - 1]
                }
            )
        self.vocabulary = {gram[0] for gram in raw[0]} - {"<s>"} | {"<unk>"}
        del self.counts[0][("<s>",)]
        self.discounts = [self.discount(counts) for counts in self.counts]
        self.followers: defaultdict[Gram, list[Gram]] = defaultdict(list)
        for counts in self.counts:
            for gram in counts:
                self.followers[gram[:-1]].append(gram)

    @staticmethod
    def discount(counts: dict[Gram, int]) -> tuple[float, ...]:
        n1, n2, n3, n4 = (
            sum(count == k for count in counts.values()) for k in (1, 2, 3, 4)
        )
        if n1 and n2 and n3 and n4:
            y = n1 / (n1 + 2 * n2)
            discounts = (1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3)
            if all(0 <= d <= k for k, d in enumerate(discounts, 1)):
                return discounts
        return FALLBACK_DISCOUNTS

    def backoff(self, context: Gram) -> float:
        grams = self.followers.get(context, [])
        if not grams:
            return 1.0
        counts, discounts = self.counts[len(context)], self.discounts[len(context)]
        return sum(discounts[min(counts[gram], 3) - 1] for gram in grams) / sum(
            counts[gram] for gram in grams
        )

    def probability(self, word: str, context: Gram) -> float:
        if word not in self.vocabulary:
            word = "<unk>"
        lower = (
            self.probability(word, context[1:]) if context else 1 / len(self.vocabulary)
        )
        grams = self.followers.get(context, [])
        if not grams:
            return lower
        counts, discounts = self.counts[len(context)], self.discounts[len(context)]
        count = counts.get((*context, word), 0)
        taken = count - discounts[min(count, 3) - 1] if count else 0.0
        return (
            taken / sum(counts[gram] for gram in grams) + self.backoff(context) * lower
        )

    def score(self, text: str) -> float:
        total = 0.0
        for sentence in sentences_of([text]):
            for at in range(1, len(sentence)):
                total += math.log10(
                    self.probability(
                        sentence[at], sentence[max(0, at - self.order + 1) : at]
                    )
                )
        return total

    def arpa(self) -> str:
        grams: list[list[Gram]] = [sorted(counts) for counts in self.counts]
        grams[0] = [("<unk>",), ("<s>",), *grams[0]]
        lines = [
            "\\data\\",
            *(f"ngram {size}={len(of_size)}" for size, of_size in enumerate(grams, 1)),
            "",
        ]
        for size, of_size in enumerate(grams, 1):
            lines.append(f"\\{size}-grams:")
            for gram in of_size:
                log = (
                    -99.0
                    if gram == ("<s>",)
                    else math.log10(self.probability(gram[-1], gram[:-1]))
                )
                backoff = (
                    f"\t{math.log10(self.backoff(gram)):.8f}"
                    if size < self.order
                    else ""
                )
                lines.append(f"{log:.8f}\t{' '.join(gram)}{backoff}")
            lines.append("")
        return "\n".join([*lines, "\\end\\", ""])


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


def trained(texts: Sequence[str], order: int) -> NgramTables:
    return make_tables(train_entries(read_sentences(as_array(texts)), order))


TEXTS = st.lists(
    st.lists(st.sampled_from(["a", "b", "ç", "\n"]), max_size=12).map(" ".join),
    min_size=1,
    max_size=5,
)


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(
    TEXTS.filter(lambda texts: any(text.strip() for text in texts)),
    TEXTS,
    st.integers(2, 4),
)
def test_trained_model_equals_the_definition(
    texts: list[str], unseen: list[str], order: int
) -> None:
    plain, tables = PlainModel(texts, order), trained(texts, order)
    scored_texts = [*texts, *unseen, "a never b", "never\n\n a"]
    scores, sizes = score_texts(tables, as_array(scored_texts))
    assert scores.tolist() == pytest.approx(
        [plain.score(text) for text in scored_texts], abs=1e-4
    )
    assert sizes.tolist() == [
        sum(len(sentence) - 1 for sentence in sentences_of([text]))
        for text in scored_texts
    ]


def test_larger_corpus_has_own_discounts_and_contexts_sum_to_one() -> None:
    texts = random_texts(1, 60)
    plain, tables = PlainModel(texts, 3), trained(texts, 3)
    assert plain.discounts[2] != FALLBACK_DISCOUNTS
    scores, _ = score_texts(tables, as_array(texts))
    assert scores.tolist() == pytest.approx(
        [plain.score(text) for text in texts], abs=1e-3
    )
    for context in [(), ("cat",), ("<s>", "the"), ("never", "the")]:
        assert sum(
            plain.probability(word, context) for word in plain.vocabulary
        ) == pytest.approx(1.0)
    # The kernel's probabilities of the second word of a line, or of its end, sum to one
    # as well.
    lines = [f"the {word}" for word in sorted(plain.vocabulary - {"</s>"})]
    firsts = [
        score_texts(tables, as_array(["the"]))[0][0]
        - math.log10(plain.probability("</s>", ("<s>", "the")))
    ]
    seconds = [
        score - math.log10(plain.probability("</s>", ("the", line.split()[1])))
        for line, score in zip(
            lines, score_texts(tables, as_array(lines))[0], strict=True
        )
    ]
    total = sum(10 ** (second - firsts[0]) for second in seconds) + plain.probability(
        "</s>", ("<s>", "the")
    )
    assert total == pytest.approx(1.0, abs=1e-4)


def test_order_of_texts_does_not_change_the_model(tmp_path: Path) -> None:
    texts = random_texts(2, 30)
    for name, order in (("a", texts), ("b", texts[::-1])):
        write_entries(
            tmp_path / name, train_entries(read_sentences(as_array(order)), 4)
        )
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    tables = make_tables(read_entries(tmp_path / "a"))
    assert tables.order == 4
    again = trained(texts, 4)
    assert (
        score_texts(tables, as_array(texts))[0].tolist()
        == score_texts(again, as_array(texts))[0].tolist()
    )


def test_trained_model_scores_like_its_arpa_file_in_kenlm(tmp_path: Path) -> None:
    kenlm = pytest.importorskip("kenlm")
    texts = random_texts(5, 40)
    path = tmp_path / "model.arpa"
    path.write_text(PlainModel(texts, 3).arpa())
    referee, tables = kenlm.Model(str(path)), trained(texts, 3)
    scores, _ = score_texts(tables, as_array(texts))
    theirs = [
        sum(referee.score(line) for line in text.split("\n") if line.strip())
        for text in texts
    ]
    assert scores.tolist() == pytest.approx(theirs, abs=1e-4)


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
    path, plain = tmp_path / "model.arpa", PlainModel(random_texts(3, 50), 4)
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
    arpa.write_text(PlainModel(random_texts(3, 50), 4).arpa())
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


def test_stage_trains_scores_and_buckets_for_any_shards(
    write_ingest: Callable[..., Path],
    tmp_path: Path,
    make_context: Callable[..., Context],
) -> None:
    documents = [*corpus(), ("web", "empty", " ")]
    config: dict[str, Any] = {
        "perplexity": {
            "ngram": {"sources": ["wiki"], "order": 3},
            "buckets": [0.3, 0.6],
        },
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
        results.append(
            (kept, summary, [(out / name).read_bytes() for name in NGRAM_FILES])
        )
    assert results[0][0] == results[1][0]
    assert results[0][1] == results[1][1]
    assert results[0][2] == results[1][2]
    kept, summary, _ = results[0]
    good, bad = ([kept[f"{kind}{number}"] for number in range(60)] for kind in "gb")
    assert max(score for _, score, _ in good) < min(score for _, score, _ in bad)
    # trained on, not judged
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
    assert sum(model["documents"] for model in summary.ngrams) == 60
    assert sum(model["words"] for model in summary.ngrams) == 1800
    assert summary.buckets["head"]["all"].kept == 36


def test_model_learns_within_max_bytes_and_without_the_holdout(
    write_ingest: Callable[..., Path],
    tmp_path: Path,
    make_context: Callable[..., Context],
) -> None:
    inputs = {"ingest": write_ingest("ingest", [list(corpus())])}
    classifier = {
        "positive": ["wiki"],
        "negative": ["web"],
        "holdout": 0.4,
        "dimensions": 4,
        "buckets": 100,
    }
    config = {
        "classifier": classifier,
        "perplexity": {"ngram": {"sources": ["wiki"], "order": 2}},
    }
    summary = quality.run(inputs, config, tmp_path / "a", make_context("work a"))
    assert 20 < sum(model["documents"] for model in summary.ngrams) < 50
    assert summary.scores["perplexity"]["separation"]["auc"] > 0.6
    less = {
        "perplexity": {"ngram": {"sources": ["wiki"], "order": 2, "max_bytes": 700}}
    }
    summary = quality.run(inputs, less, tmp_path / "b", make_context("work b"))
    assert 4 <= sum(model["documents"] for model in summary.ngrams) <= 8
    nothing = {"perplexity": {"ngram": {"sources": ["novels"]}}}
    with pytest.raises(QualityError, match=r"novels.* 0 documents"):
        quality.run(inputs, nothing, tmp_path / "c", make_context("work c"))


def test_training_documents_are_scored_by_a_model_that_has_not_seen_them(
    write_ingest: Callable[..., Path],
    tmp_path: Path,
    make_context: Callable[..., Context],
) -> None:
    rng = random.Random(8)
    lines = [" ".join(f"w{rng.randint(0, 30)}" for _ in range(20)) for _ in range(200)]
    texts = ["\n".join([line] * rng.randint(1, 4)) for line in lines]
    documents = [
        ("seen" if number < 100 else "unseen", str(number), text)
        for number, text in enumerate(texts)
    ]
    inputs = {"ingest": write_ingest("ingest", [documents])}
    config = {"perplexity": {"ngram": {"sources": ["seen"]}}}
    summary = quality.run(inputs, config, tmp_path / "out", make_context("work"))
    assert [model["documents"] > 30 for model in summary.ngrams] == [True, True]
    scores = read_table(tmp_path / "out" / "part-00000.parquet")[
        "perplexity"
    ].to_numpy()
    # By a model that was trained on them the first hundred have about 2, and the others
    # 38.
    assert np.mean(scores[:100]) == pytest.approx(np.mean(scores[100:]), rel=0.05)


@pytest.mark.parametrize(
    ("perplexity", "message"),
    [
        ({}, "perplexity"),
        ({"model": "m", "buckets": [0.3, 0.6]}, "`ngram` or `kenlm`"),
        ({"kenlm": "m", "ngram": {"sources": ["a"]}}, "n-gram model"),
        ({"kenlm": "m", "buckets": [0.6, 0.3]}, "ascending"),
    ],
)
def test_section_needs_exactly_one_ngram_model(
    perplexity: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Quality.model_validate({"perplexity": perplexity})
