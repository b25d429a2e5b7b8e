"""Names of settings in Axolotl, TRL, PEFT and transformers, with the corresponding keys
here.

Errors about unknown keys look names up here, and docs/compared.md shows the table.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OtherName:
    """A setting of other projects.

    Attributes:
        names: its names in other projects.
        keys: the keys here, below a section; empty if gristmill has no such setting.
        note: the difference, or what to do instead.
        sections: the sections that have the keys.
    """

    names: tuple[str, ...]
    keys: tuple[str, ...] = ()
    note: str = ""
    sections: tuple[str, ...] = ("sft", "dpo", "rl", "reward", "pretrain")


TUNINGS = ("sft", "dpo", "rl", "reward")
EXAMPLES = ("sft", "dpo")
ENGINE = ("engine",)
OTHER_NAMES = (
    OtherName(("per_device_train_batch_size",), ("micro_batch_size",)),
    OtherName(
        ("gradient_accumulation_steps",),
        ("global_batch_size",),
        "rows per step over all ranks; the number of micro-batches follows",
    ),
    OtherName(("max_steps",), ("steps",)),
    OtherName(
        ("num_train_epochs", "num_epochs"), ("epochs",), sections=("sft", "dpo", "rl")
    ),
    OtherName(("lr",), ("optimizer.learning_rate",)),
    OtherName(("adam_beta1", "adam_beta2"), ("optimizer.betas",), "both in a list"),
    OtherName(("adam_epsilon",), ("optimizer.eps",)),
    OtherName(("max_grad_norm",), ("optimizer.clip_norm",)),
    OtherName(("optim",), ("optimizer.kind",)),
    OtherName(("lr_scheduler_type", "lr_scheduler"), ("schedule.kind",)),
    OtherName(
        ("warmup_ratio",),
        ("schedule.warmup_steps",),
        "a number of steps, not a share of them",
    ),
    OtherName(("logging_steps",), ("log_every",)),
    OtherName(
        ("eval_steps", "evals_per_epoch"),
        ("validate_every",),
        "in steps",
        ("sft", "dpo", "rl", "pretrain"),
    ),
    OtherName(
        ("bf16", "fp16", "tf32"), ("precision",), "`auto`, `bf16`, `fp16` or `fp32`"
    ),
    OtherName(
        (
            "max_seq_length",
            "max_length",
            "sequence_len",
            "cutoff_len",
            "max_prompt_length",
        ),
        ("sequence_length",),
        "tokens of the whole conversation",
        TUNINGS,
    ),
    OtherName(
        ("datasets", "train_dataset", "dataset_name"),
        ("data",),
        "a list of sets, each with a `path`",
        TUNINGS,
    ),
    OtherName(("val_set_size", "test_size"), ("holdout",), sections=TUNINGS),
    OtherName(
        ("resume_from_checkpoint",), (), "a run that is started again resumes by itself"
    ),
    OtherName(("r", "lora_r"), ("lora.rank",), sections=TUNINGS),
    OtherName(("lora_alpha",), ("lora.alpha",), sections=TUNINGS),
    OtherName(
        ("lora_target_modules", "target_modules", "lora_target_linear"),
        ("lora.targets",),
        sections=TUNINGS,
    ),
    OtherName(("use_rslora", "peft_use_rslora"), ("lora.rslora",), sections=TUNINGS),
    OtherName(("use_dora", "peft_use_dora"), ("lora.dora",), sections=TUNINGS),
    OtherName(
        ("adapter", "use_peft", "peft_config"),
        ("lora",),
        "`lora: {}` trains adapters",
        TUNINGS,
    ),
    OtherName(("load_in_4bit",), ("lora.base",), "`nf4`", TUNINGS),
    OtherName(("load_in_8bit",), ("lora.base",), "`int8`", TUNINGS),
    OtherName(("lora_dropout",), (), "adapters are trained without dropout", TUNINGS),
    OtherName(
        ("sample_packing", "packing_strategy"),
        ("packing",),
        "examples are packed by default",
        ("sft",),
    ),
    OtherName(
        (
            "assistant_only_loss",
            "completion_only_loss",
            "train_on_inputs",
            "roles_to_train",
        ),
        ("data.train_on",),
        "`assistant`, `last` or `all`, for each set",
        ("sft",),
    ),
    OtherName(("neftune_noise_alpha",), (), "there is no noise on embeddings", TUNINGS),
    OtherName(
        ("label_smoothing_factor",),
        (),
        "`dpo.label_smoothing` is that of preferences",
        ("sft",),
    ),
    OtherName(("loss_type",), ("loss",), sections=("dpo",)),
    OtherName(
        ("loss_type",),
        ("normalisation",),
        "`sequence` is GRPO's, `token` DAPO's, `constant` Dr. GRPO's",
        ("rl",),
    ),
    OtherName(("rpo_alpha",), ("sft_weight",), sections=("dpo",)),
    OtherName(
        ("precompute_ref_log_probs",),
        (),
        "log-probabilities of the reference are always computed once",
        ("dpo",),
    ),
    OtherName(("num_generations",), ("group_size",), sections=("rl",)),
    OtherName(
        ("num_iterations", "num_ppo_epochs"), ("epochs_per_batch",), sections=("rl",)
    ),
    OtherName(("steps_per_generation",), ("steps_per_batch",), sections=("rl",)),
    OtherName(
        ("max_completion_length", "response_length"),
        ("max_new_tokens",),
        sections=("rl",),
    ),
    OtherName(("beta", "kl_coef"), ("kl_weight",), sections=("rl",)),
    OtherName(("epsilon", "cliprange"), ("clip",), sections=("rl",)),
    OtherName(("epsilon_high",), ("clip_high",), sections=("rl",)),
    OtherName(("scale_rewards",), ("advantage_scale",), sections=("rl",)),
    OtherName(("mask_truncated_completions",), ("mask_truncated",), sections=("rl",)),
    OtherName(
        ("reward_funcs",),
        ("rewards",),
        "a list of `{use: ./rewards.py:function}`",
        ("rl",),
    ),
    OtherName(("reward_weights",), ("rewards.weight",), "beside each reward", ("rl",)),
    OtherName(("max_tool_calling_iterations",), ("turns",), sections=("rl",)),
    OtherName(("use_vllm",), ("rollouts",), "`vllm`", ("rl",)),
    OtherName(("vllm_gpu_memory_utilization",), ("vllm_memory",), sections=("rl",)),
    OtherName(("gamma",), ("critic.discount",), sections=("rl",)),
    OtherName(("lam",), ("critic.gae_lambda",), sections=("rl",)),
    OtherName(
        ("gradient_checkpointing",),
        ("compute.activation_checkpointing",),
        sections=ENGINE,
    ),
    OtherName(("torch_compile",), ("compute.compile",), sections=ENGINE),
    OtherName(
        ("save_steps", "saves_per_epoch"), ("checkpoint_every",), "in steps", ENGINE
    ),
    OtherName(("save_total_limit",), ("keep_checkpoints",), sections=ENGINE),
    OtherName(("deepspeed", "fsdp", "fsdp_config"), ("parallel",), sections=ENGINE),
    OtherName(("wandb_project",), ("wandb.project",), sections=ENGINE),
    OtherName(("report_to",), ("wandb", "mlflow", "trackio"), sections=ENGINE),
    OtherName(("output_dir",), (), "outputs lie in the store, `--store`", ENGINE),
    OtherName(
        ("flash_attention", "attn_implementation"),
        (),
        "the kernel of attention is chosen by itself",
        ENGINE,
    ),
    OtherName(("group_by_length",), (), "rows are packed, and hardly padded", ("sft",)),
)


def hint_of(name: str, section: str) -> str:
    """Return an error's hint for an unknown key that has another name here; "" for a
    name without an entry.

    Args:
        name: the unknown key.
        section: the section of the manifest that contains it.
    """
    entries = [entry for entry in OTHER_NAMES if name in entry.names]
    entry = next(
        (entry for entry in entries if section in entry.sections),
        next(iter(entries), None),
    )
    if entry is None:
        return ""
    if not entry.keys:
        return f"; gristmill has no such setting: {entry.note}"
    place = section if section in entry.sections else entry.sections[0]
    keys = " or ".join(f"'{place}.{key}'" for key in entry.keys)
    return f"; it is {keys} here" + (f" ({entry.note})" if entry.note else "")
