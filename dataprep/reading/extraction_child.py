"""The process that extracts: reads pages from its standard input, writes one answer for each, in their order.

It ends with its parent, at a page that takes too much processor time, and after a page for which the memory did not
suffice. Started by `extraction_guard.Guard`; a frame is a length (8 bytes, little-endian) and as many bytes of content.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
from typing import Any, BinaryIO

from gristmill.dataprep.processes import end_with_parent
from gristmill.dataprep.reading.encoding import UndecodableError
from gristmill.dataprep.reading.extraction import Extractor, extract, find_extractor

LENGTH_BYTES = 8
WARM_UP = b"<html><head><title>t</title></head><body><p>Some text.</p></body></html>"


def frame(content: bytes) -> bytes:
    """The content, with its length in front."""
    return len(content).to_bytes(LENGTH_BYTES, "little") + content


def main() -> None:
    """Answer until the input ends. The one argument is JSON, see `Guard._start`."""
    settings = json.loads(sys.argv[1])
    end_with_parent(signal.SIGKILL, settings["parent"])
    pages, answers = os.fdopen(os.dup(0), "rb", buffering=1 << 20), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    logging.disable()  # libraries log what they think of a page; what matters comes back as its result
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    extractor = find_extractor(settings["extractor"])
    extract(WARM_UP, "utf-8", "", extractor, settings["options"])  # imports, before the limits hold
    limit_resource(resource.RLIMIT_CORE, 0)
    limit_resource(resource.RLIMIT_AS, settings["memory_bytes"])
    _answer(answers, {"ready": True})
    while (about := read_frame(pages)) is not None:
        content = read_frame(pages)
        assert content is not None
        signal.setitimer(signal.ITIMER_PROF, settings["seconds"])
        answer = _extract(json.loads(about), content, extractor, settings)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _answer(answers, answer)
        if "memory" in answer:
            return


def limit_resource(what: int, amount: int) -> None:
    """Limit what this process may take, as far as it is allowed to."""
    _, hard = resource.getrlimit(what)
    amount = amount if hard == resource.RLIM_INFINITY else min(amount, hard)
    resource.setrlimit(what, (amount, amount))


def _extract(about: dict[str, Any], content: bytes, extractor: Extractor, settings: dict[str, Any]) -> dict[str, Any]:
    try:
        extracted = extract(content, about["encoding"], about["charset"], extractor, settings["options"],
                            about["errors"])
        return {"text": extracted.text, "metadata": dict(extracted.metadata), "replaced": extracted.replaced}
    except UndecodableError as error:
        return {"error": str(error)}
    except MemoryError:
        return {"memory": True}
    except Exception as error:  # noqa: BLE001 - whatever a page does to an extractor, it is this page that is lost
        return {"error": f"the extractor failed: {type(error).__name__}: {' '.join(str(error).split())}"}


def _answer(sink: BinaryIO, answer: dict[str, Any]) -> None:
    sink.write(frame(json.dumps(answer).encode("ascii")))
    sink.flush()


def read_frame(stream: BinaryIO) -> bytes | None:
    """The content of the next frame; None at the end."""
    length = stream.read(LENGTH_BYTES)
    if len(length) < LENGTH_BYTES:
        return None
    return stream.read(int.from_bytes(length, "little"))


if __name__ == "__main__":
    main()
