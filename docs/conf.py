"""Sphinx configuration of the manual: `make docs` builds it into build/site, and any warning fails the build.

The pages are plain Markdown, as a code host shows them. Two things are added when Sphinx reads them: the navigation,
which is taken from the links of index.md, and the scheme `path:` in links to Markdown outside docs/, which the site
offers for download as it does every other file of the repository.
"""

from __future__ import annotations

import re
from typing import Any

project = "SMetric"
html_title = "SMetric"
extensions = ["myst_parser"]
root_doc = "index"
myst_heading_anchors = 4  # as a code host names them
html_theme = "pydata_sphinx_theme"
html_theme_options = {"navbar_center": [], "secondary_sidebar_items": ["page-toc"]}
html_sidebars = {"index": [], "**": ["globaltoc.html"]}
html_show_sourcelink = False


def read(app: Any, name: str, source: list[str]) -> None:
    """Adapt the text of a page to the site, in place: `source-read` of Sphinx."""
    source[0] = re.sub(r"\]\(((?:\.\./){2,}[^)#]*\.md)", r"](path:\1", source[0])
    if name == root_doc:
        source[0] += navigation(source[0])


def navigation(index: str) -> str:
    """Return a hidden table of contents with one section per heading of the index."""
    text = ""
    for section in index.split("\n## ")[1:]:
        pages = "\n".join(re.findall(r"\]\(([^):#]+)\.md\)", section))
        text += f"\n```{{toctree}}\n:hidden:\n:caption: {section.partition(chr(10))[0]}\n\n{pages}\n```\n"
    return text


def setup(app: Any) -> None:
    """Connect the hook to Sphinx."""
    app.connect("source-read", read)
