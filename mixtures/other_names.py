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
    keys: tuple[str, ...]
    note: str
    sections: tuple[str, ...]


TRAININGS = ("sft", "dpo", "rl", "reward", "pretrain")
"""Sections that have the keys unless the table names others."""
TABLE = """\
per_device_train_batch_size | micro_batch_size | - | -
gradient_accumulation_steps | global_batch_size | rows per step over all ranks; the number of micro-batches follows | -
max_steps | steps | - | -
num_train_epochs, num_epochs | epochs | - | sft, dpo, rl
lr | optimizer.learning_rate | - | -
adam_beta1, adam_beta2 | optimizer.betas | both in a list | -
adam_epsilon | optimizer.eps | - | -
max_grad_norm | optimizer.clip_norm | - | -
optim | optimizer.kind | - | -
lr_scheduler_type, lr_scheduler | schedule.kind | - | -
warmup_ratio | schedule.warmup_steps | a number of steps, not a share of them | -
logging_steps | log_every | - | -
eval_steps, evals_per_epoch | validate_every | in steps | sft, dpo, rl, pretrain
bf16, fp16, tf32 | precision | `auto`, `bf16` or `fp32` | -
max_seq_length, max_length, sequence_len, cutoff_len, max_prompt_length | sequence_length | tokens of the whole conversation | sft, dpo, rl, reward
datasets, train_dataset, dataset_name | data | a list of sets, each with a `path` | sft, dpo, rl, reward
val_set_size, test_size | holdout | - | sft, dpo, rl, reward
resume_from_checkpoint | - | a run that is started again resumes by itself | -
r, lora_r | lora.rank | - | sft, dpo, rl, reward
lora_alpha | lora.alpha | - | sft, dpo, rl, reward
lora_target_modules, target_modules, lora_target_linear | lora.targets | - | sft, dpo, rl, reward
use_rslora, peft_use_rslora | lora.rslora | - | sft, dpo, rl, reward
use_dora, peft_use_dora | lora.dora | - | sft, dpo, rl, reward
adapter, use_peft, peft_config | lora | `lora: {}` trains adapters | sft, dpo, rl, reward
load_in_4bit | lora.base | `nf4` | sft, dpo, rl, reward
load_in_8bit | lora.base | `int8` | sft, dpo, rl, reward
lora_dropout | - | adapters are trained without dropout | sft, dpo, rl, reward
sample_packing, packing_strategy | packing | examples are packed by default | sft
assistant_only_loss, completion_only_loss, train_on_inputs, roles_to_train | data.train_on | `assistant`, `last` or `all`, for each set | sft
neftune_noise_alpha | - | there is no noise on embeddings | sft, dpo, rl, reward
label_smoothing_factor | - | `dpo.label_smoothing` is that of preferences | sft
loss_type | loss | - | dpo
f_divergence_type, f_alpha_divergence_coef | divergence | `js` for `js_divergence`; of an alpha-divergence the number 1 minus the coefficient | dpo
simpo_gamma | gamma_ratio | divided by beta | dpo
loss_type | normalisation | `sequence` is GRPO's, `token` DAPO's, `constant` Dr. GRPO's | rl
desirable_weight, undesirable_weight | - | losses are over pairs; TRL's KTOTrainer trains on single answers, from the exported model | dpo
rpo_alpha, cpo_alpha | sft_weight | - | dpo
precompute_ref_log_probs | - | log-probabilities of the reference are always computed once | dpo
num_generations | group_size | - | rl
num_iterations, num_ppo_epochs | epochs_per_batch | - | rl
steps_per_generation | steps_per_batch | - | rl
max_completion_length, response_length | max_new_tokens | - | rl
kl_coef | kl_weight | `beta` of GRPOTrainer; `rl.beta` is that of GKDTrainer | rl
teacher_model, teacher_model_name_or_path | teacher | with `algorithm: distill` | rl
lmbda | - | `rl` learns from the student's own answers (1), `sft.distill` from those of the data (0) | rl
epsilon, cliprange | clip | - | rl
epsilon_high | clip_high | - | rl
importance_sampling_level | ratio | - | rl
scale_rewards | advantage_scale | - | rl
mask_truncated_completions | mask_truncated | - | rl
reward_funcs | rewards | a list of `{use: ./rewards.py:function}` | rl
reward_weights | rewards.weight | beside each reward | rl
max_tool_calling_iterations | turns | - | rl
gradient_checkpointing | compute.activation_checkpointing | - | engine
torch_compile | compute.compile | - | engine
save_steps, saves_per_epoch | checkpoint_every | in steps | engine
save_total_limit | keep_checkpoints | - | engine
deepspeed, fsdp, fsdp_config | parallel | - | engine
wandb_project | wandb.project | - | engine
report_to | wandb, mlflow | - | engine
output_dir | - | outputs lie in the store, `--store` | engine
flash_attention, attn_implementation | - | the kernel of attention is chosen by itself | engine
group_by_length | - | rows are packed, and hardly padded | sft
"""
"""Names elsewhere, keys here, note, sections; `-` for none."""


OTHER_NAMES = tuple(
    OtherName(
        tuple(names.split(", ")),
        () if keys == "-" else tuple(keys.split(", ")),
        note.removeprefix("-"),
        TRAININGS if sections == "-" else tuple(sections.split(", ")),
    )
    for names, keys, note, sections in (
        line.split(" | ") for line in TABLE.splitlines()
    )
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
