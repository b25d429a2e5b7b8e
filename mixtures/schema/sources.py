"""The sections `sources` and `ingest`: origin of documents or tokens, and how they are
read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from gristmill.mixtures.base import (
    Count,
    Fraction,
    NotNegative,
    OutsidePath,
    Positive,
    PositiveFloat,
    Section,
)
from gristmill.mixtures.user_code import Own

INGEST = "ingest"
"""Name of the section and of the stage that read the sources, and of the input that
holds the documents.
"""
GENERATE = "generate"
"""Name of the stage that writes documents of generated sources, which are then read
like files.
"""
IMPORTED = "import_tokens"
"""Name of the stage whose documents have tokens, but no text."""

Format = Literal[
    "auto",
    "text",
    "jsonl",
    "parquet",
    "arrow",
    "csv",
    "html",
    "warc",
    "pdf",
    "docx",
    "epub",
    "docling",
    "hf",
    "iceberg",
]
DATASETS: tuple[Format, ...] = ("hf", "iceberg")
"""Formats of folders whose own files say which of them hold data."""
TokenFormat = Literal["auto", "megatron", "llmc", "olmo", "memmap"]
PARTS = {"pages": ("pdf", "docling"), "chapters": ("epub",)}
"""Parts into which `split` divides document files -> their formats."""
SPLITS = (
    "`{paragraphs: 4000}` for text, `pages` for pdf and docling, `chapters` for epub, "
    "or the name of a split with `format: hf`"
)
Extractor = Literal["resiliparse", "trafilatura", "readability", "justext", "none"]


LACKING = {
    "readability": ("favor", "comments"),
    "justext": ("favor", "tables", "comments", "links", "markdown"),
}
"""Extractor -> options that it does not have."""


class ExtractOptions(Section):
    """Parts of a page that count as its text, and the form of it."""

    added: ClassVar[tuple[str, ...]] = ("markdown",)

    favor: Literal["balanced", "precision", "recall"] = "balanced"
    """`precision` prefers losing text to keeping boilerplate (only trafilatura can do
    this); `recall` the reverse (resiliparse: all visible text of the page).
    """
    tables: bool = True
    """Keep the text of tables."""
    comments: bool = False
    """Keep readers' comments under an article."""
    links: bool = False
    """Keep the targets of links."""
    markdown: bool = False
    """Write headings, lists, tables and code as Markdown, and formulas as LaTeX between
    dollars: those of MathML with a TeX annotation or `alttext`, of MathJax, KaTeX and
    MediaWiki, and the alternative texts of images of formulas. justext keeps no
    structure. Except for trafilatura, this needs the extra `extract`.
    """


class OwnReader(Own):
    """A function that reads a file: `read(path)` or `read(stream)` yields its records;
    see docs/own-readers.md.
    """

    takes: ClassVar[tuple[str, ...] | None] = ("path or stream",)
    time_limit_seconds: PositiveFloat = 60.0
    """Processor time limit per record; the rest of the file is lost if a record takes
    longer. A function that sleeps is stopped after six times that.
    """


class OwnListing(Own):
    """A function that lists a source's files: their paths or URLs, in an order that
    never changes.
    """

    time_limit_seconds: PositiveFloat = 600.0
    """Processor time limit of the listing; for waiting, six times that."""


class Paragraphs(Section):
    """Splits a long text into documents of whole paragraphs."""

    paragraphs: Positive
    """Minimum number of characters per document, which ends with the paragraph that
    reaches it.
    """


class DocumentFiles(Section):
    """Location of a source's documents, and how they are read."""

    path: OutsidePath
    """A file, a glob, a folder, an fsspec URL of one of these,
    `hf://datasets/NAME@COMMIT/...` (see docs/how-to/data/hub.md), `python-docs://`,
    `python-docstrings://` or `python-stdlib://`. The members of a tar (`.tar`, `.tgz`,
    `.tar.gz`, `.tar.zst`, `.tar.bz2`, `.tar.xz`) or zip archive are read like the files
    of a folder. Files may be compressed: `.gz`, `.zst`, `.bz2`, `.xz`. With `list`: the
    base of relative paths in the listing; the manifest's folder if absent.
    """
    list: OwnListing | None = None
    """A function of your own that lists the files, instead of all files that `path`
    names. It runs when the manifest is planned, since the files are part of the
    fingerprint; commands that only look at a manifest run it after `gristmill run` or
    `plan --allow-code` has allowed that code.
    """
    read: OwnReader | None = None
    """A function of your own that reads a file, instead of a `format`. Its records are
    treated like lines of JSONL.
    """
    format: Format = "auto"
    """`auto` decides by file extension. `jsonl` is one JSON object per line, or a JSON
    array of objects, at most 256 MiB long. `csv` is tab-separated in files named
    `.tsv`. `pdf` is the text layer of PDF files (extra `documents`); pages without one,
    such as scans, are quarantined: they need OCR first. A word that a hyphen divides at
    a line end is joined if the next line begins with a lower-case letter; the hyphen
    stays in a word with another one (`state-of-the-art`) and in a compound that stands
    within a line of the file. `docx` is Word (extra `documents`), `epub` books. A document is a file; its metadata `part_ends` has the
    end of each page or chapter in the text, in characters. `docling` is the JSON that
    Docling writes; olmOCR writes `jsonl`. Other binary formats need
    `read`. `warc` also covers WET and ARC files: 2xx responses of HTML or plain text, and conversion records, are documents;
    all other records are counted as skipped. The type of a response that declares none
    is detected as browsers do. `hf` is a folder of Hugging Face `datasets`, saved with
    `save_to_disk` or in the layout of the hub; none of its code is run. `iceberg` is
    the folder of an Apache Iceberg table, of whose current snapshot the Parquet files
    are read (extra `iceberg`); tables with row deletions are refused.
    """
    split: str | Paragraphs | None = None
    """How files are split into documents, whose locators end with `#` and their number:
    `{paragraphs: 4000}` splits text files that hold a book into whole paragraphs of at
    least that many characters, `pages` splits PDF and Docling files, `chapters` EPUB
    files. All of the text is kept. If absent, a file is one document. For `format: hf`:
    the split to read, `train` if absent.
    """
    text_field: str = "text"
    """Column or JSON key of the text (JSONL, Parquet, Arrow, CSV); `a.b` is the key `b`
    inside `a`. A column of bytes is decoded, see `encoding`. null counts as an empty
    text, a record without the field as damaged.
    """
    id_field: str | None = None
    """Column or key that becomes the document's locator; path and record number if
    absent. The locator of a page from a WARC is its URL, `#` and its record's id, since
    a crawl may contain an address more than once.
    """
    on_repeat: Literal["keep_first", "fail"] = "keep_first"
    """Treatment of a record with the same id (`id_field`, or a WARC record's) and text
    as an earlier one, in the order of the files: `keep_first` drops it
    (`ingest/repeated`), `fail` ends the stage.
    """
    metadata_fields: tuple[str, ...] | None = None
    """Keys that become metadata, `a.b` for a nested one; if absent, all top-level keys
    with a single value. NaN and infinities, which JSON does not have, become the
    strings `NaN`, `Infinity` and `-Infinity`.
    """
    encoding: str | None = None
    """A Python codec, or `auto`: the byte order mark, the encoding that the page or its
    server declares, UTF-8, the guess of a detector, in this order the first that
    decodes every byte. If absent: `auto` for web pages; for all other files the
    encoding of the byte order mark (UTF-8, UTF-16, UTF-32), or UTF-8 without one, since
    a guess would let binary files pass as text. JSON lines ignore this setting, except
    for the byte order mark. Records that do not decode (but see `encoding_errors`), and
    texts with NUL characters, are quarantined.
    """
    encoding_errors: Literal["replace", "strict"] = "replace"
    """Treatment of bytes that are invalid in the encoding: `replace` puts U+FFFD in
    their place if they are at most 1 in 200 of the record, and counts and reports them
    (`replaced` in the summary); a record with more of them, or with any under `strict`,
    is quarantined.
    """
    extract: Extractor | None = None
    """Extractor of the main text from HTML. If absent: `resiliparse` for HTML and WARC
    (DCLM, section 4.2: models trained on its text are as good as those on
    trafilatura's, and it is 8 times as fast); none for the other formats, whose text
    field is treated as HTML only if an extractor is set. `readability` is
    readability-lxml (extra `extract`), `justext` jusText with the stop words of all its
    languages. `none` keeps the markup. Word and EPUB files are read whole.
    """
    extract_options: ExtractOptions = ExtractOptions()
    """Parts of a page that count as its text; those of a Word or EPUB file, too."""
    limit: Positive | None = None
    """Largest number of documents to read. They are the first of the sorted listing, so
    one worker reads a source with a limit, file after file.
    """

    @model_validator(mode="before")
    @classmethod
    def _listed_from_the_folder(cls, value: Any) -> Any:
        """Default `path` of a source with a listing, which may name files anywhere."""
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
                    f"{value!r} is not a text encoding; use `auto`, or a Python "
                    "codec such as cp1252"
                ) from error
        return value

    def _problems(self) -> Iterator[str]:
        formats: tuple[str, ...] = ("text", "auto")
        if isinstance(self.split, str):
            parts = PARTS.get(self.split, ())
            formats = ("hf", *parts, "auto") if parts else ("hf",)
        if self.split is not None and self.format not in formats:
            yield f"`split: {self.split}` does not divide format {self.format}; {SPLITS}"
        if self.split is not None and self.read is not None:
            yield "`read` determines the documents itself; remove `split`"
        if self.read is not None and self.format != "auto":
            yield (
                f"`read` and `format: {self.format}` both determine how "
                "files are read; leave one out"
            )
        if self.list is not None and self.format in DATASETS:
            yield (
                f"`format: {self.format}` lists the files of a folder itself; remove "
                "`list`"
            )
        if self.extract_options.favor == "precision" and self.extract != "trafilatura":
            yield "only trafilatura can favor precision; add `extract: trafilatura`"
        for name in LACKING.get(self.extract or "", ()):
            default = ExtractOptions.model_fields[name].default
            if getattr(self.extract_options, name) != default:
                yield (
                    f"{self.extract} has no choice of `{name}`; remove it, or take "
                    "another extractor"
                )


class MixedSource(Section):
    """Settings of a source in the mixture."""

    licence: str | None = None
    """Licence of the documents: kept in their column `licence`, in cards and in the
    summary of training content.
    """
    weight: NotNegative = 1.0
    """Share of the mixture's tokens, relative to the other weights."""
    max_epochs: PositiveFloat = 1.0
    """Largest number of passes over its documents in the mixture, over all stages
    together; 0.5 for half of them.
    """
    where: str | None = None
    """SQL condition over the measured columns, evaluated when mixing: `"quality >=
    0.6"`. The columns of `dedup` are among them: `cluster_size` is the number of
    duplicates that a document stands for, including itself. `metadata.n` is the key `n`
    of a record's metadata (`"metadata.n >= 20"`), NULL for a record without such a key.
    `draw` is a number in [0, 1) from the hash of the document's id: `"draw < 0.1"`
    selects a random tenth.

    It depends only on the document's own columns, so that the same manifest always
    gives the same mixture. Allowed are columns, constants, comparison, arithmetic,
    `||`, `AND`, `OR`, `NOT`, `IN` a list, `BETWEEN`, `LIKE`, `ILIKE`, `GLOB`, `CASE`,
    `IS NULL`, `coalesce`, `CAST` to numbers, texts and truth values, and these
    functions: abs, ceil, ceiling, exp, floor, greatest, isfinite, isinf, isnan, least,
    ln, log, log10, log2, max, min, pow, power, round, sign, sqrt, trunc; concat,
    contains, ends_with, hex, left, length, lower, ltrim, position, prefix,
    regexp_full_match, regexp_matches, replace, right, rtrim, starts_with, strlen,
    strpos, substr, substring, suffix, trim, upper; if, ifnull, nullif. Anything else
    (`random()`, `now()`, window functions, sub-queries) is an error.
    """
    epochs: str | None = None
    """SQL expression of the same kind, over the same columns: the number of times that
    a document is read in one pass, 1 if absent. `"min(cluster_size, 4)"` reads a text
    up to four times if the web repeats it; `min` and `max` of two values are NULL if
    either is. A fraction is a chance that the document's hash decides: with 1.5, half
    of the documents are read once and the others twice. 0 leaves a document out. A
    document for which the expression is NULL is left out too, and counted as
    `epochs_unknown`: `"coalesce(min(cluster_size, 4), 1)"` keeps it. The tokens of a
    source include these repeats, and `max_epochs` limits the passes.
    """


class Source(MixedSource, DocumentFiles):
    """A named source of documents."""

    TAG: ClassVar[str] = "(documents)"


class TokenFiles(Section):
    """Location and format of tokens that another tool has written."""

    tokens: OutsidePath
    """A file, a glob, a folder or an fsspec URL of one of these; for Megatron-LM also
    the common prefix of a set's two files (`data/web_text_document`).
    """
    format: TokenFormat = "auto"
    """`megatron`: Megatron-LM's `.bin` with its `.idx`, whose documents are used.
    `llmc`: the `.bin` of llm.c and modded-nanogpt, with either header. `olmo`: the
    `.npy` of OLMo-core and Dolma, without a header or with numpy's; a `.csv.gz` beside
    it gives the ends of documents. `memmap`: nothing but tokens, as nanoGPT writes
    them. `auto` decides by name and header.
    """
    dtype: Literal["uint8", "uint16", "uint32", "uint64", "int32", "int64"] | None = (
        None
    )
    """Data type of the tokens, for files that do not declare it: `memmap`, and `olmo`
    without a header.
    """
    end_of_text: Count | None = None
    """Token id between documents; the tokenizer's end of text if absent. It does not
    count as a token of a document: the mixture puts the tokenizer's end of text after
    each.
    """
    document_tokens: Positive | None = None
    """For files without an end of text: tokens per document into which they are cut."""


class TokenSource(MixedSource, TokenFiles):
    """A named source of tokens that another tool has written; the section `tokenizer`
    gives the tokenizer of these tokens.

    `prepare` does not read it, since it has no text. Its `where` and `epochs` may use
    `tokens`, `bytes` and `draw`.
    """

    TAG: ClassVar[str] = "(tokens)"

    def _problems(self) -> Iterator[str]:
        if self.document_tokens is not None and self.end_of_text is not None:
            yield (
                "document_tokens and end_of_text both determine where "
                "documents end; leave one out"
            )
        if self.document_tokens is not None and self.format == "megatron":
            yield (
                "the index of a Megatron-LM set marks where its "
                "documents end; remove `document_tokens`"
            )


class Ingest(Section):
    """Division of sources into document shards, with limits on documents."""

    shard_bytes: Positive = 16_000_000
    """Text bytes per document shard (UTF-8)."""
    max_document_bytes: Annotated[int, Field(gt=0, le=256 << 20)] = 32 << 20
    """Text bytes (UTF-8) of the longest document; a longer one is quarantined. All
    stages hold whole documents and their measurements in memory: `filter` takes 9 to 17
    bytes per byte of prose, and at most 64 (if every byte is a line, or every other one
    a word), so that it needs 2 GiB for 32 MiB; `dedup_substrings` takes 12, and 150 for
    a document that only repeats itself. The longest novel (Proust's, 9,609,000
    characters: Guinness World Records) fits, even with three bytes a character.
    """
    max_quarantined: Fraction = 0.05
    """Share of records that may be unreadable before the stage fails. Records lost with
    a truncated or damaged file count too, as estimated from its bytes and the other
    files of its source.
    """
    extract_seconds: PositiveFloat = 10.0
    """Processor time limit for extracting one page; a page that takes longer is
    quarantined. The limit is generous, since losing a page only on slow machines would
    change the result (datatrove's 1 s is wall-clock time). A page that sleeps is
    stopped after six times that.
    """
    extract_memory_bytes: Annotated[int, Field(ge=256 << 20)] = 2 << 30
    """Address space of the extracting process; a page that needs more is
    quarantined.
    """
