"""Small stand-in data for every recipe, settings that shrink its run, and a scripted
model.

The test of recipes runs each to its end on this data, and `.ci/recipe_runs.py` writes
the figures to docs. All texts consist of words drawn from a list, with planted pages of
every kind that a rule should drop.
"""

from __future__ import annotations

import html
import json
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import Tokenizer

from benchmarks.checkout import data_folder
from gristmill.mixtures.schema.evaluation import Export
from gristmill.train.models.weights import load_model, read_shape, save_model
from gristmill.train.stages.export import write_folder
from tests.chat_endpoint import Does
from tests.dataprep.small_models import WORDS, write_classifier, write_word_vectors
from tests.flows.corpus import prose, sentence, source_code
from tests.flows.small_writer import small_writer
from tests.flows.test_begin_anywhere import write_small_model, write_small_reward_model
from tests.jsonl import write_jsonl

MODEL = data_folder() / "langid" / "lid176" / "lid.176.ftz"
"""fastText's published language identification model; also serves as a recipe's
classifier.
"""
DOCUMENTS = 25
"""Number of documents in each source of a mixture."""
EXAMPLES = 64
"""Number of conversations, pairs and questions."""
LLAMA = ("commoncrawl", "c4", "github", "wikipedia", "books", "arxiv", "stackexchange")
OLMO = (
    "web",
    "pdfs",
    "code",
    "math",
    "arxiv",
    "wiki",
    "questions",
    "thinking",
    "instructions",
)
SMOLLM = ("fineweb-edu", "cosmopedia", "python-edu", "open-web-math", "stackoverflow")
CODE = ("github", "code", "python-edu")

TOKENS = 16_384
TRAINING = [
    "tokenizer.vocab_size=512",
    "mix.sequence_length=64",
    f"mix.tokens={TOKENS}",
    "mix.validation=0.2",
    "pretrain.model={layers: 1, width: 32, heads: 2}",
    "pretrain.steps=64",
    "pretrain.global_batch_size=4",
    "pretrain.micro_batch_size=4",
    "pretrain.schedule.warmup_steps=4",
    "pretrain.validate_every=16",
    "pretrain.optimizer.learning_rate=0.01",
]
TUNING = [
    "model.path=model",
    "sequence_length=64",
    "steps=24",
    "global_batch_size=8",
    "micro_batch_size=8",
    "schedule.warmup_steps=2",
    "holdout=0.3",
    "optimizer.learning_rate=0.01",
]
REINFORCING = [
    "rl.sequence_length=64",
    "rl.max_new_tokens=8",
    "rl.group_size=4",
    "rl.steps=6",
    "rl.global_batch_size=16",
    "rl.micro_batch_size=16",
    "rl.holdout=0.3",
    "rl.optimizer.learning_rate=0.01",
]


def tuning(section: str) -> list[str]:
    """Return the settings of TUNING for one section."""
    return [
        setting if setting.startswith("model") else f"{section}.{setting}"
        for setting in TUNING
    ]


def reading(*names: str) -> list[str]:
    """Return settings for sources that read their stand-ins for as many epochs as a
    mixture needs.
    """
    return [
        part
        for name in names
        for part in (
            f"sources.{name}.path={name}.jsonl",
            f"sources.{name}.max_epochs=9",
        )
    ]


SMALLER = {
    "annealing": [
        "sources.web.path=c4.jsonl",
        "sources.best.path=books.jsonl",
        "sources.web.max_epochs=9",
        *TRAINING,
    ],
    "best-of-n": [
        *tuning("sft"),
        "examples.best.model.folder=model",
        "examples.best.model.max_tokens=4",
        "examples.best.cut=keep",
        "examples.best.per_prompt=3",
        "examples.best.rewards.0.path=reward-model",
    ],
    "c4": ["sources.crawl.path=crawl.jsonl", "sources.crawl.format=auto"],
    "code-fim": [
        "sources.code.path=files.jsonl",
        "sources.text.path=c4.jsonl",
        "sources.code.max_epochs=9",
        *TRAINING,
    ],
    "constitutional": [
        *tuning("sft"),
        *tuning("dpo")[1:],
        "examples.revised.model={url}",
        "examples.preferred.model={url}",
        "examples.preferred.compare.model={url}",
    ],
    "continued": [
        "sources.field.path=books.jsonl",
        "sources.replay.path=c4.jsonl",
        *TRAINING[1:4],
        *TRAINING[5:],
        "pretrain.model.init_from=model",
        "tokenizer.path=model/tokenizer.json",
    ],
    "dclm-baseline": [
        "sources.crawl.path=pages",
        "sources.crawl.format=html",
        f"quality.classifier={{model: {MODEL}, label: __label__en}}",
        "quality.min_quality=0.95",
    ],
    "distillation": [
        *tuning("sft"),
        "sft.distill.teacher=teacher",
        "sft.lora={rank: 2, alpha: 4}",
        "sft.optimizer.learning_rate=0.05",
    ],
    "dpo-only": tuning("dpo"),
    "fineweb": ["sources.crawl.path=pages", "sources.crawl.format=html"],
    "fineweb-2": [
        "sources.crawl.path=pages-of-two-languages",
        "sources.crawl.format=html",
        f"langid.model={MODEL}",
        "langid.keep={de: 0.5, fr: 0.5}",
    ],
    "fineweb-edu": ["sources.web.path=web.parquet", "edu.min={edu: -2.215}"],
    "grpo": [
        "model.path=model",
        *REINFORCING,
        "rl.group_size=16",
        "rl.steps=80",
        "rl.global_batch_size=128",
        "rl.micro_batch_size=128",
        "rl.optimizer.learning_rate=0.02",
    ],
    "judged": [
        "sources.web.path=web.parquet",
        "edu.judge.model={url}",
        "edu.embedding.path=vectors",
    ],
    "llama1": [*reading(*LLAMA), *TRAINING],
    "long-context": [
        "sources.text.path=c4.jsonl",
        "sources.long.path=long.jsonl",
        "sources.text.max_epochs=9",
        *TRAINING,
        "pretrain.phases=[{sequence_length: 16}, {learning_rate_scale: 0.69}]",
    ],
    "lora": tuning("sft"),
    "olmo3": [
        *reading(*OLMO),
        "sources.questions.path=books.jsonl",
        *TRAINING,
        *tuning("sft")[1:],
        *tuning("dpo")[1:],
        *REINFORCING,
        "rl.steps_per_batch=1",
    ],
    "sft-only": tuning("sft"),
    "smollm": [*reading(*SMOLLM), *TRAINING],
}
"""Settings that shrink each recipe's run, point it to the files of `write_stand_ins`,
and to `write` at the address that replaces `{url}`.
"""


def settings_of(name: str, address: str) -> list[str]:
    """Return a recipe's `--set` options for a model at this address."""
    return [
        part
        for setting in SMALLER[name]
        for part in ("--set", setting.replace("{url}", address))
    ]


def model_at(url: str) -> str:
    """Return `write` as the model section of a recipe."""
    return f"{{endpoint: '{url}', model: writer, temperature: 1.0}}"


def write(prompt: str, earlier_requests: int) -> Does:
    """A model that writes tasks in the small model's words, answers, revises, prefers
    the longer answer, and scores a page high if most of its words are in the first half
    of WORDS.
    """
    if "on a scale from 0 to 5" in prompt or "from 0 to 5:" in prompt:
        first_count = sum(word in FIRST for word in prompt.split())
        return json.dumps(
            {
                "score": 5
                if first_count > sum(word in SECOND for word in prompt.split())
                else 1
            }
        )
    return small_writer(prompt) or "sky " * (1 + earlier_requests % 3)


FIRST, SECOND = set(WORDS[: len(WORDS) // 2]), set(WORDS[len(WORDS) // 2 :])


def write_stand_ins(folder: Path) -> None:
    """Write all files of SMALLER to an empty folder."""
    random_ = random.Random(3)
    for name in dict.fromkeys([*LLAMA, *OLMO, *SMOLLM]):
        texts = [
            source_code(random_) if name in CODE else prose(random_)
            for _ in range(DOCUMENTS - 1)
        ]
        write_jsonl(
            folder / f"{name}.jsonl", [{"text": text} for text in [*texts, texts[0]]]
        )
    write_jsonl(
        folder / "long.jsonl", [{"text": prose(random_, 300)} for _ in range(6)]
    )
    pages = trouble(random_)
    write_pages(folder / "pages", pages)
    write_jsonl(
        folder / "crawl.jsonl",
        [
            {"text": text, "url": f"https://pages.example/{name}"}
            for name, text in pages.items()
        ]
        + [
            {
                "text": f"{pages['plain-0']}\nIt came once more.",
                "url": "http://www.pages.example/plain-0/",
            }
        ],
    )
    write_pages(folder / "pages-of-two-languages", languages(random_))
    files = {f"part_{number}.py": source_code(random_) for number in range(DOCUMENTS)}
    files |= {
        "again.py": files["part_0.py"] + "\n# once more\n",
        "packed.js": "var a=1;" * 300,
        "made.py": "# auto-generated, do not edit\n" + source_code(random_),
    }
    write_jsonl(
        folder / "files.jsonl",
        [{"text": text, "path": name} for name, text in files.items()],
    )
    write_word_vectors(folder / "vectors")
    write_classifier(folder / "models" / "fineweb-edu-classifier")
    pq.write_table(pa.table({"text": halves(80)}), folder / "web.parquet")
    write_examples(folder)


def trouble(random_: random.Random) -> dict[str, str]:
    """Return English pages: eight that pass every rule, and nine of kinds to drop or
    edit.
    """
    pages = {f"plain-{number}": prose(random_, 60) for number in range(8)}
    repeated_text = " ".join(sentence(random_) for _ in range(3))
    return pages | {
        "copy": pages["plain-0"],
        "nearly-copy": f"{pages['plain-1']}\n{sentence(random_)}",
        "german": "\n".join(sentences("de", 36, random_)),
        "mixed": prose(random_, 24) + "\n" + "\n".join(sentences("de", 20, random_)),
        "short": sentence(random_),
        "repeats": "\n".join([repeated_text] * 20),
        "menu": "\n".join(
            " ".join(random_.sample(sentence(random_).split(), 4)).strip(".")
            for _ in range(60)
        ),
        "braces": f"{prose(random_, 60)}\nThe function is {{ return value; }} and that was it.",
        "address": f"{prose(random_, 60)}\nWrite to the captain of the village at "
        "captain@village.example for more.",
    }


SAID = {
    "de": """der die das und in von im den des mit als für nicht auch ist war wurde einen Fluss Fischer Müllerin Brücke
        Wald Brief Händler Lehrer Kinder Netze Boot Winter Morgen Stadt Dorf träumte wartete sprach suchte ging""",
    "fr": """le la les des du de et à en un une est dans par au avec était pêcheur meunière pont forêt lettre marchand
        maître enfants filets barque hiver matin ville village rivière rêvait attendait parlait cherchait allait""",
}
"""Words of two languages, including those required by FineWeb-2's rules."""


def sentences(language: str, number: int, random_: random.Random) -> list[str]:
    """Return sentences of words drawn from a language."""
    words = SAID[language].split()
    return [
        " ".join(random_.choices(words, k=random_.randint(7, 14))).capitalize() + "."
        for _ in range(number)
    ]


def languages(random_: random.Random) -> dict[str, str]:
    """Return six German and six French pages, and for each language a repetitive and a
    short one; plus an English page.
    """
    pages = {}
    for language in SAID:
        pages |= {
            f"{language}-{number}": " ".join(sentences(language, 16, random_))
            for number in range(6)
        }
        pages[f"{language}-again"] = " ".join(sentences(language, 1, random_) * 20)
        pages[f"{language}-short"] = " ".join(sentences(language, 3, random_))
    return pages | {"english": prose(random_, 60)}


def halves(number: int) -> list[str]:
    """Return texts alternately from the second and the first half of WORDS."""
    draw = np.random.default_rng(4)
    return [
        " ".join(
            draw.choice(sorted(FIRST if place % 2 else SECOND), draw.integers(20, 60))
        )
        for place in range(number)
    ]


def write_examples(folder: Path) -> None:
    """Write a small model, a reward model, and conversations, pairs, prompts and
    questions in their words.
    """
    words, random_ = write_small_model(folder), random.Random(5)
    write_small_reward_model(folder)
    prompts = list(
        dict.fromkeys(" ".join(random_.choices(words, k=5)) for _ in range(EXAMPLES))
    )
    for name, rows in {
        "chats": [
            {
                "messages": [
                    {"role": "user", "content": prompt},
                    {"role": "assistant", "content": f"{prompt} sky"},
                ]
            }
            for prompt in prompts
        ],
        "pairs": [
            {"prompt": prompt, "chosen": f"{prompt} sky", "rejected": f"stone {prompt}"}
            for prompt in prompts
        ],
        "red-team": [{"prompt": prompt} for prompt in prompts[:16]],
        "seeds": [{"prompt": prompt} for prompt in prompts[:16]],
        "questions": [{"question": prompt, "answer": "#### 1"} for prompt in prompts],
    }.items():
        write_jsonl(folder / f"{name}.jsonl", rows)
    write_teacher(
        folder,
        [
            f"<|user|>{prompt}<|end|><|assistant|>{prompt} sky<|end|>"
            for prompt in prompts
        ],
    )


def write_teacher(folder: Path, conversations: list[str]) -> None:
    """Train the small model for some steps on conversations, as `teacher` for
    distillation.
    """
    model = load_model(folder / "trained").requires_grad_(True)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    rows = [tokenizer.encode(text).ids for text in conversations]
    shortest = min(len(row) for row in rows)
    ids = torch.tensor([row[:shortest] for row in rows])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in range(60):
        loss = torch.nn.functional.cross_entropy(
            model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: tensor.detach() for name, tensor in model.named_parameters()}
    save_model(folder / "taught", read_shape(folder / "trained"), weights)
    write_folder(folder / "taught", folder / "tokenizer", Export(), folder / "teacher")


def write_pages(folder: Path, pages: dict[str, str]) -> None:
    """Write an HTML page for each text, with a paragraph for each line."""
    folder.mkdir()
    for name, text in pages.items():
        lines = "".join(f"<p>{html.escape(line)}</p>" for line in text.split("\n"))
        (folder / f"{name}.html").write_text(
            f"<html><body><article>{lines}</article></body></html>"
        )
