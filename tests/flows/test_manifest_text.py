"""Edits of keys in a manifest's text leave all other text unchanged."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from gristmill.flows.authoring.manifest_text import ManifestTextError, set_keys

TEXT = """\
name: demo   # a comment
sources:
  prose: {path: "a/*", weight: 0.7}   # flow
  code:
    path: b

mix:
  # before the first key
  tokens: 100
  weights:
    prose: 1
    code: 2

pretrain: {steps: 3}
"""


def test_set_keys_preserves_all_other_text() -> None:
    changed = set_keys(
        TEXT,
        {
            ("sources", "prose", "weight"): 0.25,
            ("sources", "code", "weight"): 0.75,
            ("mix", "weights"): {"prose": 1e-05},
            ("mix", "exclude"): "list.ids",
            ("pretrain", "continue_from"): "x y",
            ("export", "dtype"): "fp32",
        },
    )
    assert (
        changed
        == """\
name: demo   # a comment
sources:
  prose: {path: "a/*", weight: 0.25}   # flow
  code:
    weight: 0.75
    path: b

mix:
  # before the first key
  exclude: list.ids
  tokens: 100
  weights:
    {prose: 1.0e-05}

pretrain: {continue_from: x y, steps: 3}

export: {dtype: fp32}
"""
    )


@pytest.mark.slow
@given(
    st.dictionaries(
        st.text(min_size=1, max_size=8),
        st.one_of(
            st.floats(allow_nan=False, allow_infinity=False),
            st.text(max_size=8),
            st.none(),
            st.booleans(),
            st.integers(),
            st.lists(st.text(max_size=3), max_size=2),
        ),
        max_size=3,
    )
)
def test_set_values_round_trip(value: dict[str, object]) -> None:
    assert (
        yaml.safe_load(set_keys(TEXT, {("mix", "weights"): value}))["mix"]["weights"]
        == value
    )


def test_keys_below_values_and_texts_with_anchors_are_rejected() -> None:
    with pytest.raises(
        ManifestTextError,
        match=r"mix.tokens is not a mapping, so mix.tokens.x cannot be set",
    ):
        set_keys(TEXT, {("mix", "tokens", "x"): 1})
    anchored = "a: &a {x: 1}\nb: *a\n"
    with pytest.raises(
        ManifestTextError, match=r"b.x cannot be set in this manifest's text"
    ):
        set_keys(anchored, {("b", "x"): 2})
