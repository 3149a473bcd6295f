"""How `make docs` builds the site: Sphinx with Markdown pages and the Furo theme."""

from dspine_hub._version import __version__

project = "dspine-hub"
author = "the dspine-hub authors"
copyright = "the dspine-hub authors, Apache-2.0"
release = __version__

extensions = ["myst_parser", "sphinx_copybutton", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 3
exclude_patterns = ["*.py"]

html_theme = "furo"
html_title = "dspine-hub"
html_static_path = ["_static"]
# nothing is fetched when a page is read: fonts are the system's, the search index lies beside the pages
html_theme_options = {"navigation_with_keys": True}

autodoc_typehints = "none"
autodoc_member_order = "bysource"
default_role = "code"
