"""Passages of a text are traced to documents of training rows, and to the steps that
read them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import gristmill
from gristmill.flows.cli.launch import launch
from gristmill.flows.cli.main import app
from gristmill.flows.cli.models import trace_answer
from gristmill.flows.questions.find_documents import committed_inputs
from gristmill.flows.questions.trace import trace_step
from gristmill.flows.questions.trace_text import MOST_SPANS, trace_text
from gristmill.flows.questions.training_reads import TraceError
from gristmill.flows.running.session import Session, open_session
from gristmill.tokenize.encoding.tokenizer import TextTokenizer, load
from gristmill.tokenize.packed import PackedSet

WORDS = [
    f"{a}{b}{c}"
    for a in ("gr", "m", "st", "tr", "Gr")
    for b in ("i", "a", "ou", "é", "粉")
    for c in ("st", "nd", "ll", "\N{GRINNING FACE}")
]
MANIFEST = """
name: traced
seed: 3
sources:
  web: {path: web.jsonl, weight: 0.5}
  books: {path: books.jsonl, weight: 0.5}
tokenizer: {vocab_size: 400}
mix: {tokens: 12_000, sequence_length: 64, shard_rows: 50}
text_index:
pretrain: {steps: 20, global_batch_size: 8, model: {layers: 1, width: 16, heads: 2}}
"""


def prose(rng: random.Random) -> str:
    return (
        ". ".join(" ".join(rng.choices(WORDS, k=rng.randint(4, 9))) for _ in range(12))
        + ".\n"
    )


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Session:
    """A run up to its text index: 60 documents of two sources."""
    folder, rng = tmp_path_factory.mktemp("traced"), random.Random(8)
    for source in ("web", "books"):
        lines = [
            json.dumps(
                {"text": prose(rng), "url": f"https://{source}.example/{number}"}
            )
            for number in range(60)
        ]
        (folder / f"{source}.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "traced.yaml").write_text(MANIFEST)
    session = open_session(
        str(folder / "traced.yaml"), [], str(folder / "store"), until="text_index"
    )
    assert (
        launch(session, list(session.plan), frozenset(), tracked=False, summarise=False)
        == 0
    )
    return open_session(str(folder / "traced.yaml"), [], str(folder / "store"))


@pytest.fixture(scope="module")
def tokenizer(traced: Session) -> TextTokenizer:
    return load(committed_inputs(traced)["tokenizer"])


def pieces(session: Session) -> list[dict[str, Any]]:
    """Return every document piece of the training rows with its tokens."""
    packed = PackedSet(session.folder("mix").data)
    rows = list(range(packed.rows))
    return [
        {
            **piece,
            "tokens": packed.read([piece["row"]])[
                0, piece["start"] : piece["start"] + piece["length"]
            ],
        }
        for piece in packed.pieces(rows).to_pylist()
    ]


def texts(session: Session, tokenizer: TextTokenizer, every: int) -> Iterator[Any]:
    """Yield some pieces, each with its text."""
    for piece in pieces(session)[::every]:
        ids = piece["tokens"].tolist()
        yield piece, tokenizer.decode([id_ for id_ in ids if id_ != tokenizer.eos])


@pytest.mark.slow
def test_spans_at_word_boundaries_are_found_completely(
    traced: Session, tokenizer: TextTokenizer
) -> None:
    """Spans have 8 or more tokens in a row; the found row, document and position are
    exact.
    """
    rng, planted = random.Random(1), 0
    for piece, text in texts(traced, tokenizer, 6):
        words = text.split(" ")[1:-1]
        if len(words) < 12:
            continue
        begin = rng.randrange(len(words) - 10)
        span = " ".join(words[begin : begin + 10])
        (traced_span,) = trace_text(traced, span).spans
        assert (
            traced_span.text.strip(),
            traced_span.begin <= 1,
            traced_span.end,
        ) == (span, True, len(span))
        assert traced_span.tokens >= 8
        places = {(place.id, place.row) for place in traced_span.places}
        assert (piece["id"].hex(), piece["row"]) in places
        planted += 1
    assert planted > 10


@pytest.mark.slow
def test_spans_at_any_character_are_found_except_for_boundary_words(
    traced: Session, tokenizer: TextTokenizer
) -> None:
    rng, planted = random.Random(2), 0
    for _, text in texts(traced, tokenizer, 5):
        if "\N{REPLACEMENT CHARACTER}" in text or len(text) < 70:
            continue
        begin = rng.randrange(len(text) - 60)
        span = text[begin : begin + 60]
        inner_words = " ".join(span.split(" ")[1:-1])
        longest = trace_text(traced, f"0000 {span}").spans[0]
        assert inner_words in longest.text
        assert longest.text.strip() in text
        planted += 1
    assert planted > 10


def test_place_has_document_url_row_and_reading_steps(
    traced: Session, tokenizer: TextTokenizer
) -> None:
    piece = next(candidate for candidate in pieces(traced) if candidate["length"] > 40)
    span = tokenizer.decode(piece["tokens"][5:35].tolist())
    answer = trace_text(traced, span)
    place = next(place for place in answer.spans[0].places if place.row == piece["row"])
    assert place.id == piece["id"].hex()
    assert place.address.startswith(f"https://{place.source}.example/")
    assert 0 <= place.offset - piece["offset"] <= 10
    assert place.start - piece["start"] == place.offset - piece["offset"]
    assert place.steps
    for step in place.steps:
        assert step.use == "will read"
        assert piece["row"] in trace_step(traced, step.step).rows


def test_passages_come_longest_first_and_the_rest_of_the_text_is_not_covered(
    traced: Session, tokenizer: TextTokenizer
) -> None:
    ends = [
        (piece["tokens"][4:size].tolist(), piece)
        for piece, size in zip(
            [piece for piece in pieces(traced) if piece["length"] > 50][:3],
            (20, 44, 30),
            strict=True,
        )
    ]
    text = " 0123456789 ?!? ".join(tokenizer.decode(tokens) for tokens, _ in ends)
    answer = trace_text(traced, text)
    sizes = [span.tokens for span in answer.spans]
    assert sizes == sorted(sizes, reverse=True)
    assert (len(sizes), sizes[0] >= 39) == (3, True)
    assert 0 < answer.covered < answer.characters == len(text)
    assert all(span.text == text[span.begin : span.end] for span in answer.spans)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n",
        "   ",
        "gr",
        "0 1 2 3 4 5 6 7 8 9 " * 9,
        "\N{SNOWMAN}" * 40,
        "\x00" * 30,
    ],
)
def test_absent_text_has_no_passages(traced: Session, text: str) -> None:
    answer = trace_text(traced, text)
    assert (answer.found, answer.covered, answer.spans) == (0, 0, [])


def test_only_the_longest_of_many_passages_are_described(
    traced: Session, tokenizer: TextTokenizer
) -> None:
    some = [
        piece["tokens"][2:14].tolist()
        for piece in pieces(traced)
        if piece["length"] > 20
    ][: MOST_SPANS + 9]
    answer = trace_text(
        traced, " 0123456789 ?!? ".join(tokenizer.decode(tokens) for tokens in some)
    )
    assert len(answer.spans) == MOST_SPANS < answer.found


def test_the_command_reads_a_file_and_standard_input_alike(
    traced: Session, tokenizer: TextTokenizer, tmp_path: Path
) -> None:
    text = (
        "A model said: "
        + tokenizer.decode(pieces(traced)[3]["tokens"][:30].tolist())
        + "\n"
    )
    (tmp_path / "said.txt").write_text(text)
    command = ["trace", traced.manifest_file, f"--store={traced.store.root}", "--text"]
    run = CliRunner()
    of_file = run.invoke(app, [*command, str(tmp_path / "said.txt"), "--json"])
    of_input = run.invoke(app, [*command, "-", "--json"], input=text)
    assert (
        json.loads(of_file.stdout)
        == json.loads(of_input.stdout)
        == asdict(trace_text(traced, text))
    )
    output = run.invoke(app, [*command, str(tmp_path / "said.txt")]).stdout
    printed = " ".join(output.split())
    assert " of 8 tokens or more in the training rows" in printed
    assert f"row {pieces(traced)[3]['row']} from token" in printed
    assert "will read it" in printed


def test_chat_answers_are_traced_like_files_and_from_python(
    traced: Session, tokenizer: TextTokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tokenizer.decode(pieces(traced)[3]["tokens"][:30].tolist())
    trace_answer(traced.manifest_file, None, str(traced.store.root), text)
    printed = " ".join(capsys.readouterr().out.split())
    assert f"row {pieces(traced)[3]['row']} from token" in printed
    trace_answer(
        traced.manifest_file,
        ["text_index.shortest_span=12"],
        str(traced.store.root),
        text,
    )
    assert capsys.readouterr().out.startswith(
        "(the training rows are not indexed yet; run: "
    )
    python_answer = gristmill.Store(traced.store.root).run().trace_text(text)
    passages = trace_text(traced, text)
    assert python_answer.covered == passages.covered
    assert [span.text for span in python_answer.spans] == [
        span.text for span in passages.spans
    ]
    python_answer.show()
    assert "will read it" in " ".join(capsys.readouterr().out.split())


def test_missing_text_index_error_names_the_section_and_command(
    traced: Session,
) -> None:
    folder = Path(traced.manifest_file).parent
    (folder / "bare.yaml").write_text(MANIFEST.replace("text_index:\n", ""))
    bare = open_session(str(folder / "bare.yaml"), [], str(traced.store.root))
    with pytest.raises(
        TraceError,
        match=r"add the section `text_index: \{\}` after `mix:`, and run: .*text_index",
    ):
        trace_text(bare, "a text")
    unindexed = open_session(
        traced.manifest_file, ["text_index.shortest_span=12"], str(traced.store.root)
    )
    with pytest.raises(
        TraceError,
        match=r"the training rows are not indexed yet; run: .* --until text_index",
    ):
        trace_text(unindexed, "a text")
