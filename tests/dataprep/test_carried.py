"""Workers without the launching machine's files get the package and the files that a
job names from the store.
"""

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
from gristmill.dataprep.runners import ship_files as carried_module
from gristmill.dataprep.runners import worker_bootstrap
from gristmill.dataprep.runners.ship_files import (
    FOLDER,
    carry,
    carry_step,
    package_digest,
    package_wheel,
    through,
)
from gristmill.dataprep.runners.tasks import do_group
from gristmill.mixtures.steps.own_steps import Annotate
from tests.dataprep.small_models import write_word_vectors

LIBRARIES = str(Path(np.__file__).parents[1])
STRANGER = "import sys; sys.path.append(sys.argv.pop(1)); "
"""Start of a program that finds all libraries but no checkout: `python -S` skips the
file that installs it.
"""
UNPICKLED = (
    "import pickle, sys; function, element = pickle.load(sys.stdin.buffer); "
    "list(function(element))"
)
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
    """Return a function that cloudpickle takes by value, since tests are not part of
    the package.
    """

    def read(path: str, element: str) -> Iterator[str]:
        import os

        import gristmill
        from gristmill.core.files import as_path

        yield element
        yield as_path(path).read_text()
        yield gristmill.__file__.removeprefix(os.environ["HOME"])

    return partial(read, path)


def in_stranger(
    function: Callable[..., Any], element: str, home: Path
) -> subprocess.CompletedProcess[str]:
    home.mkdir(exist_ok=True)
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "XDG_CACHE_HOME", "GRISTMILL_CACHE")
    }
    completed = subprocess.run(
        [sys.executable, "-S", "-c", WORK, LIBRARIES],
        input=cloudpickle.dumps((function, element)),
        capture_output=True,
        check=False,
        cwd=home,
        env={**environment, "HOME": str(home)},
    )
    return subprocess.CompletedProcess(
        completed.args,
        completed.returncode,
        completed.stdout.decode(),
        completed.stderr.decode(),
    )


@pytest.mark.slow
def test_worker_without_the_package_receives_it_and_the_named_files(
    tmp_path: Path,
) -> None:
    words = tmp_path / "words.txt"
    words.write_text("of this machine")
    with through(tmp_path / "store"):
        carried = carry(reading(str(words)))
    words.unlink()
    digest = package_digest()
    for home in (tmp_path / "first", tmp_path / "second"):
        for element in ("a", "b"):
            completed = in_stranger(carried, element, home)
            assert completed.stdout == repr(
                [
                    element,
                    "of this machine",
                    f"/.cache/gristmill/packages/{digest}/gristmill/__init__.py",
                ]
            ), completed.stderr
    (file,) = (tmp_path / "first" / ".cache" / "gristmill" / "files").glob(
        "*/words.txt"
    )
    assert file.read_text() == "of this machine"


def listing(folder: str, plain: str) -> Callable[[str], Iterator[str]]:
    """Return a function that reads all files of `folder`, and looks for `plain`."""

    def read(folder: str, plain: str, element: str) -> Iterator[str]:
        from gristmill.core.files import as_path

        root = as_path(folder)
        files = [path for path in root.rglob("*") if path.is_file()]
        yield from sorted(
            f"{path.relative_to(root)}: {path.read_text()}" for path in files
        )
        yield f"{element}: {as_path(plain).exists()}"

    return partial(read, folder, plain)


@pytest.mark.slow
def test_only_model_folders_are_shipped(tmp_path: Path) -> None:
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
            completed = in_stranger(carried, element, home)
            assert completed.stdout == repr(
                [
                    "1_Pooling/config.json: content of 1_Pooling/config.json",
                    "config.json: content of config.json",
                    "weights: content of weights",
                    f"{element}: False",
                ]
            ), completed.stderr
        assert len(list((home / ".cache" / "gristmill" / "folders").iterdir())) == 1


def test_scoring_step_ships_its_model_folder(tmp_path: Path) -> None:
    folder = write_word_vectors(tmp_path / "model")
    section = Annotate.model_validate(
        {"model": {"path": str(folder), "like": {"prose": "w1 w2"}}}
    )
    process = partial(
        score_shard,
        inputs={},
        section=section,
        sha256="",
        out=tmp_path / "out",
    )
    with through(tmp_path / "store"):
        carry(partial(do_group, process, str(tmp_path / "store" / "records")))
    assert sorted(
        path.name for path in (tmp_path / "store" / FOLDER / "files").glob("*/*")
    ) == sorted(path.name for path in folder.iterdir())


def test_worker_that_cannot_reach_the_store_names_it(tmp_path: Path) -> None:
    with through(tmp_path / "store"):
        carried = carry(reading(str(tmp_path)))
    (tmp_path / "store").rename(tmp_path / "hidden")
    completed = in_stranger(carried, "a", tmp_path / "home")
    assert completed.returncode == 1
    assert f"{tmp_path / 'store'} (FileNotFoundError" in completed.stderr


def other_pythons() -> list[str]:
    """Working interpreters of other minor versions, on the path or beside this one."""
    names = [
        f"python3.{minor}" for minor in range(10, 20) if minor != sys.version_info[1]
    ]
    beside = [
        str(path)
        for name in names
        for path in Path(sys.base_prefix).parent.glob(f"3.*/bin/{name}")
    ]
    return [
        program
        for program in (*names, *beside)
        if shutil.which(program) is not None
        and subprocess.run(
            [program, "-c", ""], check=False, capture_output=True
        ).returncode
        == 0
    ]


@pytest.mark.slow
def test_worker_with_another_python_is_rejected_first(tmp_path: Path) -> None:
    with through(tmp_path / "store"):
        carried = carry(reading("x"))
    code = pickle.dumps((carried, "a"))
    interpreters = other_pythons()
    if not interpreters:
        pytest.skip("there is no other Python here")
    for interpreter in interpreters:
        completed = subprocess.run(
            [interpreter, "-c", UNPICKLED],
            input=code,
            capture_output=True,
            check=False,
            cwd=tmp_path,
        )
        (last,) = completed.stderr.decode().splitlines()[-1:]
        assert last.startswith("RuntimeError: ")
        assert re.search(r"\(process \d+\)", last)
        (worker_version, run_version, wanted_version) = re.findall(
            r"Python (3\.\d+)", last
        )
        assert (
            worker_version
            != run_version
            == wanted_version
            == f"3.{sys.version_info[1]}"
        )


def test_pipeline_step_pickles_without_code_objects(tmp_path: Path) -> None:
    with through(tmp_path / "store"):
        step = carry_step(reading(str(tmp_path / "words"))).fn
    code = cloudpickle.dumps(step)
    assert not {"CodeType", "_make_function"} & {
        argument
        for _, argument, _ in pickletools.genops(code)
        if isinstance(argument, str)
    }
    (tmp_path / "words").write_text("seen")
    assert list(
        cloudpickle.loads(cloudpickle.dumps(cloudpickle.loads(code))).process("a")
    )[:2] == ["a", "seen"]


def test_unresponsive_store_is_named_after_a_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_bootstrap, "ANSWER_SECONDS", 0.2)
    with (
        silent_server() as address,
        pytest.raises(
            RuntimeError,
            match=rf"\(process \d+\) .*{address} \(TimeoutError: .* 0.2 s\)",
        ),
    ):
        worker_bootstrap.read_store({"store": address, "options": {}}, "wheel")


def test_unchanged_file_is_hashed_once_for_many_jobs(
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
    assert sorted(
        path.read_text() for path in (tmp_path / "store").rglob("words.txt")
    ) == ["one", "two!"]


def test_nothing_is_shipped_without_a_store_or_twice(tmp_path: Path) -> None:
    function = reading("x")
    assert carry(function) is function
    with through(tmp_path):
        carry(function)
        (wheel,) = (tmp_path / FOLDER).glob("*/*.whl")
        before = wheel.stat().st_mtime_ns
        carry(reading("y"))
    assert wheel.stat().st_mtime_ns == before


def test_wheel_is_content_addressed_and_holds_the_package(tmp_path: Path) -> None:
    digest, content = package_digest(), package_wheel()
    with zipfile.ZipFile(BytesIO(content)) as wheel:
        names = wheel.namelist()
        wheel.extractall(tmp_path)
    assert {
        "gristmill/__init__.py",
        "gristmill/core/files.py",
        "gristmill/mixtures/demo.yaml",
    } <= set(names)
    assert not [
        name
        for name in names
        if "__pycache__" in name or name.startswith("gristmill/tests")
    ]
    assert (
        worker_bootstrap.digest_of(
            worker_bootstrap.files_of([str(tmp_path / "gristmill")])
        )
        == digest
    )
    (tmp_path / "gristmill" / "dataprep" / "files.py").write_text("other")
    assert (
        worker_bootstrap.digest_of(
            worker_bootstrap.files_of([str(tmp_path / "gristmill")])
        )
        != digest
    )


def test_package_of_the_run_is_recognised_by_its_digest() -> None:
    assert worker_bootstrap.has_package(package_digest())
    assert not worker_bootstrap.has_package("another")


def test_worker_with_another_package_loaded_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "wheel").write_bytes(b"")
    job = {
        "store": str(tmp_path),
        "package": "another",
        "wheel": "wheel",
        "options": {},
    }
    with pytest.raises(RuntimeError, match="another gristmill"):
        worker_bootstrap.have_package(job)


def test_shipped_files_are_visible_only_inside_the_job(tmp_path: Path) -> None:
    words = tmp_path / "words.txt"
    words.write_text("carried")
    with through(tmp_path / "store"):
        carried = carry(reading(str(words)))
    words.write_text("of this machine")
    results = carried("a")
    assert next(results) == "a"
    assert as_path(str(words)).read_text() == "of this machine"
    assert next(results) == "carried"
