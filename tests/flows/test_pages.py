"""The documentation as a whole: its links, its pictures, and the files of `make
docs`.
"""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from benchmarks.checkout import ROOT
from gristmill.dataprep.runners.worker_bootstrap import SUBPACKAGES
from gristmill.flows.cli.main import app
from tests.commands import GRISTMILL, finished

PAGES = sorted(
    [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "deploy").rglob("*.md"),
    ]
)
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)")
ELSEWHERE = re.compile(r"\w+://|mailto:")


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings on a forge: lower case, without
    punctuation, hyphens for spaces.
    """
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        for heading in headings
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_resolve(page: Path) -> None:
    text = CODE.sub("", FENCED.sub("", page.read_text()))
    broken_links = []
    for target in LINK.findall(text):
        if ELSEWHERE.match(target):
            continue
        name, _, anchor = target.partition("#")
        target_path = (page.parent / name).resolve() if name else page
        if not target_path.exists() or (anchor and anchor not in anchors(target_path)):
            broken_links.append(target)
    assert broken_links == []


def test_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    assert re.search(r"^make demo .*\nmake test ", text, re.MULTILINE)
    assert "docs/pictures/chain.svg" in text
    assert "docs/pictures/terminal.svg" in text


@pytest.mark.slow
def test_committed_pictures_are_up_to_date(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / ".ci" / "pictures.py", tmp_path], check=True)
    drawn = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert len(drawn) >= 1
    # make pictures
    assert {
        name: (ROOT / "docs" / "pictures" / name).read_text() for name in drawn
    } == drawn
    # pictures load nothing from other servers
    for path in (ROOT / "docs" / "pictures").glob("*.svg"):
        assert (
            re.search(r"(href=|src=|url\()[\"']?https?:", path.read_text()) is None
        ), path.name


@pytest.mark.slow
def test_site_contains_every_page_and_command(tmp_path: Path) -> None:
    out = tmp_path / "pages"
    subprocess.run([sys.executable, ROOT / ".ci" / "site.py", out], check=True)
    help_text = finished(
        [*GRISTMILL, "--help"],
        env={"PATH": "", "COLUMNS": "200"},
    ).stdout
    commands = re.findall(r"^  ([a-z][a-z-]*)  +[A-Z]", help_text, re.MULTILINE)
    assert len(commands) > 25
    page = (out / "reference" / "commands.md").read_text()
    assert [name for name in commands if f"## gristmill {name}" not in page] == []
    page_list = (out / "llms.txt").read_text()
    places = [
        str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")
    ]
    assert [place for place in places if f"]({place}): " not in page_list] == []
    papers = (out / "papers.md").read_text()
    assert re.search(r"`DedupSemantic` mixtures/steps/dedup_semantic.py:\d+", papers)
    bundle = (tmp_path / "gristmill.md").read_text()
    assert "<!-- guide/manifest.md -->" in bundle
    assert "<!-- manifest/README.md -->" in bundle


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "page"),
    [
        ("rules_reference", "reference/rules.md"),
        ("model_families", "reference/model-families.md"),
        ("paper_index", "papers.md"),
        ("performance", "performance.md"),
    ],
)
def test_generated_reference_pages_are_up_to_date(script: str, page: str) -> None:
    command = [sys.executable, ROOT / ".ci" / f"{script}.py"]
    generated = finished(command).stdout
    assert (ROOT / "docs" / page).read_text() == generated  # make reference


def test_file_format_tables_match_schemas() -> None:
    text = (ROOT / "docs" / "reference" / "file-formats.md").read_text()
    tables = re.findall(
        r"<!-- schema: (\S+) (\S+) -->\n\|.*\n\|.*\n((?:\|.*\n)+)", text
    )
    assert len(tables) == 5
    for module, name, rows in tables:
        kinds = {
            field.name: re.sub(r"<values=(\w+).*", r"<\1>", str(field.type))
            for field in getattr(importlib.import_module(module), name)
        }
        assert (
            dict(re.findall(r"^\| `(\w+)` \| (\S+) \|", rows, re.MULTILINE)) == kinds
        ), name


def test_site_requests_nothing_from_other_servers() -> None:
    text = (ROOT / ".ci" / "mkdocs.yml").read_text()
    assert re.search(r"https?://", text) is None
    (script,) = re.findall(r"polyfills: \[(\S+)\]", text)
    # this word tells the plugin not to add its own polyfill
    assert "iframe-worker" in script
    assert (ROOT / "docs" / script).exists()


def test_every_paper_has_a_title() -> None:
    rows = re.findall(
        r"^\| (.+? \d{4}) \| (.*?) \| ",
        (ROOT / "docs" / "papers.md").read_text(),
        re.MULTILINE,
    )
    assert len(rows) > 100
    assert [name for name, title in rows if not title] == []  # .ci/papers.yaml


def said_by(path: Path) -> list[str]:
    """Return every string of a file, with `...` for its variables."""
    texts = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.append(node.value)
        elif isinstance(node, ast.JoinedStr):
            texts.append(
                "".join(
                    str(part.value) if isinstance(part, ast.Constant) else "..."
                    for part in node.values
                )
            )
    return texts


@pytest.mark.slow
def test_every_troubleshooting_message_exists_in_the_code() -> None:
    quoted = re.findall(
        r"^> (.*)$", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE
    )
    assert len(quoted) > 15
    texts = [
        text
        for folder in SUBPACKAGES
        for path in (ROOT / folder).rglob("*.py")
        for text in said_by(path)
    ]
    assert [
        message for message in quoted if not any(message in text for text in texts)
    ] == []


def command_lines(text: str) -> list[str]:
    """Return the lines of a page's blocks that call gristmill, without comments and
    shell operators.
    """
    lines = [line for block in FENCED.findall(text) for line in block.splitlines()]
    stripped_lines = [re.sub(r"^\$ ", "", line.strip()) for line in lines]
    return [
        re.split(r" (?:# |\|\|? |&& |> )", line)[0]
        for line in stripped_lines
        if line.startswith("gristmill ")
    ]


def options_of(words: list[str]) -> set[str]:
    """Return the options of the command named by the words."""
    command: Any = get_command(app)
    context = command.context_class(command, info_name="gristmill")
    while hasattr(command, "list_commands"):
        if words[0].startswith("-"):
            break
        name = words.pop(0)
        assert name in command.list_commands(context), name
        command = command.get_command(context, name)
        context = command.context_class(command, info_name=name, parent=context)
    return {
        option
        for parameter in command.get_params(context)
        for option in (*parameter.opts, *parameter.secondary_opts)
    }


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_of_a_page_has_valid_options(page: Path) -> None:
    wrong = []
    for line in command_lines(page.read_text()):
        try:
            words = shlex.split(line)[1:]
        except ValueError:  # a string that spans several lines
            continue
        if not words or not re.fullmatch(r"[a-z-]+", words[0]):
            continue
        options = options_of(words)
        wrong += [
            (line, word)
            for word in words
            if word.startswith("--")
            and len(word) > 2
            and word.partition("=")[0] not in options
        ]
    assert wrong == []
