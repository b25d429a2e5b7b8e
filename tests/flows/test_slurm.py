"""Slurm runs a manifest: the submitted jobs, and their execution by a fake Slurm on two
hosts.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import re
import shutil
import signal
import subprocess
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from benchmarks.checkout import ROOT
from tests.commands import GRISTMILL, call, finished
from tests.hosts import Host, two_hosts
from tests.jsonl import write_jsonl
from tests.servers import wait_for

MANIFEST = """
name: arrays
sources: {docs: {path: "FOLDER/docs-*.jsonl"}}
ingest: {shard_bytes: 6000}
prepare:
  - annotate: {use: ./steps.py:words}
  - dedup: {}
tokenizer: {vocab_size: 400}
mix: {tokens: 4000, sequence_length: 32}
pretrain: {model: {layers: 1, width: 32, heads: 4}, steps: 4, global_batch_size: 2}
engine: {ranks: 4, workers: 1}
"""
STEPS = """
import os, socket, time

def words(text: str) -> dict:
    folder = os.environ.get("CAUGHT")
    held = folder and "held up here" in text and socket.gethostname() == "host-b"
    if held and not os.path.exists(os.path.join(folder, "again")):
        open(os.path.join(folder, "reached"), "w").close()
        time.sleep(600)
    return {"words": len(text.split())}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("slurm")
    texts = [
        str(inspect.getdoc(function))
        for module in (json, contextlib, textwrap, shutil, os, inspect, subprocess)
        for function in (module, *vars(module).values())
        if inspect.getdoc(function)
    ]
    for number in range(12):
        write_jsonl(
            folder / f"docs-{number:02d}.jsonl",
            [{"text": text} for text in [*texts[number::12], f"no {number}"]],
        )
    with open(folder / "docs-11.jsonl", "a") as sink:
        sink.write(json.dumps({"text": "who reads this may be held up here"}) + "\n")
    (folder / "m.yaml").write_text(MANIFEST.replace("FOLDER", str(folder)))
    (folder / "steps.py").write_text(STEPS)
    return folder


def write(folder: Path, out: Path, *options: str) -> list[str]:
    call("slurm", folder / "m.yaml", "--out", out, *options)
    return sorted(path.name for path in out.iterdir())


def options_of(script: Path) -> dict[str, str]:
    options = re.findall(
        r"^#SBATCH --([\w-]+)(?:=(.*))?$", script.read_text(), re.MULTILINE
    )
    return dict(options)


def test_slurm_jobs_are_arrays_or_multi_host_trainings_chained_by_dependencies(
    folder: Path, tmp_path: Path
) -> None:
    names = write(
        folder,
        tmp_path / "jobs",
        "--array",
        "16",
        "--hosts",
        "2",
        "--gpus",
        "8",
        "--cores",
        "4",
        "--store",
        "/shared/store",
        "--sbatch=--partition=long",
    )
    assert names == [
        "01-ingest.sbatch",
        "02-annotate.sbatch",
        "03-dedup.sbatch",
        "04-tokenizer.sbatch",
        "05-tokenize.sbatch",
        "06-mix.sbatch",
        "07-pretrain.sbatch",
        "submit.sh",
    ]
    jobs = tmp_path / "jobs"
    arrays = {name: options_of(jobs / name).get("array") for name in names[:-1]}
    assert set(arrays.values()) == {"0-15", None}
    assert [name for name, tasks in arrays.items() if tasks is None] == [
        "07-pretrain.sbatch"
    ]
    training = options_of(jobs / "07-pretrain.sbatch")
    assert {
        key: training[key]
        for key in ("nodes", "gpus-per-node", "ntasks-per-node", "signal", "partition")
    } == {
        "nodes": "2",
        "gpus-per-node": "8",
        "ntasks-per-node": "1",
        "signal": "B:TERM@120",
        "partition": "long",
    }
    assert (
        "--set engine.nodes=2 --set engine.ranks=16 "
        in (jobs / "07-pretrain.sbatch").read_text()
    )
    assert (
        "--until dedup --no-ui --set engine.nodes=16 --set engine.workers=4 "
        in (jobs / names[2]).read_text()
    )
    submits = re.findall(r"sbatch --parsable (.*)\)", (jobs / "submit.sh").read_text())
    assert [line.split()[-1] for line in submits] == names[:-1]
    assert all(
        ("afterany:" in line) == (number > 0) for number, line in enumerate(submits)
    )
    bash = str(shutil.which("bash"))
    for name in names:
        assert subprocess.run([bash, "-n", str(jobs / name)]).returncode == 0


@pytest.mark.slow
def test_commands_of_the_hosts_page_are_valid(folder: Path, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "hosts.md").read_text()
    commands = re.findall(r"^gristmill .*$", page, re.MULTILINE)
    assert [command.split()[1] for command in commands] == [
        "run",
        "slurm",
        "run",
    ]
    for command, more in zip(
        commands, ([], ["--out", str(tmp_path / "jobs")], []), strict=True
    ):
        words = (
            command.replace("gristmill run", "gristmill plan")
            .replace("demo.yaml", str(folder / "m.yaml"))
            .replace("/shared", str(tmp_path))
            .split()[1:]
        )
        call(*words, *more)
    submitted = (tmp_path / "jobs" / "submit.sh").read_text()
    assert page.count("sbatch --array=3 slurm/02-") == 1
    assert " 02-" in submitted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            ["--store", "/s", "--hosts", "3"],
            "--hosts 3 cannot share 4 processes (engine.ranks) evenly: give a "
            "multiple, or --gpus",
        ),
        ([], "give a store at a path that all hosts share"),
    ],
)
def test_unsupported_multi_host_options_are_rejected(
    folder: Path,
    tmp_path: Path,
    options: list[str],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GRISTMILL_STORE", raising=False)
    outcome = call(
        "slurm", folder / "m.yaml", "--out", tmp_path / "jobs", *options, code=2
    )
    assert sentence in " ".join(outcome.output.split())
    assert not (tmp_path / "jobs").exists()


STAND_IN = """#!/bin/sh
number=$(($(cat "$QUEUE" 2>/dev/null | wc -l) + 1))
echo "$*" >> "$QUEUE"
echo "$number;cluster"
"""


class StandIn:
    """A fake Slurm: `sbatch` records submissions, whose tasks start on the hosts in
    turn.
    """

    def __init__(self, folder: Path, hosts: tuple[Host, Host]) -> None:
        self.hosts = hosts
        self._queue = folder / "queue"
        (folder / "bin").mkdir()
        (folder / "bin" / "sbatch").write_text(STAND_IN)
        (folder / "bin" / "sbatch").chmod(0o755)
        self.environment = {
            **os.environ,
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "QUEUE": str(self._queue),
        }

    def submit(self, script: Path) -> list[Path]:
        """Run `submit.sh` and return the submitted scripts, each of which waits for the
        previous one.
        """
        process = finished([str(script)], env=self.environment)
        submissions = [line.split() for line in self._queue.read_text().splitlines()]
        assert process.stdout == f"the last job is {len(submissions)}\n"
        assert [line[1:-1] for line in submissions] == [
            [f"--dependency=afterany:{number}"] if number else []
            for number in range(len(submissions))
        ]
        return [script.parent / line[-1] for line in submissions]

    @contextlib.contextmanager
    def task(
        self, script: Path, number: int, **environment: str
    ) -> Iterator[subprocess.Popen[str]]:
        """Run one task of an array, with a separate folder for its home and temporary
        files.
        """
        process = self.hosts[number % 2].start(
            [str(script)],
            {
                **self.environment,
                **environment,
                "SLURM_ARRAY_TASK_ID": str(number),
                "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=options_of(script)["chdir"],
        )
        try:
            yield process
        finally:
            kill(process)

    def run(self, script: Path) -> None:
        """Run all tasks of a job to their ends."""
        with contextlib.ExitStack() as stack:
            tasks = [
                stack.enter_context(self.task(script, number))
                for number in tasks_of(script)
            ]
            outputs = [task.communicate(timeout=250)[0] for task in tasks]
        assert [task.returncode for task in tasks] == [0] * len(tasks), "\n".join(
            outputs
        )


def tasks_of(script: Path) -> range:
    first, last = (
        int(part) for part in options_of(script).get("array", "0-0").split("-")
    )
    return range(first, last + 1)


def kill(process: subprocess.Popen[str]) -> None:
    """Kill a task and all its child processes, as Slurm does."""
    listed = finished(["ps", "-eo", "pid,ppid"]).stdout
    children: dict[int, list[int]] = {}
    for line in listed.splitlines()[1:]:
        pid, parent = map(int, line.split())
        children.setdefault(parent, []).append(pid)
    for pid in [process.pid, *below(process.pid, children)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def below(pid: int, children: Mapping[int, list[int]]) -> list[int]:
    return [
        descendant
        for child in children.get(pid, [])
        for descendant in (child, *below(child, children))
    ]


def files_of(store: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(store)): path.read_bytes()
        for path in store.glob("*/*/data/**/*")
        if path.is_file()
    }


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_arrays_on_two_hosts_write_equal_bytes_even_after_a_killed_task(
    folder: Path, tmp_path: Path
) -> None:
    """The hosts share only the store's folder; work claimed by the killed task is done
    again.
    """
    alone = [
        *GRISTMILL,
        "run",
        str(folder / "m.yaml"),
        "--until",
        "dedup",
        "--no-ui",
        "--store",
    ]
    finished([*alone, str(tmp_path / "alone")], timeout=250)
    store = tmp_path / "store"
    write(
        folder,
        tmp_path / "jobs",
        "--array",
        "2",
        "--cores",
        "1",
        "--store",
        str(store),
        "--until",
        "dedup",
    )
    with two_hosts() as hosts:
        slurm = StandIn(tmp_path, hosts)
        ingest, annotate, dedup = slurm.submit(tmp_path / "jobs" / "submit.sh")
        slurm.run(ingest)
        with slurm.task(annotate, 1, CAUGHT=str(tmp_path)) as caught:
            wait_for(
                (tmp_path / "reached").exists,
                "a task of host-b's in the middle of a shard",
            )
            with slurm.task(annotate, 0, CAUGHT=str(tmp_path)) as second_task:
                (work,) = store.glob("annotate/*/work")
                wait_for(
                    lambda: [*work.glob("offers/hosts/host-a-*.beat")],
                    "the arrival of host-a",
                )
                shards = len([*store.glob("ingest/*/data/part-*.parquet")])
                assert shards > 10
                wait_for(
                    lambda: len([*work.glob("annotate/*.json")]) == shards - 1,
                    "the end of all tasks but one",
                )
                kill(caught)
                (tmp_path / "again").touch()
                with slurm.task(annotate, 1, CAUGHT=str(tmp_path)) as again:
                    outputs = [
                        task.communicate(timeout=280)[0]
                        for task in (second_task, again)
                    ]
        assert [second_task.returncode, again.returncode] == [0, 0], "\n".join(outputs)
        slurm.run(dedup)
    assert files_of(store) == files_of(tmp_path / "alone")
    assert len(files_of(store)) > 12
