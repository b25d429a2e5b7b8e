"""The stage `tokenizer`: lossless, with merges that depend on the documents only."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from gristmill.dataprep.documents import Inputs
from gristmill.dataprep.runners.tasks import shard_tasks
from gristmill.mixtures.schema.tokenizer import Tokenizer
from gristmill.tokenize.chat_template import (
    SPECIAL_TOKENS,
    compile_template,
    render_rows,
)
from gristmill.tokenize.encoding import vocabulary_sample
from gristmill.tokenize.encoding.bpe import VocabularyError
from gristmill.tokenize.encoding.tokenizer import (
    TextTokenizer,
    TokenizerError,
    TokenizerSummary,
    load,
)
from gristmill.tokenize.encoding.vocabulary_sample import (
    HELD_OUT,
    SampleError,
    TokenizerSample,
    candidates,
    draw_sample,
    share_bytes,
)

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
CONVERSATION = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": "What is 2 + 2?\n"},
    {"role": "assistant", "content": "Four.\n\nOr 4."},
    {"role": "user", "content": "Größer als 3?"},
    {"role": "assistant", "content": "Yes"},
]


def learn(
    stages: Any, texts: Sequence[str] | int = 5, **section: Any
) -> tuple[TokenizerSummary, TextTokenizer]:
    """Learn from texts, or from some random ones, of the source `prose`."""
    documents = (
        stages.documents("prose", texts)
        if isinstance(texts, int)
        else [("prose", str(number), text) for number, text in enumerate(texts)]
    )
    inputs = {"ingest": stages.ingest("ingest", documents)}
    summary = stages.tokenizer("tokenizer", inputs, ["prose"], **section)
    return summary, load(stages.root / "tokenizer")


def external(
    stages: Any, path: Path, **section: Any
) -> tuple[TokenizerSummary, TextTokenizer]:
    """Copy a tokenizer.json."""
    summary = stages.tokenizer("tokenizer", {}, [], path=str(path), **section)
    return summary, load(stages.root / "tokenizer")


def drawn(
    stages: Any, inputs: Inputs, sources: Sequence[str] = ("prose",), seed: int = 1
) -> TokenizerSample:
    """Draw a sample of 4,000 bytes."""
    context = stages.context(f"{inputs['ingest'].name}-{seed}")
    return draw_sample(inputs, sources, 4000, None, seed, context)


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


def test_special_tokens_have_the_first_ids_and_bytes_follow(
    loaded: TextTokenizer, folder: Path
) -> None:
    ids = [loaded.tokenizer.token_to_id(token) for token in SPECIAL_TOKENS]
    assert ids == list(range(6))
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
    assert (auto.eos_token, auto.eos_token_id) == ("<|endoftext|>", 0)
    assert (auto.pad_token, auto.pad_token_id) == ("<|pad|>", 1)
    assert len(auto) == 320


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
    sample = drawn(stages, inputs, ["prose", "code"])
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
    second, third = (drawn(stages, {"ingest": ingest}, seed=seed) for seed in (2, 3))
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
    other = stages.ingest("other", stages.documents("prose", 600)[::-1], 1)
    assert drawn(stages, {"ingest": other}) == drawn(stages, ingest)


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
    summary, _ = learn(stages, ["one two one two"], vocab_size=5000)
    assert summary.vocab_size < 300
    assert (
        f"only {summary.vocab_size} of the 5000 tokens"
        in stages.warnings("tokenizer")[0]
    )
    assert summary.sample_bytes == {"prose": 15}
    assert summary.bytes_per_token["prose"] > 1


def test_empty_sample_is_rejected(stages: Any) -> None:
    with pytest.raises(SampleError, match="no text"):
        learn(stages, [])


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
    summary, loaded = external(stages, path)
    assert loaded.tokenizer.id_to_token(loaded.eos) == "<|endoftext|>"
    added = [token["id"] for token in before["added_tokens"]]
    vocab_size = max([*before["model"]["vocab"].values(), *added]) + 1
    assert loaded.vocab_size == summary.vocab_size == vocab_size + 4
    chat_ids = [loaded.special_ids[token] for token in SPECIAL_TOKENS[2:]]
    assert chat_ids == list(range(vocab_size, vocab_size + 4))
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
    summary, loaded = learn(stages, texts, vocab_size=4096)
    assert [loaded.decode(encoding.ids) for encoding in loaded.encode(texts)] == texts
    assert summary.vocab_size == 4096
    assert summary.bytes_per_token["prose"] > 2.8


def test_published_tokenizer_reads_no_documents(stages: Any, folder: Path) -> None:
    path = stages.root / "given.json"
    path.write_text((folder / "tokenizer.json").read_text())
    summary, _ = external(stages, path)
    assert summary.external
    assert summary.sample_bytes == summary.bytes_per_token == {}


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
    external(stages, path, published=published)
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

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    vocab = {token: number for number, token in enumerate([*special, "a", "##b", "b"])}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(special)
    path = stages.root / "bert.json"
    tokenizer.save(str(path))
    with pytest.raises(TokenizerError, match=r"tokenizer\.end_of_text.*\[SEP\]"):
        external(stages, path)
    for token_ in ("[EOS]", "a"):
        with pytest.raises(TokenizerError, match=r"tokenizer\.end_of_text"):
            external(stages, path, end_of_text=token_)
    summary, loaded = external(stages, path, end_of_text="[SEP]")
    assert (summary.eos, summary.pad) == (3, 0)
    assert loaded.eos == 3
    assert loaded.encode(["ab [SEP] b"])[0].ids.count(3) == 0


def test_sentencepiece_tokens_count_blanks_and_bytes(stages: Any) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokens = ["<unk>", "</s>", "<0xE2>", "\u2581", "a", "\u2581a", "é"]
    vocab = {token: number for number, token in enumerate(tokens)}
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
    _, loaded = external(stages, path)
    assert (loaded.eos, loaded.pad) == (1, 1)
    assert loaded.token_bytes[1:7].tolist() == [0, 1, 1, 1, 2, 2]


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
    summary, loaded = learn(stages, [text] * 40, pretokenizer=name)
    ids = loaded.encode([text])[0].ids
    # a uniform sample makes every piece a token
    assert [loaded.decode([number]) for number in ids] == pieces
    assert summary.pretokenizer == name


@given(text=st.text())
@example("<|endoftext|> and <|user|>\n<|end|><|pad|>")
@example("\0 \u0378 \U000e0fff \ufeff  \r\n\t\u00a0 e\u0301 \u1e9b\u0323 n't 've")
@example("<|im_start|>1234\0\u0378\U000e0fff  \r\n\t5\u00a06 'LL")
@pytest.mark.parametrize("name", ["gpt2", "llama3", "digits"])
def test_every_string_round_trips(
    loaded: TextTokenizer,
    other_tokenizers: dict[str, TextTokenizer],
    name: str,
    text: str,
) -> None:
    loaded = other_tokenizers.get(name, loaded)
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
    learn(stages, special_tokens=CHATML_TOKENS, chat_template_path=str(path))
    assert (stages.root / "tokenizer" / "chat_template.jinja").read_text() == CHATML
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(
        TokenizerError, match=r"tokenizer.chat_template_path: .*chatml.jinja"
    ):
        learn(stages, chat_template_path=str(path))


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
    with pytest.raises(TokenizerError, match=rf"tokenizer.chat_template: .*{reason}"):
        learn(stages, special_tokens=CHATML_TOKENS, chat_template=template)


@pytest.mark.parametrize(
    ("token", "reason"),
    [("word", "'word'"), ("<|user|>", r"<\|user\|>")],
)
def test_ambiguous_special_token_is_rejected(
    stages: Any, token: str, reason: str
) -> None:
    with pytest.raises(VocabularyError, match=reason):
        learn(stages, special_tokens=[token])


def test_published_tokenizer_takes_new_special_tokens_only(
    stages: Any, folder: Path
) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    content["added_tokens"] = content["added_tokens"][:1]
    path = stages.root / "own.json"
    path.write_text(json.dumps(content))
    _, loaded = external(
        stages, path, special_tokens=CHATML_TOKENS, chat_template=CHATML
    )
    assert loaded.special_ids == {
        "<|endoftext|>": 0,
        "<|im_start|>": 320,
        "<|im_end|>": 321,
    }
    with pytest.raises(TokenizerError, match=r"'Ġgr' is a plain token of .*own.json"):
        external(stages, path, special_tokens=["Ġgr"])


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
    section = {"special_tokens": CHATML_TOKENS, "chat_template": template}
    with pytest.raises(TokenizerError) if is_named else nullcontext():
        _, loaded = external(stages, published / "tokenizer.json", **section)
        assert loaded.special_ids.get("<|turn|>") is None


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
