"""`gristmill new` inspects data and writes a valid manifest with comments on its
findings.
"""

from __future__ import annotations

import gzip
import json
import re
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models
from typer.testing import Result

from gristmill.dataprep.fasttext.fasttext_models import MODEL_VARIABLE
from gristmill.dataprep.readers.sources import SourceError
from gristmill.flows.authoring.look_at_data import Look, id_field, look_at, text_field
from gristmill.flows.authoring.new_manifest import (
    MODELS,
    Wishes,
    source_name,
    write_manifest,
)
from gristmill.flows.authoring.page_text import is_html
from gristmill.mixtures.loader import ManifestError, load_manifest, parse_manifest
from gristmill.mixtures.schema.model import Model
from gristmill.mixtures.schema.sources import Paragraphs
from gristmill.mixtures.steps.filter import Filter
from gristmill.train.models.model_config import shape_of
from tests.commands import call
from tests.dataprep.binary_documents import make_pdf
from tests.jsonl import write_jsonl

MODEL = Path(__file__).resolve().parents[3] / "shared/data/langid/lid176/lid.176.ftz"
PROSE = "The river ran past the old mill and turned its wheel all day long. " * 20


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    (folder / "code").mkdir(parents=True)
    rows = [
        {
            "id": n,
            "url": "https://example.org",
            "title": "A title",
            "raw": {"content": f"{n} {PROSE}"},
        }
        for n in range(9)
    ]
    (folder / "crawl.gz").write_bytes(
        gzip.compress("\n".join(map(json.dumps, rows)).encode(), mtime=0)
    )
    pq.write_table(
        pa.table({"text": [PROSE] * 8, "note": ["x"] * 8}), folder / "books.parquet"
    )
    for name in ("a.py", "b.py", "README.md"):
        (folder / "code" / name).write_text("def f():\n    return 1\n" * 30)
    return folder


def run_new(*arguments: str) -> Result:
    return call("new", *arguments, code=None)


def written(look: Look, **wishes: Any) -> str:
    """The text of a manifest with one source."""
    return write_manifest(Wishes("a", **wishes), {"a": look}, "a.yaml")


def test_manifest_is_written_for_three_kinds_of_data(
    data: Path, tmp_path: Path
) -> None:
    file = tmp_path / "mine.yaml"
    result = run_new(
        str(file),
        "--name=mine",
        f"--source=web={data / 'crawl.gz'}",
        "--source",
        str(data / "books.parquet"),
        "--source",
        str(data / "code"),
        "--language=no",
    )
    assert result.exit_code == 0, result.output
    assert "web: 1 file" in result.output
    assert (
        "format jsonl, text in field 'raw.content', ids in field 'id'" in result.output
    )
    manifest = load_manifest(file)
    assert list(manifest.sources) == ["web", "books", "code"]
    web, books, code = manifest.sources.values()
    assert (web.format, web.text_field, web.id_field) == ("jsonl", "raw.content", "id")
    assert (books.format, books.text_field, books.id_field) == ("auto", "text", None)
    assert sum(source.weight for source in (web, books, code)) == pytest.approx(
        1.0, abs=0.002
    )
    (filter_, programs), (langid,) = (
        [getattr(step, name) for step in manifest.prepare if step.stage == name]
        for name in ("filter", "langid")
    )
    assert filter_.sources == ("web", "books"), (
        "rules for prose do not judge source code"
    )
    assert (programs.sources, list(programs.rules.sets)) == (
        ("code",),
        ["code"],
    ), "rules for code judge it"
    assert langid.keep == ("no",), "YAML's `no` is a language here, not false"
    assert [step.stage for step in manifest.prepare] == [
        "langid",
        "filter",
        "filter",
        "dedup",
    ], "stop words follow the language"
    assert manifest.mix is not None
    assert manifest.pretrain is not None
    assert manifest.mix.tokens == (
        manifest.pretrain.steps
        * manifest.pretrain.global_batch_size
        * manifest.mix.sequence_length
    )
    optimizer, schedule = manifest.pretrain.optimizer, manifest.pretrain.schedule
    assert (optimizer.kind, schedule.decay_fraction) == ("muon", 0.6)
    assert optimizer.embedding_rate_scale == 12.0
    model = manifest.pretrain.model
    assert (model.tied_embeddings, model.init) == (False, "llama")


def test_mixture_tokens_include_all_allowed_epochs(data: Path) -> None:
    """Four epochs of 20 % of the text, at four bytes per token."""
    look = replace(look_at("a", str(data / "books.parquet")), text_bytes=10_000_000)
    manifest = parse_manifest(written(look), "a.yaml")
    assert manifest.mix is not None
    assert manifest.sources["a"].max_epochs == 4
    assert manifest.mix.tokens == pytest.approx(10_000_000 / 4 * 0.2 * 4, rel=0.01)


def test_books_are_split_and_url_fields_become_ids(tmp_path: Path) -> None:
    rows = [
        {"url": f"https://example.org/{number}", "text": PROSE} for number in range(3)
    ]
    write_jsonl(tmp_path / "pages.jsonl", rows)
    (tmp_path / "book.txt").write_text("\n\n".join([PROSE] * 500))
    sources = (f"--source={tmp_path / name}" for name in ("book.txt", "pages.jsonl"))
    result = run_new(str(tmp_path / "m.yaml"), "--name=m", *sources)
    assert result.exit_code == 0, result.output
    book, pages = load_manifest(tmp_path / "m.yaml").document_sources.values()
    assert (book.split, pages.id_field) == (Paragraphs(paragraphs=4000), "url")


@pytest.mark.slow
@pytest.mark.skipif(not MODEL.exists(), reason="lid.176.ftz is missing")
@pytest.mark.parametrize("languages", [(), ("en",), ("en", "de")])
def test_written_manifest_runs_and_identifies_languages_before_filtering(
    languages: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    german = (
        "Der Fluss lief an der alten Mühle vorbei und drehte das Rad den ganzen "
        "Tag nicht ohne {} Wasser. "
    )
    rows = [
        {"text": "".join(text.format(f"{n} {line}") for line in range(5))}
        for n in range(5)
        for text in (
            "The river and number {} of the wheels have turned with the water all "
            "day. ",
            german,
        )
    ]
    write_jsonl(tmp_path / "web.jsonl", rows)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(MODEL_VARIABLE, str(MODEL))
    language_options = [f"--language={language}" for language in languages]
    assert (
        run_new(
            "m.yaml", "--source=web.jsonl", "--no-train", *language_options
        ).exit_code
        == 0
    )
    assert ("none is dropped" in (tmp_path / "m.yaml").read_text()) == (not languages)
    call("run", "m.yaml", "--until=filter", "--no-ui")
    (langid_table,), (filter_table,) = (
        (tmp_path / "gristmill-store" / stage).glob("*/data/part-*.parquet")
        for stage in ("langid", "filter")
    )
    measured_languages = pq.read_table(langid_table)["language"].to_pylist()
    assert measured_languages == ["en", "de"] * 5
    stop_words = pq.read_table(filter_table)["stop_words"].to_pylist()
    expected_kept = [
        not languages or language in languages for language in measured_languages
    ]
    assert [
        count is not None and count >= 2 for count in stop_words
    ] == expected_kept, "each language has its own stop words"


@pytest.mark.slow
def test_existing_file_is_never_overwritten_and_errors_name_the_fix(
    data: Path, tmp_path: Path
) -> None:
    file = tmp_path / "there.yaml"
    file.write_text("mine")
    existing_file = run_new(str(file), "--source", str(data / "books.parquet"))
    assert (existing_file.exit_code, file.read_text()) == (2, "mine")
    assert "exists and was not changed; name another file" in existing_file.output
    without_source = run_new(str(tmp_path / "a.yaml"))
    assert without_source.exit_code == 2
    assert "gristmill new --source PATH" in without_source.output
    duplicate_source = run_new(
        str(tmp_path / "a.yaml"),
        f"--source=a={data}/code",
        f"--source=a={data}/code",
    )
    assert "given twice; rename one of them" in duplicate_source.output
    for option, fix in (
        ("--language=english", "'en'"),
        ("--language=German", "'de'"),
        ("--language-model=nowhere.bin", "nowhere.bin"),
    ):
        wrong = run_new(
            str(tmp_path / "a.yaml"), f"--source={data}/books.parquet", option
        )
        assert wrong.exit_code == 2
        assert fix in wrong.output
    assert not (tmp_path / "a.yaml").exists()


PROGRAM = "import os\n\n\ndef size(path):\n    return os.stat(path).st_size\n" * 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "is_code", "path_field"),
    [
        (
            {
                "content": PROGRAM,
                "ext": "py",
                "lang": "Python",
                "max_stars_repo_path": "a/b.py",
                "size": 9,
            },
            True,
            "max_stars_repo_path",
        ),
        ({"content": PROGRAM, "path": "src/main.rs"}, True, "path"),
        ({"content": PROGRAM, "ext": "py"}, True, None),
        ({"content": PROGRAM, "language": "C++"}, True, None),
        ({"content": PROGRAM, "lang": "en", "path": "posts/1.md"}, False, None),
    ],
)
def test_code_rows_are_recognized_by_their_columns(
    row: dict[str, object], is_code: bool, path_field: str | None, tmp_path: Path
) -> None:
    pq.write_table(pa.Table.from_pylist([row] * 20), tmp_path / "rows.parquet")
    look = look_at("rows", str(tmp_path / "rows.parquet"))
    assert (look.is_code, look.path_field, look.text_field) == (
        is_code,
        path_field,
        "content",
    )


def test_every_source_of_programs_gets_the_rules_for_its_paths(tmp_path: Path) -> None:
    rows = {
        "stack": {"content": PROGRAM, "max_stars_repo_path": "a/b.py"},
        "files": {"content": PROGRAM, "path": "c.go"},
        "web": {"content": "A page of prose. " * 30},
    }
    looks = {
        name: look_at(name, write_jsonl(tmp_path / f"{name}.jsonl", [row] * 5))
        for name, row in rows.items()
    }
    text = write_manifest(
        Wishes("mine", ["en"], train=False), looks, str(tmp_path / "m.yaml")
    )
    steps = parse_manifest(text, str(tmp_path / "m.yaml")).steps.values()
    code = {
        step.config.sources: step.config.rules.code
        for step in steps
        if isinstance(step.config, Filter)
    }
    assert {sources: rules and rules.path_field for sources, rules in code.items()} == {
        ("stack",): "max_stars_repo_path",
        ("files",): "path",
        ("web",): None,
    }


def test_rows_without_text_are_rejected_with_their_fields(tmp_path: Path) -> None:
    (tmp_path / "numbers.jsonl").write_text('{"x": 1, "y": 2}\n')
    with pytest.raises(SourceError, match="holds text; its fields are x, y"):
        look_at("numbers", str(tmp_path / "numbers.jsonl"))


@pytest.mark.parametrize(
    ("rows", "text", "identifier"),
    [
        (
            [{"text": "short", "abstract": "a much longer text than that"}],
            "abstract",
            None,
        ),
        (
            [{"text": "a text of some length", "abstract": "a text of this length"}],
            "text",
            None,
        ),
        (
            [{"a": 1, "inner": {"body": "x"}, "id": "p"}, {"a": 2, "id": "q"}],
            "inner.body",
            "id",
        ),
        ([{"id": 1, "t": "x"}, {"id": 1, "t": "y"}], "t", None),
        ([{"x": 1}], None, None),
    ],
)
def test_usual_text_field_is_chosen_unless_another_is_much_longer(
    rows: list[dict[str, Any]], text: str | None, identifier: str | None
) -> None:
    assert text_field(rows) == text
    assert id_field(rows) == identifier


def test_rows_without_the_text_field_get_a_remark_and_a_damaged_file_is_passed_over(
    tmp_path: Path,
) -> None:
    rows = [{"text": "some text"}, {"text": "more text"}, {"title": "none"}]
    write_jsonl(tmp_path / "a.jsonl", rows)
    rows = [{"text": "some text"}] * 3
    write_jsonl(tmp_path / "b.jsonl", rows)
    (tmp_path / "broken.parquet").write_bytes(b"PAR1" + bytes(100))
    look = look_at("a", str(tmp_path))
    assert look.text_field is None
    (remark,) = look.remarks
    assert "1 of 6 rows" in remark
    assert "a.jsonl" in remark
    assert "b.jsonl" not in remark
    assert f"# {look.remarks[0]}" in written(look)


def save_tokenizer(path: Path, *special: str) -> None:
    vocabulary = {
        token: number for number, token in enumerate([*special, "a", "b", "c"])
    }
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="a"))
    tokenizer.add_special_tokens(list(special))
    tokenizer.save(str(path))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("special", "end_of_text"), [("<|endoftext|>", None), ("[SEP]", "[SEP]")]
)
def test_existing_tokenizer_is_used(
    special: str, end_of_text: str | None, data: Path, tmp_path: Path
) -> None:
    given = tmp_path / "given.json"
    save_tokenizer(given, special)
    options = (f"--source=a={data}/books.parquet", f"--tokenizer={given}")
    for name, more in (("a.yaml", ()), ("b.yaml", ("--no-train",))):
        target = tmp_path / name
        result = run_new(str(target), *options, *more)
        assert result.exit_code == 0, result.output
        manifest = load_manifest(target)
        assert (manifest.pretrain is None) == bool(more)
        assert manifest.tokenizer is not None
        assert manifest.tokenizer.path == str(given)
        assert manifest.tokenizer.end_of_text == end_of_text


@pytest.mark.slow
def test_invalid_tokenizer_is_rejected(data: Path, tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "given.json", "<|begin|>")
    result = run_new(
        str(tmp_path / "a.yaml"),
        f"--source=a={data}/books.parquet",
        f"--tokenizer={tmp_path}/given.json",
    )
    assert result.exit_code == 2
    assert "given.json" in result.output
    assert not (tmp_path / "a.yaml").exists()


PAGE = (
    "<div><h1>Rhine</h1><p>{}</p><p>It ends in the <a href='/sea'>North Sea</a>, "
    "as everybody knows.</p></div>"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [PAGE, f"<!-- made by hand -->\n<!DOCTYPE html><html><body>{PAGE}</body></html>"],
)
@pytest.mark.parametrize("as_bytes", [False, True])
def test_html_column_is_extracted(page: str, as_bytes: bool, tmp_path: Path) -> None:
    pages = [page.replace("{}", f"{number} {PROSE}") for number in range(5)]
    column = pa.array(pages).cast(pa.binary() if as_bytes else pa.string())
    pq.write_table(
        pa.table({"id": list(range(5)), "content": column}), tmp_path / "pages.parquet"
    )
    look = look_at("pages", str(tmp_path / "pages.parquet"))
    assert (look.text_field, look.extract) == ("content", True)
    assert "extract: resiliparse" in written(look)


def test_prose_with_a_few_tags_or_signs_is_not_html() -> None:
    assert not is_html(f"Use <b>bold</b> words, a < b > c. {PROSE}")
    assert not is_html("x <a> y")


@pytest.mark.parametrize("name", ["a.odt", "*.odt", "."])
def test_binary_format_error_names_a_reader(name: str, tmp_path: Path) -> None:
    (tmp_path / "a.odt").write_bytes(b"PK\x03\x04\xff")
    with pytest.raises(SourceError, match=r"OpenDocument.*read: \{use: .*pandoc"):
        look_at("a", str(tmp_path / name))


def test_pdf_and_docling_files_are_recognised(tmp_path: Path) -> None:
    for name in ("a.pdf", "paper"):
        (tmp_path / name).write_bytes(make_pdf([textwrap.wrap(PROSE, 80)]))
    look = look_at("a", str(tmp_path / "a.pdf"))
    assert look.format == "auto"
    assert look.text_bytes == pytest.approx(len(PROSE), rel=0.1)
    assert look_at("a", str(tmp_path / "paper")).format == "pdf"
    (tmp_path / "b.json").write_text('{"schema_name": "DoclingDocument", "pages": {}}')
    look = look_at("a", str(tmp_path / "b.json"))
    assert look.format == "docling"
    assert "format: docling" in written(look)


def test_output_of_olmocr_is_recognised(tmp_path: Path) -> None:
    rows = [
        {
            "id": str(number),
            "text": PROSE,
            "metadata": {"Source-File": f"{number}.pdf", "pdf-total-pages": 1},
            "attributes": {"pdf_page_numbers": [[0, len(PROSE), 1]]},
        }
        for number in range(3)
    ]
    look = look_at("a", write_jsonl(tmp_path / "output.jsonl", rows))
    assert look.id_field == "metadata.Source-File"
    assert "attributes.pdf_page_numbers" in look.metadata_fields


def test_binary_files_are_detected_by_content_and_ignored_files_are_named(
    tmp_path: Path,
) -> None:
    for content in (b"\x00\xff" * 50, b"{\\rtf1"):
        (tmp_path / "book").write_bytes(content)
        with pytest.raises(SourceError, match="cannot tell the format"):
            look_at("a", str(tmp_path / "book"))
    (tmp_path / "book").rename(tmp_path / "book.rtf")
    (tmp_path / "a.txt").write_text(PROSE)
    assert [
        remark for remark in look_at("a", str(tmp_path)).remarks if "striprtf" in remark
    ]


def test_json_array_is_inspected(tmp_path: Path) -> None:
    rows = [{"id": number, "body": f"{number} {PROSE}"} for number in range(9)]
    for name in ("rows.json", "rows"):
        (tmp_path / name).write_text(json.dumps(rows, indent=1))
        look = look_at("a", str(tmp_path / name))
        assert (look.text_field, look.id_field) == ("body", "id")
        assert look.text_bytes == pytest.approx(9 * len(PROSE), rel=0.1)


def test_sources_are_named_by_their_paths_and_invalid_names_rejected(
    data: Path,
) -> None:
    assert source_name("s3://bucket/Common Crawl/2024/*.warc.gz", []) == "2024"
    assert [
        source_name("/data/web.jsonl.zst", used_names) for used_names in ([], ["web"])
    ] == ["web", "web-2"]
    with pytest.raises(ManifestError, match="name"):
        write_manifest(
            Wishes("not a name"), {"a": look_at("a", str(data / "code"))}, "a.yaml"
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "tokens",
    [20_000, 2_400_000, 27_500_000, 27_548_160, 300_000_000, 2_300_000_000, 10**12],
)
def test_largest_preset_with_enough_tokens_per_parameter_is_chosen(
    tokens: int, data: Path
) -> None:
    text = written(look_at("a", str(data / "books.parquet")), tokens=tokens)
    manifest = parse_manifest(text, "a.yaml")
    assert manifest.mix is not None
    assert manifest.pretrain is not None

    mix = manifest.mix
    sizes = {
        preset: mix.tokens
        / shape_of(Model(preset=preset), vocabulary, mix.sequence_length).parameters
        for preset, vocabulary, *_ in MODELS
    }
    largest = [preset for preset, ratio in sizes.items() if ratio >= 20]
    chosen_preset = manifest.pretrain.model.preset
    assert chosen_preset == (largest or ["llama-1m"])[-1]
    (comment,) = re.findall(r"preset: .*# (.*)", text)
    ratio_match = re.search(r"([\d,.e+]+) tokens each", comment)
    assert ratio_match is not None
    assert float(ratio_match[1].replace(",", "")) == pytest.approx(
        sizes[chosen_preset], rel=0.01
    )
    assert ("the largest preset with 20 or more" in comment) == bool(largest)
