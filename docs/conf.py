"""How the pages are built: numpydoc docstrings, the furo theme, and every broken reference an error.

Relies on the sources next to this directory, whether the package is installed or not, and on no network.
"""

from __future__ import annotations

import sys
from pathlib import Path
from unittest.mock import MagicMock

from numpydoc.xref import DEFAULT_LINKS
from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer

sys.path.insert(0, str(Path(__file__).parent.parent))

import metrale_numba
import metrale_numba.serving

project = "metrale_numba"
author = "The metrale_numba maintainers"
project_copyright = author
version = release = metrale_numba.__version__

extensions = ["sphinx.ext.autodoc", "numpydoc", "myst_parser"]
# The first that takes the word "all" below without a warning.
needs_extensions = {"numpydoc": "1.9"}
exclude_patterns = ["_build"]
nitpicky = True
# Names of the standard library, whose own pages are not at hand while these are built.
nitpick_ignore_regex = [
    (r"py:(class|exc)", r"TypeError|ValueError|RuntimeError|RuntimeWarning|Exception"),
    (r"py:mod", r"logging"),
]

html_theme = "furo"
html_title = f"{project} {release}"
html_show_sourcelink = False
html_copy_source = False

# Types stand in the tables of parameters; in a signature they would bury the names.
autodoc_typehints = "none"
autodoc_member_order = "bysource"
# Extras, which are described without being at hand.
autodoc_mock_imports = ["prometheus_client", "redis", "torch"]
# Of this one the version is asked for.
for _name in ("transformers", "transformers.cache_utils"):
    sys.modules[_name] = MagicMock(__version__="999.0")
numpydoc_show_class_members = False
# There, only what these pages describe is linked; numpydoc would link int and str as well.
DEFAULT_LINKS.clear()
numpydoc_xref_param_type = True
numpydoc_xref_aliases = {
    **{name: f"metrale_numba.{name}" for name in metrale_numba.__all__},
    **{name: f"metrale_numba.serving.{name}" for name in metrale_numba.serving.__all__},
}
numpydoc_xref_ignore = "all"
add_function_parentheses = False
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"


def _doc_of_constant(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Give a constant the docstring that stands below it in its source, in place of its type's."""
    if what != "data":
        return
    constant = name.rpartition(".")[2]
    docs = ModuleAnalyzer.for_module("metrale_numba.interface").find_attr_docs()
    lines[:] = docs.get(("", constant), [])


def _signature(
    app: Sphinx, what: str, name: str, obj: object, options: object, signature: str | None, returns: str | None
) -> tuple[str | None, str | None] | None:
    """Leave the signature of a result out: calls make them, and the table of attributes has the same names."""
    return ("", None) if isinstance(obj, type) and issubclass(obj, tuple) else None


def setup(app: Sphinx) -> None:
    """Connect the two functions above."""
    # Before numpydoc, which rewrites what it is given.
    app.connect("autodoc-process-docstring", _doc_of_constant, priority=100)
    app.connect("autodoc-process-signature", _signature)
