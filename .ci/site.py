"""Write the pages of the documentation's site, llms.txt and one bundle of all pages:
`.ci/site.py build/pages`.

The pages are those of docs/, CONTRIBUTING.md, the pages of deploy/, and the reference
of the command line. The index of papers has lines of the code here, and none in
docs/papers.md, since they change. A link to a file without a page becomes one into the
repository, if pyproject.toml has its address, or plain text.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml
from cli_reference import reference
from paper_index import page as paper_index

ROOT = Path(__file__).resolve().parents[1]
FENCE = re.compile(r"^(```.*?^```)$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<target>[^)\s]+)\)")
HOME = "README.md"
SUMMARY = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
COLLECTED = "gristmill.md"
NOT_BUNDLED = ("dependencies.md", "patched.md", "CONTRIBUTING.md")


def main(out: Path) -> None:
    """Write everything to an empty folder `out`, and mkdocs.yml beside it."""
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(ROOT / "docs", out)
    sources = {
        path: path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")
    }
    sources |= {
        path: path.relative_to(ROOT)
        for path in [ROOT / "CONTRIBUTING.md", *(ROOT / "deploy").rglob("*.md")]
    }
    for path, place in sources.items():
        (out / place).parent.mkdir(parents=True, exist_ok=True)
        text = (
            paper_index(lines=True) if place == Path("papers.md") else path.read_text()
        )
        (out / place).write_text(
            outside_code(text, lambda text, at=path: relinked(text, at, sources))
        )
    (out / "reference").mkdir(exist_ok=True)
    (out / "reference" / "commands.md").write_text(reference())
    (out / "reference" / "recipes.md").write_text(recipes())
    places = [str(place) for place in sources.values()] + [
        "reference/commands.md",
        "reference/recipes.md",
    ]
    nav = with_all(places)
    write_configuration(out, nav)
    write_bundle(out, nav)


def recipes() -> str:
    """Return the page of the named recipes, each with its own description and its
    manifest.
    """
    parts = [
        "# Recipes\n\nManifests that follow published work: `gristmill run "
        "recipe:NAME`, with your paths as options `--set`, or `gristmill recipes NAME > "
        "mine.yaml` for a copy to change. Written from the recipes.\n"
    ]
    for path in sorted((ROOT / "mixtures" / "recipes").glob("*.yaml")):
        name, text = path.stem, path.read_text()
        comment = re.match(r"(?:#.*\n)*", text)
        assert comment is not None  # it matches everything
        description = re.sub(r"(?m)^# ?", "", comment[0]).replace("\n- ", "\n\n- ", 1)
        parts.append(
            f"## {name}\n\n{description}\n```yaml\n{text[len(comment[0]) :]}```\n"
        )
    return "\n".join(parts)


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """Change a text, except its fenced blocks."""
    parts = FENCE.split(text)
    return "".join(part if part.startswith("```") else change(part) for part in parts)


def relinked(text: str, path: Path, sources: dict[Path, Path]) -> str:
    """Return the text of a file, with links that leave docs/ redirected to pages of the
    site.
    """
    place = sources[path]

    def target(match: re.Match[str]) -> str:
        name, _, anchor = match["target"].partition("#")
        if "://" in name or name.startswith("mailto:") or not name:
            return match[0]
        file = (path.parent / name).resolve()
        if file in sources:
            name = os.path.relpath(sources[file], place.parent)
        elif not file.is_relative_to(ROOT / "docs"):
            if not file.exists():
                raise SystemExit(f"{path.relative_to(ROOT)}: {name} does not exist")
            if (url := SUMMARY.get("urls", {}).get("Source")) is None:
                return match["text"]
            name = f"{url}/blob/main/{file.relative_to(ROOT)}"
        return f"[{match['text']}]({name}{'#' + anchor if anchor else ''})"

    return LINK.sub(target, text)


def with_all(places: list[str]) -> list[Any]:
    """Return the navigation: `FOLDER/*` stands for pages of a folder that it does not
    name, and all others end the guide.
    """
    nav: list[dict[str, Any]] = read_configuration()["nav"]
    named = {place for _, place in entries(nav)}
    missing = {place for place in named if not place.endswith("/*")} - set(places)
    if missing:
        raise SystemExit(
            ".ci/mkdocs.yml names pages that do not exist: "
            f"{', '.join(sorted(missing))}"
        )
    unnamed = sorted(set(places) - named)
    nav = [with_folders(group, unnamed) for group in nav]
    guide = next(group for group in nav if "Guide" in group)["Guide"]
    guide += [place for place in unnamed if f"{os.path.dirname(place)}/*" not in named]
    return nav


def with_folders(entry: Any, unnamed: list[str]) -> Any:
    """Return a part of the navigation, with `FOLDER/*` replaced by the unnamed pages of
    that folder.
    """
    if isinstance(entry, dict):
        return {name: with_folders(value, unnamed) for name, value in entry.items()}
    if not isinstance(entry, list):
        return entry
    parts = []
    for part in entry:
        if isinstance(part, str) and part.endswith("/*"):
            parts += [
                place
                for place in unnamed
                if os.path.dirname(place) == part.removesuffix("/*")
            ]
        else:
            parts.append(with_folders(part, unnamed))
    return parts


def entries(nav: list[Any]) -> Iterator[tuple[str, str]]:
    """Return the group and the place of every page of a navigation."""
    for entry in nav:
        if isinstance(entry, str):
            yield "", entry
            continue
        for name, value in entry.items():
            if isinstance(value, str):
                yield name, value
            else:
                yield from ((name, place) for _, place in entries(value))


def read_configuration() -> dict[str, Any]:
    """Parse .ci/mkdocs.yml, without its tags for Python."""
    text = (ROOT / ".ci" / "mkdocs.yml").read_text()
    return yaml.safe_load(re.sub(r"!!python/\S+ ", "", text))


def write_configuration(out: Path, nav: list[Any]) -> None:
    """Write mkdocs.yml, beside the pages, with the whole navigation."""
    settings = (ROOT / ".ci" / "mkdocs.yml").read_text().partition("\nnav:")[0]
    folders = {"docs_dir": out.name, "site_dir": "site", "nav": nav}
    (out.parent / "mkdocs.yml").write_text(
        f"{settings}\n{yaml.safe_dump(folders, sort_keys=False)}"
    )


def write_bundle(out: Path, nav: list[Any]) -> None:
    """Write llms.txt, a list of the pages (llmstxt.org), and `gristmill.md`, all of
    them one after the other.
    """
    lines = [
        f"# gristmill\n\n> {SUMMARY['description']}\n",
        f"All pages in one file: [{COLLECTED}]({COLLECTED})\n",
    ]
    bundle = []
    for group in nav:
        ((title, pages),) = group.items()
        lines.append(f"## {title}\n")
        for _, place in entries(pages):
            text = (out / place).read_text()
            heading, first = opening(text)
            lines.append(f"- [{heading}]({place}): {first}")
            if place not in NOT_BUNDLED:
                bundle.append(f"<!-- {place} -->\n\n{text.rstrip()}\n")
        lines.append("")
    (out / "llms.txt").write_text("\n".join(lines))
    # not a page of the site: moved there after its build
    (out.parent / COLLECTED).write_text("\n".join(bundle))


def opening(text: str) -> tuple[str, str]:
    """Return a page's title and the first sentence of its text, without links."""
    heading = re.search(r"^# (.*)$", text, re.MULTILINE)
    paragraphs = re.split(
        r"\n{2,}",
        re.sub(r"^```.*?^```$|^<!--.*?-->$", "", text, flags=re.MULTILINE | re.DOTALL),
    )
    prose = next(
        (
            part.strip()
            for part in paragraphs
            if not re.match(r"\s*(?:[#<!|\-+]|$)", part)
        ),
        "",
    )
    first = LINK.sub(lambda match: match["text"], " ".join(prose.split()))
    sentence = re.split(
        r"(?<=[.?:])\*{0,2} (?=[A-Z`*])", re.sub(r"^\*[^*]+\* ", "", first)
    )[0]
    return (heading[1] if heading else "").replace("`", ""), sentence


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
