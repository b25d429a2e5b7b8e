"""Rules by language: each document is judged by the rules of its language alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from gristmill.dataprep.documents import read_documents, write_table
from gristmill.dataprep.filters import filter as filter_stage
from gristmill.dataprep.filters import replayed_rules as filter_rules
from gristmill.dataprep.filters.filter import judge
from gristmill.dataprep.whatif_thresholds import judge_shard, rules_of, short_name
from gristmill.mixtures.base import RECIPE
from gristmill.mixtures.steps.filter import Filter

SHARD = "part-00000.parquet"
WORDS = {
    "en": "the river of and stone table under morning to letter garden with #tag 17 "
    "a-very-long-compound-word".split(),
    "de": "der Fluss und die Steine von Tisch unter dem Morgen ein Brief Garten mit "
    "17 Donaudampfschifffahrt".split(),
    "th": ["ทุกคนมีสิทธิในชีวิต", "เสรีภาพและความมั่นคง", "แห่งตัวตน", "การกระทำ"],
}
LANGUAGES: list[tuple[str | None, str | None]] = [
    ("en", None),
    ("de", "Latn"),
    ("th", "Thai"),
    ("zh", "Hans"),
    ("fr", "Latn"),
    (None, None),
]
CONFIG = {
    "rules": [
        {"gopher_quality": {"min_words": 30}},
        "gopher_repetition",
        {"fineweb": {"min_terminal_line_ratio": 0.0}},
    ],
    "by_language": {
        "de": {
            "gopher_quality": {
                "min_words": 60,
                "max_mean_word_length": 15.0,
                "stop_words": ["der", "Fluss"],
            },
            "fineweb": None,
        },
        "tha_Thai": {"gopher_repetition": None, "c4": {"min_sentences": 1}},
        "zh_Hans": {"gopher_quality": {"min_words": 5}},
    },
}


def texts(seed: int, number: int) -> list[tuple[str, str | None, str | None]]:
    """Texts with a language and a script, some short, some repetitive."""
    rng = random.Random(seed)
    rows = []
    for _ in range(number):
        code, script = rng.choice(LANGUAGES)
        words = WORDS.get(code or "en", WORDS["en"])
        text = " ".join(rng.choices(words, k=rng.randint(3, 160)))
        rows.append((text + rng.choice([".", "\n" + text, ""]), code, script))
    return rows


def table(rows: list[tuple[str, str | None, str | None]]) -> pa.Table:
    parts = list(zip(*rows, strict=True))
    return pa.table(
        {
            "text": pa.array(parts[0], pa.large_string()),
            "language": pa.array(parts[1], pa.string()),
            "script": pa.array(parts[2], pa.string()),
            "source": ["web"] * len(rows),
        }
    )


def merged(entry: str) -> Filter:
    """Complete rules of one entry, written out."""
    general: dict[str, Any] = {
        "gopher_quality": {"min_words": 30},
        "gopher_repetition": {},
        "fineweb": {"min_terminal_line_ratio": 0.0},
    }
    rules_of_entry = {
        "general": general,
        "de": {
            **general,
            "gopher_quality": {
                "min_words": 60,
                "max_mean_word_length": 15.0,
                "stop_words": ["der", "Fluss"],
            },
            "fineweb": None,
        },
        "tha_Thai": {**general, "gopher_repetition": None, "c4": {"min_sentences": 1}},
        "zh_Hans": {**general, "gopher_quality": {"min_words": 5}},
    }
    return Filter.model_validate({"rules": rules_of_entry[entry]})


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_document_is_judged_by_the_rules_of_its_language(seed: int) -> None:
    rows = texts(seed, 60)
    entries = {
        ("de", "Latn"): "de",
        ("th", "Thai"): "tha_Thai",
        ("zh", "Hans"): "zh_Hans",
    }
    judged = judge(table(rows), Filter.model_validate(CONFIG))
    assert set(judged.entries) == {"general", *entries.values()}, (
        f"seed {seed} has too few languages"
    )
    for place, (text, code, script) in enumerate(rows):
        entry = entries.get((code, script), "general")
        alone = judge(table([(text, code, script)]), merged(entry))
        prefix = "" if entry == "general" else f"{entry}/"
        reason = None if alone.reasons[0] is None else prefix + alone.reasons[0]
        assert (judged.entries[place], judged.reasons[place]) == (entry, reason), (
            f"seed {seed}, document {place}"
        )
        for name, values in judged.statistics.items():
            expected = alone.statistics[name][0] if name in alone.statistics else np.nan
            np.testing.assert_equal(
                values[place], expected, f"seed {seed}, document {place}: {name}"
            )
    assert {reason.rpartition("/")[0] for reason in judged.reasons if reason} >= {
        "gopher_quality",
        "de/gopher_quality",
    }


def test_order_of_documents_does_not_change_verdicts() -> None:
    rows, section = texts(3, 40), Filter.model_validate(CONFIG)
    order = np.random.default_rng(3).permutation(len(rows))
    shuffled = judge(table([rows[place] for place in order]), section)
    assert [
        judge(table(rows), section).reasons[place] for place in order
    ] == shuffled.reasons


@pytest.mark.parametrize(
    ("unlisted", "reasons", "entries"),
    [
        (
            "general",
            [None, "gopher_quality/min_words", "gopher_quality/min_words"],
            ["de", "general", "general"],
        ),
        ("keep", [None, None, None], ["de", None, None]),
        ("drop", [None, "unlisted_language", "unlisted_language"], ["de", None, None]),
    ],
)
def test_unlisted_languages_are_judged_kept_or_dropped(
    unlisted: str, reasons: list[str | None], entries: list[str | None]
) -> None:
    section = Filter.model_validate(
        {
            "rules": ["gopher_quality"],
            "unlisted": unlisted,
            "by_language": {
                "de": {"gopher_quality": {"min_words": 1, "min_stop_words": 0}}
            },
        }
    )
    judged = judge(
        table(
            [
                ("kurz und gut", "de", "Latn"),
                ("court", "fr", "Latn"),
                ("short", None, None),
            ]
        ),
        section,
    )
    assert (judged.reasons, judged.entries) == (reasons, entries)
    assert np.isnan(judged.statistics["words"]).tolist() == [
        False,
        unlisted != "general",
        unlisted != "general",
    ]


def test_script_takes_precedence_over_its_language() -> None:
    section = Filter.model_validate(
        {
            "rules": ["gopher_quality"],
            "by_language": {"sr": None, "srp_Cyrl": None, "deu_Latn": None},
        }
    )
    rows = [
        ("a", "sr", "Latn"),
        ("a", "sr", "Cyrl"),
        ("a", "de", "Latn"),
        ("a", "de", None),
    ]
    assert judge(table(rows), section).entries == [
        "sr",
        "srp_Cyrl",
        "deu_Latn",
        "general",
    ]


@pytest.mark.parametrize("context", [None, RECIPE])
def test_section_round_trips(context: str | None) -> None:
    config = {
        **CONFIG,
        "rules": [
            {"gopher_quality": {"stop_words": ["a"]}},
            {"fineweb": {"constants": "datatrove"}},
        ],
        "unlisted": "drop",
    }
    config["by_language"] = {
        **CONFIG["by_language"],
        "fr": {"gopher_quality": {"stop_words": None}, "c4": None},
        "it": {"fineweb": {"words": "language"}},
        "es": ["mc4"],
    }
    section = Filter.model_validate(config)
    again = Filter.model_validate(section.model_dump(mode="json", context=context))
    assert again == section
    assert again.by_language["fr"].gopher_quality.stop_words is None
    assert again.by_language["de"].fineweb is None
    assert again.by_language["it"].fineweb.max_repeated_line_char_ratio == 0.01
    assert again.by_language["es"].mc4 is not None
    assert section.rule_sets == ["gopher_quality", "c4", "mc4", "fineweb"]


def test_errors_name_their_location_once() -> None:
    with pytest.raises(ValidationError) as raised:
        Filter.model_validate(
            {
                "rules": {"gopher_quality": {"min_wrds": 3}},
                "by_language": {"de": {"gopher_quality": {"max_wrds": 3}}, "fr": [3]},
            }
        )
    assert [".".join(map(str, error["loc"])) for error in raised.value.errors()] == [
        "rules.gopher_quality.min_wrds",
        "by_language.de.gopher_quality.max_wrds",
        "by_language.fr",
    ]
    with pytest.raises(ValidationError, match=r"'german'.*ISO 639-1"):
        Filter.model_validate({"by_language": {"german": {}}})
    with pytest.raises(ValidationError, match=r"`no`.*quote.*Norwegian"):
        Filter.model_validate({"by_language": {False: {}}})


@pytest.fixture
def filtered(
    write_ingest: Callable, make_context: Callable, tmp_path: Path
) -> Callable[..., dict[str, Any]]:
    """Run the stage after a table of languages: (settings, name) -> summary; the output
    is `tmp_path / name`.
    """
    rows = texts(5, 80)
    ingest = write_ingest(
        "ingest",
        [[("web", str(number), text) for number, (text, _, _) in enumerate(rows)]],
    )
    ids = pq.read_table(ingest / SHARD)["id"]
    write_table(
        tmp_path / "langid" / SHARD,
        pa.table(
            {
                "id": ids,
                "keep": [True] * len(rows),
                "reason": pa.array([None] * len(rows), pa.string()),
                "error": pa.array([None] * len(rows), pa.string()),
                "language": table(rows)["language"],
                "script": table(rows)["script"],
            }
        ),
    )
    inputs = {"ingest": ingest, "langid": tmp_path / "langid"}

    def run(
        config: dict[str, Any], name: str = "filter", **fields: Any
    ) -> dict[str, Any]:
        settings = Filter.model_validate(config).model_dump(mode="json")
        return filter_stage.run(
            inputs, settings, tmp_path / name, make_context(f"work-{name}", **fields)
        )

    return run


def test_counts_by_language_equal_those_of_the_table(
    filtered: Callable, tmp_path: Path
) -> None:
    summary = filtered({**CONFIG, "unlisted": "drop"})
    written = pq.read_table(tmp_path / "filter" / SHARD).to_pylist()
    expected: dict[str, dict[str, int]] = {}
    for row in written:
        counts = expected.setdefault(
            row["rules_language"] or "unlisted_language", {"read": 0, "kept": 0}
        )
        counts["read"] += 1
        counts["kept"] += row["keep"]
    assert summary.by_language == expected
    assert (
        summary.counts["dropped"]["unlisted_language"]
        == expected["unlisted_language"]["read"]
    )
    failing = sum(
        row["rules_language"] == "de" and row["words"] < 60 for row in written
    )
    assert summary.rules["de/gopher_quality/min_words"]["failing"] == failing > 0


def test_replayed_bounds_of_one_language_equal_a_run(
    filtered: Callable, tmp_path: Path
) -> None:
    german = {
        **CONFIG["by_language"]["de"]["gopher_quality"],
        "min_words": 10,
        "max_mean_word_length": 6.0,
    }
    changed = {
        **CONFIG,
        "by_language": {
            **CONFIG["by_language"],
            "de": {**CONFIG["by_language"]["de"], "gopher_quality": german},
        },
    }
    sections = [Filter.model_validate(config) for config in (CONFIG, changed)]
    filtered(CONFIG)
    filtered(changed, "truth")
    truth = pq.read_table(tmp_path / "truth" / SHARD)
    inputs = {
        "ingest": tmp_path / "ingest",
        "langid": tmp_path / "langid",
        "filter": tmp_path / "filter",
    }
    columns = pq.read_table(tmp_path / "filter" / SHARD).column_names
    rules = [
        rules_of(filter_rules.rules, "filter", section, columns) for section in sections
    ]
    old, new = judge_shard(inputs, SHARD, "filter", *rules)
    assert new.keep.tolist() == truth["keep"].to_pylist()
    assert old.keep.tolist() != new.keep.tolist()
    keys = {rule.key: rule.name for rule in rules[0]}
    assert (
        keys["filter.by_language.de.gopher_quality.min_words"]
        == "de/gopher_quality/min_words"
    )
    assert keys["filter.rules.gopher_quality.min_words"] == "gopher_quality/min_words"
    assert len({rule.label for rule in rules[0]}) == len(rules[0])


def test_workers_do_not_change_a_byte(filtered: Callable, tmp_path: Path) -> None:
    assert filtered(CONFIG, "one") == filtered(CONFIG, "two", workers=2)
    assert (tmp_path / "one" / SHARD).read_bytes() == (
        tmp_path / "two" / SHARD
    ).read_bytes()
    assert (
        read_documents(
            {"ingest": tmp_path / "ingest", "filter": tmp_path / "one"}, SHARD
        ).num_rows
        == 80
    )


def test_short_rule_name_has_its_language() -> None:
    assert [
        short_name(name)
        for name in ("language", "c4/max_x", "de/c4/max_x", "strict: de/c4/max_x")
    ] == [
        "language",
        "max_x",
        "max_x (de)",
        "max_x (strict: de)",
    ]
