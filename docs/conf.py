"""The documentation site. `make docs` builds it offline, and every warning is an error.

Pages are the Markdown files that are read in the repository too. The site adds what is generated: the order of the
pages, the reference of the command line and that of the Python interface.
"""

import sys
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import site_pages  # noqa: E402  of the folder tools

import polyeps  # noqa: E402

project = "polyeps"
author = "The polyeps authors"
copyright = author
version = release = polyeps.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
root_doc = "docs/README"
include_patterns = ["*.md", "docs/**", *site_pages.linked_results(ROOT)]
exclude_patterns = [
    ".*",
    "build",
    "dist",
    "runs",
    "src",
    "tests",
    "benchmarks",
    "reproductions/p*",
    "reproductions/tests",
]

myst_heading_anchors = 4

default_role = "code"
add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "mixed"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 90

html_theme = "furo"
html_title = f"polyeps {polyeps.__version__}"
html_static_path = html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_theme_options = {"top_of_page_buttons": []}


def setup(app: Sphinx) -> None:
    """Add what is generated."""
    app.connect("source-read", site_pages.complete)
    app.connect("autodoc-process-signature", site_pages.shorten)
    app.connect("autodoc-skip-member", site_pages.skip)
    app.connect("build-finished", site_pages.add_front_page)
