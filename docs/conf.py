"""How the documentation is built."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE / "_ext")]

import distsession  # noqa: E402  the checkout's, which the path now names

project = "distsession"
copyright = "the distsession contributors"
release = version = distsession.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "tables"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build", "_ext"]

myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

html_theme = "furo"
html_title = f"distsession {release}"
html_show_sourcelink = False
html_copy_source = False
