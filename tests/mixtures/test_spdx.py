"""SPDX expressions of licences in the spellings of manifests, packages and pages."""

from __future__ import annotations

import pytest

from gristmill.mixtures.spdx import check_identifier, is_allowed, spdx_of


@pytest.mark.parametrize(
    ("statement", "expression"),
    [
        ("MIT", "MIT"),
        ("The MIT License (MIT)", "MIT"),
        ("Apache License, Version 2.0", "Apache-2.0"),
        ("cc-by-sa-4.0", "CC-BY-SA-4.0"),
        ("CC BY-SA 4.0", "CC-BY-SA-4.0"),
        (
            "Creative Commons Attribution-ShareAlike 4.0 International License",
            "CC-BY-SA-4.0",
        ),
        ("public domain", "LicenseRef-scancode-public-domain"),
        ("CC0", "CC0-1.0"),
        ("GPL-2.0+", "GPL-2.0-or-later"),
        ("GNU General Public License v3 or later (GPLv3+)", "GPL-3.0-or-later"),
        ("MIT/Apache-2.0", "MIT OR Apache-2.0"),
        ("(mit and bsd-3-clause)", "MIT AND BSD-3-Clause"),
        (
            "GPL-3.0-or-later WITH GCC-exception-3.1",
            "GPL-3.0-or-later WITH GCC-exception-3.1",
        ),
        ("LicenseRef-house", "LicenseRef-house"),
        ("https://creativecommons.org/licenses/by-sa/4.0/deed.en", "CC-BY-SA-4.0"),
        ("//creativecommons.org/licenses/by/3.0/de/", "CC-BY-3.0-DE"),
        ("creativecommons.org/licenses/by/4.0/fr", "CC-BY-4.0"),
        ("http://creativecommons.org/publicdomain/zero/1.0/", "CC0-1.0"),
        ("http://creativecommons.org/publicdomain/mark/1.0/", "CC-PDM-1.0"),
        ("http://www.apache.org/licenses/LICENSE-2.0.html", "Apache-2.0"),
        ("https://opensource.org/license/mit/", "MIT"),
        ("https://spdx.org/licenses/BSD-3-Clause.html", "BSD-3-Clause"),
        ("https://www.gnu.org/licenses/gpl-3.0.html", "GPL-3.0-only"),
        ("https://opendatacommons.org/licenses/odbl/1-0/", "ODbL-1.0"),
        # No version, or no name
        ("BSD", None),
        ("cc-by", None),
        ("https://creativecommons.org/licenses/", None),
        ("see LICENSE", None),
        ("", None),
    ],
)
def test_statement_of_a_licence(statement: str, expression: str | None) -> None:
    assert spdx_of(statement) == expression


@pytest.mark.parametrize(
    ("expression", "allowed"),
    [
        ("MIT", True),
        ("GPL-3.0-only", False),
        ("MIT OR GPL-3.0-only", True),
        ("MIT AND GPL-3.0-only", False),
        ("(MIT OR GPL-3.0-only) AND CC-BY-4.0", True),
        ("MIT WITH GCC-exception-3.1", False),
    ],
)
def test_allowed_expressions(expression: str, allowed: bool) -> None:
    assert is_allowed(expression, {"MIT", "CC-BY-4.0"}) is allowed


def test_identifier_is_spelled_as_spdx_does() -> None:
    assert check_identifier("cc-by-4.0") == "CC-BY-4.0"
    for expression in ("MIT OR Apache-2.0", "CC-BY"):
        with pytest.raises(ValueError, match="SPDX"):
            check_identifier(expression)
