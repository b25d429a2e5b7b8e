"""Objectives of `pretrain` on rows with hidden spans: T5's span corruption, UL2's
denoisers, GLM's blanks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Literal

from pydantic import Field

from gristmill.mixtures.base import Fraction, InnerFraction, NonEmpty, Section

SENTINEL = "<extra_id_{}>"
"""T5's name of the token that stands for the hidden span with this number."""
Mode = Literal["R", "S", "X"]
MODE_TOKENS: tuple[dict[Mode, str], ...] = (
    {"R": "[R]", "S": "[S]", "X": "[X]"},
    {"R": "[NLU]", "S": "[S2S]", "X": "[NLG]"},
)
"""The paper's mode tokens, and those of the published UL2 20B."""


class Denoiser(Section):
    """A rule for hiding spans of a row."""

    mode: Mode
    """`R`: few short spans; `S`: the end of the row; `X`: long spans, or many."""
    density: InnerFraction
    """Share of the tokens that are hidden."""
    mean_length: Annotated[float, Field(ge=1.0)] | None = None
    """Mean tokens of a hidden span; if absent, one span at the end of the row."""

    def _problems(self) -> Iterator[str]:
        if (self.mode == "S") != (self.mean_length is None):
            yield (
                "a denoiser of mode S hides the end of a row and has no "
                "mean_length; R and X need one"
            )


class SpanCorruption(Section):
    """Span corruption: an encoder-decoder fills in hidden spans (Raffel et al. 2020,
    section 3.1.4).

    The tokenizer needs a token for each span of a row: `tokenizer: {sentinels: 100}`.
    """

    density: InnerFraction = 0.15
    """Share of the tokens that are hidden (T5: 0.15)."""
    mean_length: Annotated[float, Field(ge=1.0)] = 3.0
    """Mean tokens of a hidden span (T5: 3)."""

    @property
    def denoisers(self) -> tuple[Denoiser, ...]:
        """The only denoiser."""
        return (Denoiser(mode="R", density=self.density, mean_length=self.mean_length),)


class Ul2(Section):
    """A mixture of denoisers, one drawn evenly for each row (Tay et al. 2022, section
    3.1).

    The tokenizer needs sentinels, as for span corruption, and the mode tokens `[R]`,
    `[S]` and `[X]`.
    """

    shape: Literal["encoder_decoder", "decoder"] = "encoder_decoder"
    """`encoder_decoder`: T5's, which encodes the visible tokens and decodes the hidden
    ones. `decoder`: reads both in one row, the visible tokens in both directions; it
    reads as many tokens of a row as fit beside the sentinels.
    """
    denoisers: NonEmpty[Denoiser] = (
        Denoiser(mode="R", density=0.15, mean_length=3.0),
        Denoiser(mode="R", density=0.15, mean_length=8.0),
        Denoiser(mode="S", density=0.25),
        Denoiser(mode="X", density=0.5, mean_length=3.0),
        Denoiser(mode="X", density=0.5, mean_length=8.0),
        Denoiser(mode="X", density=0.15, mean_length=64.0),
        Denoiser(mode="X", density=0.5, mean_length=64.0),
    )
    """Denoisers; the seven of the paper's table 1 if absent."""


BLANK, LONG_BLANK, SENTENCE_BLANK, BEGIN, END = (
    "[MASK]",
    "[gMASK]",
    "[sMASK]",
    "<sop>",
    "<eop>",
)
"""Names in GLM-4's tokenizer of a blank, a blank at the end, the blank of a sentence,
and the marks around their tokens.
"""


class BlankInfilling(Section):
    """Autoregressive blank infilling: a decoder reads rows with blanks in both
    directions and fills these in, one after the other in any order (Du et al. 2022,
    section 2.1).

    The tokenizer needs `[MASK]`, `<sop>` and `<eop>`, and for the two shares `[gMASK]`
    and `[sMASK]`.
    """

    density: Annotated[float, Field(gt=0.0, lt=0.5)] = 0.15
    """Smallest share of the tokens that short blanks and whole sentences hide (Du et
    al.: 0.15).
    """
    mean_length: Annotated[float, Field(gt=0.0, le=30.0)] = 3.0
    """Mean of the Poisson distribution, without zero, from which lengths of spans are
    drawn (Du et al.: 3).
    """
    document_share: Fraction = 0.0
    """Share of the rows whose end is one blank, `[gMASK]`: half of their tokens to all,
    drawn uniformly (Du et al., section 2.1.2, with the long blank after its context, as
    in GLM-130B, Zeng et al. 2023, section 2.2).
    """
    sentence_share: Fraction = 0.0
    """Share of the rows whose blanks, `[sMASK]`, are whole sentences (Du et al.,
    section 2.1.2). A sentence ends with a token that holds one of `.?!;:` or a line
    break, as in their code.
    """

    def _problems(self) -> Iterator[str]:
        if self.document_share + self.sentence_share > 1.0:
            yield (
                f"document_share {self.document_share} and sentence_share "
                f"{self.sentence_share} add up to more "
                "than 1; the remaining rows have short blanks"
            )

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """Names of the tokens that the objective needs."""
        names = [BLANK, BEGIN, END]
        if self.document_share:
            names.append(LONG_BLANK)
        if self.sentence_share:
            names.append(SENTENCE_BLANK)
        return tuple(names)


Spans = SpanCorruption | Ul2 | BlankInfilling


def spans_of(tokens: int, denoiser: Denoiser) -> tuple[int, int]:
    """Return the numbers of hidden tokens and of spans in a row
    (random_spans_noise_mask of T5's preprocessors).

    Both are 0 in a row of fewer than two tokens.

    >>> spans_of(512, Denoiser(mode="R", density=0.15, mean_length=3.0))
    (77, 26)
    """
    if tokens < 2:
        return 0, 0
    hidden = min(max(round(tokens * denoiser.density), 1), tokens - 1)
    if denoiser.mean_length is None:
        return hidden, 1
    return hidden, max(round(min(hidden, tokens - hidden) / denoiser.mean_length), 1)


def most_spans(section: SpanCorruption | Ul2, length: int) -> int:
    """Return the largest number of hidden spans in a row of `length` tokens; each needs
    a sentinel.
    """
    return max(spans_of(length, denoiser)[1] for denoiser in section.denoisers)


def mode_names(has: Callable[[str], bool]) -> dict[Mode, str] | None:
    """Return the mode tokens that a tokenizer has; None if it has none of the known
    ones.
    """
    return next((names for names in MODE_TOKENS if all(map(has, names.values()))), None)


def lacking(section: Spans, length: int, has: Callable[[str], bool]) -> str | None:
    """Return a sentence on the special tokens that a tokenizer lacks for rows of
    `length` tokens, or None.

    >>> lacking(SpanCorruption(), 32, lambda name: name == "<extra_id_0>")
    'needs 2 sentinels, one for each hidden span of a row: say `tokenizer: {sentinels:
    2}`'
    """
    if isinstance(section, BlankInfilling):
        missing = [name for name in section.special_tokens if not has(name)]
        if not missing:
            return None
        return (
            f"needs the special tokens {', '.join(missing)}: name them in "
            "tokenizer.special_tokens"
        )
    most = most_spans(section, length)
    if not all(has(SENTINEL.format(number)) for number in range(most)):
        return f"needs {most} sentinels, one for each hidden span of a row: say `tokenizer: {{sentinels: {most}}}`"
    if isinstance(section, Ul2) and mode_names(has) is None:
        return (
            f"needs the mode tokens {', '.join(MODE_TOKENS[0].values())}: name "
            "them in tokenizer.special_tokens"
        )
    return None


def tokens_that_fit(length: int, tokens: int, denoiser: Denoiser) -> int:
    """Return the number of tokens that fit into a row of `length` together with a mode
    token, two sentinels for each span and an end of text.
    """
    return next(
        (
            count
            for count in range(min(tokens, length), 0, -1)
            if count + 2 * spans_of(count, denoiser)[1] + 2 <= length
        ),
        0,
    )
