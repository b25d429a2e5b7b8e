"""Asking models: requests per second of our client and of the stages that use it, beside plain loops over httpx.

The endpoint is a process of its own that answers at once, so that what is measured is the client: our one keeps every
answer on the disk by its key, the loop only collects them. A stage also reads its documents, fills templates in, checks
answers, and writes tables, lineage and counts; the loop beside it has the texts in memory, fills the same templates in
by Jinja, and parses the answers. The sides take turns; times are of the processor, of all threads.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import json
import multiprocessing
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.dataprep.own_steps import write_shard
from benchmarks.measuring import Row, fastest, row
from gristmill.core.stage_context import Context
from gristmill.dataprep.llm.judge_pairs import pair_text
from gristmill.dataprep.llm.llm_client import ask
from gristmill.dataprep.llm.prompt_templates import shipped
from gristmill.dataprep.llm.prompting import prompt
from gristmill.mixtures.steps.asked_model import AskedModel

REQUESTS = 2000
AT_ONCE = 16
REPEATS, STAGE_REPEATS = 5, 3
WORDS = "a text as long as a short document is, of some forty bytes a line " * 30
SAID = json.dumps({"score": 3, "better": "first", "reason": "word " * 50})
"""Of the form that any of the stages wants."""
ANSWER = json.dumps(
    {
        "choices": [{"index": 0, "message": {"role": "assistant", "content": SAID}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 500, "completion_tokens": 60},
    }
).encode()


def rows(requests: int = REQUESTS, repeats: int = REPEATS, stage_repeats: int = STAGE_REPEATS) -> Iterator[Row]:
    """Our client, and a loop over httpx with a semaphore; then the stages, each beside the same."""
    with answering() as url, tempfile.TemporaryDirectory(prefix="gristmill-bench-") as folder:
        work = iter(range(1000))

        def ours() -> None:
            context = Context(work=Path(folder) / str(next(work)), emit=lambda event: None)
            model = AskedModel(endpoint=url, model="bench", concurrency=AT_ONCE)
            assert sum(1 for _ in ask(map(prompt, texts), model, context)) == requests

        texts = [f"{number}: {WORDS}" for number in range(requests)]
        mine, plain = fastest(
            repeats,
            ours,
            lambda: asyncio.run(loop(url, texts, [lambda text, said: text])),
            clock=time.process_time,
        )
        yield row(
            "asking: requests/s",
            requests / mine,
            requests / plain,
            "requests/s",
            f"{requests:,} prompts of {len(WORDS):,} characters, {AT_ONCE} at a time; peer: an asyncio loop over "
            "httpx that keeps nothing",
        )
        yield from stage_rows(url, Path(folder), texts[::2], stage_repeats)


def stage_rows(url: str, folder: Path, texts: Sequence[str], repeats: int) -> Iterator[Row]:
    """Documents that are judged, pairs that are compared, documents and examples that are written."""
    model = {"endpoint": url, "model": "bench", "concurrency": AT_ONCE}
    write_shard(folder / "ingest", 0, texts)
    pairs = [pair_text(f"Question {number}?", text, f"{text} again") for number, text in enumerate(texts[::2])]
    write_shard(folder / "pairs", 0, pairs)
    (folder / "web.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (folder / "asked.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts[::4]))
    judged, compared, taught, criticised, revised = map(
        fill, ("judge-educational", "compare-pairs", "generate-textbook", "critique", "revision")
    )
    principles = ["Be kind."]
    told = {
        "sources": {"web": {"path": str(folder / "web.jsonl")}},
        "ingest": {},
        "order": ["taught"],
        "seed": 1,
        "generate": {"taught": {"parents": ["web"], "style": "textbook", "model": model}},
    }
    orders = [
        (pair, *order) for pair in map(json.loads, pairs) for order in (("chosen", "rejected"), ("rejected", "chosen"))
    ]
    plans: list[tuple[str, str, dict[str, Path], dict[str, Any], Sequence[Any], Sequence[Step]]] = [
        (
            "judge",
            "llm.judge",
            {"ingest": folder / "ingest"},
            {"model": model},
            texts,
            [lambda text, said: judged(text=text, source="web", answer_schema="{}")],
        ),
        (
            "judge_pairs",
            "llm.judge_pairs",
            {"ingest": folder / "pairs"},
            {"model": model},
            orders,
            [
                lambda one, said: compared(
                    prompt=one[0]["prompt"], first=one[0][one[1]], second=one[0][one[2]], answer_schema="{}"
                )
            ],
        ),
        ("generate", "llm.generated_documents", {}, told, texts, [lambda text, said: taught(text=text)]),
        (
            "examples, one revision",
            "examples.make_examples",
            {},
            {
                "name": "revised",
                "seed": 1,
                "section": {
                    "data": [{"path": str(folder / "asked.jsonl")}],
                    "model": model,
                    "revise": {"principles": principles, "rounds": 1},
                },
            },
            texts[::4],
            [
                lambda text, said: text,
                lambda text, said: criticised(prompt=text, answer=said[0], principle=principles[0]),
                lambda text, said: revised(prompt=text, answer=said[0], principle=principles[0], critique=said[1]),
            ],
        ),
    ]
    for name, module, inputs, config, items, steps in plans:
        requests = len(items) * len(steps)
        mine, plain = fastest(
            repeats,
            stage(module, inputs, config, folder),
            partial(lambda items, steps: asyncio.run(loop(url, items, steps)), items, steps),
            clock=time.process_time,
        )
        yield row(
            f"asking, {name}: requests/s",
            requests / mine,
            requests / plain,
            "requests/s",
            f"{requests:,} requests; peer: Jinja and an asyncio loop over httpx that keeps nothing",
            floor=0.65,  # 0.77 (judge) to 0.97 of 100 requests by processor time, 2026-11-24, 2 busy cores
        )


def stage(module: str, inputs: dict[str, Path], config: dict[str, Any], folder: Path) -> Callable[[], None]:
    """The whole work of a stage, in folders that are removed."""
    function, numbers = importlib.import_module(f"gristmill.dataprep.{module}").run, itertools.count()

    def run() -> None:
        work = folder / f"{module}-{next(numbers)}"
        (work / "out").mkdir(parents=True)
        context = Context(work=work / "work", stage="bench", mode="memory", emit=lambda event: None)
        context.work.mkdir()
        function(inputs, config, work / "out", context)
        shutil.rmtree(work)

    return run


def fill(name: str) -> Callable[..., str]:
    """A template that comes with gristmill, filled in by Jinja alone."""
    from jinja2 import Environment

    template = Environment(trim_blocks=True, lstrip_blocks=True).from_string(shipped(name).text)
    filled: Callable[..., str] = template.render
    return filled


Step = Callable[[Any, Sequence[str]], str]
"""(an item, what was answered about it so far) -> the next prompt."""


async def loop(url: str, items: Sequence[Any], steps: Sequence[Step]) -> None:
    """What one would write without us: each item's prompts behind each other, many items at a time."""
    import httpx

    slots = asyncio.Semaphore(AT_ONCE)
    async with httpx.AsyncClient(limits=httpx.Limits(max_connections=AT_ONCE), trust_env=False) as client:

        async def one(item: Any) -> list[str]:
            said: list[str] = []
            async with slots:
                for step in steps:
                    found = await client.post(
                        f"{url}/chat/completions",
                        json={
                            "model": "bench",
                            "messages": [{"role": "user", "content": step(item, said)}],
                            "temperature": 0.0,
                            "max_tokens": 512,
                        },
                    )
                    said.append(str(found.json()["choices"][0]["message"]["content"]))
            json.loads(said[-1])
            return said

        assert len(await asyncio.gather(*map(one, items))) == len(items)


@contextmanager
def answering() -> Iterator[str]:
    """The address of an endpoint that answers at once, in a process of its own."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=_serve, args=(there,), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{here.recv()}/v1"
    finally:
        process.terminate()
        process.join()


def _serve(told: Connection) -> None:
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(ANSWER)}\r\n\r\n".encode()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                lines = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                await reader.readexactly(int(lines.partition("content-length: ")[2].split("\r\n")[0]))
                writer.write(head + ANSWER)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def main() -> Any:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        told.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())
