"""How fast documents are judged, against the same libraries used bare on the same text in the same run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pyarrow as pa

from gristmill.dataprep.bench import library_texts, synthetic_texts
from gristmill.dataprep.bench_language import data_folder
from gristmill.dataprep.langid import measure, wanted_languages
from gristmill.dataprep.models import MODEL_SHA256, find_model, load_model
from gristmill.mixtures.language import LanguageId

DOCUMENTS = 2000
REPEATS = 5


def rows() -> Iterator[dict[str, Any]]:
    """Measure, one row per judge: MB of UTF-8 that are looked at per second."""
    yield langid_vs_fasttext(library_texts(DOCUMENTS // 2) + synthetic_texts(DOCUMENTS // 2))


def langid_vs_fasttext(texts: list[str]) -> dict[str, Any]:
    """What `langid` measures of documents, against fastText's own prediction of a list of ready-made lines."""
    local = data_folder() / "langid" / "lid176" / "lid.176.ftz"
    model = load_model(str(find_model(str(local) if local.exists() else None)), MODEL_SHA256)
    section = LanguageId()
    array = pa.array(texts, pa.large_string())
    lines = [text[: section.max_characters].replace("\n", " ") for text in texts]
    seconds = fastest(
        partial(measure, model, section, wanted_languages(section), array), partial(model.predict, lines)
    )  # fmt: skip
    size = sum(len(line.encode("utf-8")) for line in lines) / 1e6
    return {"name": "langid, against fastText's batch predict", "ours": size / seconds[0], "peer": size / seconds[1],
            "unit": "MB/s", "ratio": seconds[1] / seconds[0]}  # fmt: skip


def fastest(*works: Callable[[], Any]) -> list[float]:
    """The least seconds of each, measured by turns so that what else the machine does hits all alike."""
    seconds: list[list[float]] = [[] for _ in works]
    for _ in range(REPEATS):
        for work, taken in zip(works, seconds, strict=True):
            begin = time.perf_counter()
            work()
            taken.append(time.perf_counter() - begin)
    return [min(taken) for taken in seconds]
