"""Asking models: requests per second of our client and of the stages that use it,
beside plain loops over httpx.

The endpoint is a process of its own that answers at once, so that the client is
measured: ours keeps every answer on disk by its key, the loop only collects them. A
stage also reads its documents, fills in templates, checks answers, and writes tables,
lineage and counts; the loop beside it has the texts in memory, fills in the same
templates by Jinja, and parses the answers. The sides take turns; times are of the
processor, of all threads.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from benchmarks.dataprep.stage_runs import stage_runs, write_shard
from benchmarks.measuring import Row, fastest, row
from gristmill.core.stage_context import Context
from gristmill.dataprep.examples import make_examples
from gristmill.dataprep.llm import generated_documents, judge, judge_pairs
from gristmill.dataprep.llm.client import Asking
from gristmill.dataprep.llm.judge_pairs import pair_text
from gristmill.dataprep.llm.prompt_templates import shipped
from gristmill.dataprep.llm.prompting import prompt
from gristmill.mixtures.base import RawSection
from gristmill.mixtures.steps.asked_model import AskedModel

REQUESTS = 2000
AT_ONCE = 16
REPEATS, STAGE_REPEATS = 5, 3
WORDS = "a text as long as a short document is, of some forty bytes a line " * 30
CONTENT = json.dumps({"score": 3, "better": "first", "reason": "word " * 50})
"""Text of every answer; each stage finds the fields in it that it needs."""
ANSWER = json.dumps(
    {
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": CONTENT},
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 500, "completion_tokens": 60},
    }
).encode()


def rows(
    requests: int = REQUESTS, repeats: int = REPEATS, stage_repeats: int = STAGE_REPEATS
) -> Iterator[Row]:
    """Measure our client, then the stages, each beside a loop over httpx with a
    semaphore.
    """
    with (
        answering() as url,
        tempfile.TemporaryDirectory(prefix="gristmill-bench-") as folder,
    ):
        numbers = itertools.count()

        def ours() -> None:
            context = Context(
                work=Path(folder) / str(next(numbers)), emit=lambda event: None
            )
            model = AskedModel(endpoint=url, model="bench", concurrency=AT_ONCE)
            with Asking(model, context) as asking:
                answers = asking.answers(map(prompt, texts))
                assert sum(1 for _ in answers) == requests

        texts = [f"{number}: {WORDS}" for number in range(requests)]
        our_seconds, plain_seconds = fastest(
            repeats,
            ours,
            lambda: asyncio.run(loop(url, texts, [lambda text, answers: text])),
            clock=time.process_time,
        )
        # 0.78, 2026-11-28, 2 cores
        yield row(
            "asking: requests/s",
            requests / our_seconds,
            requests / plain_seconds,
            "requests/s",
            f"{requests:,} prompts of {len(WORDS):,} characters, {AT_ONCE} at a time; "
            "peer: an asyncio loop over httpx that keeps nothing",
            floor=0.65,
        )
        yield from stage_rows(url, Path(folder), texts[::2], stage_repeats)


Prompt = Callable[[Any, Sequence[str]], str]
"""(item, its answers so far) -> the next prompt."""


class Plan(NamedTuple):
    """A stage, and the prompts that the loop beside it asks.

    Attributes:
        name: end of the row's name.
        stage: its module.
        inputs, config: of the stage.
        items: each of which gets all prompts.
        prompts: one after the other.
    """

    name: str
    stage: ModuleType
    inputs: dict[str, Path]
    config: RawSection
    items: Sequence[Any]
    prompts: Sequence[Prompt]


def stage_rows(
    url: str, folder: Path, texts: Sequence[str], repeats: int
) -> Iterator[Row]:
    """Measure judged documents, compared pairs, and generated documents and
    examples.
    """
    for plan in stage_plans(url, folder, texts):
        requests = len(plan.items) * len(plan.prompts)
        our_seconds, plain_seconds = fastest(
            repeats,
            stage_runs(
                plan.stage.run, plan.inputs, plan.config, folder / plan.stage.__name__
            ),
            lambda plan=plan: asyncio.run(loop(url, plan.items, plan.prompts)),  # type: ignore[misc]
            clock=time.process_time,
        )
        yield row(
            f"asking, {plan.name}: requests/s",
            requests / our_seconds,
            requests / plain_seconds,
            "requests/s",
            f"{requests:,} requests; peer: Jinja and an asyncio loop over httpx that "
            "keeps nothing",
            # 0.77 (judge) to 0.97 of 100 requests by processor time, 2026-11-24, 2 busy
            # cores
            floor=0.65,
        )


def stage_plans(url: str, folder: Path, texts: Sequence[str]) -> list[Plan]:
    """Write the inputs of all stages."""
    model = {"endpoint": url, "model": "bench", "concurrency": AT_ONCE}
    write_shard(folder / "ingest", 0, texts)
    pairs = [
        pair_text(f"Question {number}?", text, f"{text} again")
        for number, text in enumerate(texts[::2])
    ]
    write_shard(folder / "pairs", 0, pairs)
    (folder / "web.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts)
    )
    (folder / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": text}) + "\n" for text in texts[::4])
    )
    judge_template, compare_template = fill("judge-educational"), fill("compare-pairs")
    textbook, critique, revision = (
        fill("generate-textbook"),
        fill("critique"),
        fill("revision"),
    )
    principle = "Be kind."
    ordered_pairs = []
    for pair in map(json.loads, pairs):
        ordered_pairs.append((pair["prompt"], pair["chosen"], pair["rejected"]))
        ordered_pairs.append((pair["prompt"], pair["rejected"], pair["chosen"]))
    generate_config = {
        "sources": {"web": {"path": str(folder / "web.jsonl")}},
        "ingest": {},
        "order": ["taught"],
        "seed": 1,
        "generate": {
            "taught": {"parents": ["web"], "style": "textbook", "model": model}
        },
    }
    examples_config = {
        "name": "revised",
        "seed": 1,
        "section": {
            "data": [{"path": str(folder / "prompts.jsonl")}],
            "model": model,
            "revise": {"principles": [principle], "rounds": 1},
        },
    }
    return [
        Plan(
            "judge",
            judge,
            {"ingest": folder / "ingest"},
            {"model": model},
            texts,
            [
                lambda text, answers: judge_template(
                    text=text, source="web", answer_schema="{}"
                )
            ],
        ),
        Plan(
            "judge_pairs",
            judge_pairs,
            {"ingest": folder / "pairs"},
            {"model": model},
            ordered_pairs,
            [
                lambda pair, answers: compare_template(
                    prompt=pair[0], first=pair[1], second=pair[2], answer_schema="{}"
                )
            ],
        ),
        Plan(
            "generate",
            generated_documents,
            {},
            generate_config,
            texts,
            [lambda text, answers: textbook(text=text)],
        ),
        Plan(
            "examples, one revision",
            make_examples,
            {},
            examples_config,
            texts[::4],
            [
                lambda text, answers: text,
                lambda text, answers: critique(
                    prompt=text, answer=answers[0], principle=principle
                ),
                lambda text, answers: revision(
                    prompt=text,
                    answer=answers[0],
                    principle=principle,
                    critique=answers[1],
                ),
            ],
        ),
    ]


def fill(name: str) -> Callable[..., str]:
    """Return a function that fills in a template of gristmill by Jinja alone."""
    from jinja2 import Environment

    template = Environment(trim_blocks=True, lstrip_blocks=True).from_string(
        shipped(name).text
    )
    render: Callable[..., str] = template.render
    return render


async def loop(url: str, items: Sequence[Any], prompts: Sequence[Prompt]) -> None:
    """Ask a plain client: each item's prompts one after the other, many items at a
    time.
    """
    import httpx

    slots = asyncio.Semaphore(AT_ONCE)
    async with httpx.AsyncClient(
        limits=httpx.Limits(max_connections=AT_ONCE), trust_env=False
    ) as client:

        async def ask_about(item: Any) -> list[str]:
            answers: list[str] = []
            async with slots:
                for prompt_of in prompts:
                    response = await client.post(
                        f"{url}/chat/completions",
                        json={
                            "model": "bench",
                            "messages": [
                                {"role": "user", "content": prompt_of(item, answers)}
                            ],
                            "temperature": 0.0,
                            "max_tokens": 512,
                        },
                    )
                    answers.append(
                        str(response.json()["choices"][0]["message"]["content"])
                    )
            json.loads(answers[-1])
            return answers

        assert len(await asyncio.gather(*map(ask_about, items))) == len(items)


@contextmanager
def answering() -> Iterator[str]:
    """Serve an endpoint that answers at once, in a process of its own; yields its
    address.
    """
    spawn = multiprocessing.get_context("spawn")
    receiver, sender = spawn.Pipe()
    process = spawn.Process(target=_serve, args=(sender,), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{receiver.recv()}/v1"
    finally:
        process.terminate()
        process.join()


def _serve(ports: Connection) -> None:
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(ANSWER)}\r\n\r\n".encode()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                lines = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                await reader.readexactly(
                    int(lines.partition("content-length: ")[2].split("\r\n")[0])
                )
                writer.write(head + ANSWER)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def main() -> Any:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        ports.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())
