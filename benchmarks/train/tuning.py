"""`gristmill bench posttrain`: updates of fine-tuning and of preferences, against TRL's
trainers on the same tokens.

Both sides train the same model of transformers' layout, from the same conversations of
mixed length, by AdamW with clipped gradients, in float32 on one thread of the CPU, so
that other load makes no thread wait for another. A side is timed per update, except its
first one; sides take turns.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.measuring import Row, added_bytes, cost_row, fastest, row
from benchmarks.train.small_models import drawn_decoder
from gristmill.mixtures.base import Options
from gristmill.mixtures.schema.model import Model
from gristmill.mixtures.schema.posttraining import LossSettings
from gristmill.tokenize.packing.best_fit import best_fit_decreasing
from gristmill.train.models.hf_configs import hf_config
from gristmill.train.models.model_config import Shape, shape_of
from gristmill.train.models.transformer import Llama
from gristmill.train.models.weights import WEIGHTS_FILE, drawn, load_model
from gristmill.train.objectives.losses import (
    IGNORED,
    next_tokens,
    sequence_logps,
    weighted_nll,
)
from gristmill.train.objectives.preference_losses import PairLogps, preference_loss

VOCAB, LENGTH = 2048, 256
SECTION = Model(layers=4, width=128, heads=4)
EXAMPLES_PER_UPDATE, PAIRS_PER_UPDATE = 16, 4
WARMUPS, UPDATES, TURNS = 1, 4, 2
RATE, BETA, PAD = 1e-4, 0.1, 1
LARGE_VOCAB, LARGE_ROWS, LARGE_LENGTH = 32_768, 16, 512
SMALL = Model(layers=1, width=128, heads=4)
Batch = tuple[Tensor, Tensor, Tensor | None]
"""Ids and targets (n, t), and positions in their examples if rows hold several."""
Example = tuple[list[int], list[int]]
"""Ids, and 1 for those that are trained."""


def rows() -> Iterator[Row]:
    """Measure updates per second."""
    torch.set_num_threads(1)
    missing = [
        name for name in ("trl", "transformers", "datasets") if find_spec(name) is None
    ]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_start(folder)
        examples = conversations(EXAMPLES_PER_UPDATE * (WARMUPS + UPDATES))
        packed, padded = (
            [batch(part, is_packed) for part in grouped(examples)]
            for is_packed in (True, False)
        )
        tokens_per_update = float(
            np.mean(
                [
                    sum(len(ids) for ids, _ in part)
                    for part in grouped(examples)[WARMUPS:]
                ]
            )
        )
        sides = {
            "packed": lambda: tune(folder, packed),
            "padded": lambda: tune(folder, padded),
        }
        if not missing:
            sides["trl"] = lambda: trl_tunes(folder, examples, packing=False)
            sides["trl packed"] = lambda: trl_tunes(folder, examples, packing=True)
        speed = {
            name: tokens_per_update / seconds
            for name, seconds in by_turns(sides).items()
        }
        yield row(
            "fine-tuning, packed vs padded rows",
            speed["packed"],
            speed["padded"],
            "tokens/s",
            floor=1.7,
        )
        if missing:
            note = f"{missing[0]} is not installed"
            yield row("sft_vs_trl", speed["packed"], None, "tokens/s", note)
            yield row("sft_vs_trl_packed", speed["packed"], None, "tokens/s", note)
            return
        # 3.67 and 1.93, 2.20 over padded rows; of preferences below 1.93: 2026-11-21, 2
        # cores.
        yield row(
            "sft_vs_trl",
            speed["packed"],
            speed["trl"],
            "tokens/s",
            "TRL pads, its default",
            floor=2.5,
        )
        yield row(
            "sft_vs_trl_packed",
            speed["packed"],
            speed["trl packed"],
            "tokens/s",
            "TRL packs too (bfd)",
            floor=1.5,
        )
        batches = trl_pairs(folder)
        seconds = by_turns(
            {
                "ours": lambda: prefer(folder, batches),
                "trl": lambda: watched(trl_trainer(folder)),
            }
        )
        yield row(
            "dpo_vs_trl",
            PAIRS_PER_UPDATE / seconds["ours"],
            PAIRS_PER_UPDATE / seconds["trl"],
            "pairs/s",
            "reference log-probabilities stored, TRL's computed in each update",
            floor=1.4,
        )


def large_vocabulary_rows() -> Iterator[Row]:
    """Measure log-probabilities of answers and their gradients, where the vocabulary is
    much larger than the model, against TRL's fused output layer.
    """
    import trl.trainer.utils
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(1)
    shape = shape_of(SMALL, LARGE_VOCAB, LARGE_LENGTH)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(LARGE_VOCAB, (LARGE_ROWS, LARGE_LENGTH), generator=generator)
    ends = torch.randint(LARGE_LENGTH // 2, LARGE_LENGTH, (LARGE_ROWS, 1))
    places = torch.arange(LARGE_LENGTH)
    is_answer = (places >= LARGE_LENGTH // 3) & (places < ends)
    ours = drawn_decoder(shape)
    config = AutoConfig.for_model(**hf_config(shape, "float32", [0], PAD))
    theirs = AutoModelForCausalLM.from_config(config)
    theirs.load_state_dict(ours.state_dict(), strict=False)
    trl.trainer.utils.add_fused_lm_head(theirs)

    def our_logps() -> Tensor:
        targets = next_tokens(ids, is_answer)
        logps: Tensor = ours(ids, partial(sequence_logps, targets=targets))
        return logps

    def their_logps() -> Tensor:
        labels = ids.masked_fill(~is_answer, IGNORED)
        output = theirs(ids, labels=labels, fused_lm_head=True)
        logps: Tensor = output.log_probs.masked_fill(~is_answer[:, 1:], 0.0).sum(dim=1)
        return logps

    def update(logps: Callable[[], Tensor]) -> None:
        chosen, rejected = logps().chunk(2)
        loss = -torch.nn.functional.logsigmoid(BETA * (chosen - rejected)).mean()
        loss.backward()  # type: ignore[no-untyped-call]

    sides = [partial(update, logps) for logps in (our_logps, their_logps)]
    with torch.no_grad():
        gap = float((our_logps() - their_logps()).abs().max())
    for side in sides:
        side()
    note = (
        f"{LARGE_ROWS} x {LARGE_LENGTH} tokens, {int(is_answer.sum()):,} of answers, "
        f"{LARGE_VOCAB:,} ids; sums differ by {gap:.0e} at most"
    )
    our_bytes, their_bytes = map(added_bytes, sides)
    yield cost_row(
        "dpo_logps_memory_vs_trl", our_bytes / 1e6, their_bytes / 1e6, "MB", note, 1.0
    )
    our_seconds, their_seconds = fastest(1, *sides, clock=time.process_time)
    yield cost_row(
        "dpo_logps_seconds_vs_trl", our_seconds, their_seconds, "s", note, 1.0
    )


def by_turns(sides: dict[str, Callable[[], list[float]]]) -> dict[str, float]:
    """Return each side's mean seconds of an update, in its fastest turn."""
    means: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(TURNS):
        for name, side in sides.items():
            means[name].append(float(np.mean(side()[WARMUPS:])))
    return {name: min(side_means) for name, side_means in means.items()}


def write_start(folder: Path) -> Shape:
    """Write the first weights of all sides, as transformers loads them."""
    from gristmill.core.files import write_json
    from gristmill.train.models.tensor_files import ready, write_tensors

    shape = shape_of(SECTION, VOCAB, LENGTH)
    with torch.device("meta"):
        sizes = {
            name: parameter.shape for name, parameter in Llama(shape).named_parameters()
        }
    tensors = {name: ready(drawn(shape, 0)(name, size)) for name, size in sizes.items()}
    write_json(folder / "config.json", hf_config(shape, "float32", [0], PAD))
    write_tensors(folder / WEIGHTS_FILE, tensors)
    return shape


def conversations(count: int) -> list[Example]:
    """Draw ids; lengths are log-normal as those of instruction sets, a third of each is
    a prompt.
    """
    generator = np.random.default_rng(0)
    lengths = np.clip(np.exp(generator.normal(4.0, 0.8, count)), 8, LENGTH).astype(int)
    return [
        (
            generator.integers(6, VOCAB, length).tolist(),
            [int(place >= length // 3) for place in range(length)],
        )
        for length in lengths
    ]


def grouped(examples: Sequence[Example]) -> list[Sequence[Example]]:
    """Return the examples of each update."""
    return [
        examples[start : start + EXAMPLES_PER_UPDATE]
        for start in range(0, len(examples), EXAMPLES_PER_UPDATE)
    ]


def batch(examples: Sequence[Example], is_packed: bool) -> Batch:
    """Lay out examples: one per row and padded, or several in a row by best fit."""
    sizes = np.array([len(ids) for ids, _ in examples], dtype=np.int32)
    bins, used = (
        best_fit_decreasing(sizes, LENGTH)
        if is_packed
        else (np.arange(len(sizes)), len(sizes))
    )
    ids = torch.full(
        (used, LENGTH if is_packed else int(sizes.max())), PAD, dtype=torch.int64
    )
    trained, positions = (
        torch.zeros(ids.shape, dtype=torch.bool),
        torch.full(ids.shape, -1, dtype=torch.int64),
    )
    filled = np.zeros(used, dtype=int)
    for (tokens, mask), place in zip(examples, bins, strict=True):
        span = slice(filled[place], filled[place] + len(tokens))
        ids[place, span] = torch.tensor(tokens)
        positions[place, span] = torch.arange(len(tokens))
        trained[place, span] = torch.tensor(mask, dtype=torch.bool) & (
            torch.arange(len(tokens)) > 0
        )
        filled[place] = span.stop
    longest = int(filled.max())
    targets = next_tokens(ids[:, :longest], trained[:, :longest])
    return ids[:, :longest], targets, positions[:, :longest] if is_packed else None


def timed(
    folder: Path, batches: Sequence[Any], loss_of: Callable[[Llama, Any], Tensor]
) -> list[float]:
    """Return the seconds of an update of our model for each batch."""
    model = load_model(folder).train()
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=RATE, weight_decay=0.0, fused=True
    )
    seconds = []
    for update_batch in batches:
        start = time.perf_counter()
        loss_of(model, update_batch).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds.append(time.perf_counter() - start)
    return seconds


def tune(folder: Path, batches: Sequence[Batch]) -> list[float]:
    """Time our updates of fine-tuning: the mean loss of the trained tokens."""

    def loss_of(model: Llama, update_batch: Batch) -> Tensor:
        ids, targets, positions = update_batch
        counted = (targets != IGNORED).float()
        loss: Tensor = model(
            ids,
            partial(weighted_nll, targets=targets, weights=counted / counted.sum()),
            positions=positions,
        )[0]
        return loss

    return timed(folder, batches, loss_of)


def prefer(folder: Path, batches: Sequence[tuple[Tensor, Tensor]]) -> list[float]:
    """Time our updates of preferences, on TRL's batches; the reference's
    log-probabilities are stored.
    """
    reference = load_model(folder)
    with torch.no_grad():
        stored = [
            reference(ids, partial(sequence_logps, targets=targets))
            for ids, targets in batches
        ]

    def loss_of(model: Llama, pairs: tuple[tuple[Tensor, Tensor], Tensor]) -> Tensor:
        (ids, targets), reference_logps = pairs
        policy = model(ids, partial(sequence_logps, targets=targets))
        tokens = (targets != IGNORED).sum(dim=1).float()
        pair = PairLogps(*policy.chunk(2), *reference_logps.chunk(2), *tokens.chunk(2))
        return preference_loss(pair, LossSettings(beta=BETA))[0].mean()

    return timed(folder, list(zip(batches, stored, strict=True)), loss_of)


def trl_settings(folder: Path, per_update: int) -> Options:
    """Return the settings of both of TRL's trainers."""
    return {
        "output_dir": str(folder / "trl"),
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "seed": 0,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 1000,
        "max_steps": WARMUPS + UPDATES,
        "per_device_train_batch_size": per_update,
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
        "weight_decay": 0.0,
        "optim": "adamw_torch_fused",
        "max_length": LENGTH,
        "dataloader_num_workers": 0,
    }


def peer(folder: Path) -> Any:
    """Load the model as TRL trains it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def tokenizer() -> Any:
    """Return a tokenizer with a word for each id."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = {"</s>": 0, "<pad>": PAD, **{f"w{word}": word for word in range(2, VOCAB)}}
    words = Tokenizer(models.WordLevel(ids, unk_token="w2"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="</s>", pad_token="<pad>"
    )


def left_padded(prompts: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
    """Return prompts as rows of ids padded on the left, and their attention mask."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor(
        [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    )
    return ids, mask


def watched(trainer: Any) -> list[float]:
    """Return the seconds of each of a trainer's updates."""
    from transformers import PrinterCallback, TrainerCallback

    times: list[float] = []

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *arguments: Any, **keywords: Any) -> None:
            times.append(time.perf_counter())

        def on_step_end(self, *arguments: Any, **keywords: Any) -> None:
            times[-1] = time.perf_counter() - times[-1]

    trainer.remove_callback(PrinterCallback)  # standard output is the benchmark's
    trainer.add_callback(Watch())
    trainer.train()
    return times


def trl_tunes(folder: Path, examples: Sequence[Example], packing: bool) -> list[float]:
    """Time TRL's updates of fine-tuning; packed, an update has as many rows as ours on
    average.
    """
    import trl
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    data = Dataset.from_list(
        [{"input_ids": ids, "completion_mask": mask} for ids, mask in examples]
    )
    rows_of = [len(batch(part, is_packed=True)[0]) for part in grouped(examples)]
    per_update = round(float(np.mean(rows_of))) if packing else EXAMPLES_PER_UPDATE
    settings = trl.SFTConfig(
        **trl_settings(folder, per_update), packing=packing, completion_only_loss=True
    )
    return watched(
        trl.SFTTrainer(
            model=peer(folder),
            args=settings,
            train_dataset=data,
            processing_class=tokenizer(),
        )
    )


def trl_trainer(folder: Path) -> Any:
    """Return TRL's trainer of preferences; its reference model runs in each update."""
    import trl
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    generator = np.random.default_rng(1)

    def words(most: int) -> str:
        return " ".join(
            f"w{word}"
            for word in generator.integers(6, VOCAB, generator.integers(8, most))
        )

    data = Dataset.from_list(
        [
            {
                "prompt": words(40),
                "chosen": " " + words(120),
                "rejected": " " + words(120),
            }
            for _ in range(PAIRS_PER_UPDATE * (WARMUPS + UPDATES))
        ]
    )
    settings = trl.DPOConfig(
        **trl_settings(folder, PAIRS_PER_UPDATE), beta=BETA, loss_type=["sigmoid"]
    )
    return trl.DPOTrainer(
        model=peer(folder),
        ref_model=peer(folder),
        args=settings,
        train_dataset=data,
        processing_class=tokenizer(),
    )


def trl_pairs(folder: Path) -> list[tuple[Tensor, Tensor]]:
    """Return TRL's batches: ids (2n, t), chosen ones first, and the target of each
    position.
    """
    trainer = trl_trainer(folder)
    batches = []
    for start in range(0, len(trainer.train_dataset), PAIRS_PER_UPDATE):
        collated = trainer.data_collator(
            [trainer.train_dataset[start + k] for k in range(PAIRS_PER_UPDATE)]
        )
        targets = next_tokens(collated["input_ids"], collated["completion_mask"].bool())
        batches.append((collated["input_ids"], targets))
    return batches
