"""Tokenizers that gigatoken encodes exactly as `tokenizers` does, and gigatoken's
settings for them.

gigatoken reads the same tokenizer.json but ignores settings that it does not know, and
its ids then differ from the library's. This module writes its input from settings that
were compared one by one; a tokenizer with any other setting is left to the library.
Special tokens are left out: text that spells one is encoded as text.
"""

from __future__ import annotations

import string
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Literal

import orjson

from gristmill.tokenize.encoding.pretokens import GPT2, byte_characters
from gristmill.tokenize.encoding.tokenizer_json import (
    UNUSUAL_KEYS,
    AddedToken,
    Step,
    TokenizerJson,
    describe,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer


NEVER_TEXT = "\uffff\ufffe"
"""Two noncharacters (Unicode, section 23.7). gigatoken searches for added tokens in a
whole document before splitting it, which loads the document into the cache: with a
token to search for, encoding takes a twentieth less time.
"""


class NotKnownError(ValueError):
    """A tokenizer that only the `tokenizers` library can encode with; the message is
    the reason.
    """


@dataclass(frozen=True)
class Known:
    """Settings of a tokenizer for gigatoken.

    Attributes:
        json: a tokenizer.json.
        byte_level: whether it has character classes (a byte-level BPE), or only words
            between blanks.
        nfc: whether text is normalized.
        first_stand_in: id of the first of `stand_ins`; above all ids of the tokenizer.
        stand_ins: ids of isolated characters that become several ids: gigatoken has a
            single id in place of each.
    """

    json: str
    byte_level: bool
    nfc: bool
    first_stand_in: int
    stand_ins: Sequence[Sequence[int]] = field(default=())


def read_known(tokenizer: Tokenizer) -> Known:
    """Derive gigatoken's settings from a tokenizer.

    Raises:
        NotKnownError: only the library can encode with it; the message is the reason.
    """
    described = describe(tokenizer)
    model = described["model"]
    if model["type"] != "BPE":
        raise NotKnownError(f"its model is {model['type']}")
    for key in UNUSUAL_KEYS:
        if model.get(key):
            raise NotKnownError(f"its model has {key}")
    normalizers = _steps(described["normalizer"], "normalizers")
    byte_level = not model.get("byte_fallback")
    nfc = byte_level and bool(normalizers)
    added = _added_tokens(described, nfc)
    vocabulary = model["vocab"]
    pre_tokenizer = described["pre_tokenizer"]
    added_ids = (token["id"] for token in described["added_tokens"])
    first = max(chain(vocabulary.values(), added_ids)) + 1
    stand_ins: list[list[int]] = []
    if byte_level:
        characters = byte_characters()
        _refuse_missing(
            byte for byte in TEXT_BYTES if characters[byte] not in model["vocab"]
        )
        # Text never becomes a token that is not spelt in bytes, but gigatoken would
        # match it.
        spelt = set(characters)
        vocabulary = {
            token: number
            for token, number in vocabulary.items()
            if token and spelt.issuperset(token)
        }
        if any(step["type"] != "NFC" for step in normalizers):
            raise NotKnownError(f"its normalizer is {_names(normalizers)}")
        pre_tokenizer, digits = _pre_tokenizer(pre_tokenizer)
        if digits:
            cut, stand_ins = _digits_alone(tokenizer, first)
            added = [*added, *cut]
        added = [*added, _plain(first + len(stand_ins), NEVER_TEXT)]
        # the library encodes its documents anyway
        stand_ins = [*stand_ins, [0]] if stand_ins else []
    elif model.get("ignore_merges"):
        raise NotKnownError("its model has byte_fallback and ignore_merges")
    else:
        _refuse_missing(
            byte
            for byte in TEXT_BYTES
            if f"<0x{byte:02X}>" not in vocabulary
            and (byte >= 0x80 or chr(byte) not in vocabulary)
        )
    merges = [
        tuple(merge.split(" ") if isinstance(merge, str) else merge)
        for merge in model["merges"]
    ]
    # A duplicate merge has its later rank in the library and its first in gigatoken.
    last_first = dict.fromkeys(reversed(merges))
    pairs = [
        (left, right)
        for left, right in reversed(last_first)
        if left in vocabulary and right in vocabulary and left + right in vocabulary
    ]
    if len({left + right for left, right in pairs}) < len(pairs):
        # Two merges produce the same token, whose id gigatoken must not use as the
        # rank: repeating the first merge, which is otherwise ignored, prevents that.
        pairs.append(pairs[0])
    specification = {
        "added_tokens": added,
        "normalizer": described["normalizer"],
        "pre_tokenizer": pre_tokenizer,
        "model": {
            "type": "BPE",
            "vocab": vocabulary,
            "merges": pairs,
            "byte_fallback": not byte_level,
            "ignore_merges": bool(model.get("ignore_merges")),
        },
    }
    json = orjson.dumps(specification).decode()
    return Known(json, byte_level, nfc, first, stand_ins)


def _plain(number: int, content: str) -> AddedToken:
    """Added token that is found in text as it is."""
    return {"id": number, "content": content, "special": False, "normalized": False}


def _steps(
    described: Step | None, inside: Literal["normalizers", "pretokenizers"]
) -> list[Step]:
    """Steps of a normalizer or pre-tokenizer."""
    if described is None:
        return []
    if described["type"] != "Sequence":
        return [described]
    return [step for child in described[inside] for step in _steps(child, inside)]


def _names(steps: Sequence[Step]) -> str:
    return " + ".join(
        step["type"]
        + (" with add_prefix_space" if step.get("add_prefix_space") else "")
        for step in steps
    )


TEXT_BYTES = (*range(0xC0), *range(0xC2, 0xF5))
"""Bytes that occur in UTF-8 (RFC 3629, section 3); some vocabularies lack the
others.
"""


def _refuse_missing(missing: Iterator[int]) -> None:
    if number := len(list(missing)):
        raise NotKnownError(f"its vocabulary lacks {number} of the bytes of text")


def _added_tokens(described: TokenizerJson, nfc: bool) -> list[AddedToken]:
    """Added tokens that text can become: all but the special ones.

    Raises:
        NotKnownError: gigatoken would match them at other places than the library.
    """
    special = [
        token["content"] for token in described["added_tokens"] if token["special"]
    ]
    plain = [token for token in described["added_tokens"] if not token["special"]]
    for token in plain:
        content = token["content"]
        for key in ("single_word", "lstrip", "rstrip"):
            if token.get(key):
                raise NotKnownError(f"its added token {content!r} has {key}")
        # NFC must give the same text before and after splitting at the token.
        stays = content.isascii() and not MADE_BY_NFC.intersection(content)
        if token["normalized"] and content[-1:] in COMPOSING:
            stays = False
        if nfc and not stays:
            raise NotKnownError(
                f"its added token {content!r} may be made, or undone, by its normalizer"
            )
    normalized = {token["normalized"] for token in plain}
    if len(normalized) > 1 or (
        True in normalized and described["normalizer"] and not nfc
    ):
        raise NotKnownError("its added tokens are looked for in normalized text")
    contents = {token["content"] for token in plain}
    beginnings: dict[str, str] = {}
    if special:
        for content in contents:
            beginnings |= {content[:end]: content for end in range(1, len(content))}
    # The library does not match an added token within a special one.
    for text in special:
        for begin in range(len(text)):
            tail = text[begin:]
            heads = (tail[:end] for end in range(1, len(tail) + 1))
            part = beginnings.get(tail) if begin else None
            part = part or next((head for head in heads if head in contents), None)
            if part is not None:
                raise NotKnownError(
                    f"its added token {part!r} may be a part of the special token "
                    f"{text!r}"
                )
    return [_plain(token["id"], token["content"]) for token in plain]


MADE_BY_NFC = frozenset("K;`")
"""ASCII that NFC produces from other characters: the Kelvin sign, the Greek question
mark, varia (UnicodeData.txt).
"""
COMPOSING = frozenset("<=>" + string.ascii_letters)
"""ASCII that NFC composes with a following mark: letters, and the signs that a slash
negates.
"""


def _pre_tokenizer(described: Step | None) -> tuple[Step, bool]:
    """Pre-tokenizer of a byte-level BPE for gigatoken, and whether every digit is
    isolated first.

    gigatoken itself refuses unknown patterns.

    Raises:
        NotKnownError: it has steps that gigatoken ignores.
    """
    steps = _steps(described, "pretokenizers")
    *before, last = steps or [Step(type="none")]
    by_regex: Step = {
        "type": "ByteLevel",
        "add_prefix_space": bool(last.get("add_prefix_space", True)),
        "use_regex": True,
    }
    if last["type"] != "ByteLevel" or (before and by_regex["add_prefix_space"]):
        raise NotKnownError(f"its pre-tokenizer is {_names(steps) or 'none'}")
    if last.get("use_regex", True):
        if not before:
            return by_regex, False
        if [step["type"] for step in before] == ["Digits"] and before[0].get(
            "individual_digits"
        ):
            return by_regex, True
    elif before and all(step["type"] == "Split" for step in before):
        for step in before:
            if (
                step["behavior"] != "Isolated"
                or step.get("invert")
                or "Regex" not in step["pattern"]
            ):
                raise NotKnownError(
                    f"its pre-tokenizer splits in another way: {step['behavior']}, "
                    f"invert {bool(step.get('invert'))}, {step['pattern']}"
                )
        if [step["pattern"]["Regex"] for step in before] == [GPT2]:
            return by_regex, False
        return {"type": "Sequence", "pretokenizers": steps}, False
    raise NotKnownError(f"its pre-tokenizer is {_names(steps)}")


def _digits_alone(
    tokenizer: Tokenizer, first: int
) -> tuple[list[AddedToken], list[list[int]]]:
    """Every numeric character as an added token, which gigatoken isolates as `Digits`
    does; `first`: a free id.

    Returns:
        the added tokens, and the ids of those that are several tokens: these have an id
        from `first` on.
    """
    from tokenizers import pre_tokenizers

    # Characters unassigned in Python's Unicode may be numeric in the library's.
    candidates = [
        chr(code)
        for code in range(0x20000)
        if unicodedata.category(chr(code)) in ("Nd", "Nl", "No", "Cn")
    ]
    digits = pre_tokenizers.Digits(individual_digits=True)
    pieces = digits.pre_tokenize_str("a" + "a".join(candidates) + "a")
    numeric = [piece for piece, _ in pieces if len(piece) == 1 and piece != "a"]
    tokens: list[AddedToken] = []
    stand_ins: list[list[int]] = []
    encodings = tokenizer.encode_batch_fast(numeric, add_special_tokens=False)
    for character, encoding in zip(numeric, encodings, strict=True):
        number = encoding.ids[0]
        if len(encoding.ids) > 1:
            number = first + len(stand_ins)
            stand_ins.append(encoding.ids)
        tokens.append(_plain(number, character))
    return tokens, stand_ins
