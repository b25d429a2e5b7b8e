"""Ablations: arms and controls become settings, planted differences are found, and the
rule is fixed before the first training.
"""

from __future__ import annotations

import json
import re
import zlib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import gristmill
from gristmill.core.lease import acquire
from gristmill.dataprep.user_code.shuffled_words import shuffle_words
from gristmill.flows.running.run import StageFailedError
from gristmill.flows.running.session import Session
from gristmill.flows.sweeps import ablation, proxies
from gristmill.flows.sweeps.ablation import AblationPlan, HeldOut, plan_ablation
from gristmill.flows.sweeps.ablation_results import analyse_ablation
from gristmill.flows.sweeps.arms import Variant, arms_of_rules, read_arms
from gristmill.flows.sweeps.grid import SweepError
from gristmill.flows.sweeps.paired_differences import detectable, seeds_to_find
from gristmill.flows.sweeps.proxies import Proxy, Request, TrainedGroup
from gristmill.mixtures.loader import load_manifest
from gristmill.mixtures.manifest import Manifest
from gristmill.mixtures.schema.ablation import Ablation
from gristmill.mixtures.steps.filter import Filter
from tests.commands import call

MANIFEST = """\
name: small
seed: 3
sources:
  web: {path: web.jsonl, weight: 3, where: "tokens > 2"}
  books: {path: books.jsonl}
prepare:
  - filter: {rules: [{gopher_quality: {min_words: 7}}, fineweb, c4]}
  - filter: {rules: {mc4: {}}}
    name: long
  - dedup
tokenizer: {path: tokenizer.json}
mix: {tokens: 9000, sequence_length: 64}
pretrain: {steps: 900, global_batch_size: 4}
"""
ARMS = """\
arms:
  no-dedup: {without: [dedup]}
  no-books: {without: [books]}
  plain: {without: [filter.fineweb, long.mc4]}
  strict: {set: {filter.gopher_quality.min_words: 70}, where: "tokens < 900"}
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    monkeypatch.chdir(tmp_path)
    tokens = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokens.train_from_iterator([], trainer)
    tokens.save("tokenizer.json")
    for name in ("web", "books"):
        Path(f"{name}.jsonl").write_text('{"text": "one two"}\n')
    Path("small.yaml").write_text(MANIFEST)
    Path("arms.yaml").write_text(ARMS)
    return tmp_path


def variants(settings: Ablation) -> dict[str, Variant]:
    return {arm.name: arm for arm in read_arms(settings, "small.yaml", [])}


def settings_of(**keys: Any) -> Ablation:
    return Ablation.model_validate({**yaml.safe_load(ARMS), **keys})


def rules_of(manifest: Manifest) -> dict[str, list[str]]:
    return {
        name: list(step.config.rules.sets) if isinstance(step.config, Filter) else []
        for name, step in manifest.steps.items()
    }


@pytest.mark.usefixtures("project")
def test_arms_change_what_they_name_and_nothing_else() -> None:
    arms_by_name = variants(settings_of())
    loaded = {
        name: load_manifest("small.yaml", arm.overrides)
        for name, arm in arms_by_name.items()
    }
    rules = {name: rules_of(manifest) for name, manifest in loaded.items()}
    whole = {
        "filter": ["gopher_quality", "c4", "fineweb"],
        "long": ["mc4"],
        "dedup": [],
    }
    assert rules["reference"] == rules["no-books"] == rules["strict"] == whole
    assert rules["no-dedup"] == {name: whole[name] for name in ("filter", "long")}
    assert rules["plain"] == {**whole, "filter": ["gopher_quality", "c4"], "long": []}
    least = {
        name: manifest.steps["filter"].config.rules.gopher_quality.min_words  # type: ignore[attr-defined]
        for name, manifest in loaded.items()
    }
    assert least == {**dict.fromkeys(arms_by_name, 7), "strict": 70}
    assert loaded["no-books"].sources["books"].weight == 0
    assert arms_by_name["strict"].conditions == {
        "web": "(tokens > 2) AND (tokens < 900)",
        "books": "(tokens < 900)",
    }


@pytest.mark.usefixtures("project")
def test_each_rule_set_is_left_out_and_stands_alone() -> None:
    arms_by_name = variants(Ablation(each_rule=True))
    sets = ["gopher_quality", "c4", "fineweb", "mc4"]
    names = [f"{kind}-{name}" for name in sets for kind in ("no", "only")]
    assert list(arms_by_name) == ["reference", "no-rules", *names]
    only = load_manifest("small.yaml", arms_by_name["only-mc4"].overrides)
    assert rules_of(only) == {"filter": [], "long": ["mc4"], "dedup": []}
    none = load_manifest("small.yaml", arms_by_name["no-rules"].overrides)
    assert rules_of(none) == {"filter": [], "long": [], "dedup": []}


@pytest.mark.usefixtures("project")
def test_rule_set_beside_one_other_is_alone_where_that_one_is_left_out() -> None:
    Path("small.yaml").write_text(
        MANIFEST.replace("fineweb, c4]", "c4]").replace("{mc4: {}}", "{}")
    )
    manifest = load_manifest("small.yaml")
    assert list(arms_of_rules(manifest)) == [
        "no-rules",
        "no-gopher_quality",
        "no-c4",
    ]


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ({"arms": {"a": {"without": ["dedupe"]}}}, "dedupe"),
        ({"arms": {}}, "at least one arm"),
        ({"decide": {"target": {"poems": 1}}}, "poems"),
        ({"pretrain": {"no_such_key": 1}}, "no_such_key"),
    ],
)
def test_wrong_ablations_are_rejected_before_any_work(
    keys: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(SweepError, match=complaint):
        plan_ablation(settings_of(**keys), "small.yaml", [], "store")
    assert not Path("store").exists()


@pytest.mark.usefixtures("project")
def test_arms_of_a_trial_share_all_but_documents_and_controls_differ_as_they_say() -> (
    None
):
    plan = plan_ablation(settings_of(), "small.yaml", [], "store")
    run = prepared(plan)
    reference, dedup = plan.variants[:2]

    def opened(
        variant: Variant, seed: int = 3, pool: float = 1.0, place: int = 0
    ) -> Session:
        pools = dict.fromkeys(("web", "books"), pool)
        return plan.open(run.overrides(plan.trials[place], variant, pools, seed))

    first, other, again = opened(reference), opened(dedup), opened(reference, 4)
    recipes = [{**session.plan["pretrain"].recipe} for session in (first, other, again)]
    assert [recipe.pop("seed") for recipe in recipes] == [3, 3, 4]
    assert recipes[0] == recipes[1] == recipes[2]
    assert first.plan["mix"].recipe == other.plan["mix"].recipe
    assert first.plan["mix"].fingerprint != other.plan["mix"].fingerprint
    assert first.plan["dedup"].fingerprint == again.plan["dedup"].fingerprint
    assert list(first.manifest.steps) == ["filter", "long", "dedup", "without_held_out"]
    assert first.manifest.sources["books"].where == "draw >= 0.050000"
    assert first.manifest.mix is not None
    tokens = first.manifest.mix.tokens
    section = first.manifest.pretrain
    assert section is not None
    assert tokens == section.steps * section.global_batch_size * 64
    assert tokens == pytest.approx(20 * section.model.layer_weights, rel=0.01)

    half = opened(reference, pool=0.5)
    assert half.manifest.sources["web"].where == (
        "(tokens > 2) AND draw >= 0.050000 AND draw < 0.525000"
    )
    tiny = opened(reference, place=1).manifest.pretrain
    assert tiny is not None
    ratio = tiny.optimizer.learning_rate / section.optimizer.learning_rate
    assert ratio == pytest.approx(0.01)
    assert tiny.optimizer.weight_decay == section.optimizer.weight_decay


@pytest.mark.usefixtures("project")
def test_arm_whose_documents_another_run_filters_waits_for_the_free_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = plan_ablation(settings_of(), "small.yaml", [], "store")
    run = prepared(plan)
    requests = [
        Request(arm.name, 3, tuple(run.overrides(plan.trials[0], arm, {}, 3)))
        for arm in plan.variants
    ]
    folder = plan.open(requests[0].overrides).folder("filter").path
    lease = acquire(folder / "lease", lambda owner: None, lambda: True)
    assert lease is not None
    trained: list[str] = []
    monkeypatch.setattr(proxies, "run_in_sequence", lambda *args: None)
    monkeypatch.setattr(proxies, "measured", lambda *args: None)
    monkeypatch.setattr(proxies, "packed_manifest", lambda session: {})
    proxies.train_proxies(
        plan,
        requests,
        lambda event: trained.append(event.message),  # type: ignore[union-attr]
    )
    lease.release()
    arms = [message.split(": ")[1].split(",")[0] for message in trained]
    # All arms but `plain` have the filter of the manifest.
    assert arms == ["plain", "strict", "reference", "no-dedup", "no-books"]


def prepared(plan: AblationPlan) -> ablation.AblationRun:
    """A run whose held-out text exists."""
    documents = Path("held-out.jsonl").resolve()
    documents.write_text('{"text": "three four five"}\n')
    Path("held").mkdir(exist_ok=True)
    Path("held/packed.json").write_text("{}")
    run = ablation.AblationRun(plan, lambda event: None)
    run.held_out = HeldOut(Path("held").resolve(), documents, 0.05)
    return run


def packed(**sources: tuple[int, int, float]) -> dict[str, Any]:
    """The manifest of a packed set: source -> its tokens, those read, and epochs."""
    keys = ("available_tokens", "tokens", "epochs")
    return {
        "realised": {
            name: dict(zip(keys, values, strict=True))
            for name, values in sources.items()
        }
    }


TOKENS = {"no-dedup": 40_000, "strict": 10_000}
EFFECTS = {"no-dedup": 0.05, "no-books": 0.0, "strict": -0.03, "plain": 0.0001}


@pytest.fixture
def planted(project: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Trainings with planted bits per byte: the effect of the arm, noise of the seed
    that all arms share, and a little noise of their own. Returns the trained arms.
    """
    trained: list[str] = []

    def proxy(request: Request) -> Proxy:
        effects = {**EFFECTS, "shuffled words": 1.0, "half duplicated": 0.02}
        effect = effects.get(request.group, 0.0)
        section = next(s for s in request.overrides if s.startswith("pretrain="))
        seed = yaml.safe_load(section.removeprefix("pretrain="))["seed"]
        shared = np.random.default_rng(seed).normal(0, 0.05)
        key = zlib.crc32(f"{request.group} {request.seed}".encode())
        own = np.random.default_rng(key).normal(0, 0.001)
        value = 2.0 + effect + shared + own
        tasks = {"quiz": 0.5 + effect / 10 + own}
        values = {"web": value, "books": value + 1.0}
        return Proxy(request.seed, "f", values, tasks)

    def train(
        plan: Any, requests: list[Request], emit: Any, weights: str, server: Any
    ) -> list[TrainedGroup]:
        assert weights == "validation_average"
        groups = dict.fromkeys(request.group for request in requests)
        trained.extend(groups)
        return [
            TrainedGroup(
                name,
                tuple(proxy(entry) for entry in requests if entry.group == name),
                packed(
                    web=(TOKENS.get(name, 20_000), 5000, 0.5),
                    books=(1000, 2000, 2.0),
                    of_weight_0=(50_000, 0, 0.0),
                ),
            )
            for name in groups
        ]

    monkeypatch.setattr(ablation, "train_proxies", train)
    monkeypatch.setattr(ablation, "run_in_sequence", lambda *args, **keys: None)
    monkeypatch.setattr(ablation, "set_aside", lambda run: prepared(run.plan).held_out)
    return trained


def ablated(*options: str) -> str:
    command = ["ablate", "small.yaml", "--arms=arms.yaml", "--store=store"]
    return call(*command, *options).stdout


def reported(*options: str) -> Any:
    return json.loads(ablated("--json", *options))


@pytest.mark.slow
def test_planted_differences_are_decided_and_controls_hold(
    planted: list[str],
) -> None:
    report = reported()
    assert report["decisions"] == {
        "no-dedup": "worse",
        "no-books": "cannot tell",
        "plain": "cannot tell",
        "strict": "better",
    }
    assert report["can_tell"] is True
    assert report["earlier_rule"] is None
    assert report["seeds"] == [3, 4, 5, 6, 7]
    assert report["target"] == {"web": 0.5, "books": 0.5}
    assert len(report["trials"]) == 2
    arms = {arm["arm"]: arm for arm in report["trials"][0]["arms"]}
    strict = arms["strict"]
    assert strict["difference"]["agreement"] == 1.0
    assert (strict["tokens_kept"], strict["epochs"]) == (11_000, 2.0)
    # The random drops are reference documents, and those of the larger arm.
    for comparison in ("difference", "random_drop"):
        assert strict[comparison]["mean"] == pytest.approx(-0.03, abs=0.003)
    assert arms["no-dedup"]["random_drop"]["mean"] == pytest.approx(0.0, abs=0.003)
    assert arms["plain"]["random_drop"] is None
    controls = {control["name"]: control for control in report["trials"][0]["controls"]}
    assert {name: control["holds"] for name, control in controls.items()} == {
        "other seeds": True,
        "shuffled words": True,
        "half duplicated": True,
    }
    trial = ["reference", "other seeds", "shuffled words", "half duplicated"]
    trial += ["no-dedup", "no-books", "plain", "strict"]
    trial += ["random drop for no-dedup", "random drop for strict"]
    assert planted == trial * 2
    assert json.loads(Path("small-ablation.json").read_text()) == report
    assert "<svg" in Path("small-ablation.html").read_text()


@pytest.mark.usefixtures("planted")
def test_quick_takes_fewer_trainings_and_another_rule_is_noticed() -> None:
    report = reported("--quick")
    assert report["seeds"] == [3, 4, 5]
    assert [trial["trial"] for trial in report["trials"]] == [
        {"pool": "equal_tokens", "size": "50k", "rate": "tuned"}
    ]
    again = reported("--quick")
    assert again["earlier_rule"] is None
    Path("arms.yaml").write_text(ARMS + "decide: {smallest_difference: 0.04}\n")
    later = reported("--quick")
    assert later["earlier_rule"]["decide"]["smallest_difference"] == 0.002
    assert later["decisions"]["strict"] == "cannot tell"


@pytest.mark.usefixtures("planted")
def test_python_takes_the_content_of_the_file(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arms = {"arms": {"strict": {"without": ["dedup"]}}, "rates": {"tuned": 1.0}}
    results = gristmill.ablate("small.yaml", arms, store="store", progress=False)
    assert results.decisions == {"strict": "better"}
    assert results.trials[0].arms[0].difference.seeds == 5
    assert capsys.readouterr().out == ""


@pytest.mark.usefixtures("planted")
def test_task_can_be_the_target() -> None:
    Path("quiz.jsonl").write_text("{}")
    task = {"name": "quiz", "path": "quiz.jsonl", "kind": "cloze"}
    arms = {
        "arms": {"strict": {"without": ["dedup"]}},
        "pretrain": {"tasks": [task]},
        "decide": {"target": {"quiz": 2.0}},
    }
    results = gristmill.ablate("small.yaml", arms, quick=True, store="store")
    (trial,) = results.trials
    assert results.target == {"quiz": 1.0}
    assert trial.arms[0].difference.mean == pytest.approx(-0.003, abs=0.003)
    assert trial.reference[0] == pytest.approx(0.5, abs=0.01)


@pytest.mark.usefixtures("planted")
def test_printed_report_fits_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """No number is broken over two lines, also beside the name of a rule set."""
    monkeypatch.setenv("COLUMNS", "80")
    Path("arms.yaml").write_text(
        ARMS + "  no-gopher_repetition: {without: [filter.gopher_quality]}\n"
    )
    printed = ablated("--quick")
    assert all(len(line) <= 80 for line in printed.splitlines())
    arm = next(line for line in printed.splitlines() if "no-gopher" in line)
    assert re.search(r"[+-]\d\.\d{4} ± \d\.\d{4} .* of 3  cannot tell$", arm)
    lines = [line.split() for line in printed.splitlines()]
    assert [line[0] for line in lines if line[-1:] in (["better"], ["worse"])] == [
        "strict",
        "no-dedup",
    ]
    # The smaller set, and the set whose random part it is compared with.
    pairs = [line[:2] for line in lines]
    assert ["strict", "reference"] in pairs
    assert ["reference", "no-dedup"] in pairs


def trained_trial(
    duplicates: float, arm: float, shuffled: float = 1.0
) -> ablation.TrainedTrial:
    """A trial with planted means, and noise of the seeds that differs between arms."""

    def trained(name: str, mean: float, noise: float) -> TrainedGroup:
        proxies = tuple(
            Proxy(seed, "f", {"web": 2.0 + mean + noise * (seed - 1)})
            for seed in range(3)
        )
        return TrainedGroup(name, proxies, packed(web=(100, 9, 1.0)))

    trial = ablation.Trial("equal_tokens", "1m", "tuned")
    return ablation.TrainedTrial(
        trial,
        1000,
        (trained("reference", 0.0, 0.0), trained("arm", arm, 0.001)),
        (
            trained("other seeds", 0.0, 0.002),
            trained("shuffled words", shuffled, 0.01),
            trained("half duplicated", duplicates, 0.01),
        ),
        {},
    )


def plan_of_arm() -> AblationPlan:
    settings = Ablation.model_validate({"arms": {"arm": {"without": ["dedup"]}}})
    return plan_ablation(settings, "small.yaml", [], "store")


@pytest.mark.parametrize(
    ("duplicates", "arm", "shuffled", "decision"),
    [
        (0.05, 0.01, 1.0, "worse"),
        # Its interval is 0.01 +- 4.303 * 0.01 / sqrt(3): up to 0.0348.
        (0.01, 0.01, 1.0, "cannot tell"),
        (0.01, 0.04, 1.0, "worse"),
        (0.01, -0.04, 1.0, "better"),
        # Nothing is decided by an instrument that is wrong, or finds no shuffled words.
        (-0.05, 0.04, 1.0, "cannot tell"),
        (0.05, 0.04, 0.02, "cannot tell"),
    ],
)
@pytest.mark.usefixtures("project")
def test_harm_that_does_not_separate_hides_differences_of_its_size(
    duplicates: float, arm: float, shuffled: float, decision: str
) -> None:
    results = analyse_ablation(
        plan_of_arm(), [trained_trial(duplicates, arm, shuffled)]
    )
    assert results.decisions == {"arm": decision}
    assert results.trials[0].arms[0].decision == decision
    control = results.trials[0].controls[2]
    assert control.holds == (duplicates == 0.05)
    assert control.is_required == (duplicates == -0.05)


@pytest.mark.usefixtures("project")
def test_nothing_is_decided_without_a_required_control() -> None:
    outcome = trained_trial(0.05, 0.04)
    same, _, duplicates = outcome.controls
    failed = TrainedGroup("shuffled words", error="killed")
    outcome = replace(outcome, controls=(same, failed, duplicates))
    results = analyse_ablation(plan_of_arm(), [outcome])
    assert results.decisions == {"arm": "cannot tell"}
    assert results.failed == {"shuffled words": "killed"}


@pytest.mark.usefixtures("project")
def test_seeds_are_planned_for_a_decision_on_all_arms() -> None:
    plan = plan_of_arm()
    outcome = trained_trial(0.05, 0.002)
    (single,) = analyse_ablation(plan, [outcome]).trials
    reference, arm = outcome.arms
    four = tuple(replace(arm, name=f"arm {number}") for number in range(4))
    (several,) = analyse_ablation(
        plan, [replace(outcome, arms=(reference, *four))]
    ).trials
    assert single.arms[0].seeds_needed == seeds_to_find(0.002, 0.001, 0.95)
    assert several.arms[0].seeds_needed == seeds_to_find(0.002, 0.001, 0.9875)
    assert several.detectable == pytest.approx(detectable(3, 0.001, 0.9875))


@pytest.mark.usefixtures("planted")
def test_insensitive_budget_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shuffled words and duplicates make no difference."""
    train = ablation.train_proxies

    def train_alike(plan: Any, requests: Any, *args: Any, **keys: Any) -> Any:
        groups = train(plan, requests, *args, **keys)
        proxies = tuple(Proxy(seed, "f", {"web": 2.0 + seed}) for seed in range(3))
        return [replace(group, proxies=proxies) for group in groups]

    monkeypatch.setattr(ablation, "train_proxies", train_alike)
    report = reported("--quick")
    assert report["can_tell"] is False
    assert set(report["decisions"].values()) == {"cannot tell"}


@pytest.mark.usefixtures("planted")
def test_no_arm_is_trained_if_the_manifest_itself_cannot_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trained: list[str] = []

    def fail(
        plan: Any, requests: list[Request], *args: Any, **keys: Any
    ) -> list[TrainedGroup]:
        names = dict.fromkeys(request.group for request in requests)
        trained.extend(names)
        return [TrainedGroup(name, error="too few documents") for name in names]

    monkeypatch.setattr(ablation, "train_proxies", fail)
    with pytest.raises(StageFailedError):
        gristmill.ablate("small.yaml", yaml.safe_load(ARMS), quick=True, store="store")
    assert trained == ["reference"]


@pytest.mark.slow
@pytest.mark.usefixtures("planted")
def test_smaller_sizes_are_compared_with_the_largest() -> None:
    Path("arms.yaml").write_text(ARMS + "sizes: [50k, 400k]\nrates: {tuned: 1.0}\n")
    report = reported()
    assert report["agreement"] == {"50k": 1.0}


@pytest.mark.usefixtures("project")
def test_equal_pool_has_the_documents_that_the_largest_arm_reads_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of web the arm without dedup has four times the tokens that it reads, the
    manifest twice; books are too few for any arm, and one arm cannot be mixed.
    """
    settings = settings_of(pools=["equal_tokens", "equal_pool"], rates={"tuned": 1.0})
    plan = plan_ablation(settings, "small.yaml", [], "store")
    epochs = {"reference": 0.5, "no-dedup": 0.25, "no-books": 0.5, "strict": 3.0}
    names = iter(variant.name for variant in plan.variants)
    current: list[str] = []

    def run(session: Session, *args: Any, **keys: Any) -> None:
        assert list(session.plan)[-1] == "mix"
        current[:] = [next(names)]
        if current == ["plain"]:
            raise StageFailedError("too few documents")

    def packed_manifest(session: Session) -> dict[str, Any]:
        books = (0, 0.0) if current == ["no-books"] else (10, 2.0)
        return packed(web=(10**6, 10, epochs[current[0]]), books=(10**6, *books))

    monkeypatch.setattr(ablation, "run_in_sequence", run)
    monkeypatch.setattr(ablation, "packed_manifest", packed_manifest)
    trained: list[Request] = []

    def train(
        plan: Any, requests: list[Request], *args: Any, **keys: Any
    ) -> list[TrainedGroup]:
        trained.extend(requests)
        names = dict.fromkeys(request.group for request in requests)
        return [TrainedGroup(name) for name in names]

    monkeypatch.setattr(ablation, "train_proxies", train)
    equal_tokens, equal_pool = plan.trials
    assert equal_tokens.pool == "equal_tokens"
    prepared(plan).train_trial(equal_pool)
    # The held-out part is below 0.05, and a quarter of the rest is used.
    end = f"draw < {0.05 + 0.95 * 0.25:.6f}"
    settings_by_arm = {request.group: request.overrides for request in trained}
    for arm in ("reference", "no-dedup", "strict", "shuffled words"):
        conditions = {
            source: setting
            for setting in settings_by_arm[arm]
            for source in ("web", "books")
            if setting.startswith(f"sources.{source}.where=")
        }
        assert end in conditions["web"]
        assert "draw <" not in conditions["books"]


def test_share_read_has_several_documents() -> None:
    assert ablation.share_read(0.25, 10**6) == 0.25
    assert ablation.share_read(0.001, 10**6) == 0.02
    assert ablation.share_read(0.001, 10_000) == 1.0
    assert ablation.share_read(3.0, 10**6) == 1.0


@given(st.text(alphabet="ab \n"))
def test_shuffled_words_stay_in_their_lines(text: str) -> None:
    shuffled = shuffle_words(text)
    assert shuffled == shuffle_words(text)
    for line, before in zip(shuffled.split("\n"), text.split("\n"), strict=True):
        assert Counter(line.split(" ")) == Counter(before.split(" "))
