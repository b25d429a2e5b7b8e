"""Which stages' outputs each stage reads: functions of the manifest, which may switch stages off."""

from __future__ import annotations

from collections.abc import Callable

from gristmill.mixtures.manifest import Manifest


def _annotators(manifest: Manifest) -> list[str]:
    return [step.stage for step in manifest.prepare]


def before(name: str) -> Callable[[Manifest], list[str]]:
    """Of a preparing step: the documents, and the steps before it."""

    def needs(manifest: Manifest) -> list[str]:
        annotators = _annotators(manifest)
        return ["ingest", *annotators[: annotators.index(name)]]

    return needs


def documents(*others: str) -> Callable[[Manifest], list[str]]:
    """The documents with all that was judged of them, and other stages."""
    return lambda manifest: ["ingest", *_annotators(manifest), *others]


def only(*names: str) -> Callable[[Manifest], list[str]]:
    """These, whatever the manifest says."""
    return lambda manifest: list(names)


def _start(manifest: Manifest) -> str:
    """The stage whose model preferences are learned from."""
    return "sft" if manifest.sft is not None else "pretrain"


def before_sft_data(manifest: Manifest) -> list[str]:
    """The examples; and pre-training, where rows of it are replayed and it alone knows which of them it has read."""
    sft, pretrain = manifest.sft, manifest.pretrain
    is_open = pretrain is not None and (pretrain.early_stopping is not None
                                        or pretrain.spikes.rollback_after is not None)
    return ["sft_prepare", "tokenizer", "mix", *(["pretrain"] if sft is not None and sft.replay and is_open else [])]


def before_reward(manifest: Manifest) -> list[str]:
    """The pairs, where they are those of preference optimisation, and the model that becomes one of rewards."""
    own = manifest.reward is not None and manifest.reward.data is not None
    return [*([] if own else ["dpo_prepare"]), "tokenizer", _start(manifest)]


def before_teacher(manifest: Manifest) -> list[str]:
    """The rows that it is asked about, and the teacher where it is trained here."""
    own = manifest.sft is not None and manifest.sft.distill is not None and manifest.sft.distill.teacher == "pretrain"
    return ["tokenizer", "sft_data", *(["pretrain"] if own else [])]


def before_reference(manifest: Manifest) -> list[str]:
    """The answers, and the model that preferences are learned from."""
    return ["dpo_data", _start(manifest)]


def before_dpo(manifest: Manifest) -> list[str]:
    """The same, what that model thinks of the answers, and held-out text."""
    return ["tokenizer", "mix", *before_reference(manifest), "reference"]


def before_rl(manifest: Manifest) -> list[str]:
    """The model that begins, and the model of rewards where one is asked."""
    if manifest.rl is None:
        return []
    last = next(name for name in ("dpo", "sft", "pretrain") if getattr(manifest, name) is not None)
    start = last if manifest.rl.start_from == "auto" else manifest.rl.start_from
    models = ["reward"] if any(one.kind == "model" and one.path is None for one in manifest.rl.rewards) else []
    return ["mix", "tokenizer", start, *models]


def final_model(manifest: Manifest) -> list[str]:
    """The last model that the manifest trains."""
    final = next(name for name in ("rl", "dpo", "sft", "pretrain") if getattr(manifest, name) is not None)
    measured = ["mix"] if manifest.export is not None and manifest.export.int8 else []
    return ["tokenizer", *measured, final]
