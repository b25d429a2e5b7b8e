"""What `pretrain` predicts of rows whose spans are hidden: T5's span corruption, UL2's denoisers, GLM's blanks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import Field, model_validator

from gristmill.mixtures.base import Fraction, Section

SENTINEL = "<extra_id_{}>"
"""T5's name of the token that stands for the hidden span of a number."""
Mode = Literal["R", "S", "X"]
MODE_TOKENS: tuple[dict[Mode, str], ...] = (
    {"R": "[R]", "S": "[S]", "X": "[X]"},
    {"R": "[NLU]", "S": "[S2S]", "X": "[NLG]"},
)
"""The paper's mode tokens, and those of the published UL2 20B."""
Density = Annotated[float, Field(gt=0.0, lt=1.0)]


class Denoiser(Section):
    """One way to hide spans of a row."""

    mode: Mode
    """`R`: short spans, few of them; `S`: the end of the row; `X`: long spans, or many."""
    density: Density
    """Share of the tokens that are hidden."""
    mean_length: Annotated[float, Field(ge=1.0)] | None = None
    """Mean tokens of a hidden span; a single one at the end of the row if absent."""

    @model_validator(mode="after")
    def _ends_where_it_is_sequential(self) -> Denoiser:
        if (self.mode == "S") != (self.mean_length is None):
            raise ValueError("a denoiser of mode S hides the end of a row and has no mean_length; R and X need one")
        return self


class SpanCorruption(Section):
    """Span corruption: an encoder-decoder fills in hidden spans (Raffel et al. 2020, section 3.1.4).

    The tokenizer needs a token for each span of a row: `tokenizer: {sentinels: 100}`.
    """

    density: Density = 0.15
    """Share of the tokens that are hidden (T5: 0.15)."""
    mean_length: Annotated[float, Field(ge=1.0)] = 3.0
    """Mean tokens of a hidden span (T5: 3)."""

    @property
    def denoisers(self) -> tuple[Denoiser, ...]:
        """The only one."""
        return (Denoiser(mode="R", density=self.density, mean_length=self.mean_length),)


class Ul2(Section):
    """A mixture of denoisers, one drawn evenly for each row (Tay et al. 2022, section 3.1).

    The tokenizer needs sentinels, as for span corruption, and the mode tokens `[R]`, `[S]` and `[X]`.
    """

    shape: Literal["encoder_decoder", "decoder"] = "encoder_decoder"
    """`encoder_decoder`: T5's, which encodes what is left and decodes what is hidden. `decoder`: one that reads both in
    a row, what is left in both directions; of a row as many tokens are read as fit in with the sentinels."""
    denoisers: Annotated[tuple[Denoiser, ...], Field(min_length=1)] = (
        Denoiser(mode="R", density=0.15, mean_length=3.0),
        Denoiser(mode="R", density=0.15, mean_length=8.0),
        Denoiser(mode="S", density=0.25),
        Denoiser(mode="X", density=0.5, mean_length=3.0),
        Denoiser(mode="X", density=0.5, mean_length=8.0),
        Denoiser(mode="X", density=0.15, mean_length=64.0),
        Denoiser(mode="X", density=0.5, mean_length=64.0),
    )
    """The paper's seven, of table 1, if absent."""


BLANK, LONG_BLANK, SENTENCE_BLANK, BEGIN, END = "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>"
"""What GLM-4's tokenizer calls a blank, one at the end and one of a sentence, and what stands around their tokens."""


class BlankInfilling(Section):
    """Autoregressive blank infilling: a decoder reads rows with blanks in both directions, and fills these in, one
    after the other in any order (Du et al. 2022, section 2.1).

    The tokenizer needs `[MASK]`, `<sop>` and `<eop>`, for the shares `[gMASK]` and `[sMASK]`.
    """

    density: Annotated[float, Field(gt=0.0, lt=0.5)] = 0.15
    """Least share of the tokens that short blanks and whole sentences hide (Du et al.: 0.15)."""
    mean_length: Annotated[float, Field(gt=0.0, le=30.0)] = 3.0
    """Of the Poisson distribution, without zero, that lengths of spans are drawn from (Du et al.: 3)."""
    document_share: Fraction = 0.0
    """Share of the rows of which the end is one blank, `[gMASK]`: half of their tokens to all, drawn evenly (Du et al.,
    section 2.1.2, with the long blank behind its context, as in GLM-130B, Zeng et al. 2023, section 2.2)."""
    sentence_share: Fraction = 0.0
    """Share of the rows whose blanks, `[sMASK]`, are whole sentences (Du et al., section 2.1.2). A sentence ends with a
    token that holds one of `.?!;:` or a line break, as in their code."""

    @model_validator(mode="after")
    def _shares_of_one(self) -> BlankInfilling:
        if self.document_share + self.sentence_share > 1.0:
            raise ValueError(
                f"document_share {self.document_share} and sentence_share {self.sentence_share} are more "
                "than 1 together; the rest of the rows has short blanks"
            )
        return self

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """Names of the tokens that it needs."""
        return (
            BLANK,
            BEGIN,
            END,
            *((LONG_BLANK,) if self.document_share else ()),
            *((SENTENCE_BLANK,) if self.sentence_share else ()),
        )


Spans = SpanCorruption | Ul2 | BlankInfilling


def spans_of(tokens: int, one: Denoiser) -> tuple[int, int]:
    """Hidden tokens, and spans, of a row of so many (random_spans_noise_mask of T5's preprocessors); none of fewer than
    two.

    >>> spans_of(512, Denoiser(mode="R", density=0.15, mean_length=3.0))
    (77, 26)
    """
    if tokens < 2:
        return 0, 0
    hidden = min(max(round(tokens * one.density), 1), tokens - 1)
    if one.mean_length is None:
        return hidden, 1
    return hidden, max(round(min(hidden, tokens - hidden) / one.mean_length), 1)


def most_spans(section: SpanCorruption | Ul2, length: int) -> int:
    """Most hidden spans of a row of so many tokens, for each of which there is a sentinel."""
    return max(spans_of(length, one)[1] for one in section.denoisers)


def mode_names(has: Callable[[str], bool]) -> dict[Mode, str] | None:
    """The mode tokens that a tokenizer has; None where it has none of the known ones."""
    return next((names for names in MODE_TOKENS if all(map(has, names.values()))), None)


def lacking(section: Spans, length: int, has: Callable[[str], bool]) -> str | None:
    """What special tokens a tokenizer lacks for rows of so many tokens, in a sentence; None where it has them.

    >>> lacking(SpanCorruption(), 32, lambda name: name == "<extra_id_0>")
    'needs 2 sentinels, one for each hidden span of a row: say `tokenizer: {sentinels: 2}`'
    """
    if isinstance(section, BlankInfilling):
        missing = [name for name in section.special_tokens if not has(name)]
        return (
            f"needs the special tokens {', '.join(missing)}: name them in tokenizer.special_tokens"
            if (missing)
            else None
        )
    most = most_spans(section, length)
    if not all(has(SENTINEL.format(number)) for number in range(most)):
        return f"needs {most} sentinels, one for each hidden span of a row: say `tokenizer: {{sentinels: {most}}}`"
    if isinstance(section, Ul2) and mode_names(has) is None:
        return f"needs the mode tokens {', '.join(MODE_TOKENS[0].values())}: name them in tokenizer.special_tokens"
    return None


def tokens_that_fit(length: int, tokens: int, one: Denoiser) -> int:
    """How many of so many tokens fit into a row of `length` together with a mode token, two sentinels for each span and
    an end of text."""
    return next(
        (count for count in range(min(tokens, length), 0, -1) if count + 2 * spans_of(count, one)[1] + 2 <= length), 0
    )
