"""Sets of examples that a model writes: which principle, which answer wins, what is kept, what is asked how often."""

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
from gristmill.dataprep.examples.make_examples import run
from gristmill.dataprep.examples.new_prompts import rouge_l, words_of
from gristmill.dataprep.examples.read_examples import ExamplesError, example_id, read_examples, read_set
from gristmill.dataprep.llm.lineage import descendants
from gristmill.dataprep.llm.llm_client import BudgetSpentError
from gristmill.dataprep.rewards.answer_checks import NoAnswerError
from gristmill.mixtures.steps.examples import MadeExamples
from gristmill.mixtures.user_code import OwnFunction, take_code
from tests.chat_endpoint import Behaviour, Does, Drop, Ended, Endpoint, Refuse

PROMPTS = [f"Question number {at} about the sea" for at in range(12)]
PRINCIPLES = ["Be kind.", "Be honest.", "Be brief."]
LENGTHS = """
def length(completions):
    return [float(len(one)) for one in completions]
"""


def write_prompts(folder: Path, rows: list[dict[str, Any]] | None = None) -> dict[str, str]:
    """Prompts in a file; id of each -> its text."""
    rows = [{"prompt": one} for one in PROMPTS] if rows is None else rows
    (folder / "prompts.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    return {one["id"]: one["prompt"][-1]["content"] for one in read_examples(str(folder / "prompts.jsonl"), "prompts")}


Made = Callable[..., tuple[dict[str, Any], list[dict[str, Any]], Endpoint]]


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Made]:
    """Make a set: (behaviour of the endpoint, settings of the set) -> the summary, the examples, the endpoint."""
    opened: list[Endpoint] = []

    def make(
        behaviour: Behaviour, out: str = "out", endpoint: Endpoint | None = None, concurrency: int = 4, **settings: Any
    ) -> tuple[dict[str, Any], list[dict[str, Any]], Endpoint]:
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
                **{key: {"model": model, **one} if key == "compare" else one for key, one in settings.items()},
            }
        )
        config = {"name": "set", "section": section.model_dump(mode="json"), "seed": 7}
        (tmp_path / out).mkdir(exist_ok=True)
        work = tmp_path / f"{out}-work"
        work.mkdir(exist_ok=True)
        summary = run({}, config, tmp_path / out, Context(work=work, emit=lambda event: None))
        lines = (tmp_path / out / "set.jsonl").read_text().splitlines()
        return summary, [json.loads(line) for line in lines], endpoint

    yield make
    for endpoint in opened:
        endpoint.__exit__()


def answer(asked: str, before: int) -> Does:
    """A model that answers, criticises, revises, and prefers what is longer."""
    if "Say where the answer falls short" in asked:
        return f"critique by {asked.splitlines()[2]}"
    if "Write the answer that the assistant" in asked:
        return f"revised after <{asked.split('<critique>')[1].split('</critique>')[0].strip()}>"
    if "two ways in which" in asked:
        first, second = (asked.split(f"<{one}>")[1].split(f"</{one}>")[0] for one in ("first", "second"))
        return json.dumps({"better": "first" if len(first) > len(second) else "second"})
    return f"answer to {asked}{'!' * (1 + before)}"


def test_an_answer_is_revised_by_the_principle_that_the_hash_of_its_prompt_chooses(tmp_path: Path, made: Made) -> None:
    prompts = write_prompts(tmp_path)
    summary, found, _ = made(answer, revise={"principles": PRINCIPLES, "rounds": 2})
    assert len(found) == 12
    for one in found:
        asked = one["parents"][0]
        drawn = [PRINCIPLES[seeded_key(7, "principle", asked, 0, number) % 3] for number in range(2)]
        assert one["principles"] == drawn
        assert one["messages"] == [
            {"role": "user", "content": prompts[asked]},
            {"role": "assistant", "content": f"revised after <critique by {drawn[1]}>"},
        ]
    assert {one["id"] for one in found} == {one["id"] for one in read_examples(str(tmp_path / "out/set.jsonl"), "sft")}
    assert sum(summary["principles"].values()) == 24
    assert len(summary["principles"]) == 3
    assert summary["asked"][0]["asked"] == 12 * 5


def test_without_a_judge_a_pair_prefers_the_revised_answer_to_the_first_one(tmp_path: Path, made: Made) -> None:
    write_prompts(tmp_path)
    _, found, _ = made(answer, revise={"principles": PRINCIPLES}, gives="pairs")
    assert len(found) == 12
    for one in found:
        assert one["chosen"][0]["content"].startswith("revised after")
        assert one["rejected"][0]["content"].startswith("answer to Question")


def test_the_best_of_n_wins_the_worst_is_rejected_and_equal_ones_give_no_pair(tmp_path: Path, made: Made) -> None:
    write_prompts(tmp_path)
    (tmp_path / "rewards.py").write_text(LENGTHS)
    rewards = [{"use": own(tmp_path)}]

    def varied(asked: str, before: int) -> Does:
        return "the same" if "number 3 " in asked else f"{asked} {'long ' * before}"

    summary, found, _ = made(varied, per_prompt=4, rewards=rewards, model={"concurrency": 1})
    texts = {one["messages"][0]["content"]: one["messages"][1]["content"] for one in found}
    assert texts == {one: "the same" if "number 3 " in one else f"{one} {'long ' * 3}".strip() for one in PROMPTS}
    assert summary["answers"] == {"asked": 48, "usable": 45, "dropped": {"repeated": 3}}
    summary, found, _ = made(varied, "pairs", per_prompt=4, rewards=rewards, gives="pairs", model={"concurrency": 1})
    assert len(found) == 11
    for one in found:
        text = one["prompt"][0]["content"]
        assert (one["chosen"][0]["content"], one["rejected"][0]["content"]) == (f"{text} {'long ' * 3}".strip(), text)
        assert one["rewards"] == [{"length": len(text) + 15}, {"length": len(text)}]
    assert summary["prompts"] == {"read": 12, "kept": 11, "dropped": {"repeated": 1}, "quarantined": 0}
    assert summary["rewards"]["chosen"]["mean"] - summary["rewards"]["rejected"]["mean"] == pytest.approx(15)


def own(folder: Path) -> dict[str, Any]:
    return take_code(OwnFunction("./rewards.py:length"), folder).by_value()


def test_rejection_sampling_keeps_all_different_answers_that_are_right(tmp_path: Path, made: Made) -> None:
    write_prompts(tmp_path, [{"question": f"What is {at} plus one?", "answer": f"#### {at + 1}"} for at in range(6)])

    def count(asked: str, before: int) -> Does:
        number = int(asked.split()[2])
        return f"way {before % 3}: {number + (1 if before % 2 == 0 and number < 4 else 2)}"

    rewards = [{"kind": "number", "weight": 2.0}]
    summary, found, _ = made(count, per_prompt=6, best=6, rewards=rewards, min_reward=2.0, model={"concurrency": 1})
    by_prompt: dict[str, set[str]] = {}
    for one in found:
        by_prompt.setdefault(one["messages"][0]["content"], set()).add(one["messages"][1]["content"])
    assert by_prompt == {f"What is {at} plus one?": {f"way {way}: {at + 1}" for way in (0, 1, 2)} for at in range(4)}
    assert summary["prompts"] == {"read": 6, "kept": 4, "dropped": {"below": 2}, "quarantined": 0}
    assert summary["rewards"]["all"]["answers"] == 4 * 6 + 2 * 3
    assert summary["rewards"]["chosen"]["answers"] == 12


def test_a_reward_that_compares_with_right_answers_wants_them(tmp_path: Path, made: Made) -> None:
    write_prompts(tmp_path)
    with pytest.raises(NoAnswerError, match=r"examples.set data .* 12 of 12 prompts have no 'answer'"):
        made(answer, rewards=[{"kind": "number"}])


def test_the_answer_that_a_judge_prefers_in_both_orders_is_chosen_whichever_came_first(
    tmp_path: Path, made: Made
) -> None:
    write_prompts(tmp_path)

    def either(asked: str, before: int) -> Does:
        if "two ways in which" in asked and "number 5 " in asked:
            return json.dumps({"better": "first"})
        if "two ways in which" in asked:
            return answer(asked, before)
        number = int(asked.split()[2])
        return "word " * (3 if before == number % 2 else 9)

    summary, found, endpoint = made(
        either, per_prompt=2, compare={"principles": PRINCIPLES}, gives="pairs", model={"concurrency": 1}
    )
    assert len(found) == 11
    assert summary["prompts"]["dropped"] == {"undecided": 1}
    for one in found:
        assert len(one["chosen"][0]["content"].split()) == 9
        assert len(one["rejected"][0]["content"].split()) == 3
        principle = PRINCIPLES[seeded_key(7, "compare", one["parents"][0]) % 3]
        assert one["principles"] == [principle]
        asked = [text for text in endpoint.asked if one["prompt"][0]["content"] in text and "<first>" in text]
        assert len(asked) == 2
        assert all(principle in text for text in asked)


def test_a_judges_score_is_a_reward_and_what_it_does_not_score_is_quarantined(tmp_path: Path, made: Made) -> None:
    write_prompts(tmp_path)

    def judged(asked: str, before: int) -> Does:
        if "Judge how good the answer is" not in asked:
            return f"variant {before} of {asked}"
        if "number 2 " in asked:
            return "I cannot say."
        return json.dumps({"score": 5 if "variant 1 " in asked else 2})

    with Endpoint(judged) as endpoint:
        of_judge = {"kind": "judge", "model": {"endpoint": endpoint.url, "model": "judge"}}
        summary, found, _ = made(
            judged, per_prompt=3, rewards=[of_judge], max_quarantined=0.1, model={"concurrency": 1}
        )
    assert len(found) == 11
    assert {one["messages"][1]["content"][:9] for one in found} == {"variant 1"}
    assert summary["prompts"]["quarantined"] == 1
    (line,) = (tmp_path / "out/quarantine.jsonl").read_text().splitlines()
    assert "no JSON object" in json.loads(line)["error"]


def test_empty_cut_and_refused_answers_are_counted_and_the_counts_balance(tmp_path: Path, made: Made) -> None:
    write_prompts(tmp_path)

    def bad(asked: str, before: int) -> Does:
        number = int(asked.split()[2])
        return {1: "  ", 2: Ended("It was a dark and"), 3: Refuse(400)}.get(number, f"answer {number}")

    summary, found, _ = made(bad, max_quarantined=0.1)
    assert summary["prompts"] == {"read": 12, "kept": 9, "dropped": {"cut": 1, "empty": 1}, "quarantined": 1}
    assert len(found) == 9
    summary, _, _ = made(bad, "kept", max_quarantined=0.1, cut="keep")
    assert summary["prompts"]["dropped"] == {"empty": 1}
    with pytest.raises(ExamplesError, match=r"none of 12 prompts gives an example \(empty 12\)"):
        made(lambda asked, before: " ", "none")


def new_tasks(asked: str, before: int) -> Does:
    """Numbered tasks of words that depend on what is shown, one of them a near-copy of a shown one."""
    if not asked.startswith("Below is a list of tasks"):
        return f"answer to {asked}"
    first = asked.split("1. ", 1)[1].split("\n")[0]
    key = seeded_key("tasks", asked)
    words = [[f"w{(key >> (8 * part + at)) % 997}" for at in range(6)] for part in range(3)]
    new = [f"{first} please", *(" ".join(["Explain", *of_task]) for of_task in words), "Too short"]
    return "Here they are:\n" + "\n".join(f"{9 + at}. {task}" for at, task in enumerate(new))


def test_new_prompts_are_grown_near_copies_refused_and_their_parents_known(tmp_path: Path, made: Made) -> None:
    seeds = write_prompts(tmp_path)
    summary, found, endpoint = made(new_tasks, grow={"number": 20, "shown": 4, "rounds": 30})
    assert len(found) == 20 == summary["grown"]["kept"]
    assert summary["grown"]["dropped"]["alike"] >= summary["grown"]["requests"] // 2
    assert summary["grown"]["dropped"]["length"] > 0
    texts = [one["messages"][0]["content"] for one in found]
    assert all(one.startswith("Explain w") for one in texts)
    every = [*texts, *seeds.values()]
    assert max(rouge_l(words_of(one), words_of(other)) for one in texts for other in every if one != other) < 0.7
    shown = {**seeds, **{one["parents"][0]: one["messages"][0]["content"] for one in found}}
    for one in found:
        own_text, *parents = (shown[parent] for parent in one["parents"])
        assert len(parents) == 4
        request = next(
            text for text in endpoint.asked if text.startswith("Below") and all(parent in text for parent in parents)
        )
        assert own_text in str(new_tasks(request, 0))


def test_the_order_of_prompts_and_the_concurrency_change_no_byte_and_a_second_run_asks_nothing(
    tmp_path: Path, made: Made
) -> None:
    write_prompts(tmp_path)
    settings: dict[str, Any] = {"grow": {"number": 10, "shown": 3}, "revise": {"principles": PRINCIPLES}}

    def behaves(asked: str, before: int) -> Does:
        return str(new_tasks(asked, 0)) if asked.startswith("Below is a list") else str(answer(asked, 0))

    _, _, endpoint = made(behaves, "one", concurrency=1, **settings)
    lines = (tmp_path / "prompts.jsonl").read_text().splitlines()
    (tmp_path / "prompts.jsonl").write_text("\n".join(reversed(lines)) + "\n")
    made(behaves, "two", concurrency=16, **settings)
    for name in ("set.jsonl", "lineage.parquet"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name
    before = sum(endpoint.asked.values())
    summary, _, _ = made(behaves, "one", endpoint=endpoint, concurrency=3, **settings)
    assert sum(endpoint.asked.values()) == before
    assert summary["asked"][0]["asked"] == 0


def test_a_budget_ends_it_with_all_answers_kept_and_more_of_it_asks_only_for_the_others(
    tmp_path: Path, made: Made
) -> None:
    write_prompts(tmp_path)
    endpoint = Endpoint(lambda asked, before: answer(asked, 0))
    with endpoint:
        settings: dict[str, Any] = {"revise": {"principles": PRINCIPLES}, "endpoint": endpoint}
        with pytest.raises(BudgetSpentError, match="the budget of 20 requests"):
            made(answer, model={"budget": {"requests": 20}}, **settings)
        assert sum(endpoint.answered.values()) == 20
        _, found, _ = made(answer, model={"budget": {"requests": 36}}, **settings)
        assert len(found) == 12
        assert sum(endpoint.answered.values()) == 36


def test_an_excluded_prompt_takes_its_examples_with_it_and_changes_no_other(tmp_path: Path, made: Made) -> None:
    prompts = write_prompts(tmp_path)
    _, before, _ = made(answer, "before", revise={"principles": PRINCIPLES}, model={"concurrency": 1})
    gone = sorted(prompts)[4]
    (tmp_path / "gone.ids").write_text(f"{gone}\n")
    _, after, _ = made(
        answer, "after", revise={"principles": PRINCIPLES}, exclude=str(tmp_path / "gone.ids"), model={"concurrency": 1}
    )
    assert [one for one in before if gone not in one["parents"]] == after
    assert len(after) == 11
    family = descendants({"examples-set": tmp_path / "before"}, [bytes.fromhex(gone)])
    assert {one.hex() for one in family} == {one["id"] for one in before if gone in one["parents"]}


def test_a_seed_is_gone_with_the_new_prompts_that_were_written_after_it_and_with_theirs(
    tmp_path: Path, made: Made
) -> None:
    prompts = write_prompts(tmp_path)
    grow = {"number": 16, "shown": 4, "rounds": 30}
    _, before, _ = made(new_tasks, "before", grow=grow)
    gone = sorted(prompts)[0]
    family = {one.hex() for one in descendants({"s": tmp_path / "before"}, [bytes.fromhex(gone)])}
    lost = {one["id"] for one in before if one["id"] in family}
    assert 0 < len(lost) < len(before)
    assert lost >= {one["id"] for one in before if gone in one["parents"]}
    (tmp_path / "gone.ids").write_text("\n".join([gone, *family]))
    _, after, endpoint = made(new_tasks, "after", grow=grow, exclude=str(tmp_path / "gone.ids"))
    assert not {one["id"] for one in after} & family
    assert not any(prompts[gone] in text for text in endpoint.asked)


def test_licences_and_ids_of_records_go_through_to_what_is_made_of_them(tmp_path: Path, made: Made) -> None:
    record = "ab" * 16
    write_prompts(tmp_path, [{"prompt": "One of these", "licence": "MIT", "id": record}, {"prompt": "Another of them"}])
    summary, found, _ = made(answer)
    by_licence = {one.get("licence"): one for one in found}
    asked = example_id({"prompt": [{"role": "user", "content": "One of these"}]})
    assert by_licence["MIT"]["parents"] == [asked, record]
    assert "licence" not in by_licence[None]
    assert summary["licences"] == ["MIT"]
    family = descendants({"s": tmp_path / "out"}, [bytes.fromhex(record)])
    assert {one.hex() for one in family} == {asked, by_licence["MIT"]["id"]}
    again = read_set(str(tmp_path / "out/set.jsonl"), "prompts")
    assert {origin.record for origin in again.origins} == {one["id"] for one in found}
    assert {origin.licence for origin in again.origins} == {"MIT", None}


def test_what_has_tools_is_quarantined(tmp_path: Path, made: Made) -> None:
    tool = {"type": "function", "function": {"name": "look", "description": "", "parameters": {}}}
    write_prompts(tmp_path, [{"prompt": "Look", "tools": [tool]}, {"prompt": "Do not look"}])
    summary, found, _ = made(answer, max_quarantined=0.5)
    assert (len(found), summary["prompts"]["quarantined"]) == (1, 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"per_prompt": 2, "model": {"temperature": 0.0}},
            "at model.temperature 0 all answers to a prompt are the same",
        ),
        ({"per_prompt": 2}, "nothing determines the best answer"),
        ({"best": 2}, "best is 2, but per_prompt gives 1 answers"),
        ({"min_reward": 1}, "min_reward needs `rewards`"),
        ({"gives": "pairs"}, "pairs need a rule for the better answer"),
        (
            {"gives": "pairs", "rewards": [{"kind": "regex", "pattern": "a"}]},
            "pairs by rewards need at least two answers",
        ),
        ({"compare": {}}, "compare chooses between two answers, but per_prompt is 1"),
        ({"compare": {}, "per_prompt": 2, "rewards": [{"kind": "regex", "pattern": "a"}]}, "keep one of the two"),
        ({"rewards": [{"kind": "model"}]}, "kind model needs the `path` of a reward model"),
        ({"rewards": [{"kind": "length", "target_tokens": 3}]}, "does not match any of the expected tags"),
        ({"revise": {"principles": []}}, "principles"),
        ({"grow": {"number": 3, "shown": 1}}, "greater than or equal to 2"),
        ({"rewards": [{"kind": "regex", "pattern": "a"}, {"kind": "regex", "pattern": "b"}]}, "two are called regex"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    tmp_path: Path, made: Made, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        made(answer, **settings)


def make_in_process(config: dict[str, Any], out: str, work: str) -> None:
    """What a process does that is killed."""
    run({}, config, Path(out), Context(work=Path(work), emit=lambda event: None))


@pytest.mark.slow
@pytest.mark.parametrize("kill_at", [1, 14, 30])
def test_what_is_killed_asks_nothing_twice_and_ends_with_the_same_bytes(tmp_path: Path, kill_at: int) -> None:
    """It is killed while it waits for its n-th answer: of 12 answers, critiques or revisions."""
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
            target=make_in_process, args=(config, str(tmp_path / "killed"), str(tmp_path / "killed-work"))
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
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
