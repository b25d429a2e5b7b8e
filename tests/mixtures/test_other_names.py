"""Other projects' names of settings, in errors and in docs/compared.md."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.checkout import ROOT
from gristmill.mixtures.loader import ManifestError, all_keys, load_manifest
from gristmill.mixtures.manifest import Manifest
from gristmill.mixtures.other_names import OTHER_NAMES, TRAININGS, hint_of

COMPARED = ROOT / "docs" / "compared.md"


def test_table_maps_foreign_names_to_existing_keys() -> None:
    keys = {".".join(key) for key in all_keys(Manifest)}
    for entry in OTHER_NAMES:
        assert {f"{entry.sections[0]}.{key}" for key in entry.keys} <= keys
        assert (
            not {
                f"{section}.{name}"
                for section in entry.sections
                for name in entry.names
            }
            & keys
        )


def table_lines() -> Iterator[str]:
    yield "| elsewhere | gristmill | |"
    yield "| --- | --- | --- |"
    for entry in OTHER_NAMES:
        places = entry.sections if entry.sections != TRAININGS else ()
        prefix = f"{places[0]}." if len(places) == 1 else ""
        names = ", ".join(f"`{name}`" for name in entry.names)
        keys = ", ".join(f"`{prefix}{key}`" for key in entry.keys) or "-"
        yield f"| {names} | {keys} | {entry.note} |"


def test_documentation_shows_the_table() -> None:
    assert "\n".join(table_lines()) in COMPARED.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("section", "name", "key"),
    [
        ("rl", "num_generations", "'rl.group_size'"),
        ("sft", "r", "'sft.lora.rank'"),
        ("sft", "gradient_accumulation_steps", "'sft.global_batch_size'"),
        ("dpo", "warmup_ratio", "'dpo.schedule.warmup_steps'"),
        ("sft", "per_device_train_batch_size", "'sft.micro_batch_size'"),
        ("dpo", "num_train_epochs", "'dpo.epochs'"),
        ("rl", "loss_type", "'rl.normalisation'"),
        ("sft", "gradient_checkpointing", "'engine.compute.activation_checkpointing'"),
        ("sft", "lora_dropout", "no such setting"),
    ],
)
def test_foreign_name_is_rejected_with_our_key(
    section: str, name: str, key: str, tmp_path: Path
) -> None:
    assert key in hint_of(name, section)
    path = tmp_path / "a.yaml"
    path.write_text(
        f"{section}:\n  data: [{{path: a.jsonl}}]\n  steps: 1\n  {name}: 3\n"
    )
    with pytest.raises(ManifestError) as error:
        load_manifest(path)
    assert key in str(error.value)
