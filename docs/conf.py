"""How the site is built: ``python -m sphinx -W --keep-going docs build/site``.

``JAXRL_NOTEBOOKS=off`` leaves the notebooks unexecuted, which is quick; ``cache`` is the default
and executes those that changed since the last build.
"""

import importlib.resources
import os
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
# The generated pages read the catalog, the claims and the golden data of this checkout.
sys.path[:0] = [str(HERE / "_extensions"), str(HERE.parent)]
# Notebooks run in processes of their own, which import the checkout as well.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")])
)

import jaxrl_llm

project = "jaxrl_llm"
author = "the authors of jaxrl_llm"
version = release = jaxrl_llm.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.mathjax",
    "myst_nb",
    "sphinx_copybutton",
    "docstrings",
    "generated_pages",
    "repository_links",
]
exclude_patterns = ["_extensions", "**.ipynb_checkpoints"]

myst_enable_extensions = ["colon_fence", "dollarmath"]
# README and docs link to headings as GitHub names them.
myst_heading_anchors = 4
nb_execution_mode = os.environ.get("JAXRL_NOTEBOOKS", "cache")
nb_execution_timeout = 600
nb_execution_raise_on_error = True

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
maximum_signature_line_length = 88
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
add_module_names = False
# Every page has the menu of all pages: with thousands of functions in it a build takes long.
toc_object_entries = False
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

html_theme = "sphinx_book_theme"
html_title = "jaxrl_llm"
# MathJax is part of the site, so that formulas need no network.
mathjax_path = "mathjax/tex-chtml.js"
mathjax3_config = {
    # Only with this package has a text of LaTeX escapes: names have underscores.
    "loader": {"load": ["[tex]/textmacros"]},
    "tex": {"packages": {"[+]": ["textmacros"]}},
    # The menu of a formula loads renderers and speech that the site leaves out.
    "options": {"enableMenu": False},
}

html_static_path = ["_static"]
html_favicon = "_static/icon.svg"
html_css_files = ["site.css"]
html_theme_options = {
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "collapse_navbar": True,  # of other chapters, a page lists the titles alone
}
# Without a mode, the script of the theme reports an error on the first page that one visits.
html_context = {"default_mode": "auto"}
html_show_copyright = False


def copy_mathjax(app, exception: Exception | None) -> None:
    """Copies what pages load of MathJax: the package as an extension would copy all its 24 MB."""
    if exception is not None or app.builder.format != "html":
        return
    source = importlib.resources.files("sphinx-mathjax-offline") / "static/mathjax"
    target = app.outdir / "_static/mathjax"
    for folder in ("input/tex/extensions", "output/chtml/fonts/woff-v2"):
        shutil.copytree(source / folder, target / folder, dirs_exist_ok=True)
    shutil.copy(source / "tex-chtml.js", target)


def setup(app) -> None:
    """Called by Sphinx."""
    app.connect("build-finished", copy_mathjax)
