"""Every command of the how-to pages runs in a copy of their project and prints the
page's output: `make test-docs`.
"""

from __future__ import annotations

import fnmatch
import io
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.checkout import ROOT
from benchmarks.store_servers import object_store
from gristmill.dataprep.runners.errors import MissingEngineError
from tests.chat_endpoint import Endpoint
from tests.flows import doc_pages
from tests.flows.doc_pages import BLOCK, MARKED, run_page
from tests.flows.hub_stand_in import Hub, serve_hub
from tests.needs_sandbox import skip_without_sandbox
from tests.servers import prefect_home

HOW_TO = ROOT / "docs" / "how-to"
PAGES = sorted(path for path in HOW_TO.rglob("*.md") if path.name != "README.md")
NOTHING_TO_RUN = {"hub.md", "kubernetes.md", "prefect.md", "ray.md"}
"""Pages that need the Hub, a cluster or a permanent server; tests/flows/test_hub.py,
test_deploy_files.py, test_serving.py and test_engines.py check them.
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the first page after its commands: a complete run, whose outputs
    all pages reuse.
    """
    folder = tmp_path_factory.mktemp("project")
    assert run_page(HOW_TO / "README.md", folder) == 2
    return folder


def push_chat_model(hub: Hub, folder: Path) -> None:
    """Push a tiny untrained OLMo 2 with a tokenizer and a chat template, and a data set
    of conversations, under the names of the page.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    bytes_alone = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens = Tokenizer(models.BPE())
    tokens.pre_tokenizer, tokens.decoder = bytes_alone, decoders.ByteLevel()
    tokens.train_from_iterator(
        [],
        trainers.BpeTrainer(
            special_tokens=["<|endoftext|>"], initial_alphabet=bytes_alone.alphabet()
        ),
    )
    template = (
        "{% for message in messages %}<|{{ message['role'] }}|>\n"
        "{{ message['content'] }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokens, eos_token="<|endoftext|>", chat_template=template
    ).save_pretrained(folder)
    config = AutoConfig.for_model(
        "olmo2",
        vocab_size=tokens.get_vocab_size(),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=1024,
        eos_token_id=0,
        pad_token_id=None,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    hub.push("allenai/OLMo-2-0425-1B-Instruct", files)
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"Who grinds sack {number}?"},
                {"role": "assistant", "content": f"The mill does. {'Mill. ' * 99}"},
            ]
        }
        for number in range(48)
    ]
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), sink)
    name = "data/train-00000-of-00001.parquet"
    hub.push("HuggingFaceH4/no_robots", {name: sink.getvalue()})


def answer_as_extractor(prompt: str) -> str:
    """Return the heading of the page in a prompt as Markdown."""
    heading = re.search("<h1>(.*)</h1>", prompt)
    assert heading is not None
    return f"# {heading[1]}"


STORE_PAGES = {"s3.md": ["s3"], "google-cloud-and-azure.md": ["gs", "az"]}
"""Pages that need a bucket `shelf` -> schemes of its object stores."""


@pytest.fixture
def what_the_page_needs(
    page: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[None]:
    """Start a Dask cluster, a hub or a server with a bucket, or check the sandbox, for
    pages that need it.
    """
    if page.name in STORE_PAGES:
        with ExitStack() as stack:
            for scheme in STORE_PAGES[page.name]:
                try:
                    server = stack.enter_context(object_store("shelf", scheme))
                except (ImportError, MissingEngineError) as error:
                    pytest.skip(str(error))
                for name, value in server.environment().items():
                    monkeypatch.setenv(name, value)
            yield
    elif page.name == "reach-the-ui.md":
        monkeypatch.setenv(
            "PREFECT_HOME",
            prefect_home(
                tmp_path / "prefect", request.getfixturevalue("prefect_database")
            ),
        )
        monkeypatch.delenv("PREFECT_API_URL", raising=False)
        yield
    elif page.name == "dask.md":
        pytest.importorskip("distributed")
        from tests.dataprep.dask_processes import Cluster

        (tmp_path / "cluster").mkdir()
        with closing(Cluster(tmp_path / "cluster")) as cluster:
            cluster.add_worker()
            yield
    elif page.name == "tune-a-hub-model.md":
        with serve_hub() as hub:
            push_chat_model(hub, tmp_path / "hub")
            monkeypatch.setenv("HF_ENDPOINT", hub.url)
            monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
            # Processes that have imported huggingface_hub keep its own address.
            command = tmp_path / "bin" / "gristmill"
            command.parent.mkdir()
            command.write_text(
                f'#!/bin/sh\nexec {sys.executable} -m gristmill.flows.cli.main "$@"\n'
            )
            command.chmod(0o755)
            monkeypatch.setattr(doc_pages, "commands_folder", lambda: command.parent)
            yield
    elif page.name == "extract-with-a-model.md":
        with Endpoint(lambda prompt, before: answer_as_extractor(prompt)) as endpoint:
            monkeypatch.setenv("EXTRACTOR_URL", endpoint.url)
            yield
    elif page.name == "tools-in-rl.md":
        skip_without_sandbox()
        yield
    else:
        yield


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "page",
    [one for one in PAGES if one.name not in NOTHING_TO_RUN],
    ids=lambda page: page.stem,
)
@pytest.mark.usefixtures("what_the_page_needs")
def test_examples_of_the_page_run_as_documented(
    page: Path, project: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "mill"
    # copies modification times, which identify the files
    shutil.copytree(project, folder)
    if page.name == "dask.md":
        shutil.copy(tmp_path / "cluster" / "scheduler.json", folder)
    assert run_page(page, folder) >= 1


FORMATS = ROOT / "docs" / "reference" / "file-formats.md"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_file_formats_page_lists_every_file_of_a_run(
    project: Path,
) -> None:
    assert run_page(FORMATS, project) == 1
    documented_names = [
        re.sub(r"\d{5,}|SOURCE", "*", pattern)
        for pattern in re.findall(r"`([^`\n]+)`", FORMATS.read_text())
    ]
    patterns = {pattern.removeprefix("data/") for pattern in documented_names}
    store, unknown = project / "gristmill-store", []
    for stage in (
        "ingest",
        "filter",
        "dedup",
        "tokenizer",
        "tokenize",
        "mix",
        "pretrain",
    ):
        (output,) = (
            path for path in (store / stage).iterdir() if path.name.startswith("mill--")
        )
        for path in output.rglob("*"):
            name = str(path.relative_to(output)).removeprefix("data/")
            parent_folders = {f"{folder}/" for folder in Path(name).parents}
            if (
                path.is_file()
                and not parent_folders & patterns
                and not any(
                    fnmatch.fnmatch(name, pattern)
                    or fnmatch.fnmatch(Path(name).name, pattern)
                    for pattern in patterns
                )
            ):
                unknown.append(f"{stage}: {name}")
    assert unknown == []


@pytest.mark.parametrize(
    "page", [HOW_TO / "README.md", *PAGES], ids=lambda page: page.stem
)
def test_every_block_of_the_page_has_a_test_mark(page: Path) -> None:
    text = page.read_text()
    assert [block["text"] for block in MARKED.finditer(text)] == [
        block_text for _, block_text in BLOCK.findall(text)
    ]
    marks = [block["mark"] for block in MARKED.finditer(text)]
    assert (page.name in NOTHING_TO_RUN) == (
        not any(mark.startswith("run") for mark in marks)
    )


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("which architecture", "which-architectures.md"),
        ("chat template", "chat-template.md"),
        ("trained on", "chat-template.md"),
        ("train longer", "train-longer.md"),
        ("reach ui", "reach-the-ui.md"),
        ("free disk space", "free-disk-space.md"),
        ("source too small", "source-too-small.md"),
        ("data set hugging face hub", "hub.md"),
        ("fine-tune hugging face hub", "tune-a-hub-model.md"),
    ],
)
def test_search_for_a_question_finds_its_page(words: str, page: str) -> None:
    """The site's search ranks words in titles first; a page's question is right below
    its title.
    """
    openings = {
        path.name: "\n".join(path.read_text().split("\n\n")[:2]).lower()
        for path in PAGES
    }
    assert page in {
        name
        for name, text in openings.items()
        if all(word in text for word in words.split())
    }


def test_index_page_lists_every_page() -> None:
    text = (HOW_TO / "README.md").read_text()
    assert [
        page.name for page in PAGES if f"]({page.relative_to(HOW_TO)})" not in text
    ] == []
