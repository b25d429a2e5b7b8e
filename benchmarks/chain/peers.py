"""Other whole chains, each run by an interpreter that has it.

`GRISTMILL_BENCH_PEERS` names a folder of virtual environments, one per peer, for those whose pins conflict with ours.
What is installed beside gristmill, as datatrove is with the extra `bench`, needs none.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.chain.our_chain import END_OF_TEXT, MIN_QUALITY, WORKERS, Models
from benchmarks.chain.pages import Corpus
from benchmarks.checkout import ROOT

VARIABLE = "GRISTMILL_BENCH_PEERS"
ONE_THREAD = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
"""Where there is a process per core."""
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "DO_NOT_TRACK": "1"}


@dataclass(frozen=True)
class Peer:
    """Somebody else's chain.

    Attributes:
        name: of its folder below VARIABLE, and in rows.
        module: that it is imported as.
        does: what of the chain it does.
        work: given its interpreter, the corpus, the models and a folder, does it.
    """

    name: str
    module: str
    does: str
    work: Callable[[str, Corpus, Models, Path], dict[str, float]]

    def interpreter(self) -> str | None:
        """The Python that has it, or None."""
        own = Path(os.environ.get(VARIABLE) or ROOT / "build" / "peers") / self.name / "bin" / "python"
        if own.exists():
            return str(own)
        return sys.executable if importlib.util.find_spec(self.module) is not None else None


class PeerError(RuntimeError):
    """A peer failed; the message has the end of what it printed."""


def call(command: Sequence[str], folder: Path, **environment: str) -> str:
    """Run a command of a peer in a folder, and return what it printed.

    Raises:
        PeerError: it failed.
    """
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False,
                          env={**os.environ, **ONE_THREAD, **OFFLINE, **environment})
    (folder / "log").write_text(done.stdout + done.stderr)
    if done.returncode != 0:
        last = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()][-3:]
        raise PeerError(f"{Path(command[0]).name} ended with {done.returncode}: {' / '.join(last)[-300:]}")
    return done.stdout


def by_datatrove(python: str, corpus: Corpus, models: Models, folder: Path) -> dict[str, float]:
    """All of the chain; what its verdicts are lies in the folder then."""
    settings = {
        "out": str(folder), "corpus": str(corpus.folder), "tasks": len(list(corpus.folder.glob("*.jsonl"))),
        "workers": WORKERS, "language_model": str(models.language), "classifier": str(models.classifier),
        "min_quality": MIN_QUALITY, "tokenizer": str(models.tokenizer), "eos_token": END_OF_TEXT,
    }  # fmt: skip
    path = folder / "settings.json"
    path.write_text(json.dumps(settings))
    printed = call([python, str(Path(__file__).with_name("peer_datatrove.py")), str(path)], folder)
    seconds: dict[str, float] = json.loads(printed.splitlines()[-1])
    return seconds


PEERS = (Peer("datatrove", "datatrove", "the whole chain", by_datatrove),)


def fresh(folder: Path) -> Path:
    """An empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def described(seconds: dict[str, float]) -> Any:
    """Seconds of each step, in words."""
    return ", ".join(f"{name} {each:.0f} s" for name, each in seconds.items())
