"""Line rules of C4 and of RefinedWeb/DCLM."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pyarrow as pa
import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gristmill.dataprep.cleaning import lines_c4, lines_dclm
from gristmill.dataprep.cleaning.line_pieces import (
    DECIMAL,
    DIGIT,
    UPPER,
    character_classes,
)
from gristmill.dataprep.cleaning.lines_c4 import POLICY_PHRASES, c4_lines
from gristmill.dataprep.cleaning.lines_dclm import COUNTED, dclm_lines
from gristmill.dataprep.edits import apply_edits
from gristmill.dataprep.text.unicode_tables import CODE_POINTS
from gristmill.mixtures.steps.clean import C4Lines, DclmLines

Counted = dict[str, int]
POSTS = (
    Path(__file__).resolve().parents[2].parent
    / "shared"
    / "data"
    / "text"
    / "18f_posts.jsonl.zst"
)


def c4(text: str, **options: object) -> tuple[str, Counted]:
    texts = pa.array([text], pa.large_string())
    edits, counts, *_ = c4_lines(texts, C4Lines.model_validate(options))
    return apply_edits(texts, edits).to_pylist()[0], positive(
        lines_c4.RULES, counts[0].tolist()
    )


def dclm(text: str, **options: object) -> tuple[str, Counted]:
    texts = pa.array([text], pa.large_string())
    edits, counts, *_ = dclm_lines(texts, DclmLines.model_validate(options))
    return apply_edits(texts, edits).to_pylist()[0], positive(
        lines_dclm.RULES, counts[0].tolist()
    )


def positive(names: tuple[str, ...], counts: list[int]) -> Counted:
    return {name: count for name, count in zip(names, counts, strict=True) if count}


def c4_reference(text: str, options: C4Lines) -> tuple[str, Counted]:
    """Plain version of `lines_c4.py`."""
    kept, counts = [], dict.fromkeys(lines_c4.RULES, 0)
    marks = (".", "?", "!", '"', *("'" if options.dialect == "datatrove" else ""))
    for stripped in map(str.strip, text.splitlines()):
        longest_word = options.max_word_characters
        if longest_word and any(len(word) > longest_word for word in stripped.split()):
            counts["c4_long_word"] += 1
            continue
        line, citations = stripped, 0
        if options.citations:
            line, citations = re.subn(
                r"\[\d*\]|\[edit\]|\[citation needed\]", "", stripped
            )
        lowered = line.lower()
        if options.terminal_punctuation and (
            not line.endswith(marks) or line.endswith("...")
        ):
            counts["c4_no_terminal_punctuation"] += 1
        elif len(line.split()) < options.min_words:
            counts["c4_few_words"] += 1
        else:
            counts["c4_citations"] += citations
            if options.javascript and "javascript" in lowered:
                counts["c4_javascript"] += 1
            elif options.policy and any(phrase in lowered for phrase in POLICY_PHRASES):
                counts["c4_policy"] += 1
            else:
                kept.append(line)
    return "\n".join(kept).strip(), {
        rule: count for rule, count in counts.items() if count
    }


def dclm_reference(text: str, options: DclmLines) -> tuple[str, Counted]:
    """Plain version of `lines_dclm.py`."""
    counts = dict.fromkeys(lines_dclm.RULES, 0)
    counter = re.compile(rf"\W*\d[,.\d]*[kmb]?\s+(?:{'|'.join(COUNTED)})\W*")

    def keep(rule: str, is_dropped: object, used: bool, strip: bool = True) -> None:
        nonlocal text
        if used:
            lines = text.split("\n")
            kept = [line for line in lines if not is_dropped(line)]  # type: ignore[operator]
            counts[rule] = len(lines) - len(kept)
            text = "\n".join(kept).strip() if strip else "\n".join(kept)

    upper, digits = options.max_uppercase_ratio, options.max_digit_ratio
    keep(
        "dclm_uppercase",
        lambda line: line and sum(map(str.isupper, line)) / len(line) > upper,
        upper is not None,
    )
    keep(
        "dclm_digits",
        lambda line: line and sum(map(str.isdigit, line)) / len(line) > digits,
        digits is not None,
    )
    keep(
        "dclm_counters", lambda line: counter.fullmatch(line.lower()), options.counters
    )
    keep(
        "dclm_few_words",
        lambda line: line and len(line.split()) < options.min_words,
        True,
        strip=False,
    )
    for pattern in (
        (r"\s?items in cart", r"\s?read more...$", r"^sign-in\s?")
        if options.substrings
        else ()
    ):
        kept = []
        for line in text.split("\n"):
            edited = line
            if len(line.split()) <= options.max_substring_words:
                edited = re.sub(pattern, "", line, flags=re.IGNORECASE)
            is_dropped = bool(line) and not edited.strip()
            counts["dclm_substrings"] += is_dropped or edited != line
            if not is_dropped:
                kept.append(edited)
        text = "\n".join(kept).strip()
    return text, {rule: count for rule, count in counts.items() if count}


C4_GOLDEN = [
    ("Five words end it here.", {}, "Five words end it here.", {}),
    (
        "Five words end it here?\nFive words end it here!",
        {},
        "Five words end it here?\nFive words end it here!",
        {},
    ),
    ('He said "five words end."', {}, 'He said "five words end."', {}),
    ("Five words end it here", {}, "", {"c4_no_terminal_punctuation": 1}),
    ("Five words end it here...", {}, "", {"c4_no_terminal_punctuation": 1}),
    ("Five words end it here…", {}, "", {"c4_no_terminal_punctuation": 1}),
    ("Five words end it here'", {}, "", {"c4_no_terminal_punctuation": 1}),
    (
        "'Five words end it here'",
        {"dialect": "datatrove"},
        "'Five words end it here'",
        {},
    ),
    (
        "Five words end it here'...",
        {"dialect": "datatrove"},
        "",
        {"c4_no_terminal_punctuation": 1},
    ),
    (
        "Five words end it here",
        {"terminal_punctuation": False},
        "Five words end it here",
        {},
    ),
    ("Only four words here.", {}, "", {"c4_few_words": 1}),
    ("Only four words here.", {"constants": "paper"}, "Only four words here.", {}),
    ("Two words.", {"constants": "paper"}, "", {"c4_few_words": 1}),
    ("Two words.", {"min_words": 2}, "Two words.", {}),
    (
        "a " + "x" * 1000 + " of five words.",
        {},
        "a " + "x" * 1000 + " of five words.",
        {},
    ),
    ("a " + "é" * 1001 + " of five words.", {}, "", {"c4_long_word": 1}),
    (
        "a " + "x" * 11 + " of five words.",
        {"max_word_characters": 10},
        "",
        {"c4_long_word": 1},
    ),
    (
        "A[1] line[citation needed] of five[edit][] words.[23]",
        {},
        "A line of five words.",
        {"c4_citations": 5},
    ),
    ("[1] A line of five words.", {}, "A line of five words.", {"c4_citations": 1}),
    ("A line of five words. [1]", {}, "", {"c4_no_terminal_punctuation": 1}),
    ("A[a] line of [ 1] words.", {}, "A[a] line of [ 1] words.", {}),
    ("A[1] line of five words.", {"citations": False}, "A[1] line of five words.", {}),
    ("Please turn JavaScript on for this.", {}, "", {"c4_javascript": 1}),
    (
        "Please turn JavaScript on for this.",
        {"javascript": False},
        "Please turn JavaScript on for this.",
        {},
    ),
    ("You accept our Terms of Use now.", {}, "", {"c4_policy": 1}),
    ("Read our long privacy policy here.", {}, "", {"c4_policy": 1}),
    ("Read our long Cookie Policy here.", {}, "", {"c4_policy": 1}),
    ("This fine site uses cookies too.", {}, "", {"c4_policy": 1}),
    ("This is the use of cookies.", {}, "", {"c4_policy": 1}),
    ("We may also use cookies here.", {}, "", {"c4_policy": 1}),
    (
        "We may also use coo[1]kies here.",
        {},
        "",
        {"c4_citations": 1, "c4_policy": 1},
    ),
    (
        "We may also use cookies here.",
        {"policy": False},
        "We may also use cookies here.",
        {},
    ),
    ("Privacy policy of the javascript page.", {}, "", {"c4_javascript": 1}),
    (
        "  One two three four five. \r\n\tOne two three four six.\u2028",
        {},
        "One two three four five.\nOne two three four six.",
        {},
    ),
    (
        "No.\nOne two three four five.\nNo.\nNo.\n\nOne two three four six.\nNo.",
        {},
        "One two three four five.\nOne two three four six.",
        {"c4_few_words": 4, "c4_no_terminal_punctuation": 1},
    ),
    ("", {}, "", {}),
]

DCLM_GOLDEN = [
    (
        "Plain line here\nANOTHER LOUD line",
        {},
        "Plain line here",
        {"dclm_uppercase": 1},
    ),
    # 3 of 6 pass, 3 of 5 do not
    ("AAA bb\nAAA b", {}, "AAA bb", {"dclm_uppercase": 1}),
    ("LOUD line HERE", {"max_uppercase_ratio": None}, "LOUD line HERE", {}),
    ("one line\n12345\nanother line", {}, "one line\nanother line", {"dclm_digits": 1}),
    ("1 2 3", {}, "1 2 3", {}),
    ("٣٤٥\none line", {}, "one line", {"dclm_digits": 1}),
    ("3 likes\none line", {}, "one line", {"dclm_counters": 1}),
    ("* 1,204.5K Views *\none line", {}, "one line", {"dclm_counters": 1}),
    (
        "3 likes it\n3 K views\n3likes of\nv3 views\none line",
        {},
        "3 likes it\n3 K views\n3likes of\nv3 views\none line",
        {},
    ),
    ("3 likes\none line", {"counters": False}, "3 likes\none line", {}),
    ("one\none line\n\ntwo lines", {}, "one line\n\ntwo lines", {"dclm_few_words": 1}),
    ("one\none line", {"min_words": 0}, "one\none line", {}),
    (
        "2 items in cart\nhave items in cart now",
        {},
        "2\nhave now",
        {"dclm_substrings": 2},
    ),
    ("items in cart\none line", {}, "one line", {"dclm_substrings": 1}),
    (
        "a story begins Read more...\none line",
        {},
        "a story begins\none line",
        {"dclm_substrings": 1},
    ),
    ("a story begins read more of", {}, "a story begins", {"dclm_substrings": 1}),
    ("a story begins Read more..", {}, "a story begins Read more..", {}),
    (
        "Sign-in to see more\nplease Sign-in",
        {},
        "to see more\nplease Sign-in",
        {"dclm_substrings": 1},
    ),
    (
        "one two three four five six seven items in cart",
        {},
        "one two three four five six seven",
        {"dclm_substrings": 1},
    ),
    ("1 2 3 4 5 6 7 8 items in cart", {}, "1 2 3 4 5 6 7 8 items in cart", {}),
    (
        "one line\n \nanother",
        {"min_words": 0},
        "one line\nanother",
        {"dclm_substrings": 1},
    ),
    ("Sign-in to see", {"substrings": False}, "Sign-in to see", {}),
    ("\n\n one line \n\n", {}, "one line", {}),
    ("", {}, "", {}),
]


@pytest.mark.parametrize(
    ("text", "options", "expected", "counts"),
    C4_GOLDEN,
    ids=[str(n) for n in range(len(C4_GOLDEN))],
)
def test_c4_lines(
    text: str, options: dict[str, object], expected: str, counts: Counted
) -> None:
    assert c4(text, **options) == (expected, counts)
    assert c4_reference(text, C4Lines.model_validate(options)) == (expected, counts)


@pytest.mark.parametrize(
    ("text", "options", "expected", "counts"),
    DCLM_GOLDEN,
    ids=[str(n) for n in range(len(DCLM_GOLDEN))],
)
def test_dclm_lines(
    text: str, options: dict[str, object], expected: str, counts: Counted
) -> None:
    assert dclm(text, **options) == (expected, counts)
    assert dclm_reference(text, DclmLines.model_validate(options)) == (expected, counts)


PIECES = [
    "\n",
    " ",
    "\r\n",
    "\u2028",
    "\x85",
    "\u00a0",
    "a",
    "É",
    "A",
    "1",
    "٣",
    ".",
    "...",
    "?",
    "'",
]
texts = st.one_of(
    st.text(max_size=60), st.lists(st.sampled_from(PIECES), max_size=25).map("".join)
)
c4_options = st.builds(
    C4Lines,
    citations=st.booleans(),
    terminal_punctuation=st.booleans(),
    min_words=st.integers(0, 3),
    dialect=st.sampled_from(["c4", "datatrove"]),
    javascript=st.booleans(),
    policy=st.booleans(),
    max_word_characters=st.sampled_from([0, 5, 20]),
)
dclm_options = st.builds(
    DclmLines,
    max_uppercase_ratio=st.sampled_from([None, 0.2, 0.5]),
    max_digit_ratio=st.sampled_from([None, 0.999999]),
    counters=st.booleans(),
    min_words=st.integers(0, 3),
    substrings=st.booleans(),
    max_substring_words=st.integers(0, 12),
)


@pytest.mark.slow
@given(texts, c4_options)
@settings(deadline=None, max_examples=500)
def test_c4_equals_its_plain_definition(text: str, options: C4Lines) -> None:
    assert c4(text, **options.model_dump()) == c4_reference(text, options)


@pytest.mark.slow
@given(texts, dclm_options)
@example("a\n\x85 items in cart", DclmLines())
@settings(deadline=None, max_examples=500)
def test_dclm_equals_its_plain_definition(text: str, options: DclmLines) -> None:
    assert dclm(text, **options.model_dump()) == dclm_reference(text, options)


@given(texts)
@settings(deadline=None, max_examples=200)
def test_c4_is_idempotent_without_nested_citations(text: str) -> None:
    once, counts = c4(text)
    if "c4_citations" not in counts:
        assert c4(once) == (once, {})


def test_each_rule_counts_lines_and_bytes() -> None:
    texts = pa.array(["Só é.\nOne two[1] three four five.\nno", "x"], pa.large_string())
    _, counts, sizes, _ = c4_lines(texts, C4Lines())
    assert dict(zip(lines_c4.RULES, counts.T.tolist(), strict=True)) == {
        "c4_long_word": [0, 0],
        "c4_citations": [1, 0],
        "c4_no_terminal_punctuation": [1, 1],
        "c4_few_words": [1, 0],
        "c4_javascript": [0, 0],
        "c4_policy": [0, 0],
    }
    assert sizes[:, 1].tolist() == [3, 0]
    assert sizes[:, 2].tolist() == [2, 1]
    assert sizes[:, 3].tolist() == [len("Só é.".encode()), 0]
    _, counts, sizes, _ = dclm_lines(texts, DclmLines())
    assert counts.tolist() == [[0, 0, 0, 1, 0], [0, 0, 0, 1, 0]]
    assert sizes.tolist() == [[0, 0, 0, 2, 0], [0, 0, 0, 1, 0]]


def test_code_points_are_classified_like_python() -> None:
    characters = [chr(code) for code in range(CODE_POINTS)]
    classes = character_classes()
    for flag, predicate in (
        (UPPER, str.isupper),
        (DIGIT, str.isdigit),
        (DECIMAL, str.isdecimal),
    ):
        assert (classes & flag != 0).tolist() == [*map(predicate, characters)]


@pytest.mark.skipif(not POSTS.exists(), reason="the posts of 18F are not here")
@pytest.mark.parametrize(
    "options",
    [{}, {"terminal_punctuation": False}, {"min_words": 3}],
    ids=["c4", "fineweb", "3"],
)
def test_datatrove_keeps_the_same_lines_of_real_posts(
    options: dict[str, object],
) -> None:
    """datatrove counts words before it removes citations; here none are removed."""
    pytest.importorskip("datatrove")
    from datatrove.data import Document
    from datatrove.pipeline.filters import C4QualityFilter

    section = C4Lines.model_validate(
        {"citations": False, "dialect": "datatrove", **options}
    )
    peer = C4QualityFilter(
        remove_citations=False,
        filter_no_terminal_punct=section.terminal_punctuation,
        min_num_sentences=-1,
        min_words_per_line=section.min_words,
        filter_lorem_ipsum=False,
        filter_curly_bracket=False,
    )
    with zstandard.open(POSTS, "rt", encoding="utf-8") as lines:
        posts = [json.loads(line)["text"] for line in itertools.islice(lines, 60)]
    posts.append(
        "'Nobody ever said so before,' he said\n'and nobody will say it "
        "again.'\n'It ends as it began'"
    )
    texts = pa.array(posts, pa.large_string())
    ours = apply_edits(texts, c4_lines(texts, section)[0]).to_pylist()
    documents = [Document(text=post, id="") for post in posts]
    assert all(peer.filter(document) for document in documents)
    assert ours == [document.text for document in documents]
    assert ours != posts
