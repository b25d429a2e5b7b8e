"""The sdist and the wheel: both contain the whole product, and an installed wheel runs
the demo in an empty folder.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.test_architecture import LAYERS, ROOT
from tests.test_packaging import package_of, product_files

BESIDE = ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in")
BUILD = (
    "import sys; from setuptools import build_meta; "
    "print(build_meta.build_{}(sys.argv[1]))"
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def build(kind: str, project: Path, out: Path) -> Path:
    out.mkdir(exist_ok=True)
    process = subprocess.run(
        [sys.executable, "-c", BUILD.format(kind), str(out)],
        cwd=project,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    return out / process.stdout.split()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a wheel from an sdist of a copy of the checkout."""
    folder = tmp_path_factory.mktemp("built")
    project = folder / "checkout"
    for layer in LAYERS:
        shutil.copytree(
            ROOT / layer, project / layer, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in BESIDE:
        shutil.copy(ROOT / name, project / name)
    (project / "tests").mkdir()
    shutil.copy(
        ROOT / "tests" / "test_packaging.py", project / "tests" / "test_packaging.py"
    )
    with tarfile.open(build("sdist", project, folder / "sdist")) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    assert {name for name in BESIDE if not (unpacked / name).is_file()} == set()
    assert not (unpacked / "tests").exists(), (
        "tests cannot run without the whole tests folder"
    )
    return build("wheel", unpacked, folder / "wheel")


def test_a_wheel_from_the_sdist_has_every_file_of_the_product(wheel: Path) -> None:
    expected = {
        "/".join([*package_of(file.parent).split("."), file.name])
        for file in product_files()
    }
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        (licence,) = (name for name in archive.namelist() if name.endswith("/LICENSE"))
        assert archive.read(licence) == (ROOT / "LICENSE").read_bytes()
    assert names == expected


def test_an_installed_wheel_runs_the_demo_in_an_empty_folder(
    wheel: Path, tmp_path: Path
) -> None:
    """The environment sees the packages installed here but not this checkout, since
    .pth files there are ignored.
    """
    environment, empty = tmp_path / "venv", tmp_path / "empty"
    empty.mkdir()
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True
    )
    (packages,) = environment.glob("lib/python3*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = str(environment / "bin" / "python")
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "--python",
            python,
            "install",
            "--quiet",
            "--no-deps",
            "--no-index",
            "--disable-pip-version-check",
            "--ignore-installed",
            str(wheel),
        ],
        check=True,
    )
    variables = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "GRISTMILL_STORE")
    }

    def gristmill_output(*command: str) -> str:
        process = subprocess.run(
            [str(environment / "bin" / "gristmill"), *command],
            cwd=empty,
            env=variables,
            capture_output=True,
            text=True,
            check=False,
        )
        assert process.returncode == 0, process.stdout + process.stderr
        return process.stdout

    package_folder = subprocess.run(
        [python, "-c", "import gristmill; print(gristmill.__path__[0])"],
        cwd=empty,
        env=variables,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    assert package_folder == str(packages / "gristmill")
    assert "pretrain" in gristmill_output("plan", "demo")
    assert "fineweb" in gristmill_output("recipes")
    gristmill_output("run", "demo", "--until", "ingest", "--no-ui")
    states = {
        row["stage"]: row["state"]
        for row in json.loads(gristmill_output("status", "demo", "--json"))["stages"]
    }
    assert states["ingest"] == "committed"
