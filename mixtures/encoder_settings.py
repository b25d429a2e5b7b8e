"""The sections of models that read documents: where they lie, how long documents are cut, what scores are called."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from gristmill.mixtures.base import OutsidePath, Positive, Section
from gristmill.mixtures.columns import Column


class ReadingModel(Section):
    """A model that reads documents, from files of this machine; no hub is ever asked. See docs/annotators.md."""

    path: OutsidePath
    """Its folder, with config.json, model.safetensors and tokenizer.json."""
    pool: Literal["first", "mean", "max", "tokens"] = "first"
    """What becomes of a document that is longer than the model reads at a time. `first`: its beginning alone is read,
    as most published classifiers were trained and measured. Else all of it is read in windows, and their values are
    put together: their `mean`, the largest (`max`), or the mean weighted by their `tokens`."""
    max_windows: Positive = 16
    """Windows of a document that are read at the most, from its beginning."""
    window_tokens: Annotated[int, Field(ge=8)] | None = None
    """Tokens of a window, those that the tokenizer adds included; as many as the model reads if absent."""
    overlap_tokens: Annotated[int, Field(ge=0)] = 0
    """Tokens that a window has in common with the one before."""
    device: Literal["cpu", "gpu"] = "cpu"
    """Where it computes; on a CPU by one thread for each of `engine.workers`."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """What it computes in: float32 on a CPU and bfloat16 on a GPU if absent. On CPUs with AMX (Xeons since 2023)
    bfloat16 is four times as fast, and changes the cosine of a vector with itself in the fourth decimal."""
    onnx: str | None = None
    """A file in the folder, such as onnx/model_quint8_avx2.onnx, by which ONNX Runtime computes in place of torch, on
    the CPU. It pays for weights of 8 bits: 2.1 to 2.8 times torch's float32. Of float32 it was 0.7 to 1.1."""
    batch_tokens: Positive | None = None
    """Tokens of the windows that are read at once, padding included: 2,048 on a CPU, where more is slower, and 65,536
    on a GPU."""

    @model_validator(mode="before")
    @classmethod
    def _path_alone(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _onnx_is_on_the_cpu(self) -> ReadingModel:
        if self.onnx is not None and (self.device == "gpu" or self.dtype is not None):
            raise ValueError("ONNX Runtime computes on the CPU, in what its file says: leave `device` and `dtype` out")
        return self

    @model_validator(mode="after")
    def _windows_move_on(self) -> ReadingModel:
        if self.window_tokens is not None and 2 * self.overlap_tokens > self.window_tokens:
            raise ValueError(
                f"windows of {self.window_tokens} tokens can have {self.window_tokens // 2} in common at "
                f"the most; overlap_tokens is {self.overlap_tokens}"
            )
        return self


class ScoringModel(ReadingModel):
    """A model that scores documents: a classifier of transformers or of fastText, or sentence embeddings (`like`)."""

    path: OutsidePath
    """A folder with config.json, model.safetensors and tokenizer.json, or a model of fastText (.bin, .ftz)."""
    name: Column | None = None
    """What the columns are called. Of a model with one output it is the column; of one with classes the column of the
    likeliest class's name, and the others are `<name>_<class>`. If absent: `score`, or `class` and the classes."""
    classes: tuple[str, ...] | None = None
    """Classes that are columns, as the model's config names them; all if absent. `[]`: the likeliest alone."""
    values: Literal["probabilities", "logits"] | None = None
    """What the columns hold: probabilities (a softmax, or a sigmoid of each where the config says that a document may
    have several classes) if absent; of a model with one output its number as it is, as of a regression."""
    like: dict[Column, str | tuple[str, ...]] = Field(default_factory=dict)
    """Of sentence embeddings: column -> texts of what is looked for; it holds the largest cosine with one of them."""

    @model_validator(mode="after")
    def _likeness_has_no_classes(self) -> ScoringModel:
        if self.like and not (self.name is None and self.classes is None and self.values is None):
            raise ValueError(
                "the columns of sentence embeddings are those of `like`; leave `name`, `classes` and `values` out"
            )
        return self
