"""The stage `tokenizer`: lossless, with merges that depend on the documents only."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from gristmill.dataprep.runners.tasks import shard_tasks
from gristmill.mixtures.schema.tokenizer import Tokenizer
from gristmill.tokenize.chat_template import (
    SPECIAL_TOKENS,
    compile_template,
    render_rows,
)
from gristmill.tokenize.encoding import vocabulary_sample
from gristmill.tokenize.encoding.bpe import VocabularyError
from gristmill.tokenize.encoding.tokenizer import TextTokenizer, TokenizerError, load
from gristmill.tokenize.encoding.vocabulary_sample import (
    HELD_OUT,
    SampleError,
    candidates,
    draw_sample,
    share_bytes,
)

CONVERSATION = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": "What is 2 + 2?\n"},
    {"role": "assistant", "content": "Four.\n\nOr 4."},
    {"role": "user", "content": "Größer als 3?"},
    {"role": "assistant", "content": "Yes"},
]


@pytest.fixture(scope="module")
def folder(module_stages: Any) -> Path:
    documents = [
        *module_stages.documents("prose", 80),
        *module_stages.documents("code", 40),
    ]
    ingest = module_stages.ingest("ingest", documents, 3)
    module_stages.tokenizer(
        "tokenizer", {"ingest": ingest}, ["prose", "code"], vocab_size=320
    )
    return module_stages.root / "tokenizer"


@pytest.fixture(scope="module")
def loaded(folder: Path) -> TextTokenizer:
    return load(folder)


@given(st.text())
@example("<|endoftext|> and <|user|>\n<|end|><|pad|>")
@example("\0 \u0378 \U000e0fff \ufeff  \r\n\t\u00a0 e\u0301 \u1e9b\u0323 n't 've")
def test_every_string_round_trips(loaded: TextTokenizer, text: str) -> None:
    ids = loaded.encode([text])[0].ids
    assert loaded.decode(ids) == text
    assert not set(ids) & set(loaded.special_ids.values())
    assert int(loaded.token_bytes[ids].sum()) == len(text.encode())


def test_special_tokens_have_the_first_ids_and_bytes_follow(
    loaded: TextTokenizer, folder: Path
) -> None:
    assert [loaded.tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == [
        0,
        1,
        2,
        3,
        4,
        5,
    ]
    assert (loaded.eos, loaded.pad, loaded.vocab_size) == (0, 1, 320)
    assert loaded.token_bytes.dtype == np.uint16
    assert loaded.token_bytes[:6].tolist() == [0] * 6
    assert loaded.token_bytes[6:262].tolist() == [1] * 256
    assert (loaded.token_bytes[262:] >= 2).all()
    assert json.loads((folder / "tokenizer.json").read_text())["normalizer"] is None


def test_default_chat_template_renders_as_documented_and_marks_assistant_tokens(
    folder: Path,
) -> None:
    transformers = pytest.importorskip("transformers")
    auto = transformers.AutoTokenizer.from_pretrained(folder)
    expected = (
        "<|endoftext|><|system|>\nAnswer briefly.<|end|>\n"
        "<|user|>\nWhat is 2 + 2?\n<|end|>\n"
        "<|assistant|>\nFour.\n\nOr 4.<|end|>\n<|user|>\nGrößer als "
        "3?<|end|>\n<|assistant|>\nYes<|end|>\n"
    )
    assert auto.apply_chat_template(CONVERSATION, tokenize=False) == expected
    assert auto.apply_chat_template(
        CONVERSATION[:2], tokenize=False, add_generation_prompt=True
    ) == (
        "<|endoftext|><|system|>\nAnswer briefly.<|end|>\n<|user|>\nWhat is 2 + "
        "2?\n<|end|>\n<|assistant|>\n"
    )
    rendered = auto.apply_chat_template(
        CONVERSATION, return_dict=True, return_assistant_tokens_mask=True
    )
    ids, mask = np.array(rendered["input_ids"]), np.array(rendered["assistant_masks"])
    assert auto.decode(ids) == expected
    assert auto.decode(ids[mask == 1]) == "Four.\n\nOr 4.<|end|>Yes<|end|>"
    assert mask.sum() == (np.diff(np.flatnonzero(mask)) >= 1).sum() + 1


def test_transformers_encodes_text_and_special_tokens_alike(
    folder: Path, loaded: TextTokenizer
) -> None:
    transformers = pytest.importorskip("transformers")
    auto = transformers.AutoTokenizer.from_pretrained(folder)
    text = "grist millstone, and a tree: größer\n\n  42"
    assert auto.encode(text, add_special_tokens=False) == loaded.encode([text])[0].ids
    assert (
        auto.eos_token,
        auto.pad_token,
        auto.eos_token_id,
        auto.pad_token_id,
        len(auto),
    ) == (
        "<|endoftext|>",
        "<|pad|>",
        0,
        1,
        320,
    )


def test_sample_has_equal_shares_of_kept_documents(stages: Any) -> None:
    documents = [*stages.documents("prose", 100), *stages.documents("code", 100)]
    ingest = stages.ingest("ingest", documents, 2)
    dropped = stages.annotate(
        "filter",
        ingest,
        lambda table: {
            "keep": [
                int(locator.split("/")[1]) % 2 == 0
                for locator in table["locator"].to_pylist()
            ]
        },
    )
    inputs = {"ingest": ingest, "filter": dropped}
    sample = draw_sample(
        inputs, ["prose", "code"], 4000, None, 1, stages.context("sample")
    )
    kept = {
        text for _, locator, text in documents if int(locator.split("/")[1]) % 2 == 0
    }
    for source in ("prose", "code"):
        assert sum(len(text.encode()) for text in sample.learn[source]) == 2000
        assert sum(text not in kept for text in sample.learn[source]) <= 1
        assert all(
            any(document_text.startswith(text) for document_text in kept)
            for text in sample.learn[source]
        )
        assert sum(len(text.encode()) for text in sample.measure[source]) == int(
            2000 * HELD_OUT
        )
        assert not set(sample.measure[source]) & set(sample.learn[source])
    second, third = (
        draw_sample(
            {"ingest": ingest},
            ["prose"],
            4000,
            None,
            seed,
            stages.context(f"seed {seed}"),
        )
        for seed in (2, 3)
    )
    assert second != third


@pytest.mark.parametrize("partition_bytes", [10**6, 3000])
def test_sample_candidates_are_bounded(
    stages: Any, monkeypatch: pytest.MonkeyPatch, partition_bytes: int
) -> None:
    monkeypatch.setattr(vocabulary_sample, "PARTITION_BYTES", partition_bytes)
    ingest = {"ingest": stages.ingest("ingest", stages.documents("prose", 600), 30)}
    sizes = [len(text.encode()) for _, _, text in stages.documents("prose", 600)]
    tasks = shard_tasks(ingest["ingest"])
    for source_candidates in candidates(
        ingest, tasks, {"prose": 4000}, 1, stages.context("candidates")
    ).values():
        drawn_sizes = source_candidates["size"].to_numpy()
        assert drawn_sizes.sum() - drawn_sizes[-1] < 4000 <= drawn_sizes.sum()
        assert len(drawn_sizes) <= 4000 // min(sizes) + 1
    sample = draw_sample(ingest, ["prose"], 4000, None, 1, stages.context("whole"))
    stages.ingest("other", stages.documents("prose", 600)[::-1], 1)
    again = draw_sample(
        {"ingest": stages.root / "other"},
        ["prose"],
        4000,
        None,
        1,
        stages.context("again"),
    )
    assert again == sample


def test_shares_follow_weights_and_unknown_sources_are_rejected() -> None:
    assert share_bytes(["a", "b", "c"], 1000, {"a": 3, "c": 1}) == {"a": 750, "c": 250}
    assert share_bytes(["a", "b"], 1000, None) == {"a": 500, "b": 500}
    with pytest.raises(SampleError, match=r"no source is called 'd' \(sources: a, b\)"):
        share_bytes(["a", "b"], 1000, {"d": 1})
    with pytest.raises(SampleError, match="all are zero"):
        share_bytes(["a"], 1000, {"a": 0})


def test_truncated_sample_ends_at_a_character(stages: Any) -> None:
    ingest = stages.ingest("ingest", [("prose", "a", "€" * 100)])
    assert draw_sample(
        {"ingest": ingest}, ["prose"], 10, None, 0, stages.context("sample")
    ).learn["prose"] == ["€€€"]


def test_sample_too_small_for_the_vocabulary_is_warned_about(stages: Any) -> None:
    ingest = stages.ingest("ingest", [("prose", "a", "one two one two")])
    summary = stages.tokenizer(
        "tokenizer", {"ingest": ingest}, ["prose"], vocab_size=5000
    )
    assert summary.vocab_size < 300
    assert (
        f"only {summary.vocab_size} of the 5000 tokens"
        in stages.warnings("tokenizer")[0]
    )
    assert summary.sample_bytes == {"prose": 15}
    assert summary.bytes_per_token["prose"] > 1


def test_empty_sample_is_rejected(stages: Any) -> None:
    with pytest.raises(SampleError, match="no text"):
        stages.tokenizer(
            "tokenizer", {"ingest": stages.ingest("ingest", [])}, ["prose"]
        )


def test_empty_sample_error_names_the_stage_that_dropped_the_documents(
    stages: Any,
) -> None:
    ingest = stages.ingest("ingest", stages.documents("prose", 8), shards=2)
    dropped = stages.annotate(
        "filter", ingest, lambda table: {"keep": [False] * len(table)}
    )
    with pytest.raises(
        SampleError, match=r"filter dropped 8 of 8 documents \(rule 8\)"
    ):
        stages.tokenizer("tokenizer", {"ingest": ingest, "filter": dropped}, ["prose"])


def external(stages: Any, path: Path) -> dict[str, Any]:
    return stages.tokenizer("tokenizer", {}, [], path=str(path))


@pytest.mark.slow
def test_published_tokenizer_gets_chat_tokens_after_its_vocabulary(
    stages: Any, shared_data: Path
) -> None:
    path = stages.root / "neox.json"
    path.write_bytes(
        zstandard.decompress(
            (shared_data / "tokenizer" / "gpt_neox_tokenizer.json.zst").read_bytes(),
            max_output_size=1 << 26,
        )
    )
    before = json.loads(path.read_text())
    summary = external(stages, path)
    loaded = load(stages.root / "tokenizer")
    assert loaded.tokenizer.id_to_token(loaded.eos) == "<|endoftext|>"
    vocab_size = (
        max(
            [
                *before["model"]["vocab"].values(),
                *(token["id"] for token in before["added_tokens"]),
            ]
        )
        + 1
    )
    assert loaded.vocab_size == summary.vocab_size == vocab_size + 4
    assert [loaded.special_ids[token] for token in SPECIAL_TOKENS[2:]] == [
        vocab_size,
        vocab_size + 1,
        vocab_size + 2,
        vocab_size + 3,
    ]
    after = json.loads((stages.root / "tokenizer" / "tokenizer.json").read_text())
    assert after["model"]["vocab"] == before["model"]["vocab"]
    assert len(after["model"]["merges"]) == len(before["model"]["merges"])
    text = "Plain text, größer, and      blanks <|endoftext|>"
    ids = loaded.encode([text])[0].ids
    assert loaded.eos not in ids
    assert loaded.decode(ids) == text
    assert int(loaded.token_bytes[ids].sum()) == len(text.encode())


@pytest.mark.slow
def test_real_text_round_trips_and_is_compressed(
    stages: Any, shared_data: Path
) -> None:
    raw = zstandard.decompress(
        (shared_data / "text" / "peps.jsonl.zst").read_bytes(), max_output_size=1 << 26
    )
    texts = [json.loads(line)["text"] for line in raw.decode().splitlines()[:40]]
    ingest = stages.ingest(
        "ingest", [("peps", str(number), text) for number, text in enumerate(texts)]
    )
    summary = stages.tokenizer(
        "tokenizer", {"ingest": ingest}, ["peps"], vocab_size=4096
    )
    loaded = load(stages.root / "tokenizer")
    assert [loaded.decode(encoding.ids) for encoding in loaded.encode(texts)] == texts
    assert summary.vocab_size == 4096
    assert summary.bytes_per_token["peps"] > 2.8


def test_published_tokenizer_reads_no_documents(stages: Any, folder: Path) -> None:
    path = stages.root / "given.json"
    path.write_text((folder / "tokenizer.json").read_text())
    summary = stages.tokenizer("tokenizer", {}, [], path=str(path))
    assert (
        summary.external,
        summary.sample_bytes,
        summary.bytes_per_token,
    ) == (True, {}, {})


@pytest.mark.parametrize(
    ("published", "given", "bos"),
    [
        (True, {"content": "<|pad|>", "special": True}, "<|pad|>"),
        (True, None, None),
        # The packed rows of a model trained from scratch have no other start of text.
        (False, {"content": "<|pad|>", "special": True}, "<|endoftext|>"),
    ],
)
def test_published_tokenizer_keeps_its_start_of_text(
    stages: Any,
    folder: Path,
    published: bool,
    given: dict[str, object] | None,
    bos: str | None,
) -> None:
    path = stages.root / "tokenizer.json"
    path.write_text((folder / "tokenizer.json").read_text())
    # transformers writes a token with its flags
    config = stages.root / "tokenizer_config.json"
    config.write_text(json.dumps({"bos_token": given, "eos_token": None}))
    stages.tokenizer("tokenizer", {}, [], published=published, path=str(path))
    written = json.loads((stages.root / "tokenizer/tokenizer_config.json").read_text())
    assert written.get("bos_token") == bos
    assert written["eos_token"] == "<|endoftext|>"


def test_tokenizer_without_an_end_of_text_is_rejected(stages: Any) -> None:
    from tokenizers import Tokenizer, models

    path = stages.root / "bare.json"
    Tokenizer(models.BPE(vocab={"a": 0}, merges=[])).save(str(path))
    with pytest.raises(
        TokenizerError, match=r"bare\.json has none of .*tokenizer\.end_of_text"
    ):
        external(stages, path)
    path.write_text("{}")
    with pytest.raises(TokenizerError, match=r"bare\.json is not a tokenizer\.json"):
        external(stages, path)


def test_wordpiece_tokenizer_needs_a_named_end_of_text(stages: Any) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocab = {
        token: number
        for number, token in enumerate(
            ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "##b", "b"]
        )
    }
    tokenizer = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    path = stages.root / "bert.json"
    tokenizer.save(str(path))
    with pytest.raises(TokenizerError, match=r"tokenizer\.end_of_text.*\[SEP\]"):
        external(stages, path)
    for token_ in ("[EOS]", "a"):
        with pytest.raises(TokenizerError, match=r"tokenizer\.end_of_text"):
            stages.tokenizer("wrong", {}, [], path=str(path), end_of_text=token_)
    summary = stages.tokenizer("tokenizer", {}, [], path=str(path), end_of_text="[SEP]")
    assert (summary.eos, summary.pad) == (3, 0)
    loaded = load(stages.root / "tokenizer")
    assert loaded.eos == 3
    assert loaded.encode(["ab [SEP] b"])[0].ids.count(3) == 0


def test_sentencepiece_tokens_count_blanks_and_bytes(stages: Any) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = {
        "<unk>": 0,
        "</s>": 1,
        "<0xE2>": 2,
        "\u2581": 3,
        "a": 4,
        "\u2581a": 5,
        "é": 6,
    }
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab, merges=[("\u2581", "a")], byte_fallback=True, unk_token="<unk>"
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["</s>"])
    path = stages.root / "pieces.json"
    tokenizer.save(str(path))
    external(stages, path)
    loaded = load(stages.root / "tokenizer")
    assert (loaded.eos, loaded.pad) == (1, 1)
    assert loaded.token_bytes[1:7].tolist() == [0, 1, 1, 1, 2, 2]


CHATML = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{- message['content'] + '<|im_end|>' -}}{%- endgeneration -%}
{%- else -%}{{- message['content'] + '<|im_end|>' -}}{%- endif -%}
{{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
UNMARKED = CHATML.replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "")
CHATML_TOKENS = ["<|im_start|>", "<|im_end|>"]


@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        ("gpt2", ["pay", " 12345", "\n\n", "\t", "now", "!!", "\n"]),
        ("llama3", ["pay", " ", "123", "45", "\n\n", "\tnow", "!!\n"]),
        (
            "digits",
            ["pay", " ", "1", "2", "3", "4", "5", "\n\n", "\t", "now", "!!", "\n"],
        ),
    ],
)
def test_tokens_never_cross_pretokenizer_boundaries(
    stages: Any, name: str, pieces: list[str]
) -> None:
    text = "pay 12345\n\n\tnow!!\n"
    ingest = stages.ingest(
        "ingest", [("prose", str(number), text) for number in range(40)]
    )
    summary = stages.tokenizer(
        "tokenizer", {"ingest": ingest}, ["prose"], pretokenizer=name
    )
    loaded = load(stages.root / "tokenizer")
    ids = loaded.encode([text])[0].ids
    # a uniform sample makes every piece a token
    assert [loaded.decode([number]) for number in ids] == pieces
    assert summary.pretokenizer == name


@given(text=st.text())
@example("<|im_start|>1234\0\u0378\U000e0fff  \r\n\t5\u00a06 'LL")
@pytest.mark.parametrize("name", ["llama3", "digits"])
def test_every_string_round_trips_with_any_pretokenizer(
    other_tokenizers: dict[str, TextTokenizer], name: str, text: str
) -> None:
    loaded = other_tokenizers[name]
    ids = loaded.encode([text])[0].ids
    assert loaded.decode(ids) == text
    assert not set(ids) & set(loaded.special_ids.values())
    assert int(loaded.token_bytes[ids].sum()) == len(text.encode())


@pytest.fixture(scope="module")
def other_tokenizers(module_stages: Any) -> dict[str, TextTokenizer]:
    ingest = module_stages.ingest("few", module_stages.documents("prose", 20))
    for name in ("llama3", "digits"):
        module_stages.tokenizer(
            name,
            {"ingest": ingest},
            ["prose"],
            pretokenizer=name,
            special_tokens=CHATML_TOKENS,
            chat_template=CHATML,
        )
    return {name: load(module_stages.root / name) for name in ("llama3", "digits")}


def test_custom_special_tokens_and_template_render_as_in_transformers(
    module_stages: Any, other_tokenizers: dict[str, TextTokenizer]
) -> None:
    transformers = pytest.importorskip("transformers")
    from gristmill.train.data.conversation_tokens import Chat

    folder, loaded = module_stages.root / "llama3", other_tokenizers["llama3"]
    assert [
        loaded.special_ids[token] for token in (*SPECIAL_TOKENS, *CHATML_TOKENS)
    ] == list(range(8))
    assert loaded.token_bytes[:8].tolist() == [0] * 8
    chat, auto = Chat(folder), transformers.AutoTokenizer.from_pretrained(folder)
    expected = (
        "<|im_start|>user\nHow?<|im_end|>\n<|im_start|>assistant\nSo.<|im_end|>\n"
    )
    messages = [
        {"role": "user", "content": "How?"},
        {"role": "assistant", "content": "So."},
    ]
    assert auto.apply_chat_template(messages, tokenize=False) == expected
    assert chat.text(messages) == expected
    assert [text for text, turn in chat.rows(messages)[-1] if turn] == ["So.<|im_end|>"]
    assert chat.stops >= {loaded.special_ids["<|im_end|>"], loaded.eos}


def test_unmarked_template_trains_what_each_answer_adds_to_the_generation_prompt() -> (
    None
):
    messages = [
        {"role": role, "content": f"{role} {number}\n"}
        for number in range(2)
        for role in ("system", "user", "assistant")
    ]
    marked, unmarked = (
        render_rows(compile_template(template), messages)
        for template in (CHATML, UNMARKED)
    )
    assert marked == unmarked
    assert [text for text, turn in unmarked[0] if turn] == [
        "assistant 0\n<|im_end|>",
        "assistant 1\n<|im_end|>",
    ]
    assert not any(
        turn
        for _, turn in render_rows(
            compile_template(UNMARKED), messages[:2], prompt=True
        )[0]
    )


def test_template_is_read_from_a_file(stages: Any) -> None:
    path = stages.root / "chatml.jinja"
    path.write_text(CHATML)
    ingest = {"ingest": stages.ingest("ingest", stages.documents("prose", 5))}
    stages.tokenizer(
        "tokenizer",
        ingest,
        ["prose"],
        special_tokens=CHATML_TOKENS,
        chat_template_path=str(path),
    )
    assert (stages.root / "tokenizer" / "chat_template.jinja").read_text() == CHATML
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(
        TokenizerError, match=r"tokenizer.chat_template_path: .*chatml.jinja"
    ):
        stages.tokenizer("other", ingest, ["prose"], chat_template_path=str(path))


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for message in messages %}", "it cannot be rendered: line 1: "),
        ("{{ messages[0]['content'] + 1 }}", "it cannot be rendered: TypeError"),
        (
            "{{ raise_exception('only users may speak') }}",
            "it cannot be rendered: .*only users may speak",
        ),
        (
            UNMARKED.replace(
                "message['content']",
                "(message['content'] if loop.last else message['content'] | upper)",
            ),
            "asked in another way",
        ),
        (
            CHATML.replace("in messages", "in messages if message['role'] != 'system'"),
            "leaves out the text of the system",
        ),
        (
            CHATML.replace("'<|im_start|>assistant\\n'", "'<|im_start|>assistant: '"),
            "asked in another way",
        ),
        (
            CHATML.replace("im_end", "end_of_turn"),
            r"<\|end_of_turn\|>",
        ),
    ],
)
def test_untrainable_template_is_rejected(
    stages: Any, template: str, reason: str
) -> None:
    ingest = {"ingest": stages.ingest("ingest", stages.documents("prose", 5))}
    with pytest.raises(TokenizerError, match=rf"tokenizer.chat_template: .*{reason}"):
        stages.tokenizer(
            "tokenizer",
            ingest,
            ["prose"],
            special_tokens=CHATML_TOKENS,
            chat_template=template,
        )


@pytest.mark.parametrize(
    ("token", "reason"),
    [("word", "'word'"), ("<|user|>", r"<\|user\|>")],
)
def test_ambiguous_special_token_is_rejected(
    stages: Any, token: str, reason: str
) -> None:
    ingest = {"ingest": stages.ingest("ingest", stages.documents("prose", 5))}
    with pytest.raises(VocabularyError, match=reason):
        stages.tokenizer("tokenizer", ingest, ["prose"], special_tokens=[token])


def test_published_tokenizer_takes_new_special_tokens_only(
    stages: Any, folder: Path
) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    content["added_tokens"] = content["added_tokens"][:1]
    path = stages.root / "own.json"
    path.write_text(json.dumps(content))
    ingest = {"ingest": stages.ingest("ingest", stages.documents("prose", 5))}
    stages.tokenizer(
        "tokenizer",
        ingest,
        ["prose"],
        path=str(path),
        special_tokens=CHATML_TOKENS,
        chat_template=CHATML,
    )
    loaded = load(stages.root / "tokenizer")
    assert loaded.special_ids == {
        "<|endoftext|>": 0,
        "<|im_start|>": 320,
        "<|im_end|>": 321,
    }
    with pytest.raises(TokenizerError, match=r"'Ġgr' is a plain token of .*own.json"):
        stages.tokenizer(
            "other", ingest, ["prose"], path=str(path), special_tokens=["Ġgr"]
        )


@pytest.mark.parametrize("is_named", [False, True])
def test_marks_of_a_published_template_may_be_text(
    is_named: bool, stages: Any, folder: Path
) -> None:
    """OLMo 2's `<|user|>` is not a token. The template is that of the tokenizer's
    folder, or is named for a tokenizer of another folder.
    """
    published = stages.root / "published"
    published.mkdir()
    shutil.copy(folder / "tokenizer.json", published)
    template = CHATML.replace("im_start", "turn")
    (published / "tokenizer_config.json").write_text(
        json.dumps({} if is_named else {"chat_template": template})
    )
    ingest = {"ingest": stages.ingest("ingest", stages.documents("prose", 5))}

    def write() -> None:
        stages.tokenizer(
            "tokenizer",
            ingest,
            ["prose"],
            path=str(published / "tokenizer.json"),
            special_tokens=CHATML_TOKENS,
            chat_template=template,
        )

    if is_named:
        with pytest.raises(TokenizerError):
            write()
    else:
        write()
        assert load(stages.root / "tokenizer").special_ids.get("<|turn|>") is None


def test_inconsistent_settings_are_rejected() -> None:
    for section, message in (
        ({"chat_template": "a", "chat_template_path": "b"}, "chat_template_path"),
        ({"path": "a.json", "pretokenizer": "digits"}, "pretokenizer digits"),
        ({"special_tokens": ["<|a|>", "<|a|>"]}, "names '<|a|>' twice"),
        (
            {"vocab_size": 264, "special_tokens": ["<|a|>", "<|b|>", "<|c|>"]},
            "the minimum is 265",
        ),
        ({"pretokenizer": "gpt4"}, "Input should be 'gpt2', 'llama3' or 'digits'"),
    ):
        with pytest.raises(ValidationError, match=re.escape(message)):
            Tokenizer.model_validate(section)
