"""Generated example sets: principles, winning answers, lineage, and the number of
requests.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gristmill.core.seeds import seeded_key
from gristmill.core.stage_context import Context
from gristmill.dataprep.examples.make_examples import AnswerCounts, MadeSet, run
from gristmill.dataprep.examples.read_examples import (
    ExamplesError,
    example_id,
    read_set,
)
from gristmill.dataprep.llm.client import BudgetSpentError
from gristmill.dataprep.llm.lineage import descendants
from gristmill.dataprep.rewards.answer_checks import NoAnswerError
from gristmill.mixtures.steps.examples import MadeExamples
from gristmill.mixtures.user_code import OwnFunction, take_code
from tests.chat_endpoint import Behaviour, Does, Drop, Ended, Endpoint, Refuse
from tests.dataprep.document_shards import file_contents

PROMPTS = [f"Question number {at} about the sea" for at in range(12)]
PRINCIPLES = ["Be kind.", "Be honest.", "Be brief."]
LENGTHS = """
def length(completions):
    return [float(len(completion)) for completion in completions]
"""


def write_prompts(
    folder: Path, rows: list[dict[str, Any]] | None = None
) -> dict[str, str]:
    """Write prompts to a file, and return the text of each by its id."""
    rows = [{"prompt": prompt} for prompt in PROMPTS] if rows is None else rows
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        example["id"]: example["prompt"][-1]["content"]
        for example in read_set(str(path), "prompts").examples
    }


MakeSet = Callable[..., tuple[MadeSet, list[dict[str, Any]], Endpoint]]


@pytest.fixture
def make_set(tmp_path: Path) -> Iterator[MakeSet]:
    """Make a set of PROMPTS, unless the test writes others: (behaviour of the endpoint, settings of the set) -> summary,
    examples, endpoint.
    """
    opened: list[Endpoint] = []
    write_prompts(tmp_path)

    def make(
        behaviour: Behaviour,
        out: str = "out",
        endpoint: Endpoint | None = None,
        concurrency: int = 4,
        **settings: Any,
    ) -> tuple[MadeSet, list[dict[str, Any]], Endpoint]:
        if endpoint is None:
            endpoint = Endpoint(behaviour)
            endpoint.__enter__()
            opened.append(endpoint)
        model = {
            "endpoint": endpoint.url,
            "model": "m",
            "temperature": 1.0,
            "seed": 0,
            "concurrency": concurrency,
            **settings.pop("model", {}),
        }
        section = MadeExamples.model_validate(
            {
                "data": [{"path": str(tmp_path / "prompts.jsonl")}],
                "model": model,
                **{
                    key: {"model": model, **value} if key == "compare" else value
                    for key, value in settings.items()
                },
            }
        )
        config = {"name": "set", "section": section.model_dump(mode="json"), "seed": 7}
        (tmp_path / out).mkdir(exist_ok=True)
        work = tmp_path / f"{out}-work"
        work.mkdir(exist_ok=True)
        summary = run(
            {}, config, tmp_path / out, Context(work=work, emit=lambda event: None)
        )
        lines = (tmp_path / out / "set.jsonl").read_text().splitlines()
        return summary, [json.loads(line) for line in lines], endpoint

    yield make
    for endpoint in opened:
        endpoint.__exit__()


def answer(asked: str, before: int) -> Does:
    """A model that answers, criticises, revises, and prefers longer answers."""
    if "Say where the answer falls short" in asked:
        return f"critique by {asked.splitlines()[2]}"
    if "Write the answer that the assistant" in asked:
        return (
            "revised after "
            f"<{asked.split('<critique>')[1].split('</critique>')[0].strip()}>"
        )
    if "two ways in which" in asked:
        first, second = (
            asked.split(f"<{tag}>")[1].split(f"</{tag}>")[0]
            for tag in ("first", "second")
        )
        return json.dumps({"better": "first" if len(first) > len(second) else "second"})
    return f"answer to {asked}{'!' * (1 + before)}"


def test_answer_is_revised_by_the_principle_of_its_prompts_hash(
    tmp_path: Path, make_set: MakeSet
) -> None:
    prompts = write_prompts(tmp_path)
    summary, examples, _ = make_set(
        answer, revise={"principles": PRINCIPLES, "rounds": 2}
    )
    assert len(examples) == 12
    for example in examples:
        prompt = example["parents"][0]
        drawn = [
            PRINCIPLES[seeded_key(7, "principle", prompt, 0, number) % 3]
            for number in range(2)
        ]
        assert example["principles"] == drawn
        assert example["messages"] == [
            {"role": "user", "content": prompts[prompt]},
            {"role": "assistant", "content": f"revised after <critique by {drawn[1]}>"},
        ]
    reread = read_set(str(tmp_path / "out/set.jsonl"), "sft").examples
    assert {example["id"] for example in examples} == {
        example["id"] for example in reread
    }
    assert sum(summary.principles.values()) == 24
    assert len(summary.principles) == 3
    assert summary.asked[0]["asked"] == 12 * 5


def test_pair_prefers_the_revised_answer_without_a_judge(make_set: MakeSet) -> None:
    _, examples, _ = make_set(answer, revise={"principles": PRINCIPLES}, gives="pairs")
    assert len(examples) == 12
    for example in examples:
        assert example["chosen"][0]["content"].startswith("revised after")
        assert example["rejected"][0]["content"].startswith("answer to Question")


def test_best_of_n_is_chosen_worst_rejected_and_ties_dropped(
    tmp_path: Path, make_set: MakeSet
) -> None:
    (tmp_path / "rewards.py").write_text(LENGTHS)
    rewards = [{"use": own_reward(tmp_path)}]

    def varied(asked: str, before: int) -> Does:
        return "the same" if "number 3 " in asked else f"{asked} {'long ' * before}"

    summary, examples, _ = make_set(
        varied, per_prompt=4, rewards=rewards, concurrency=1
    )
    texts = {
        example["messages"][0]["content"]: example["messages"][1]["content"]
        for example in examples
    }
    expected = {prompt: f"{prompt} {'long ' * 3}".strip() for prompt in PROMPTS}
    assert texts == {**expected, PROMPTS[3]: "the same"}
    assert summary.answers == AnswerCounts(48, 45, {"repeated": 3})
    summary, pairs, _ = make_set(
        varied,
        "pairs",
        per_prompt=4,
        rewards=rewards,
        gives="pairs",
        concurrency=1,
    )
    assert len(pairs) == 11
    for pair in pairs:
        text = pair["prompt"][0]["content"]
        assert (pair["chosen"][0]["content"], pair["rejected"][0]["content"]) == (
            f"{text} {'long ' * 3}".strip(),
            text,
        )
        assert pair["rewards"] == [{"length": len(text) + 15}, {"length": len(text)}]
    assert summary.prompts == {
        "read": 12,
        "kept": 11,
        "dropped": {"repeated": 1},
        "quarantined": 0,
    }
    assert summary.rewards["chosen"].mean - summary.rewards[
        "rejected"
    ].mean == pytest.approx(15)


def own_reward(folder: Path) -> dict[str, Any]:
    return take_code(OwnFunction("./rewards.py:length"), folder).by_value()


def test_rejection_sampling_keeps_distinct_correct_answers(
    tmp_path: Path, make_set: MakeSet
) -> None:
    write_prompts(
        tmp_path,
        [
            {"question": f"What is {at} plus one?", "answer": f"#### {at + 1}"}
            for at in range(6)
        ],
    )

    def count(asked: str, before: int) -> Does:
        number = int(asked.split()[2])
        return (
            f"way {before % 3}: {number + (1 if before % 2 == 0 and number < 4 else 2)}"
        )

    rewards = [{"kind": "number", "weight": 2.0}]
    summary, examples, _ = make_set(
        count,
        per_prompt=6,
        best=6,
        rewards=rewards,
        min_reward=2.0,
        concurrency=1,
    )
    by_prompt: dict[str, set[str]] = {}
    for example in examples:
        by_prompt.setdefault(example["messages"][0]["content"], set()).add(
            example["messages"][1]["content"]
        )
    assert by_prompt == {
        f"What is {at} plus one?": {f"way {way}: {at + 1}" for way in (0, 1, 2)}
        for at in range(4)
    }
    assert summary.prompts == {
        "read": 6,
        "kept": 4,
        "dropped": {"below": 2},
        "quarantined": 0,
    }
    assert summary.rewards["all"].answers == 4 * 6 + 2 * 3
    assert summary.rewards["chosen"].answers == 12


def test_reward_that_compares_needs_answers(make_set: MakeSet) -> None:
    with pytest.raises(NoAnswerError, match=r"examples\.set .*12 of 12 .*'answer'"):
        make_set(answer, rewards=[{"kind": "number"}])


def test_answer_that_wins_in_both_orders_is_chosen(make_set: MakeSet) -> None:
    def either(asked: str, before: int) -> Does:
        if "two ways in which" in asked and "number 5 " in asked:
            return json.dumps({"better": "first"})
        if "two ways in which" in asked:
            return answer(asked, before)
        number = int(asked.split()[2])
        return "word " * (3 if before == number % 2 else 9)

    summary, pairs, endpoint = make_set(
        either,
        per_prompt=2,
        compare={"principles": PRINCIPLES},
        gives="pairs",
        concurrency=1,
    )
    assert len(pairs) == 11
    assert summary.prompts["dropped"] == {"undecided": 1}
    for pair in pairs:
        assert len(pair["chosen"][0]["content"].split()) == 9
        assert len(pair["rejected"][0]["content"].split()) == 3
        principle = PRINCIPLES[seeded_key(7, "compare", pair["parents"][0]) % 3]
        assert pair["principles"] == [principle]
        requests = [
            text
            for text in endpoint.asked
            if pair["prompt"][0]["content"] in text and "<first>" in text
        ]
        assert len(requests) == 2
        assert all(principle in text for text in requests)


def test_judge_score_is_a_reward_and_unscored_prompts_are_quarantined(
    tmp_path: Path, make_set: MakeSet
) -> None:
    def judged(asked: str, before: int) -> Does:
        if "Judge how good the answer is" not in asked:
            return f"variant {before} of {asked}"
        if "number 2 " in asked:
            return "I cannot say."
        return json.dumps({"score": 5 if "variant 1 " in asked else 2})

    with Endpoint(judged) as endpoint:
        reward = {
            "kind": "judge",
            "model": {"endpoint": endpoint.url, "model": "judge"},
        }
        summary, examples, _ = make_set(
            judged,
            per_prompt=3,
            rewards=[reward],
            max_quarantined=0.1,
            concurrency=1,
        )
    assert len(examples) == 11
    assert {example["messages"][1]["content"][:9] for example in examples} == {
        "variant 1"
    }
    assert summary.prompts["quarantined"] == 1
    (line,) = (tmp_path / "out/quarantine.jsonl").read_text().splitlines()
    assert "no JSON object" in json.loads(line)["error"]


def test_empty_truncated_and_refused_answers_are_counted(make_set: MakeSet) -> None:
    def bad(asked: str, before: int) -> Does:
        number = int(asked.split()[2])
        return {1: "  ", 2: Ended("It was a dark and"), 3: Refuse(400)}.get(
            number, f"answer {number}"
        )

    summary, examples, _ = make_set(bad, max_quarantined=0.1)
    assert summary.prompts == {
        "read": 12,
        "kept": 9,
        "dropped": {"cut": 1, "empty": 1},
        "quarantined": 1,
    }
    assert len(examples) == 9
    summary, _, _ = make_set(bad, "kept", max_quarantined=0.1, cut="keep")
    assert summary.prompts["dropped"] == {"empty": 1}
    with pytest.raises(ExamplesError, match=r"12 prompts .*\(empty 12\)"):
        make_set(lambda asked, before: " ", "none")


def test_prompt_order_and_concurrency_do_not_change_a_byte(
    tmp_path: Path, make_set: MakeSet
) -> None:
    settings: dict[str, Any] = {"revise": {"principles": PRINCIPLES}}

    def behaves(asked: str, before: int) -> Does:
        return answer(asked, 0)

    _, _, endpoint = make_set(behaves, "one", concurrency=1, **settings)
    lines = (tmp_path / "prompts.jsonl").read_text().splitlines()
    (tmp_path / "prompts.jsonl").write_text("\n".join(reversed(lines)) + "\n")
    make_set(behaves, "two", concurrency=16, **settings)
    assert file_contents(tmp_path / "one") == file_contents(tmp_path / "two")
    before = sum(endpoint.asked.values())
    summary, _, _ = make_set(
        behaves, "one", endpoint=endpoint, concurrency=3, **settings
    )
    assert sum(endpoint.asked.values()) == before
    assert summary.asked[0]["asked"] == 0


def test_run_after_a_spent_budget_requests_only_missing_answers(
    make_set: MakeSet,
) -> None:
    endpoint = Endpoint(lambda asked, before: answer(asked, 0))
    with endpoint:
        settings: dict[str, Any] = {
            "revise": {"principles": PRINCIPLES},
            "endpoint": endpoint,
        }
        with pytest.raises(BudgetSpentError, match="20 requests"):
            make_set(answer, model={"budget": {"requests": 20}}, **settings)
        assert sum(endpoint.answered.values()) == 20
        _, examples, _ = make_set(
            answer, model={"budget": {"requests": 36}}, **settings
        )
        assert len(examples) == 12
        assert sum(endpoint.answered.values()) == 36


def test_excluded_prompt_removes_only_its_examples(
    tmp_path: Path, make_set: MakeSet
) -> None:
    prompts = write_prompts(tmp_path)
    _, before, _ = make_set(
        answer, "before", revise={"principles": PRINCIPLES}, concurrency=1
    )
    excluded = sorted(prompts)[4]
    (tmp_path / "gone.ids").write_text(f"{excluded}\n")
    _, after, _ = make_set(
        answer,
        "after",
        revise={"principles": PRINCIPLES},
        exclude=str(tmp_path / "gone.ids"),
        concurrency=1,
    )
    assert [
        example for example in before if excluded not in example["parents"]
    ] == after
    assert len(after) == 11
    family = descendants(
        {"examples-set": tmp_path / "before"}, [bytes.fromhex(excluded)]
    )
    assert {example.hex() for example in family} == {
        example["id"] for example in before if excluded in example["parents"]
    }


def test_licences_and_ids_pass_to_generated_examples(
    tmp_path: Path, make_set: MakeSet
) -> None:
    record = "ab" * 16
    write_prompts(
        tmp_path,
        [
            {"prompt": "One of these", "licence": "MIT", "id": record},
            {"prompt": "Another of them"},
        ],
    )
    summary, examples, _ = make_set(answer)
    by_licence = {example.get("licence"): example for example in examples}
    prompt_id = example_id({"prompt": [{"role": "user", "content": "One of these"}]})
    assert by_licence["MIT"]["parents"] == [prompt_id, record]
    assert "licence" not in by_licence[None]
    assert summary.licences == ["MIT"]
    family = descendants({"s": tmp_path / "out"}, [bytes.fromhex(record)])
    assert {example.hex() for example in family} == {prompt_id, by_licence["MIT"]["id"]}
    again = read_set(str(tmp_path / "out/set.jsonl"), "prompts")
    assert {origin.record for origin in again.origins} == {
        example["id"] for example in examples
    }
    assert {origin.licence for origin in again.origins} == {"MIT", None}


def test_prompt_with_tools_is_quarantined(tmp_path: Path, make_set: MakeSet) -> None:
    tool = {
        "type": "function",
        "function": {"name": "look", "description": "", "parameters": {}},
    }
    write_prompts(
        tmp_path, [{"prompt": "Look", "tools": [tool]}, {"prompt": "Do not look"}]
    )
    summary, examples, _ = make_set(answer, max_quarantined=0.5)
    assert (len(examples), summary.prompts["quarantined"]) == (1, 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"per_prompt": 2, "model": {"temperature": 0.0}}, r"model\.temperature 0"),
        ({"per_prompt": 2}, "best"),
        ({"best": 2}, "best .*2.*per_prompt .*1"),
        ({"min_reward": 1}, "min_reward .*`rewards`"),
        ({"gives": "pairs"}, "pairs"),
        (
            {"gives": "pairs", "rewards": [{"kind": "regex", "pattern": "a"}]},
            "pairs .*two answers",
        ),
        ({"compare": {}}, "compare .*per_prompt .*1"),
        (
            {
                "compare": {},
                "per_prompt": 2,
                "rewards": [{"kind": "regex", "pattern": "a"}],
            },
            "compare.*rewards|rewards.*compare",
        ),
        ({"rewards": [{"kind": "model"}]}, "model .*`path`"),
        ({"rewards": [{"kind": "length", "target_tokens": 3}]}, "expected tags"),
        ({"revise": {"principles": []}}, "principles"),
        (
            {
                "rewards": [
                    {"kind": "regex", "pattern": "a"},
                    {"kind": "regex", "pattern": "b"},
                ]
            },
            "two .*regex",
        ),
    ],
)
def test_contradictory_settings_are_rejected(
    make_set: MakeSet, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_set(answer, **settings)


def make_in_process(config: dict[str, Any], out: str, work: str) -> None:
    """Make a set in a process that can be killed."""
    run({}, config, Path(out), Context(work=Path(work), emit=lambda event: None))


@pytest.mark.slow
@pytest.mark.parametrize("kill_at", [1, 14, 30])
def test_killed_run_repeats_no_request_and_resumes_with_the_same_bytes(
    tmp_path: Path, kill_at: int
) -> None:
    """Killed while it waits for its n-th answer, of 36 answers, critiques and
    revisions.
    """
    write_prompts(tmp_path)
    victims: list[Any] = []

    def deadly(asked: str, before: int) -> Does:
        if victims and sum(endpoint.asked.values()) == kill_at:
            os.kill(victims.pop().pid, signal.SIGKILL)
            return Drop()
        return answer(asked, 0)

    with Endpoint(deadly) as endpoint:
        model = {"endpoint": endpoint.url, "model": "m", "seed": 0, "concurrency": 1}
        section = MadeExamples.model_validate(
            {
                "data": [{"path": str(tmp_path / "prompts.jsonl")}],
                "model": model,
                "revise": {"principles": PRINCIPLES},
                "rewards": [{"kind": "regex", "pattern": "kind"}],
            }
        )
        config = {"name": "set", "section": section.model_dump(mode="json"), "seed": 7}
        for name in ("killed", "whole"):
            for folder in (name, f"{name}-work"):
                (tmp_path / folder).mkdir()
        child = multiprocessing.get_context("spawn").Process(
            target=make_in_process,
            args=(config, str(tmp_path / "killed"), str(tmp_path / "killed-work")),
        )
        victims.append(child)
        child.start()
        child.join(timeout=120)
        assert child.exitcode == -signal.SIGKILL
        assert sum(endpoint.answered.values()) == kill_at - 1
        make_in_process(config, str(tmp_path / "killed"), str(tmp_path / "killed-work"))
        assert sum(endpoint.answered.values()) == 36
        assert set(endpoint.answered.values()) == {1}
        make_in_process(config, str(tmp_path / "whole"), str(tmp_path / "whole-work"))
    for name in ("set.jsonl", "lineage.parquet"):
        assert (tmp_path / "killed" / name).read_bytes() == (
            tmp_path / "whole" / name
        ).read_bytes()
