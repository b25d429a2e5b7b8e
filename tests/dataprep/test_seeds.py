"""Seeded keys are stable: they decide the documents of mixtures and the initial weights
of models.
"""

from __future__ import annotations

import pytest

from gristmill.core.seeds import content_key, seeded_bytes, seeded_key
from gristmill.mixtures.schema.mix import Mix
from gristmill.tokenize.shuffle import order_key


def test_keys_are_stable() -> None:
    assert (
        order_key(7, "mix", "documents")
        == seeded_key("gristmill", 7, "mix", "documents")
        == 501757538284448482
    )
    assert seeded_key(7, "model.embed_tokens.weight") == 6386769700040092443
    assert seeded_bytes(7, "an id", size=16).hex() == "b92e6acfc38d7ad4b3f47b521529d54a"
    assert content_key(7, [["user", "Why?"]]) == 10423136157022099323
    assert content_key(7, [1, 2], bits=128) == 18194522577411754210913177492441662496


@pytest.mark.parametrize(("seed", "key"), [(None, 0), (0, 0), (5, 5)])
def test_section_without_a_seed_is_keyed_by_0(seed: int | None, key: int) -> None:
    assert Mix(tokens=1000, sequence_length=10, seed=seed).key_seed == key
