from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BLOCKED = """
import sys, importlib

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"apache_beam", "prefect", "transformers"} or name == "gristmill.flows":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
for module in sys.argv[1:]:
    importlib.import_module(f"gristmill.train.{module}")

from gristmill.mixtures.schema.model import Model
from gristmill.train.models.encoder import model_of
from gristmill.train.models.model_config import shape_of

model_of(shape_of(Model(layers=1, width=8, heads=2, ffn_width=8), 16, 4))
"""
LOADED = """
import sys
import gristmill.train.stages.sft_data, gristmill.train.stages.dpo_data
print("torch" in sys.modules)
import gristmill.train.stages.export
print("torch._dynamo" in sys.modules)
"""


@pytest.mark.slow
def test_data_stages_load_no_torch_and_export_loads_no_compiler() -> None:
    """Either import takes a second or two; `export` loads all modules that read a model
    or generate with it.
    """
    process = subprocess.run(
        [sys.executable, "-c", LOADED], capture_output=True, text=True, check=True
    )
    assert process.stdout.split() == ["False", "False"]


@pytest.mark.slow
def test_training_imports_without_beam_and_prefect() -> None:
    """A decoder is built without transformers, of which encoders have their layers."""
    folder = Path(__file__).parents[2] / "train"
    modules = [
        ".".join(path.relative_to(folder).with_suffix("").parts)
        for path in folder.rglob("*.py")
    ]
    assert {"stages.dpo", "trainer"} <= set(modules)
    process = subprocess.run(
        [sys.executable, "-c", BLOCKED, *modules],
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
