"""Reservations of rights that the texts of a site and the metadata of a page state."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache

from protego import Protego

HELD_TEXTS = 1024
"""Parsed texts that a worker holds."""
TRAINING_USES = ("train-genai", "train-ai")
"""Categories of AIPREF's vocabulary, the narrower one first: its preference counts."""
VERBS = {True: "Allow", False: "Disallow", None: "#"}
"""Preference on training -> rule of a robots.txt."""


parse_robots = lru_cache(HELD_TEXTS)(Protego.parse)


def disallowed_agents(text: str, url: str, agents: Sequence[str]) -> str | None:
    """Agents that may not fetch a page, separated by commas, or `all agents`; None if
    all may.
    """
    robots = parse_robots(text)
    disallowed = [agent for agent in agents if not robots.can_fetch(url, agent)]
    if len(disallowed) == len(agents) > 1:
        return "all agents"
    return ", ".join(disallowed) or None


def training_preference(usage: str) -> bool | None:
    """Preference on training of a Content-Usage value, such as `train-ai=n, search=y`:
    True allows it, None does not say.
    """
    items = (item.partition(";")[0].partition("=") for item in usage.split(","))
    preferences = {name.strip().lower(): value.strip() for name, _, value in items}
    for use in TRAINING_USES:
        if preferences.get(use) in ("y", "n"):
            return preferences[use] == "y"
    return None


@lru_cache(HELD_TEXTS)
def usage_as_robots(text: str) -> str:
    """Rewrite a robots.txt whose Content-Usage rules take the place of its other rules:
    `Content-Usage: /path train-ai=n` becomes `Disallow: /path`, so that groups and
    paths match as RFC 9309 says.
    """
    lines = []
    for line in text.splitlines():
        name, _, value = (
            part.strip() for part in line.partition("#")[0].partition(":")
        )
        if name.lower() == "user-agent":
            lines.append(line)
        elif name.lower() == "content-usage":
            rule = value if value.startswith("/") else f"/ {value}"
            path, _, usage = rule.partition(" ")
            lines.append(f"{VERBS[training_preference(usage)]}: {path}")
    return "\n".join(lines)


def reserved_usage(
    header: str | None, robots: str | None, url: str, agents: Sequence[str]
) -> str | None:
    """Place of a Content-Usage that reserves a page from training, or None."""
    if header is not None and training_preference(header) is False:
        return f"header: {header}"
    if robots is None or "content-usage" not in robots.lower():
        return None
    reserved = disallowed_agents(usage_as_robots(robots), url, agents)
    return None if reserved is None else f"robots.txt: {reserved}"


def directives_in(value: str, directives: Sequence[str]) -> str | None:
    """Directives that a tag or header for robots has, separated by commas; None if it
    has none.
    """
    words = re.findall(r"[a-z]+", value.lower())
    return ", ".join(name for name in directives if name in words) or None


def page_reservation(metadata: Mapping[str, str]) -> tuple[str, bool] | None:
    """Place of the TDM reservation that a page states, and True if it reserves its
    rights; a meta tag precedes a header (TDMRep, section 6). None if it states none.
    """
    for key, place in (("meta_tdm_reservation", "meta"), ("tdm_reservation", "header")):
        value = metadata.get(key, "").strip()
        if value in ("0", "1"):
            return place, value == "1"
    return None


def site_reservation(text: str, url: str) -> str | None:
    """Location in a tdmrep.json whose rule reserves a page, or None. The first rule that
    matches counts.
    """
    for location, is_reserved in parse_tdmrep(text):
        if not parse_robots(f"User-agent: *\nDisallow: {location}").can_fetch(url, "*"):
            return location if is_reserved else None
    return None


@lru_cache(HELD_TEXTS)
def parse_tdmrep(text: str) -> list[tuple[str, bool]]:
    """Rules of a tdmrep.json: location, and True if it is reserved. Anything else in the
    file is ignored, as crawlers do with a malformed robots.txt.
    """
    try:
        rules = json.loads(text)
    except ValueError:
        return []
    return [
        (str(rule["location"]), str(rule.get("tdm-reservation")) == "1")
        for rule in (rules if isinstance(rules, list) else [rules])
        if isinstance(rule, dict) and "location" in rule
    ]
