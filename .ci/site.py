"""Write the pages of the documentation's site, llms.txt and one bundle of all pages: `.ci/site.py build/pages`.

The pages are those of docs/, CONTRIBUTING.md, the pages of deploy/, and the reference of the command line. The
index of papers has lines of the code here, which docs/papers.md has not, since they move. A link to a file that has no
page becomes one into the repository, if pyproject.toml says where that is, or plain text.
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
    sources = {path: path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")}
    sources |= {path: path.relative_to(ROOT) for path in [ROOT / "CONTRIBUTING.md", *(ROOT / "deploy").rglob("*.md")]}
    for path, place in sources.items():
        (out / place).parent.mkdir(parents=True, exist_ok=True)
        text = paper_index(lines=True) if place == Path("papers.md") else path.read_text()
        (out / place).write_text(outside_code(text, lambda text, at=path: relinked(text, at, sources)))
    (out / "reference").mkdir(exist_ok=True)
    (out / "reference" / "commands.md").write_text(reference())
    (out / "reference" / "recipes.md").write_text(recipes())
    places = [str(place) for place in sources.values()] + ["reference/commands.md", "reference/recipes.md"]
    nav = with_all(places)
    write_configuration(out, nav)
    write_bundle(out, nav)


def recipes() -> str:
    """The page of the named recipes: each with what it says of itself, how it is run, and its manifest."""
    parts = [
        "# Recipes\n\nManifests that follow published work: `gristmill run recipe:NAME`, with your paths as "
        "options `--set`, or `gristmill new --recipe NAME` for a copy to change. Written from the recipes.\n"
    ]
    for path in sorted((ROOT / "mixtures" / "recipes").glob("*.yaml")):
        name, text = path.stem, path.read_text()
        comment = re.match(r"(?:#.*\n)+", text)
        said = re.sub(r"(?m)^# ?", "", comment[0]) if comment else ""
        body = text[len(comment[0]) :] if comment else text
        parts.append(f"## {name}\n\n{re.sub(chr(10) + '- ', chr(10) * 2 + '- ', said, count=1)}\n```yaml\n{body}```\n")
    return "\n".join(parts)


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """The text, with everything but its fenced blocks changed."""
    parts = FENCE.split(text)
    return "".join(part if part.startswith("```") else change(part) for part in parts)


def relinked(text: str, path: Path, sources: dict[Path, Path]) -> str:
    """The text of the file `path`, with the links that leave docs/ turned to where the site has what they name."""
    place = sources[path]

    def target(match: re.Match[str]) -> str:
        name, _, anchor = match["target"].partition("#")
        if "://" in name or name.startswith("mailto:") or not name:
            return match[0]
        found = (path.parent / name).resolve()
        if found in sources:
            name = os.path.relpath(sources[found], place.parent)
        elif not found.is_relative_to(ROOT / "docs"):
            if not found.exists():
                raise SystemExit(f"{path.relative_to(ROOT)}: {name} does not exist")
            if (url := SUMMARY.get("urls", {}).get("Source")) is None:
                return match["text"]
            name = f"{url}/blob/main/{found.relative_to(ROOT)}"
        return f"[{match['text']}]({name}{'#' + anchor if anchor else ''})"

    return LINK.sub(target, text)


def with_all(places: list[str]) -> list[Any]:
    """The navigation: `FOLDER/*` stands for what it names of a folder nowhere else, and the rest ends the guide."""
    nav: list[dict[str, Any]] = read_configuration()["nav"]
    named = {place for _, place in entries(nav)}
    gone = {place for place in named if not place.endswith("/*")} - set(places)
    if gone:
        raise SystemExit(f".ci/mkdocs.yml names pages that are not there: {', '.join(sorted(gone))}")
    left = sorted(set(places) - named)
    nav = [with_folders(group, left) for group in nav]
    next(group for group in nav if "Guide" in group)["Guide"] += [
        place for place in left if f"{os.path.dirname(place)}/*" not in named
    ]
    return nav


def with_folders(entry: Any, left: list[str]) -> Any:
    """A part of the navigation, in which `FOLDER/*` is replaced by the pages that are left of that folder."""
    if isinstance(entry, dict):
        return {name: with_folders(value, left) for name, value in entry.items()}
    if isinstance(entry, list):
        return [
            one
            for part in entry
            for one in (
                [place for place in left if os.path.dirname(place) == part[:-2]]
                if isinstance(part, str) and part.endswith("/*")
                else [with_folders(part, left)]
            )
        ]
    return entry


def entries(nav: list[Any]) -> Iterator[tuple[str, str]]:
    """Every page of a navigation: its group, its place."""
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
    """What .ci/mkdocs.yml says; its tags for Python stay what they are."""
    text = (ROOT / ".ci" / "mkdocs.yml").read_text()
    return yaml.safe_load(re.sub(r"!!python/\S+ ", "", text))


def write_configuration(out: Path, nav: list[Any]) -> None:
    """mkdocs.yml, beside the pages, with the whole navigation."""
    settings = (ROOT / ".ci" / "mkdocs.yml").read_text().partition("\nnav:")[0]
    folders = {"docs_dir": out.name, "site_dir": "site", "nav": nav}
    (out.parent / "mkdocs.yml").write_text(f"{settings}\n{yaml.safe_dump(folders, sort_keys=False)}")


def write_bundle(out: Path, nav: list[Any]) -> None:
    """llms.txt, a list of the pages (llmstxt.org), and `gristmill.md`, all of them one after the other."""
    lines = [f"# gristmill\n\n> {SUMMARY['description']}\n", f"All pages in one file: [{COLLECTED}]({COLLECTED})\n"]
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
    (out.parent / COLLECTED).write_text("\n".join(bundle))  # no page of the site: moved there once that is built


def opening(text: str) -> tuple[str, str]:
    """A page's title and the first sentence of its text, without links."""
    heading = re.search(r"^# (.*)$", text, re.MULTILINE)
    paragraphs = re.split(r"\n{2,}", re.sub(r"^```.*?^```$|^<!--.*?-->$", "", text, flags=re.MULTILINE | re.DOTALL))
    prose = next((part.strip() for part in paragraphs if not re.match(r"\s*(?:[#<!|\-+]|$)", part)), "")
    first = LINK.sub(lambda match: match["text"], " ".join(prose.split()))
    sentence = re.split(r"(?<=[.?:])\*{0,2} (?=[A-Z`*])", re.sub(r"^\*[^*]+\* ", "", first))[0]
    return (heading[1] if heading else "").replace("`", ""), sentence


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
