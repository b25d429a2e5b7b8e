"""The languages of a document's lines, and the lines to cut because theirs is not wanted.

A line is known when it has `min_line_characters` (white space at its ends aside) and the model's score for its top
language reaches `line_threshold`; all others count for no language and are never cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from gristmill.dataprep.edits import Edit
from gristmill.dataprep.judges.language_codes import Language
from gristmill.mixtures.langid import LanguageId

LANGUAGES_NAMED = 3
"""A document's column names so many languages, the most frequent ones."""


@dataclass(frozen=True)
class LineJudgement:
    """What the lines of one document say.

    Attributes:
        characters: language -> characters of its known lines.
        wanted_characters: those of wanted languages among them.
        cuts: the edits that take other languages' lines out.
        lines_cut: number of lines that they take.
        lines_left: lines that hold more than white space afterwards.
    """

    characters: Mapping[str, int] = field(default_factory=dict)
    wanted_characters: int = 0
    cuts: Sequence[Edit] = ()
    lines_cut: int = 0
    lines_left: int = 0

    @property
    def share(self) -> float:
        """Share of the known characters that are in wanted languages; NaN where nothing is known."""
        total = sum(self.characters.values())
        return self.wanted_characters / total if total else float("nan")


def judge_lines(
    texts: Sequence[str],
    identify: Callable[[Sequence[str]], tuple[list[Language], np.ndarray]],
    is_wanted: Callable[[Language], bool],
    section: LanguageId,
) -> list[LineJudgement]:
    """Judge the lines of n texts; all lines go through the model at once.

    Args:
        texts: documents.
        identify: lines -> their languages and scores.
        is_wanted: whether a language is to be kept.
        section: the thresholds of lines.
    """
    lines = [text.split("\n") for text in texts]
    long = [[number for number, line in enumerate(of_one) if len(line.strip()) >= section.min_line_characters]
            for of_one in lines]  # fmt: skip
    languages, scores = identify([lines[text][number] for text, numbers in enumerate(long) for number in numbers])
    found = iter(zip(languages, scores.tolist(), strict=True))
    judgements = []
    for of_one, numbers in zip(lines, long, strict=True):
        known = {number: language for number, (language, score) in zip(numbers, found, strict=False)
                 if score >= section.line_threshold}  # fmt: skip
        judgements.append(_judge_document(of_one, known, is_wanted, section.cut_other_lines))
    return judgements


def _judge_document(
    lines: Sequence[str], known: Mapping[int, Language], is_wanted: Callable[[Language], bool], cut: bool
) -> LineJudgement:
    characters: dict[str, int] = {}
    wanted_characters = 0
    others = []
    for number, language in known.items():
        size = len(lines[number].strip())
        characters[language.code] = characters.get(language.code, 0) + size
        if is_wanted(language):
            wanted_characters += size
        else:
            others.append(number)
    gone = set(others) if cut else set()
    left = sum(1 for number, line in enumerate(lines) if number not in gone and line.strip())
    return LineJudgement(characters, wanted_characters, cut_lines(lines, gone), len(gone), left)


def cut_lines(lines: Sequence[str], gone: set[int]) -> list[Edit]:
    """The edits after which a text of these lines is the others, joined by newlines; neighbours make one edit."""
    if not gone:
        return []
    sizes = [len(line.encode("utf-8")) for line in lines]
    starts = np.concatenate([[0], np.cumsum(np.array(sizes) + 1)]).tolist()
    edits: list[tuple[int, int, str]] = []
    for number in sorted(gone):
        if edits and edits[-1][1] == starts[number]:
            edits[-1] = (edits[-1][0], starts[number + 1], "")
        else:
            edits.append((starts[number], starts[number + 1], ""))
    begin, end, _ = edits[-1]
    if end > starts[-1] - 1:  # the last line ends without a newline: the one before goes instead
        edits[-1] = (max(0, begin - 1), starts[-1] - 1, "")
    return edits


def without_cuts(text: str, cuts: Sequence[Edit]) -> str:
    """The text after its cuts."""
    if not cuts:
        return text
    data, at, left = text.encode("utf-8"), 0, []
    for begin, end, _ in cuts:
        left.append(data[at:begin])
        at = end
    return b"".join([*left, data[at:]]).decode("utf-8")


def describe_lines(lines: Iterable[LineJudgement], cut: bool) -> dict[str, np.ndarray]:
    """The columns of n documents' lines."""
    lines = list(lines)
    names = np.array([_name_languages(line.characters) for line in lines], str)
    columns = {"line_languages": names, "line_language_share": np.array([line.share for line in lines])}
    if cut:
        columns["language_lines_cut"] = np.array([line.lines_cut for line in lines], np.int64)
        columns["language_lines_left"] = np.array([line.lines_left for line in lines], np.int64)
    return columns


def _name_languages(characters: Mapping[str, int]) -> str:
    """`en 0.91, de 0.09`: the most frequent languages with their shares of the known characters."""
    total = sum(characters.values())
    ranked = sorted(characters.items(), key=lambda item: (-item[1], item[0]))[:LANGUAGES_NAMED]
    return ", ".join(f"{language} {size / total:.2f}" for language, size in ranked)
