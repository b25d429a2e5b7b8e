"""Prefect's settings are read from Prefect itself only if a file sets any, since its
import is slow.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ASKS = """
import sys
from gristmill.flows.prefect.server_settings import prefect_setting
print(prefect_setting("PREFECT_API_URL"), "prefect" in sys.modules)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "text", "expected_value"),
    [
        ("notes", "", "None False"),
        (".env", "OTHER=1\n", "None False"),
        ("pyproject.toml", '[project]\ndependencies = ["prefect"]\n', "None False"),
        ("pyproject.toml", "[tool.ruff]\nline-length = 120\n", "None False"),
        (
            "pyproject.toml",
            '[tool]\nprefect.api.url = "http://there/api"\n',
            "http://there/api True",
        ),
        ("prefect.toml", '[api]\nurl = "http://there/api"\n', "http://there/api True"),
        (".env", "prefect_api_url=http://there/api\n", "http://there/api True"),
        (
            "home/profiles.toml",
            'active = "a"\n[profiles.a]\nPREFECT_API_URL = "http://there/api"\n',
            "http://there/api True",
        ),
    ],
)
def test_prefect_is_imported_only_if_a_file_has_its_settings(
    tmp_path: Path, file: str, text: str, expected_value: str
) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / file).write_text(text)
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PREFECT_")
    }
    run = subprocess.run(
        [sys.executable, "-c", ASKS],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**environment, "PREFECT_HOME": str(tmp_path / "home")},
    )
    assert run.stdout.strip() == expected_value, run.stderr
