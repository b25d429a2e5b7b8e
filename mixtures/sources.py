"""The sections `sources` and `ingest`: where documents, or tokens, come from and how they are read."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from gristmill.mixtures.base import Fraction, OutsidePath, Positive, PositiveFloat, Section
from gristmill.mixtures.user_code import Own

INGEST = "ingest"
"""The section and the stage that read the sources: the input that holds the documents."""
GENERATE = "generate"
"""The stage that writes documents of sources, which are read like files."""
IMPORTED = "import_tokens"
"""The stage whose documents have tokens, but no text."""

Format = Literal["auto", "text", "jsonl", "parquet", "arrow", "csv", "html", "warc", "hf"]
TokenFormat = Literal["auto", "megatron", "llmc", "olmo", "memmap", "mds"]
Extractor = Literal["resiliparse", "trafilatura", "none"]


class ExtractOptions(Section):
    """What of a page counts as its text."""

    favor: Literal["balanced", "precision", "recall"] = "balanced"
    """`precision` loses text rather than keep boilerplate (trafilatura alone can); `recall` the other way round
    (resiliparse: all visible text of the page)."""
    tables: bool = True
    """Keep the text of tables."""
    comments: bool = False
    """Keep what readers wrote under an article."""
    links: bool = False
    """Keep the targets of links."""


class OwnReader(Own):
    """A function that reads a file: `read(path)` or `read(stream)` yields its records; see docs/own-readers.md."""

    time_limit_seconds: PositiveFloat = 60.0
    """Processor time that one record may take; one that takes more costs the rest of its file. A function that sleeps
    instead ends at six times that."""


class OwnListing(Own):
    """A function that lists a source's files: their paths or URLs, in an order that never changes."""

    time_limit_seconds: PositiveFloat = 600.0
    """Processor time that the listing may take; waiting, six times that."""


class Paragraphs(Section):
    """Cuts a long text into documents of whole paragraphs."""

    paragraphs: Positive
    """Characters that a document has at least; it ends with the paragraph in which it reaches them."""


class DocumentFiles(Section):
    """Where a source's documents are and how they are read."""

    path: OutsidePath
    """A file, a glob, a folder, an fsspec URL of one of these, `python-docs://` or `python-stdlib://`. The members of a
    tar (`.tar`, `.tgz`, `.tar.gz`, `.tar.zst`, `.tar.bz2`, `.tar.xz`) or zip archive are read like a folder's files.
    Files may be compressed: `.gz`, `.zst`, `.bz2`, `.xz`, `.lz4`. With `list`: what relative paths of the listing are
    relative to, the manifest's folder if absent."""
    list: OwnListing | None = None
    """A function of yours that lists the files, instead of all that `path` names. It runs when the manifest is planned,
    since the files are part of the fingerprint; commands that only look at a manifest run it after `gristmill run` or
    `plan --allow-code` has allowed that code."""
    read: OwnReader | None = None
    """A function of yours that reads a file, instead of a `format`. What it yields is treated like lines of JSONL."""
    format: Format = "auto"
    """`auto` decides by file extension. `jsonl` is one JSON object per line, or a JSON array of objects, which is read
    as a stream too. PDF, Word and other binary formats need `read`. `csv` is tab-separated in files called `.tsv`. `warc` covers WET and ARC
    files too: the 2xx responses of HTML or plain text, and conversion records, are documents; all else is counted as
    skipped. A response that declares no type is looked at as browsers do.
    `hf` is a folder of Hugging Face `datasets`, saved with `save_to_disk` or in the layout of the hub; none of its
    code runs."""
    split: str | Paragraphs | None = None
    """How text files are cut into documents, where one file is a book: `chapters`, before headings (`Chapter IV`,
    `BOOK THE FIRST`, `III.`, `Prologue`, `## Markdown`), or `{paragraphs: 4000}`, into whole paragraphs of so many
    characters. A file without headings stays whole. Nothing of the text is lost, and a document's locator ends with
    `#` and its number. Absent: a file is one document. For `format: hf`: the split that is read, `train` if absent."""
    text_field: str = "text"
    """Column or JSON key that holds the text (JSONL, Parquet, Arrow, CSV); `a.b` is the key `b` inside of `a`. A column
    of bytes is decoded, see `encoding`. null counts as an empty text, a record without the field as damaged."""
    id_field: str | None = None
    """Column or key kept as the document's locator; otherwise path and record number. The locator of a page from a WARC
    is its URL, `#` and its record's id, since a crawl may hold an address more than once."""
    on_repeat: Literal["keep_first", "fail"] = "keep_first"
    """What happens to a record with the id (`id_field`, or a WARC record's) and the text of one before, in the order of
    the files: `keep_first` drops it (`ingest/repeated`), `fail` ends the stage."""
    metadata_fields: tuple[str, ...] | None = None
    """Keys kept as metadata, `a.b` for one inside another; all top-level keys with a single value if absent. NaN and
    infinities, which JSON does not have, become the strings `NaN`, `Infinity` and `-Infinity`."""
    encoding: str | None = None
    """A codec of Python, or `auto`: the byte order mark, the encoding that the page or its server declares, UTF-8,
    the guess of a detector, the first that decodes every byte. Absent: `auto` for web pages; for everything else what a
    byte order mark at the file's beginning says (UTF-8, UTF-16, UTF-32), UTF-8 without one, since a guess would let
    binary files pass as text. JSON lines ignore this setting, but for the byte order mark. What does not decode is
    quarantined, but see `encoding_errors`, and so is a text with NUL characters."""
    encoding_errors: Literal["replace", "strict"] = "replace"
    """What happens to bytes that the encoding does not hold: `replace` puts U+FFFD where they are at most 1 in 200 of
    the record, counts them (`replaced` in the summary) and says so; a record with more of them, and with `strict` any,
    is quarantined."""
    extract: Extractor | None = None
    """Turns HTML into its main text. Absent: `resiliparse` for HTML and WARC (DCLM, section 4.2: models trained on its
    text are as good as those on trafilatura's, and it is 8 times as fast); nothing for the other formats, whose text
    field is taken for HTML where an extractor is named. `none` keeps the markup."""
    extract_options: ExtractOptions = ExtractOptions()
    """What of a page counts as its text."""
    limit: Positive | None = None
    """Read at most this many documents. They are the first of the sorted listing, so a source with a limit is read by
    one worker, file after file."""

    @model_validator(mode="before")
    @classmethod
    def _listed_from_the_folder(cls, value: Any) -> Any:
        """A listing needs no `path`: it may name files anywhere."""
        is_listed = isinstance(value, dict) and value.get("list") is not None
        return {"path": ".", **value} if is_listed else value

    @field_validator("encoding")
    @classmethod
    def _is_an_encoding(cls, value: str | None) -> str | None:
        if value not in (None, "auto"):
            try:
                "".encode(value)
            except LookupError as error:
                raise ValueError(
                    f"{value!r} is not a text encoding; use `auto`, or a codec of Python such as cp1252"
                ) from error
        return value

    @model_validator(mode="after")
    def _only_what_applies(self) -> Self:
        if self.split is not None and self.format not in ("hf", "text", "auto"):
            raise ValueError(
                f"`split` cuts text files, or names a split of `format: hf`; format {self.format} has neither"
            )
        if self.format != "hf" and isinstance(self.split, str) and self.split != "chapters":
            raise ValueError(
                f"`split: {self.split}` is no way to cut a text; give `chapters` or "
                "`{paragraphs: 4000}`, or set `format: hf`"
            )
        if self.format == "hf" and isinstance(self.split, Paragraphs):
            raise ValueError("`split` names a split of `format: hf`, such as train; rows are not cut")
        if self.split is not None and self.read is not None:
            raise ValueError("`read` says itself what a document is; remove `split`")
        if self.read is not None and self.format != "auto":
            raise ValueError(f"`read` and `format: {self.format}` both say how files are read; leave one out")
        if self.list is not None and self.format == "hf":
            raise ValueError("`format: hf` lists the files of a folder itself; remove `list`")
        if self.extract_options.favor == "precision" and self.extract != "trafilatura":
            raise ValueError("only trafilatura can favor precision; add `extract: trafilatura`")
        return self


class Mixed(Section):
    """What the mixture takes of a source."""

    licence: str | None = None
    """Licence of the documents: kept in their column `licence`, in cards and in the summary of training content."""
    weight: Annotated[float, Field(ge=0.0)] = 1.0
    """Share of the mixture's tokens, relative to the other weights."""
    max_epochs: PositiveFloat = 1.0
    """How many passes over its documents the mixture may take, over all stages together."""
    min_tokens: Positive | None = None
    """Least tokens that the mixture takes, rounded up to whole rows; see `mix.on_shortfall`."""
    max_tokens: Positive | None = None
    """Most tokens that the mixture takes, rounded down to whole rows; see `mix.on_shortfall`."""
    where: str | None = None
    """SQL condition over the measured columns, evaluated when mixing: `"quality >= 0.6"`. What `dedup` found out is
    among them: `cluster_size` is how many duplicates a document stands for, itself counted. `metadata.n` is the key `n`
    of a record's metadata (`"metadata.n >= 20"`), unknown where a record has no such key.

    It is a function of the document's own columns, so that the same manifest always gives the same mixture. There are
    columns, constants, comparison, arithmetic, `||`, `AND`, `OR`, `NOT`, `IN` a list, `BETWEEN`, `LIKE`, `ILIKE`,
    `GLOB`, `CASE`, `IS NULL`, `coalesce`, `CAST` to numbers, texts and truth values, and these functions: abs, ceil,
    ceiling, exp, floor, greatest, isfinite, isinf, isnan, least, ln, log, log10, log2, max, min, pow, power, round,
    sign, sqrt, trunc; concat, contains, ends_with, hex, left, length, lower, ltrim, position, prefix,
    regexp_full_match, regexp_matches, replace, right, rtrim, starts_with, strlen, strpos, substr, substring, suffix,
    trim, upper; if, ifnull, nullif. Anything else (`random()`, `now()`, window functions, sub-queries) is an error."""
    epochs: str | None = None
    """SQL expression of the same kind, over the same columns: how often each document is in one pass, once if absent.
    `"min(cluster_size, 4)"` gives a text that the web repeats up to four times its place; `min` and `max` of two values
    are NULL where either is. A part of one is a chance that the document's hash decides: 1.5 is once for half of the
    documents and twice for the others. 0 leaves a document out. One of which the expression is NULL is left out too,
    and counted as `epochs_unknown`: `"coalesce(min(cluster_size, 4), 1)"` keeps it. The tokens of a source count with
    these repeats, and `max_epochs` limits the passes."""

    @model_validator(mode="after")
    def _limits_agree(self) -> Self:
        if self.min_tokens is not None and self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} is more than max_tokens {self.max_tokens}")
        return self


class Source(Mixed, DocumentFiles):
    """One named source of documents."""

    TAG: ClassVar[str] = "(documents)"


class TokenFiles(Section):
    """Where tokens are that another tool has made, and how they are stored."""

    tokens: OutsidePath
    """A file, a glob, a folder or an fsspec URL of one of these; of Megatron-LM also what a set's two files have in
    common (`data/web_text_document`)."""
    format: TokenFormat = "auto"
    """`megatron`: Megatron-LM's `.bin` with its `.idx`, whose documents are taken. `llmc`: llm.c's and
    modded-nanogpt's `.bin`, with either header. `olmo`: the `.npy` of OLMo-core and Dolma, without a header or with
    numpy's; a `.csv.gz` beside it says where documents end. `memmap`: nothing but tokens, as nanoGPT writes them.
    `mds`: a folder of MosaicML Streaming. `auto` decides by name and header."""
    dtype: Literal["uint8", "uint16", "uint32", "uint64", "int32", "int64"] | None = None
    """What the tokens are stored as, where the files do not say it: `memmap`, `olmo` without a header, and `bytes` of
    MDS (int64 if absent)."""
    end_of_text: Annotated[int, Field(ge=0)] | None = None
    """The id between documents, where it is not the tokenizer's own. It is no token of a document: the mixture puts the
    tokenizer's end of text behind each."""
    document_tokens: Positive | None = None
    """For files without an end of text: cut them into documents of this many tokens."""
    column: str | None = None
    """Column of an MDS set that holds the tokens; `tokens` or `input_ids` if absent."""


class TokenSource(Mixed, TokenFiles):
    """One named source of tokens that another tool has made; the section `tokenizer` gives the one that made them.

    Nothing of `prepare` reads it: there is no text. Its `where` and `epochs` may ask for `tokens` and `bytes`."""

    TAG: ClassVar[str] = "(tokens)"

    @model_validator(mode="after")
    def _cuts_by_one(self) -> Self:
        if self.document_tokens is not None and self.end_of_text is not None:
            raise ValueError("document_tokens and end_of_text both say where documents end; leave one out")
        if self.document_tokens is not None and self.format == "megatron":
            raise ValueError("the index of a Megatron-LM set says where its documents end; remove `document_tokens`")
        return self


class Ingest(Section):
    """How sources are cut into document shards."""

    shard_bytes: Positive = 16_000_000
    """Text bytes per document shard (UTF-8)."""
    max_document_bytes: Annotated[int, Field(gt=0, le=256 << 20)] = 32 << 20
    """Text bytes (UTF-8) of the longest document; a longer one is quarantined. All stages hold whole documents and what
    they find in them: `filter` 9 to 17 bytes per byte of prose, and 64 at most (where every byte is a line, or every
    other one a word), so that it needs 2 GiB for 32 MiB; `dedup_substrings` 12, and 150 where a document does nothing
    but repeat itself. The longest novel (Proust's, 9,609,000 characters: Guinness World Records) fits, with three bytes
    a character too."""
    max_quarantined: Fraction = 0.05
    """Share of records that may be unreadable before the stage fails. Those that are lost with a file which ends early
    or is damaged count too: as many as its bytes and the other files of its source let expect."""
    extract_seconds: PositiveFloat = 10.0
    """Processor time that the extraction of one page may take; a page that takes more is quarantined. Generous, since
    a page that is lost on a slow machine only would change the result (datatrove's 1 s is of the clock). A page that
    sleeps instead ends at six times that."""
    extract_memory_bytes: Annotated[int, Field(ge=256 << 20)] = 2 << 30
    """Address space of the process that extracts; a page that needs more is quarantined."""
