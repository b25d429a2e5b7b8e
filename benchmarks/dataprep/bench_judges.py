"""How fast documents are judged, against the same libraries used bare on the same text in the same run."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from benchmarks.checkout import data_folder
from benchmarks.dataprep.timing import library_texts, synthetic_texts
from gristmill.dataprep.judges.arpa import read_arpa
from gristmill.dataprep.judges.fasttext_models import MODEL_SHA256, find_model, load_model
from gristmill.dataprep.judges.langid import measure, wanted_languages
from gristmill.dataprep.judges.ngram_tables import score_texts
from gristmill.mixtures.langid import LanguageId

DOCUMENTS = 2000
REPEATS = 5


def rows() -> Iterator[dict[str, Any]]:
    """Measure, one row per judge: MB of UTF-8 that are looked at per second."""
    texts = library_texts(DOCUMENTS // 2) + synthetic_texts(DOCUMENTS // 2)
    yield langid_vs_fasttext(texts)
    yield perplexity_vs_kenlm(texts)


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
    return {"name": "langid_vs_fasttext", "ours": size / seconds[0], "peer": size / seconds[1],
            "unit": "MB/s", "ratio": seconds[1] / seconds[0]}  # fmt: skip


def perplexity_vs_kenlm(texts: list[str]) -> dict[str, Any]:
    """Scores of texts under the 3-grams of half of them, against KenLM's own on the same model, line by line."""
    name = "perplexity from ARPA, against kenlm"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.arpa"
        path.write_text(flat_model(texts[::2], 3), encoding="utf-8")
        tables, array = read_arpa(path), pa.array(texts, pa.large_string())
        score_texts(tables, array.slice(0, 1))  # compiles, or loads what an earlier run compiled
        size = sum(len(text.encode("utf-8")) for text in texts) / 1e6
        try:
            import kenlm
        except ImportError:
            (seconds,) = fastest(partial(score_texts, tables, array))
            return {"name": name, "ours": size / seconds, "peer": None, "unit": "MB/s", "ratio": None,
                    "note": "kenlm is not installed"}  # fmt: skip
        model = kenlm.Model(str(path))
        ours, peer = fastest(
            partial(score_texts, tables, array),
            lambda: [model.score(line) for text in texts for line in text.split("\n") if line.strip()],
        )
    return {"name": name, "ours": size / ours, "peer": size / peer, "unit": "MB/s", "ratio": peer / ours}


def flat_model(texts: list[str], order: int) -> str:
    """An ARPA file of all n-grams of some texts, all of one probability: as fast as a trained one."""
    grams: list[set[tuple[str, ...]]] = [{("<unk>",)}, *(set() for _ in range(order - 1))]
    for line in (line for text in texts for line in text.split("\n") if line.strip()):
        words = ("<s>", *line.split(), "</s>")
        for size, of_size in enumerate(grams, 1):
            of_size.update(words[at : at + size] for at in range(len(words) - size + 1))
    lines = ["\\data\\", *(f"ngram {size}={len(of_size)}" for size, of_size in enumerate(grams, 1)), ""]
    for size, of_size in enumerate(grams, 1):
        backoff = "\t-0.3" if size < order else ""
        lines += [f"\\{size}-grams:", *(f"-2.5\t{' '.join(gram)}{backoff}" for gram in sorted(of_size)), ""]
    return "\n".join([*lines, "\\end\\", ""])


def fastest(*works: Callable[[], Any]) -> list[float]:
    """The least seconds of each, measured by turns so that what else the machine does hits all alike."""
    seconds: list[list[float]] = [[] for _ in works]
    for _ in range(REPEATS):
        for work, taken in zip(works, seconds, strict=True):
            begin = time.perf_counter()
            work()
            taken.append(time.perf_counter() - begin)
    return [min(taken) for taken in seconds]
