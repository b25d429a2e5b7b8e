"""Settings of models that read documents: folder, length of windows, names of
scores.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, model_validator

from gristmill.mixtures.base import Count, OutsidePath, Positive, RowLength, Section
from gristmill.mixtures.columns import Column


class ReadingModel(Section):
    """A model that reads documents. See docs/annotators.md."""

    path: OutsidePath
    """The model's folder, with config.json, model.safetensors and tokenizer.json."""
    pool: Literal["first", "mean", "max", "tokens"] = "first"
    """Handling of a document longer than the model's input. `first`: read only the
    beginning, as most published classifiers were trained and measured. Otherwise the
    whole document is read in windows, whose values are combined: their `mean`, the
    largest (`max`), or the mean weighted by `tokens`.
    """
    max_windows: Positive = 16
    """Largest number of windows per document, from the beginning."""
    window_tokens: RowLength | None = None
    """Tokens per window, including those that the tokenizer adds; the model's input
    length if absent.
    """
    overlap_tokens: Count = 0
    """Tokens that a window shares with the one before."""
    device: Literal["cpu", "gpu"] = "cpu"
    """Device of the computation; on a CPU each of `engine.workers` has one thread."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Data type of the computation; if absent, float32 on a CPU and bfloat16 on a GPU.
    On CPUs with AMX (Xeons since 2023) bfloat16 is four times as fast, and changes the
    cosine of a vector with itself in the fourth decimal.
    """
    onnx: str | None = None
    """A file in the folder, such as onnx/model_quint8_avx2.onnx, that ONNX Runtime runs
    on the CPU instead of torch. It pays off for 8-bit weights: 2.1 to 2.8 times the
    speed of torch's float32; float32 files ran at 0.7 to 1.1 times.
    """
    batch_tokens: Positive | None = None
    """Tokens read at once, padding included; if absent, 2,048 on a CPU, where more is
    slower, and 65,536 on a GPU.
    """

    @model_validator(mode="before")
    @classmethod
    def _path_alone(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value

    def _problems(self) -> Iterator[str]:
        if self.onnx is not None and (self.device == "gpu" or self.dtype is not None):
            yield (
                "ONNX Runtime computes on the CPU in the data type of its file: "
                "leave `device` and `dtype` out"
            )
        if (
            self.window_tokens is not None
            and 2 * self.overlap_tokens > self.window_tokens
        ):
            yield (
                f"windows of {self.window_tokens} tokens can overlap by at most "
                f"{self.window_tokens // 2}; overlap_tokens is {self.overlap_tokens}"
            )


class ScoringModel(ReadingModel):
    """A model that scores documents: a transformers or fastText classifier, or sentence
    embeddings (`like`).
    """

    path: OutsidePath
    """A folder with config.json, model.safetensors and tokenizer.json, or a fastText
    model (.bin, .ftz).
    """
    name: Column | None = None
    """Name of the columns. For a model with one output it is the column; for a
    classifier it is the column of the most likely class's name, and the others are
    `<name>_<class>`. If absent: `score`, or `class` and the classes.
    """
    classes: tuple[str, ...] | None = None
    """Classes that become columns, as the model's config names them; all if absent.
    `[]`: only the most likely one.
    """
    values: Literal["probabilities", "logits"] | None = None
    """Values of the columns: if absent, probabilities (a softmax, or a sigmoid per
    class if the config allows several classes per document); for a model with one
    output, such as a regression, its number as it is.
    """
    like: dict[Column, str | tuple[str, ...]] = Field(default_factory=dict)
    """For sentence embeddings: column -> texts to compare with; the column holds the
    largest cosine with one of them.
    """

    def _problems(self) -> Iterator[str]:
        if self.like and not (
            self.name is None and self.classes is None and self.values is None
        ):
            yield (
                "sentence embeddings have only the columns of `like`; leave `name`, "
                "`classes` and `values` out"
            )
