"""Validation of a whole manifest before any work: every mistake with its file, line and
key.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.checkout import ROOT
from gristmill.mixtures.loader import ManifestError, load_manifest, parse_manifest
from gristmill.mixtures.manifest import Manifest

GOOD = """\
name: small
seed: 3
sources:
  prose: {path: "text/*.txt", weight: 2}
prepare:
  - filter: {rules: [gopher_quality, {gopher_repetition: {max_top_2gram_char_ratio: 0.3}}]}
  - dedup
  - langid: {keep: [en, de]}
tokenizer: {vocab_size: 512}
mix: {tokens: 20_000, sequence_length: 64}
pretrain: {steps: 5}
evaluate:
"""


def problems_of(text: str, *overrides: str) -> list[str]:
    with pytest.raises(ManifestError) as caught:
        parse_manifest(text, "m.yaml", overrides)
    return [str(problem) for problem in caught.value.problems]


def test_valid_manifest_is_read_with_defaults() -> None:
    manifest = parse_manifest(GOOD, "/base/m.yaml")
    assert manifest.seed == 3
    assert [step.stage for step in manifest.prepare] == ["filter", "dedup", "langid"]
    filter_ = manifest.prepare[0].filter
    assert filter_ is not None
    assert filter_.rules.gopher_repetition is not None
    assert filter_.rules.gopher_repetition.max_top_2gram_char_ratio == 0.3
    assert filter_.rules.gopher_repetition.max_top_3gram_char_ratio == 0.18
    assert manifest.mix is not None
    assert manifest.mix.tokens == 20_000
    assert manifest.evaluate is not None
    assert manifest.export is None


def test_relative_paths_are_resolved_against_the_folder_of_the_manifest(
    tmp_path: Path,
) -> None:
    (tmp_path / "m.yaml").write_text(GOOD)
    manifest = load_manifest(tmp_path / "m.yaml")
    assert manifest.sources["prose"].path == str(tmp_path / "text/*.txt")


def test_all_mistakes_are_reported_with_line_and_key() -> None:
    text = """\
name: bad
sources:
  prose: {path: "a.txt", wieght: 2}
  code:
    path: "b.txt"
    weight: -1
prepare:
  - filter: {sources: [prse]}
  - langid: {threshold: 1.5}
pretrain: {steps: 10}
"""
    assert problems_of(text) == [
        "m.yaml:3: sources.prose.wieght: unknown key, did you mean 'weight'?",
        "m.yaml:6: sources.code.weight: input should be greater than or equal to 0 "
        "(got -1)",
        "m.yaml:8: prepare[0].filter.sources[0]: no such source: 'prse', did you "
        "mean 'prose'? (sources: prose, code)",
        "m.yaml:9: prepare[1].langid.threshold: input should be less than or equal "
        "to 1 (got 1.5)",
        "m.yaml:10: pretrain: needs a section `mix:` too, which is absent",
    ]


def test_misspelt_threshold_inside_a_list_is_reported_at_its_line() -> None:
    text = GOOD.replace("max_top_2gram_char_ratio", "max_top_2gram_chars_ratio")
    (problem,) = problems_of(text)
    assert problem.startswith(
        "m.yaml:6: prepare[0].filter.rules[1].gopher_repetition.max_top_2gram_chars_ratio:"
    )
    assert "did you mean 'max_top_2gram_char_ratio'?" in problem


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("keep: [en, de]", "keep: en", "prepare[2].langid.keep"),
        ("keep: [en, de]", "keep: {en: 5}", "prepare[2].langid.keep.en"),
        ("{steps: 5}", "{steps: 5}\nengine: {ranks: x}", "engine.ranks"),
        ("weight: 2", "split: 5", "sources.prose.split"),
        ("weight: 2", "split: {paragraphs: x}", "sources.prose.split.paragraphs"),
    ],
)
def test_value_that_has_none_of_its_forms_is_one_problem_at_its_key(
    old: str, new: str, key: str
) -> None:
    with pytest.raises(ManifestError) as caught:
        parse_manifest(GOOD.replace(old, new), "m.yaml")
    (problem,) = caught.value.problems
    assert problem.key == key


def test_rule_set_for_an_unknown_source_is_reported_at_its_line() -> None:
    filter_section = "rules: [fineweb], rule_sources: {fineweb: [cod]}"
    (problem,) = problems_of(
        f"name: x\nsources: {{code: {{path: a.txt}}}}\nprepare:\n  - filter: {{{filter_section}}}\n"
    )
    assert problem == (
        "m.yaml:4: prepare[0].filter.rule_sources.fineweb[0]: no such source: 'cod', "
        "did you mean 'code'? (sources: code)"
    )


def test_duplicate_key_is_rejected() -> None:
    assert problems_of(GOOD + "seed: 4\n") == ["m.yaml:13: seed: given twice; keep one"]


def test_repeated_gguf_kind_is_reported_at_its_line() -> None:
    (problem,) = problems_of(
        "name: x\nmodel: {path: m}\nexport:\n  weights: raw\n  gguf: [q8_0, q8_0]\n"
    )
    assert problem.startswith("m.yaml:5: export.gguf: q8_0 is given twice; keep one")


def test_repeated_step_is_numbered_or_named_and_settings_address_it_so() -> None:
    more = "  - filter\n  - {filter: {rules: [c4]}, name: strict}\n  - filter"
    text = GOOD.replace("  - langid: {keep: [en, de]}", more)
    names = list(parse_manifest(text, "m.yaml").steps)
    assert names == ["filter", "dedup", "filter-2", "strict", "filter-3"]
    settings = ["filter-2.max_quarantined=0.25", "prepare.strict.max_quarantined=0.5"]
    steps = parse_manifest(text, "m.yaml", settings).steps
    assert [steps[name].config.max_quarantined for name in names] == [
        0.05,
        0.05,
        0.25,
        0.5,
        0.05,
    ]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mix", "'mix' has another meaning in a manifest; choose another name"),
        ("dedup", "'dedup' has another meaning in a manifest; choose another name"),
        (
            "filter",
            "'filter' is already the name of entry 0 of `prepare`; choose another name",
        ),
    ],
)
def test_step_name_that_is_in_use_is_rejected(name: str, message: str) -> None:
    text = GOOD.replace(
        "  - langid: {keep: [en, de]}", f"  - {{filter: {{}}, name: {name}}}"
    )
    assert problems_of(text) == [f"m.yaml:8: prepare[2].name: {message}"]


def test_step_names_that_are_the_same_in_expressions_are_rejected() -> None:
    text = GOOD.replace(
        "  - langid: {keep: [en, de]}",
        "  - {filter: {}, name: a-b}\n  - {filter: {}, name: a_b}",
    )
    assert problems_of(text) == [
        "m.yaml:9: prepare[3].name: 'a_b' is already the name of entry 2 of "
        "`prepare`; choose another name"
    ]


def test_step_name_with_a_blank_is_rejected() -> None:
    (problem,) = problems_of(
        GOOD.replace("  - langid: {keep: [en, de]}", "  - {filter: {}, name: 'a b'}")
    )
    assert problem.startswith("m.yaml:8: prepare[2].name: ")


def test_broken_yaml_names_its_line() -> None:
    (problem,) = problems_of("name: x\nsources: {a: [}\n")
    assert problem.startswith("m.yaml:2: (syntax): not valid YAML")


def test_secret_in_a_manifest_is_rejected() -> None:
    (problem,) = problems_of(
        GOOD.replace(
            '{path: "text/*.txt", weight: 2}', '{path: "x", metadata_fields: [a]}'
        )
        + "engine: {runner: FlinkRunner, options: {token: abc}}\n"
    )
    assert "engine.options.token" in problem
    assert "abc" not in problem


def test_zero_weights_are_rejected_unless_the_mixture_sets_its_own() -> None:
    zero_weights = GOOD.replace("weight: 2", "weight: 0")
    (problem,) = problems_of(zero_weights)
    assert "every weight is 0" in problem
    parse_manifest(zero_weights, "m.yaml", ["mix.weights={alpha: 0.7}"])
    (problem,) = problems_of(
        zero_weights, "mix.phases=[{end: 0.5, weights: {prose: 1}}, {}]"
    )
    assert "every weight is 0" in problem
    problems = problems_of(GOOD, "mix.weights={prose: 0}")
    assert [problem.partition(": ")[0] for problem in problems] == ["--set mix.weights"]


def test_weights_of_a_mixture_name_known_sources() -> None:
    stages = "mix.phases=[{end: 0.5, weights: {alpha: 0.5}}, {weights: {prsoe: 1}}]"
    assert problems_of(GOOD, stages) == [
        "--set mix.phases: mix.phases[1].weights.prsoe: no such source: 'prsoe', did "
        "you mean 'prose'? (sources: prose)"
    ]
    (problem,) = problems_of(
        GOOD.replace("prose:", "alpha:"), "mix.weights={alpha: 0.5}"
    )
    assert "alpha" in problem


def test_phased_set_is_not_read_past_its_end() -> None:
    """20,000 tokens are 312 rows of 64: 19 steps of 16 rows read 304 of them, 20 would
    read 320.
    """
    stages = "mix.phases=[{end: 0.8}, {weights: {prose: 1}}]"
    parse_manifest(GOOD, "m.yaml", [stages, "pretrain.steps=19"])
    parse_manifest(GOOD, "m.yaml", ["pretrain.steps=20"])
    assert problems_of(GOOD, stages, "pretrain.steps=20") == [
        "--set pretrain.steps: 20 steps of 16 rows read 320 rows, but the set with "
        "phases has 312 and is read once; "
        "take at most 19 steps, or mix at least 20480 tokens (mix.tokens)"
    ]


def test_override_replaces_values_also_inside_prepare() -> None:
    overrides = [
        "pretrain.steps=9",
        "prepare.dedup.exact=false",
        "sources.prose.weight=5",
    ]
    manifest = parse_manifest(GOOD, "m.yaml", overrides)
    assert manifest.pretrain is not None
    assert manifest.pretrain.steps == 9
    dedup = manifest.prepare[1].dedup
    assert dedup is not None
    assert dedup.exact is False
    assert manifest.sources["prose"].weight == 5


def test_null_disables_a_rule_set_also_of_a_list() -> None:
    manifest = parse_manifest(GOOD, "m.yaml", ["filter.gopher_quality=null"])
    rules = manifest.prepare[0].filter.rules
    assert list(rules.sets) == ["gopher_repetition"]
    assert rules.gopher_repetition.max_top_2gram_char_ratio == 0.3


def test_override_of_an_unknown_key_is_rejected() -> None:
    (problem,) = problems_of(GOOD, "pretrain.stepz=9")
    assert "pretrain.stepz: unknown key, did you mean 'steps'?" in problem


def test_missing_manifest_is_named_in_the_error() -> None:
    with pytest.raises(ManifestError, match=r"nowhere\.yaml"):
        load_manifest("nowhere.yaml")


def first_manifest(page: str) -> Manifest:
    text = (ROOT / page).read_text().partition("```yaml\n")[2].partition("```")[0]
    return parse_manifest(text, page)


def test_the_manifest_in_the_readme_is_valid_and_short() -> None:
    manifest = first_manifest("README.md")
    assert None not in (
        manifest.tokenizer,
        manifest.mix,
        manifest.pretrain,
        manifest.sft,
        manifest.dpo,
    )
    assert [step.stage for step in manifest.prepare] == [
        "langid",
        "filter",
        "dedup",
        "quality",
    ]
    assert manifest.sources["web"].where == "quality >= 0.6"


def test_the_manifest_of_the_guide_is_valid_with_every_section() -> None:
    manifest = first_manifest("docs/guide/manifest.md")
    sections = (
        manifest.tokenizer,
        manifest.mix,
        manifest.pretrain,
        manifest.sft,
        manifest.dpo,
        manifest.evaluate,
        manifest.export,
    )
    assert None not in sections
    assert [step.stage for step in manifest.prepare] == [
        "langid",
        "filter",
        "dedup",
        "quality",
    ]
    assert manifest.sources["web"].where == "quality >= 0.6"


def test_the_longer_preparation_in_the_guide_is_valid() -> None:
    page = (ROOT / "docs" / "guide" / "preparing.md").read_text()
    (text,) = [
        block.partition("```")[0]
        for block in page.split("```yaml\n")[1:]
        if block.startswith("prepare:")
    ]
    sources = "sources: {web: {path: a}, books: {path: b}, git: {path: c}}"
    manifest = parse_manifest(f"name: x\n{sources}\n{text}", "preparing.md")
    assert [step.stage for step in manifest.prepare] == [
        "clean",
        "langid",
        "filter",
        "dedup",
        "dedup_substrings",
        "quality",
        "decontaminate",
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("dedup: {}", "dedup: unknown key; it is a step, an entry of `prepare:`"),
        ("filtre: {}", "filtre: unknown key, did you mean 'filter'?"),
        ("evalute: {}", "evalute: unknown key, did you mean 'evaluate'?"),
        (
            "sft: {learning_rate: 1}",
            "sft.learning_rate: unknown key, did you mean "
            "'sft.optimizer.learning_rate'?",
        ),
    ],
)
def test_unknown_section_is_rejected_with_the_fix(line, message):
    with pytest.raises(ManifestError, match=re.escape(message)):
        parse_manifest(f"name: a\nsources: {{a: {{path: a.txt}}}}\n{line}\n", "a.yaml")
