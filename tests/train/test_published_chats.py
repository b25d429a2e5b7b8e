"""Token ids and masks of published chat templates, compared with transformers, which
reads them from the templates that TRL marks for training.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from gristmill.core.files import write_json
from gristmill.tokenize.chat_template import SPECIAL_FORM
from gristmill.train.data.conversation_tokens import Chat
from gristmill.train.rl.tools.call_format import Call, CallFormat

transformers = pytest.importorskip("transformers")
trl = pytest.importorskip("trl")

FOLDER = Path(trl.__file__).parent / "chat_templates"
NAMES = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
USER = {"role": "user", "content": "Rain?"}
PLAIN = [USER, {"role": "assistant", "content": "No."}]
REASONED = [USER, {**PLAIN[1], "reasoning_content": "It is summer."}]
INLINE = [
    USER,
    {"role": "assistant", "content": "<think>\nIt is summer.\n</think>\n\nNo."},
]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Forecast.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "A city."}},
            "required": ["city"],
        },
    },
}
ARGUMENTS = {"city": "Zürich", "days": [1, 2], "wind": None, "unit": '"C"'}
CALLING = [
    USER,
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "call00000",
                "type": "function",
                "function": {"name": "weather", "arguments": ARGUMENTS},
            }
        ],
    },
]


@pytest.fixture
def published(tmp_path: Path) -> Any:
    """Make a tokenizer of bytes and the template's special tokens."""

    def make(name: str) -> Chat:
        template = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        vocabulary = {character: id for id, character in enumerate(sorted(alphabet))}
        tokenizer = Tokenizer(models.BPE(vocabulary, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        special = sorted({*NAMES.values(), *SPECIAL_FORM.findall(template)})
        tokenizer.add_special_tokens(
            [AddedToken(token, special=True, normalized=False) for token in special]
        )
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **NAMES}
        write_json(tmp_path / "tokenizer_config.json", config)
        (tmp_path / "chat_template.jinja").write_text(template, encoding="utf-8")
        return Chat(tmp_path, datetime.now)  # as transformers does

    return make


@pytest.mark.parametrize(
    ("name", "messages"),
    [
        *((name, PLAIN) for name in ("qwen3", "phi3", "gptoss", "llama3", "qwen3_6")),
        *((name, REASONED) for name in ("qwen3", "gptoss", "qwen3_6")),
        ("nemotron_3_nano", REASONED),
        ("nemotron_3_nano", INLINE),
        ("deepseek_r1_distill", INLINE),
        ("qwen3", CALLING),
        ("gptoss", CALLING),
        # The next turn ends an answer.
        ("glm4moe", PLAIN),
        ("glm4moe", REASONED),
        ("glm4moe", CALLING),
    ],
)
def test_ids_and_masks_of_an_answer_equal_those_of_transformers(
    published: Any, name: str, messages: list[Any]
) -> None:
    chat = published(name)
    tools = [TOOL] if messages is CALLING else []
    (row,) = chat.rows(messages, tools=tools)
    tokens = chat.tokens(row)
    theirs = transformers.AutoTokenizer.from_pretrained(
        chat.folder
    ).apply_chat_template(
        messages,
        tools=tools or None,
        chat_template=(FOLDER / f"{name}_training.jinja").read_text(encoding="utf-8"),
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    ids = theirs["input_ids"]
    assert tokens.ids.tolist() == ids[: len(tokens.ids)]
    assert chat.decode(ids[len(tokens.ids) :]) == ""
    ours, theirs_mask = tokens.turns > 0, theirs["assistant_masks"]
    prompt = len(chat.encode(messages[:1], prompt=True, tools=tools).ids)
    # TRL also trains tokens that a model reads in its prompt, or never writes.
    assert [
        id
        for place, (id, learned) in enumerate(zip(ids, theirs_mask, strict=True))
        if learned and place >= prompt and chat.decode([id]).strip()
    ] == [id for id in tokens.ids[ours].tolist() if chat.decode([id]).strip()]
    assert ours.argmax() == prompt
    assert tokens.ids[ours][-1] in chat.stops


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("qwen3", ["<|im_end|>"]),
        ("phi3", ["<|end|>"]),
        ("gptoss", ["<|call|>", "<|return|>"]),
        ("llama3_1", ["<|eot_id|>"]),
        ("glm4moe", ["<|user|>", "<|observation|>"]),
    ],
)
def test_generation_stops_at_the_ends_of_answers_and_calls(
    published: Any, name: str, ends: list[str]
) -> None:
    chat = published(name)
    stops = {chat.decode([stop], special=True) for stop in chat.stops}
    assert stops == {"</s>", *ends}


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "llama3_1"])
def test_calls_and_arguments_survive_the_round_trip(published: Any, name: str) -> None:
    chat = published(name)
    (row,) = chat.rows(CALLING, tools=[TOOL])
    (answer,) = (text for text, turn in row if turn)
    form = CallFormat(chat)
    assert form.templated
    assert form.calls(answer) == [Call("weather", ARGUMENTS)]
    # The answer of the tool continues the tokens that the model wrote.
    reasoning = {"reasoning_content": "Hm."} if name == "qwen3" else {}
    messages = [
        USER,
        {**CALLING[1], **reasoning},
        {"role": "tool", "name": "weather", "content": "dry"},
    ]
    prompt = chat.encode(messages, prompt=True, tools=[TOOL]).ids.tolist()
    assert prompt[-len(form.answers(["dry"])) :] == form.answers(["dry"])
