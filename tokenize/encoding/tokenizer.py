"""Stage `tokenizer`: a vocabulary learnt from a sample of the documents, or any
tokenizer.json.

Output: tokenizer.json, tokenizer_config.json, chat_template.jinja (the files of
transformers' AutoTokenizer) and token_bytes.npy (uint16 per id: UTF-8 bytes of text per
token, 0 for special tokens).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NotRequired, TypedDict

import numpy as np

from gristmill.core.files import (
    array_bytes,
    as_path,
    find_json,
    sha256_file,
    write_bytes,
    write_json,
    write_text,
)
from gristmill.core.stage_context import Context
from gristmill.mixtures.schema import tokenizer as sections
from gristmill.tokenize.chat_template import (
    CHAT_TEMPLATE,
    END_OF_TEXT,
    PAD,
    SPECIAL_TOKENS,
    TemplateRefusedError,
    check_template,
)
from gristmill.tokenize.encoding.bpe import train
from gristmill.tokenize.encoding.pretokens import byte_characters
from gristmill.tokenize.packed_files import DTYPES, TokenizerEntry, dtype_name

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer


TOKENIZER_FILE, TOKENIZER_CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
PAD_NAMES = (PAD, "<pad>", "[PAD]", "<|finetune_right_pad_id|>", "<|padding|>")
BLANK = "\u2581"
"""SentencePiece's character for a blank (Kudo and Richardson 2018)."""
UNBOUNDED_LENGTH = 10**9
"""The model limits the length of a text, not the tokenizer."""


@dataclass(frozen=True)
class TextTokenizer:
    """Tokenizer for documents: text that spells a special token is encoded as text.

    Attributes:
        tokenizer: the `tokenizers` object; encodes special tokens as text, adds
            nothing.
        vocab_size: one above the largest id.
        special_ids: special token -> id.
        eos: id that ends a document.
        pad: id that fills a row (`eos` if the tokenizer has no other).
        token_bytes: uint16 of shape (vocab_size,), see `count_token_bytes`.
        sha256: of tokenizer.json.
    """

    tokenizer: Tokenizer
    vocab_size: int
    special_ids: Mapping[str, int]
    eos: int
    pad: int
    token_bytes: np.ndarray
    sha256: str

    @property
    def dtype(self) -> np.dtype:
        """Type of ids in files, little-endian."""
        return DTYPES[dtype_name(self.vocab_size)]

    def described(self) -> TokenizerEntry:
        """Description of the tokenizer in a packed set."""
        return {
            "vocab_size": self.vocab_size,
            "eos": self.eos,
            "pad": self.pad,
            "sha256": self.sha256,
        }

    def encode(self, texts: Sequence[str]) -> list[Encoding]:
        """Encode documents; `.ids` of a result never contains a special id (no
        character offsets).
        """
        return self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        """Decode the tokens of a document, with special tokens spelt out."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)


class TokenizerRecipe(TypedDict):
    """Recipe of the stage."""

    tokenizer: dict[str, object]
    """The section (`mixtures.schema.tokenizer.Tokenizer`)."""
    sources: list[str]
    """Names, in the manifest's order."""
    seed: int
    published: NotRequired[bool]
    """True if a model is trained further that was published with the external
    tokenizer.
    """


@dataclass(frozen=True)
class TokenizerSummary:
    """Summary of the stage.

    Attributes:
        vocab_size: one above the largest id.
        sha256: of tokenizer.json.
        eos: id that ends a document.
        pad: id that fills a row.
        external: whether it was copied.
        pretokenizer: of a learnt tokenizer.
        sample_bytes: text of each source that it was learnt from.
        bytes_per_token: of other text of each source; None without tokens.
    """

    vocab_size: int
    sha256: str
    eos: int
    pad: int
    external: bool
    pretokenizer: str | None
    sample_bytes: Mapping[str, int]
    bytes_per_token: Mapping[str, float | None]


def run(
    inputs: Mapping[str, Path], config: TokenizerRecipe, out: Path, context: Context
) -> TokenizerSummary:
    """Learn a tokenizer, or copy an external one; the module lists the output.

    Args:
        inputs: `ingest` and the annotating stages; empty for an external tokenizer.
        config: settings and sources.
        out: output folder.
        context: where to run.

    Raises:
        TokenizerError: the external tokenizer.json cannot be used.
        gristmill.tokenize.encoding.vocabulary_sample.SampleError: the sample has no
            text.
        gristmill.tokenize.encoding.bpe.VocabularyError: the requested vocabulary
            cannot be learnt.
    """
    from gristmill.tokenize.encoding.vocabulary_sample import (
        TokenizerSample,
        draw_sample,
    )

    section = sections.Tokenizer.model_validate(config["tokenizer"])
    os.environ.setdefault("RAYON_NUM_THREADS", str(context.beam.workers))
    own_template = read_template(section)
    template = own_template or CHAT_TEMPLATE
    sample = TokenizerSample({}, {})
    if section.path is not None:
        tokenizer = read_external(
            as_path(section.path),
            section.special_tokens,
            own_template=own_template is not None,
            end_of_text=section.end_of_text,
        )
    else:
        sample = draw_sample(
            inputs,
            config["sources"],
            section.sample_bytes,
            section.weights,
            config["seed"],
            context,
        )
        tokenizer = train(
            sample,
            section.vocab_size,
            section.pretokenizer,
            section.special_tokens,
        )
    check(tokenizer, template, section)
    if section.path is None and tokenizer.get_vocab_size() < section.vocab_size:
        context.warn(
            f"the sample holds only {tokenizer.get_vocab_size()} of the "
            f"{section.vocab_size} tokens asked for; the vocabulary is smaller "
            "than tokenizer.vocab_size, which changes nothing else"
        )
    published = None
    if section.path is not None and config.get("published"):
        published = configured_tokens(as_path(section.path).parent)
    write_tokenizer(tokenizer, out, template, section.end_of_text, published)
    written = for_documents(tokenizer, out)
    bytes_per_token = dict[str, float | None]()
    for source, texts in sample.measure.items():
        number = sum(len(encoding.ids) for encoding in written.encode(texts))
        bytes_per_token[source] = (
            round(_text_bytes(texts) / number, 4) if number else None
        )
    return TokenizerSummary(
        vocab_size=written.vocab_size,
        sha256=written.sha256,
        eos=written.eos,
        pad=written.pad,
        external=section.path is not None,
        pretokenizer=None if section.path else section.pretokenizer,
        sample_bytes={
            source: _text_bytes(texts) for source, texts in sample.learn.items()
        },
        bytes_per_token=bytes_per_token,
    )


def read_template(section: sections.Tokenizer) -> str | None:
    """Read the chat template of a manifest; None if it has none.

    Raises:
        TokenizerError: its file cannot be read.
    """
    if section.chat_template_path is None:
        return section.chat_template
    try:
        return as_path(section.chat_template_path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(
            f"tokenizer.chat_template_path: {section.chat_template_path} cannot be "
            f"read as text: {error}"
        ) from error


def check(tokenizer: Tokenizer, template: str, section: sections.Tokenizer) -> None:
    """Check that a template can write conversations with a tokenizer.

    Raises:
        TokenizerError: it cannot.
    """
    eos, pad = end_and_pad(tokenizer, section.end_of_text)
    is_published = section.path is not None and template == published_template(
        as_path(section.path).parent
    )
    try:
        check_template(
            template,
            None if is_published else special_ids(tokenizer),
            eos_token=eos,
            pad_token=pad,
            bos_token=eos,
        )
    except TemplateRefusedError as error:
        raise TokenizerError(f"tokenizer.chat_template: {error}") from error


def special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Special token -> id."""
    return {
        token.content: number
        for number, token in tokenizer.get_added_tokens_decoder().items()
        if token.special
    }


def end_and_pad(
    tokenizer: Tokenizer, end_of_text: str | None
) -> tuple[str | None, str | None]:
    """Tokens that end a text (by default the first of END_OF_TEXT_NAMES in the
    vocabulary) and that fill a row.
    """
    eos = end_of_text or first_known(tokenizer, END_OF_TEXT_NAMES)
    return eos, first_known(tokenizer, PAD_NAMES) or eos


def write_tokenizer(
    tokenizer: Tokenizer,
    out: Path,
    template: str = CHAT_TEMPLATE,
    end_of_text: str | None = None,
    published: Mapping[str, str] | None = None,
) -> None:
    """Write the four files of the stage.

    `bos_token`, which templates may write in front of a conversation, is that of the
    published model, or the end of text, which documents follow in a packed set.

    Args:
        tokenizer: the vocabulary.
        out: folder of the files.
        template: of conversations.
        end_of_text: the token that ends a text; by default the first of
            END_OF_TEXT_NAMES in the vocabulary.
        published: tokens of a published model by their names in its
            tokenizer_config.json; None for a model that is trained from scratch.
    """
    eos, pad = end_and_pad(tokenizer, end_of_text)
    bos = eos if published is None else published.get("bos_token")
    write_json(
        out / TOKENIZER_CONFIG_FILE,
        {
            **({"bos_token": bos} if bos else {}),
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": eos,
            "pad_token": pad,
            "model_max_length": UNBOUNDED_LENGTH,
            "clean_up_tokenization_spaces": False,
        },
    )
    write_text(out / TEMPLATE_FILE, template)
    write_bytes(out / "token_bytes.npy", array_bytes(count_token_bytes(tokenizer)))
    write_text(out / TOKENIZER_FILE, tokenizer.to_str(pretty=True))


def load(folder: Path) -> TextTokenizer:
    """Load a tokenizer for documents from a committed `tokenizer` stage or an exported
    model's folder.

    Raises:
        TokenizerError: it has no token that ends a text.
    """
    from tokenizers import Tokenizer

    text = (folder / TOKENIZER_FILE).read_text(encoding="utf-8")
    return for_documents(Tokenizer.from_str(text), folder)


def for_documents(tokenizer: Tokenizer, folder: Path) -> TextTokenizer:
    """Set up the tokenizer of a folder's tokenizer.json as one for documents.

    Raises:
        TokenizerError: it has no token that ends a text.
    """
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    eos, pad = map(tokenizer.token_to_id, read_end_and_pad(folder, tokenizer))
    # both are in the vocabulary
    assert eos is not None
    assert pad is not None
    counted = folder / "token_bytes.npy"
    if counted.exists():
        with counted.open("rb") as stream:
            token_bytes = np.load(stream)
    else:
        # folders of external tokenizers lack the file
        token_bytes = count_token_bytes(tokenizer)
    return TextTokenizer(
        tokenizer,
        len(token_bytes),
        special_ids(tokenizer),
        eos,
        pad,
        token_bytes,
        sha256_file(folder / TOKENIZER_FILE),
    )


def read_end_and_pad(folder: Path, tokenizer: Tokenizer) -> tuple[str, str]:
    """Tokens that end a text and that fill a row: `eos_token` of a folder's
    tokenizer_config.json ends one if it is in the vocabulary.

    Raises:
        TokenizerError: no token ends a text.
    """
    token = configured_tokens(folder).get("eos_token", "")
    is_known = tokenizer.token_to_id(token) is not None
    eos, pad = end_and_pad(tokenizer, token if is_known else None)
    if eos is None or pad is None:
        raise TokenizerError(
            f"{folder / TOKENIZER_FILE} has no token that ends a text; run the "
            "tokenizer stage again"
        )
    return eos, pad


def configured_tokens(folder: Path) -> dict[str, str]:
    """Special tokens in a folder's tokenizer_config.json by their names (`bos_token`,
    `eos_token`), which transformers passes to templates; empty without the file.
    """
    tokens: dict[str, str] = {}
    for name, token in find_json(folder / TOKENIZER_CONFIG_FILE, {}).items():
        if not name.endswith("_token"):
            continue
        # transformers writes a token with its flags
        text = token["content"] if isinstance(token, dict) else token
        if isinstance(text, str) and text:
            tokens[name] = text
    return tokens


def published_template(folder: Path) -> str | None:
    """Chat template of a folder that transformers loads, the default of several; None
    without a template.
    """
    file = folder / TEMPLATE_FILE
    if file.exists():
        return file.read_text(encoding="utf-8")
    template = find_json(folder / TOKENIZER_CONFIG_FILE, {}).get("chat_template")
    if isinstance(template, list):
        by_name = {entry.get("name"): entry["template"] for entry in template}
        template = by_name.get("default")
    return template or None


def read_prompt_tokenizer(folder: Path, follows_end: bool | None) -> Tokenizer:
    """Read the tokenizer of a folder so that `encode(text)` begins with what stood
    before each text when the model was trained.

    Args:
        folder: of the tokenizer stage, or of an exported model.
        follows_end: True or False for a model that was trained here, on texts that
            follow an end of text or nothing; None for a published one, whose
            tokenizer.json says what is added.

    Raises:
        TokenizerError: no token of a model that was trained here ends a text.
    """
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    tokenizer = Tokenizer.from_str(
        (folder / TOKENIZER_FILE).read_text(encoding="utf-8")
    )
    if follows_end is not None:
        end, _ = read_end_and_pad(folder, tokenizer)
        start = [(end, tokenizer.token_to_id(end))] if follows_end else []
        before = [token for token, _ in start]
        tokenizer.post_processor = TemplateProcessing(
            single=[*before, "$A"],
            pair=[*before, "$A", *before, "$B"],
            special_tokens=start,
        )
    return tokenizer


def count_token_bytes(tokenizer: Tokenizer) -> np.ndarray:
    """UTF-8 bytes of text per token: uint16 of shape (vocab_size,).

    Byte-level tokens spell one byte per character. SentencePiece tokens write a blank
    as U+2581 and unknown bytes as <0xAB>. Special tokens and unused ids count 0.
    """
    byte_level = _is_byte_level(tokenizer)
    added = tokenizer.get_added_tokens_decoder()
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    sizes = np.zeros(max(vocabulary.values()) + 1, np.uint16)
    for token, number in vocabulary.items():
        if number in added:
            sizes[number] = 0 if added[number].special else len(token.encode())
        elif byte_level:
            sizes[number] = len(token)
        elif len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            sizes[number] = 1
        else:
            sizes[number] = len(token.replace(BLANK, " ").encode())
    return sizes


def word_edges(tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Masks of the ids that begin a word, and of the ids followed by one: bool of shape
    (vocab_size,) each.

    Words are separated by blanks and line breaks, which belong to the following word. A
    token begins a word if it begins with a blank or, in a WordPiece vocabulary, has no
    `##` prefix; special tokens belong to no word.
    """
    prefix = getattr(tokenizer.model, "continuing_subword_prefix", None)
    blanks = {BLANK, " ", "\t", "\n", "\r"}
    if _is_byte_level(tokenizer):
        characters = byte_characters()
        blanks = {characters[byte] for byte in range(0x80) if chr(byte).isspace()}
    special = tokenizer.get_added_tokens_decoder()
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    begins, ends = np.ones((2, max(vocabulary.values()) + 1), bool)
    for token, number in vocabulary.items():
        if number in special:
            continue
        begins[number] = not token.startswith(prefix) if prefix else token[:1] in blanks
        ends[number] = not prefix and token[-1:] in blanks and not set(token) <= blanks
    return begins, ends


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    """Return whether tokens spell one byte per character."""
    return "ByteLevel(" in f"{tokenizer.pre_tokenizer!r} {tokenizer.decoder!r}"


def _text_bytes(texts: Sequence[str]) -> int:
    return sum(len(text.encode()) for text in texts)


END_OF_TEXT_NAMES = (
    END_OF_TEXT,
    "</s>",
    "<|end_of_text|>",
    "<eos>",
    "<|eot_id|>",
    "[EOS]",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)
"""End-of-text tokens of published tokenizers: GPT-2 and NeoX, Llama 2, Llama 3, Gemma,
Llama 3 Instruct, others, DeepSeek.
"""


class TokenizerError(ValueError):
    """An unusable tokenizer.json, or text that it cannot encode."""


def read_external(
    path: Path,
    special_tokens: Sequence[str] = (),
    own_template: bool = False,
    end_of_text: str | None = None,
) -> Tokenizer:
    """Read an external tokenizer.json and append the special tokens that it lacks.

    Args:
        path: the file.
        special_tokens: those of the manifest.
        own_template: the manifest has its own chat template, so the default template's
            tokens are not needed.
        end_of_text: the manifest's token that ends a text.

    Raises:
        TokenizerError: it does not parse, has no token that ends a text, or has a plain
            token named as special.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:
        # the library raises bare Exception for every malformed file
        raise TokenizerError(
            f"tokenizer.path: {path} is not a tokenizer.json that the tokenizers "
            f"library reads: {error}"
        ) from error
    special = special_ids(tokenizer)
    if end_of_text is not None and end_of_text not in special:
        raise TokenizerError(
            f"tokenizer.end_of_text: {end_of_text!r} is not a special token of "
            f"{path}; it has {', '.join(sorted(special))}"
        )
    if end_of_text is None and first_known(tokenizer, END_OF_TEXT_NAMES) is None:
        raise TokenizerError(
            f"tokenizer.path: {path} has none of {', '.join(END_OF_TEXT_NAMES)}; "
            "name the token that ends a text in "
            f"tokenizer.end_of_text (special tokens: {', '.join(sorted(special))})"
        )
    required_tokens = [*(() if own_template else SPECIAL_TOKENS[2:]), *special_tokens]
    for token in special_tokens:
        if token not in special and tokenizer.token_to_id(token) is not None:
            raise TokenizerError(
                f"tokenizer.special_tokens: {token!r} is a plain token of {path}, "
                "which a text could become; write another like <|name|>"
            )
    if missing := [
        token for token in required_tokens if tokenizer.token_to_id(token) is None
    ]:
        tokenizer.add_special_tokens(missing)
    return tokenizer


def first_known(tokenizer: Tokenizer, names: Sequence[str]) -> str | None:
    """First of the names that is a token of the tokenizer, or None."""
    return next(
        (name for name in names if tokenizer.token_to_id(name) is not None), None
    )
