"""Workers that have nothing of the machine that a run was started on: package and files come to them by the store."""

from __future__ import annotations

import os
import pickle
import pickletools
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest

from benchmarks.chaos.network import silent_server
from gristmill.core.files import as_path, sha256_file
from gristmill.dataprep.encoders.score_documents import score_shard
from gristmill.dataprep.jobs import ship_files as carried_module
from gristmill.dataprep.jobs import worker_bootstrap
from gristmill.dataprep.jobs.ship_files import FOLDER, carry, carry_step, package, through
from gristmill.dataprep.jobs.tasks import do_group
from gristmill.mixtures.steps.own_steps import Annotate
from tests.dataprep.small_models import write_word_vectors

LIBRARIES = str(Path(np.__file__).parents[1])
STRANGER = "import sys; sys.path.append(sys.argv.pop(1)); "
"""Begins a program that finds all libraries and no checkout: what installs that is a file that `python -S` skips."""
UNPICKLED = "import pickle, sys; function, element = pickle.load(sys.stdin.buffer); list(function(element))"
WORK = (
    STRANGER
    + """
import importlib.util, pickle
assert importlib.util.find_spec("gristmill") is None
function, element = pickle.load(sys.stdin.buffer)
sys.stdout.write(repr(list(function(element))))
"""
)


def reading(path: str) -> Callable[[str], Iterator[str]]:
    """A function of a job, which is pickled by value, as this test is no part of the package."""

    def read(path: str, element: str) -> Iterator[str]:
        import os

        import gristmill
        from gristmill.core.files import as_path

        yield element
        yield as_path(path).read_text()
        yield gristmill.__file__.removeprefix(os.environ["HOME"])

    return partial(read, path)


def in_stranger(function: Callable[..., Any], element: str, home: Path) -> subprocess.CompletedProcess[str]:
    home.mkdir(exist_ok=True)
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "XDG_CACHE_HOME", "GRISTMILL_CACHE")
    }
    done = subprocess.run(
        [sys.executable, "-S", "-c", WORK, LIBRARIES],
        input=cloudpickle.dumps((function, element)),
        capture_output=True,
        check=False,
        cwd=home,
        env={**environment, "HOME": str(home)},
    )
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


@pytest.mark.slow
def test_a_worker_without_the_package_gets_it_and_the_files_that_a_job_names(tmp_path: Path) -> None:
    words = tmp_path / "words.txt"
    words.write_text("of this machine")
    with through(tmp_path / "store"):
        carried = carry(reading(str(words)))
    words.unlink()
    digest, _ = package()
    for home in (tmp_path / "first", tmp_path / "second"):
        for element in ("a", "b"):
            done = in_stranger(carried, element, home)
            assert done.stdout == repr(
                [element, "of this machine", f"/.cache/gristmill/packages/{digest}/gristmill/__init__.py"]
            ), done.stderr
    (file,) = (tmp_path / "first" / ".cache" / "gristmill" / "files").glob("*/words.txt")
    assert file.read_text() == "of this machine"


def listing(folder: str, plain: str) -> Callable[[str], Iterator[str]]:
    """A function of a job that reads all files of a folder, and looks for another one."""

    def read(folder: str, plain: str, element: str) -> Iterator[str]:
        from gristmill.core.files import as_path

        there = as_path(folder)
        files = [path for path in there.rglob("*") if path.is_file()]
        yield from sorted(f"{path.relative_to(there)}: {path.read_text()}" for path in files)
        yield f"{element}: {as_path(plain).exists()}"

    return partial(read, folder, plain)


@pytest.mark.slow
def test_a_models_folder_is_carried_whole_and_one_that_is_no_models_is_not(tmp_path: Path) -> None:
    model, plain = tmp_path / "model", tmp_path / "plain"
    for name in ("config.json", "1_Pooling/config.json", "weights"):
        (model / name).parent.mkdir(parents=True, exist_ok=True)
        (model / name).write_text(f"content of {name}")
    plain.mkdir()
    (plain / "secret").write_text("stays")
    with through(tmp_path / "store"):
        carried = carry(listing(str(model), str(plain)))
    assert not [*(tmp_path / "store").rglob("secret")]
    shutil.rmtree(model)
    shutil.rmtree(plain)
    for home in (tmp_path / "first", tmp_path / "second"):
        for element in ("a", "b"):
            done = in_stranger(carried, element, home)
            assert done.stdout == repr(
                [
                    "1_Pooling/config.json: content of 1_Pooling/config.json",
                    "config.json: content of config.json",
                    "weights: content of weights",
                    f"{element}: False",
                ]
            ), done.stderr
        assert len(list((home / ".cache" / "gristmill" / "folders").iterdir())) == 1


def test_a_step_that_scores_by_a_model_carries_its_folder(tmp_path: Path) -> None:
    folder = write_word_vectors(tmp_path / "model")
    section = Annotate.model_validate({"model": {"path": str(folder), "like": {"prose": "w1 w2"}}})
    process = partial(score_shard, inputs={}, config=section.model_dump(mode="json"), sha256="", out=tmp_path / "out")
    with through(tmp_path / "store"):
        carry(partial(do_group, process, str(tmp_path / "store" / "records")))
    assert sorted(path.name for path in (tmp_path / "store" / FOLDER / "files").glob("*/*")) == sorted(
        path.name for path in folder.iterdir()
    )


def test_a_worker_that_cannot_see_the_store_says_so_and_what_to_do(tmp_path: Path) -> None:
    with through(tmp_path / "store"):
        carried = carry(reading(str(tmp_path)))
    (tmp_path / "store").rename(tmp_path / "hidden")
    done = in_stranger(carried, "a", tmp_path / "home")
    assert done.returncode == 1
    assert f"cannot see the store {tmp_path / 'store'} (FileNotFoundError" in done.stderr
    assert "give a store that all workers reach under the same name" in done.stderr


def other_pythons() -> list[str]:
    """Programs of Python of other minor versions that work, on the path or beside this one."""
    names = [f"python3.{minor}" for minor in range(10, 20) if minor != sys.version_info[1]]
    beside = [str(path) for name in names for path in Path(sys.base_prefix).parent.glob(f"3.*/bin/{name}")]
    return [
        one
        for one in (*names, *beside)
        if shutil.which(one) is not None
        and subprocess.run([one, "-c", ""], check=False, capture_output=True).returncode == 0
    ]


@pytest.mark.slow
def test_a_worker_of_another_python_says_so_before_anything_else(tmp_path: Path) -> None:
    with through(tmp_path / "store"):
        carried = carry(reading("x"))
    code = pickle.dumps((carried, "a"))
    others = other_pythons()
    if not others:
        pytest.skip("there is no other Python here")
    for other in others:
        done = subprocess.run([other, "-c", UNPICKLED], input=code, capture_output=True, check=False, cwd=tmp_path)
        (last,) = done.stderr.decode().splitlines()[-1:]
        assert re.fullmatch(
            r"RuntimeError: the worker \S+ \(process \d+\) has Python 3\.\d+, and the run Python "
            r"3\.\d+, whose functions no other version can run; start workers with Python 3\.\d+",
            last,
        )


def test_the_step_of_a_pipeline_is_no_compiled_code_either(tmp_path: Path) -> None:
    with through(tmp_path / "store"):
        step = carry_step(reading(str(tmp_path / "words"))).fn
    code = cloudpickle.dumps(step)
    assert not {"CodeType", "_make_function"} & {
        argument for _, argument, _ in pickletools.genops(code) if isinstance(argument, str)
    }
    (tmp_path / "words").write_text("seen")
    assert list(cloudpickle.loads(cloudpickle.dumps(cloudpickle.loads(code))).process("a"))[:2] == ["a", "seen"]


def test_a_store_that_does_not_answer_is_named_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_bootstrap, "ANSWER_SECONDS", 0.2)
    with (
        silent_server() as address,
        pytest.raises(
            RuntimeError,
            match=(
                rf"^the worker \S+ \(process \d+\) cannot see the store {address} \(TimeoutError: no answer in 0.2 s\); give"
            ),
        ),
    ):
        worker_bootstrap.read_store({"store": address, "options": {}}, "wheel")


def test_a_file_that_many_jobs_name_is_read_once_unless_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []

    def counting(path: Path) -> str:
        read.append(path)
        return sha256_file(path)

    monkeypatch.setattr(carried_module, "sha256_file", counting)
    words = tmp_path / "words.txt"
    with through(tmp_path / "store"):
        for text in ("one", "two!"):
            words.write_text(text)
            carry(reading(str(words)))
            carry(reading(str(words)))
    assert read == [words, words]
    assert sorted(path.read_text() for path in (tmp_path / "store").rglob("words.txt")) == ["one", "two!"]


def test_nothing_is_carried_without_a_store_nor_twice(tmp_path: Path) -> None:
    function = reading("x")
    assert carry(function) is function
    with through(tmp_path):
        carry(function)
        (wheel,) = (tmp_path / FOLDER).glob("*/*.whl")
        before = wheel.stat().st_mtime_ns
        carry(reading("y"))
    assert wheel.stat().st_mtime_ns == before


def test_the_wheel_is_named_by_its_content_and_holds_the_package(tmp_path: Path) -> None:
    digest, content = package()
    with zipfile.ZipFile(BytesIO(content)) as wheel:
        names = wheel.namelist()
        wheel.extractall(tmp_path)
    assert {"gristmill/__init__.py", "gristmill/core/files.py", "gristmill/mixtures/demo.yaml"} <= set(names)
    assert not [name for name in names if "__pycache__" in name or name.startswith("gristmill/tests")]
    assert worker_bootstrap.digest_of(worker_bootstrap.files_of([str(tmp_path / "gristmill")])) == digest
    (tmp_path / "gristmill" / "dataprep" / "files.py").write_text("other")
    assert worker_bootstrap.digest_of(worker_bootstrap.files_of([str(tmp_path / "gristmill")])) != digest


def test_a_worker_that_has_another_package_loaded_is_refused(tmp_path: Path) -> None:
    (tmp_path / "wheel").write_bytes(b"")
    job = {"store": str(tmp_path), "package": "another", "wheel": "wheel", "options": {}}
    with pytest.raises(RuntimeError, match="has loaded another gristmill than the run has; start it anew"):
        worker_bootstrap.have_package(job)


def test_files_of_a_job_are_its_own_also_between_what_it_yields(tmp_path: Path) -> None:
    words = tmp_path / "words.txt"
    words.write_text("carried")
    with through(tmp_path / "store"):
        carried = carry(reading(str(words)))
    words.write_text("of this machine")
    results = carried("a")
    assert next(results) == "a"
    assert as_path(str(words)).read_text() == "of this machine"
    assert next(results) == "carried"
