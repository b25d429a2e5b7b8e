"""The sections `pretrain`, `sft`, `dpo`, `evaluate` and `export`: what is trained, measured and handed on."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from gristmill.mixtures.section import Fraction, OutsidePath, Positive, PositiveFloat, Section


class Model(Section):
    """A Llama-style decoder."""

    layers: Positive = 4
    """Decoder blocks."""
    width: Positive = 128
    """Of the residual stream."""
    heads: Positive = 4
    """Query heads."""
    kv_heads: Positive | None = None
    """Key and value heads (grouped-query attention); as many as `heads` if absent."""
    ffn_width: Positive | None = None
    """Width of the SwiGLU layer; 8/3 of `width`, rounded up to a multiple of 64, if absent."""
    rope_theta: PositiveFloat = 10_000.0
    """Base of the rotary position embedding."""
    norm_eps: PositiveFloat = 1e-5
    """Of RMSNorm."""
    tied_embeddings: bool = True
    """Use the input embedding as output layer too."""

    @model_validator(mode="after")
    def _divisible(self) -> Model:
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise ValueError(f"width {self.width} must be an even multiple of heads {self.heads}")
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} must be a multiple of kv_heads {self.kv_heads}")
        return self


class Optimizer(Section):
    """AdamW (Loshchilov & Hutter 2019); weight decay on matrices only."""

    learning_rate: PositiveFloat = 1e-3
    """At the peak of the schedule."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """Decay of the running means of gradients and of their squares."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second mean."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.1
    """Decoupled, per step and learning rate."""
    clip_norm: PositiveFloat = 1.0
    """Largest global norm of the gradients."""


class Schedule(Section):
    """Learning rate as a function of the step."""

    kind: Literal["wsd", "cosine", "linear", "constant"] = "wsd"
    """`wsd`: warm-up, stable, decay; `cosine`, `linear`: decay from the warm-up on; `constant`."""
    warmup_steps: Annotated[int, Field(ge=0)] = 20
    """Steps in which the rate rises linearly from 0."""
    decay_fraction: Fraction = 0.3
    """Share of the steps in which WSD decays (Hu et al. 2024)."""
    final_fraction: Fraction = 0.0
    """Learning rate at the end, as a share of the peak."""


class Training(Section):
    """What the three training stages have in common."""

    steps: Positive
    """Optimizer steps."""
    global_batch_size: Positive = 16
    """Rows (or pairs) per optimizer step, over all ranks and micro-batches."""
    micro_batch_size: Positive = 16
    """Rows (or pairs) per forward pass on one rank at the most."""
    optimizer: Optimizer = Optimizer()
    """AdamW's settings."""
    schedule: Schedule = Schedule()
    """Learning rate as a function of the step."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Compute dtype; `auto` is bf16 on a GPU and fp32 on a CPU."""
    log_every: Positive = 10
    """Steps between records of loss and speed."""
    spike_sigma: PositiveFloat = 6.0
    """A step whose loss lies so many deviations over the running mean is skipped (OLMo-core: 6)."""
    seed: int | None = None
    """Of initialisation and order; the manifest's if absent."""


class Pretrain(Training):
    """Next-token training on the packed set."""

    model: Model = Model()
    """The decoder that is trained."""
    validate_every: Positive = 100
    """Steps between validations."""


class Examples(Section):
    """One set of instructions or preferences."""

    path: OutsidePath
    """A JSONL file or glob, or `python-docs://`."""
    limit: Positive | None = None
    """Read at most this many examples."""


class Sft(Training):
    """Supervised fine-tuning on conversations; loss on the assistant's turns."""

    data: Annotated[tuple[Examples, ...], Field(min_length=1)]
    """Where the examples are."""
    sequence_length: Annotated[int, Field(ge=8)] | None = None
    """The mixture's if absent."""
    optimizer: Optimizer = Optimizer(learning_rate=3e-4, weight_decay=0.0)
    """AdamW's settings."""


class Dpo(Training):
    """Direct preference optimisation (Rafailov et al. 2023)."""

    data: Annotated[tuple[Examples, ...], Field(min_length=1)]
    """Where the examples are."""
    beta: PositiveFloat = 0.1
    """Strength of the tie to the reference model."""
    sequence_length: Annotated[int, Field(ge=8)] | None = None
    """Tokens per row; the mixture's if absent."""
    holdout: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.1
    """Share of pairs, chosen by hash of the prompt, that only measure the reward accuracy."""
    optimizer: Optimizer = Optimizer(learning_rate=5e-5, weight_decay=0.0)
    """AdamW's settings."""


class Evaluate(Section):
    """Measurements on held-out data, and samples."""

    prompts: tuple[str, ...] = ("The", "def", "Return")
    """Continued by the pre-trained model, and asked of the tuned ones."""
    max_new_tokens: Positive = 48
    """Longest continuation."""
    temperature: Annotated[float, Field(ge=0.0)] = 0.8
    """Of sampling; 0 takes the likeliest token."""
    seed: int | None = None
    """Of initialisation and order; the manifest's if absent."""


class Export(Section):
    """The folder that transformers loads."""

    dtype: Literal["fp32", "bf16"] = "fp32"
    """Of the exported weights."""
