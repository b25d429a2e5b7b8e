"""`gristmill rate`: the choice of models, pairs of their answers, and the server."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient

from gristmill.flows.models.find_model import ModelNotFoundError
from gristmill.flows.pages import page_server
from gristmill.flows.rating import answer_pairs
from gristmill.flows.rating.answer_pairs import RatedModel, make_pairs, models_to_rate
from gristmill.flows.rating.ratings import rating_files
from gristmill.flows.rating.server import RateProblemError, serve_pairs
from gristmill.flows.stages.registry import TOKENIZER
from gristmill.mixtures.sections.model import Model
from gristmill.tokenize.encoding.tokenizer import write_tokenizer
from gristmill.tokenize.encoding.vocabulary import train
from gristmill.tokenize.encoding.vocabulary_sample import TokenizerSample
from gristmill.train.generation.sampling import Sampling
from gristmill.train.models.decoder import Llama
from gristmill.train.models.model_config import shape_of
from gristmill.train.models.weights import drawn, save_model

ROWS = {"pretrain": "documents", "sft": "conversations", "dpo": "preferences"}
GREEDY = Sampling(0.0, 1.0, 0)


def session(
    folder: Path,
    name: str = "run",
    made: tuple[str, ...] = ("pretrain", "sft", "dpo"),
    seed: int = 0,
) -> Any:
    """Return a fake session with a plan of three trainings, some of which have
    committed models in a folder.
    """
    plan = {
        stage: SimpleNamespace(
            stage=SimpleNamespace(output="model", row_kind=rows),
            identity=f"{name}-{stage}",
        )
        for stage, rows in ROWS.items()
    }
    plan["filter"] = SimpleNamespace(
        stage=SimpleNamespace(output=None, row_kind=None), identity=""
    )

    def committed(stage: str) -> Any:
        return (
            SimpleNamespace(data=folder / f"{name}-{stage}")
            if stage in (*made, TOKENIZER)
            else None
        )

    return SimpleNamespace(
        plan=plan,
        committed=committed,
        manifest=SimpleNamespace(name=name),
        manifest_file=f"{name}.yaml",
        command=lambda *words: (
            f"gristmill {words[0]} {name}.yaml {' '.join(words[1:])}".strip()
        ),
    )


def labels(*arguments: Any) -> list[str]:
    return [model.label for model in models_to_rate(*arguments)]


def test_last_two_models_are_compared_unless_stages_are_given(
    tmp_path: Path,
) -> None:
    run = session(tmp_path)
    first, second = models_to_rate(run, None, None, None)
    assert (first.label, first.fingerprint, first.weights) == (
        "sft",
        "run-sft",
        tmp_path / "run-sft" / "model",
    )
    assert (second.label, second.chat, first.chat) == ("dpo", True, True)
    assert labels(run, None, "pretrain", None) == ["pretrain", "dpo"]
    assert labels(run, None, None, "sft") == ["dpo", "sft"]
    assert labels(run, None, "dpo", None) == ["dpo", "sft"]
    assert not models_to_rate(run, None, "pretrain", "dpo")[0].chat


def test_second_model_comes_from_the_other_manifest(tmp_path: Path) -> None:
    run, after = session(tmp_path), session(tmp_path, "after", ("pretrain", "sft"))
    first, second = models_to_rate(run, after, None, None)
    assert [first.label, second.label] == ["run/dpo", "after/sft"]
    assert [first.fingerprint, second.fingerprint] == ["run-dpo", "after-sft"]
    assert second.weights == tmp_path / "after-sft" / "model"
    assert second.tokenizer == tmp_path / f"after-{TOKENIZER}"
    assert labels(run, after, "sft", "pretrain") == ["run/sft", "after/pretrain"]
    assert labels(run, after, "sft", "sft") == ["run/sft", "after/sft"]


@pytest.mark.parametrize(
    ("made", "others", "first", "second", "message"),
    [
        (("sft",), None, None, None, "run.yaml has made sft; two models are compared"),
        ((), None, None, None, "run.yaml has made no model yet"),
        (
            ("sft", "dpo"),
            None,
            "dpo",
            "dpo",
            "both models are dpo; name two different stages",
        ),
        (
            ("sft", "dpo"),
            None,
            "sft",
            "filter",
            "'filter' makes no model; those that do are pretrain, sft, dpo",
        ),
        (
            ("sft", "dpo"),
            None,
            "pretrain",
            "dpo",
            "run.yaml: pretrain has made no model yet; run: gristmill run run.yaml",
        ),
        (
            ("sft",),
            (),
            None,
            None,
            "after.yaml: no model is trained yet; run: gristmill run after.yaml",
        ),
        ((), ("sft",), None, None, "run.yaml: no model is trained yet"),
    ],
)
def test_incomparable_models_are_rejected_with_the_reason(
    tmp_path: Path,
    made: tuple[str, ...],
    others: tuple[str, ...] | None,
    first: str | None,
    second: str | None,
    message: str,
) -> None:
    second_session = None if others is None else session(tmp_path, "after", others)
    with pytest.raises(ModelNotFoundError) as error:
        models_to_rate(session(tmp_path, made=made), second_session, first, second)
    assert message in str(error.value)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two untrained models with different outputs; the model of `after` equals that of
    `run-dpo`.
    """
    folder = tmp_path_factory.mktemp("models")
    vocabulary = train(
        TokenizerSample({"all": ["red blue one two sky grass rose " * 20]}, {}), 270
    )
    shape = shape_of(Model(layers=1, width=16, heads=2), 270, 64)
    with torch.device("meta"):
        parameters = {
            name: tensor.shape for name, tensor in Llama(shape).named_parameters()
        }
    # An untrained model repeats the last token for any seed, unless its layers have
    # larger weights.
    for name, scale in (
        ("run-pretrain", 1.0),
        ("run-dpo", 100.0),
        ("after-pretrain", 100.0),
    ):
        (folder / name / "model").mkdir(parents=True)
        weights = {key: drawn(shape, 2)(key, size) for key, size in parameters.items()}
        save_model(
            folder / name / "model",
            shape,
            {
                key: tensor * scale if "layers" in key else tensor
                for key, tensor in weights.items()
            },
        )
    for name in ("run", "after"):
        (folder / f"{name}-{TOKENIZER}").mkdir()
        write_tokenizer(vocabulary, folder / f"{name}-{TOKENIZER}")
    return folder


def rated(folder: Path, name: str, stage: str) -> RatedModel:
    return RatedModel(
        stage,
        f"{name}-{stage}",
        folder / f"{name}-{stage}" / "model",
        folder / f"{name}-{TOKENIZER}",
        False,
    )


@pytest.mark.slow
def test_different_answers_become_pairs_and_are_generated_once(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = {1: {"prompt": "red"}, 3: {"prompt": "sky " * 100}, 4: {"prompt": "rose"}}
    models, answers_file = (
        [rated(trained, "run", "pretrain"), rated(trained, "run", "dpo")],
        tmp_path / "x.answers.json",
    )
    made_pairs = make_pairs(models, prompts, GREEDY, 8, answers_file)
    assert [answer_pair.prompt for answer_pair in made_pairs.pairs] == ["red", "rose"]
    assert {
        (answer_pair.first, answer_pair.second) for answer_pair in made_pairs.pairs
    } == {("pretrain", "dpo")}
    assert all(
        answer_pair.answers[0] != answer_pair.answers[1]
        for answer_pair in made_pairs.pairs
    )
    assert list(made_pairs.failed) == [3]
    assert made_pairs.failed[3].startswith("pretrain: ")
    opened_models = list[str]()
    original = answer_pairs.open_language_model
    monkeypatch.setattr(
        answer_pairs,
        "open_language_model",
        lambda weights, tokenizer: (
            opened_models.append(weights.parent.name) or original(weights, tokenizer)
        ),
    )
    assert make_pairs(models, prompts, GREEDY, 8, answers_file) == made_pairs
    assert opened_models == []
    longer = make_pairs(models, prompts, GREEDY, 9, answers_file)
    assert opened_models == ["run-pretrain", "run-dpo"]
    assert {answer_pair.id for answer_pair in longer.pairs}.isdisjoint(
        answer_pair.id for answer_pair in made_pairs.pairs
    )


@pytest.mark.slow
def test_prompts_with_equal_answers_are_omitted(trained: Path, tmp_path: Path) -> None:
    models = [rated(trained, "run", "dpo"), rated(trained, "after", "pretrain")]
    made_pairs = make_pairs(
        models, {1: {"prompt": "red"}}, GREEDY, 8, tmp_path / "x.answers.json"
    )
    assert (made_pairs.pairs, made_pairs.same, made_pairs.failed) == ([], 1, {})


def asked(tmp_path: Path, *prompts: str) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
    )
    return path


@pytest.mark.slow
def test_pairs_of_two_manifests_are_served_with_ratings_beside_the_first(
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    served = list[Any]()

    def keep(app: Any, listening: Any) -> None:
        served.append((app, listening.getsockname()))
        listening.close()

    monkeypatch.setattr(page_server, "serve", keep)
    run, after = (
        session(trained, made=("pretrain",)),
        session(trained, "after", ("pretrain",)),
    )
    files = rating_files(None, str(tmp_path / "run.yaml"))
    serve_pairs(
        run,
        after,
        None,
        None,
        asked(tmp_path, "red", "sky " * 100, "rose"),
        files,
        (0.0, 1.0, 0),
        8,
        0,
    )
    (app, (host, port)), printed = served[0], capsys.readouterr()
    assert host == "127.0.0.1"
    address = printed.out.split()[0]
    assert address.startswith(f"http://127.0.0.1:{port}/?token=")
    assert f"asks about 2 pairs; ratings go to {files.ratings}" in printed.out
    assert (
        f"{tmp_path / 'prompts.jsonl'}, line 2 is left out: run/pretrain: "
        in printed.err
    )
    client = TestClient(app, base_url=f"http://127.0.0.1:{port}")
    assert client.get("/?rater=ann").status_code == 403
    assert client.get(address).status_code == 200
    page = client.get("/?rater=ann").text
    assert "ann: 0 of 2 rated" in page
    assert "run/pretrain" not in page
    answers = json.loads(files.answers.read_text())
    assert answers["models"] == ["run/pretrain", "after/pretrain"]
    assert files.settled.read_text() == ""


@pytest.mark.slow
def test_server_without_pairs_does_not_start(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        page_server, "serve", lambda app, listening: pytest.fail("it was served")
    )
    run = session(trained, made=("pretrain",))
    files = rating_files(None, str(tmp_path / "run.yaml"))
    with pytest.raises(
        RateProblemError,
        match=r"prompts\.jsonl has two answers that differ; there is nothing to rate",
    ):
        serve_pairs(
            run, run, None, None, asked(tmp_path, "red"), files, (0.0, 1.0, 0), 8, 0
        )
    with pytest.raises(
        RateProblemError, match=r"run\.yaml has made pretrain; two models are compared"
    ):
        serve_pairs(
            run, None, None, None, asked(tmp_path, "red"), files, (0.0, 1.0, 0), 8, 0
        )
