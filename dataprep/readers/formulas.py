"""Formulas of web pages as LaTeX, from the source that MathML, MathJax, KaTeX and images
of formulas carry beside what a browser shows.

The places are those of OpenWebMath (Paster et al. 2023, section 3.1). A formula without
a source, such as MathML without an annotation, stays as it is.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from resiliparse.parse.html import ElementNode, HTMLTree

FORMULAS = (
    ".katex-display",
    ".katex",
    ".mwe-math-element",  # MediaWiki
    "mjx-container",  # MathJax 3
    "math",
    'script[type^="math/tex"]',  # MathJax 2
    "img.latex, img.tex, img.math",  # WordPress, Sphinx
)
"""Elements that show one formula; outer ones before those inside of them."""
RENDERED = ".MathJax_Preview, .MathJax, .MathJax_Display, .MathJax_SVG"
"""What MathJax 2 shows beside the script with the source."""
BLOCKS = '.katex-display, [display="block"], [display="true"], [type*="mode=display"]'
_DISPLAY_STYLE = re.compile(r"\{\\(?:displaystyle|textstyle)\s+(.*)\}", re.DOTALL)
"""The group that MediaWiki puts around a formula."""


def write_formulas(tree: HTMLTree, inline: str = "${}$", block: str = "$${}$$") -> None:
    """Replace the formulas of a page by their LaTeX.

    Args:
        inline, block: forms of a formula in a line, and of one by itself.
    """
    root = tree.document
    if root is None:
        return
    if root.query_selector('script[type^="math/tex"]') is not None:
        for rendered in root.query_selector_all(RENDERED):
            rendered.remove()
    for selector in FORMULAS:
        for formula in root.query_selector_all(selector):
            source = _source(formula)
            if source:
                is_block = formula.matches(BLOCKS) or formula.query_selector(BLOCKS)
                text = (block if is_block else inline).replace("{}", source)
                node: Any = tree.create_text_node(text)
                formula.replace_with(node)


def _source(formula: ElementNode) -> str:
    """LaTeX of an element, or empty."""
    annotation = formula.query_selector('annotation[encoding="application/x-tex"]')
    labelled = formula if formula.hasattr("alttext") else None
    labelled = labelled or formula.query_selector("[alttext]")
    if annotation is not None:
        source = annotation.text
    elif labelled is not None:
        source = labelled.getattr("alttext")
    else:
        source = formula.text if formula.tag == "script" else formula.getattr("alt")
    source = " ".join((source or "").split())
    styled = _DISPLAY_STYLE.fullmatch(source)
    return styled[1].strip() if styled else source
