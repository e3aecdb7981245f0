"""Configuration of the documentation. Build it with ``sphinx-build -W -b html docs docs/_build``."""

import inspect
import sys
from pathlib import Path

from docutils import nodes
from docutils.nodes import Element, Node
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.nodes import make_refnode

import ezmsg.mlx

sys.path.insert(0, str(Path(__file__).parent / "results"))

project = "ezmsg-mlx"
author = "The ezmsg-mlx maintainers"
copyright = "The ezmsg-mlx maintainers"
version = release = ezmsg.mlx.__version__.partition("+")[0]

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    # Makes the tables of figures from the files in results/data.
    "render",
]
# Included by another page.
exclude_patterns = ["_build", "units_table.md"]

myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_class_signature = "separated"
napoleon_numpy_docstring = False
napoleon_use_rtype = False

html_theme = "pydata_sphinx_theme"
html_title = "ezmsg-mlx"
html_static_path = ["_static"]
html_css_files = ["tables.css"]
html_theme_options = {
    "github_url": "https://github.com/ezmsg-org/ezmsg-mlx",
    "navbar_align": "left",
    "show_toc_level": 2,
    "header_links_before_dropdown": 6,
    "footer_start": ["copyright"],
    "footer_end": [],
    # Not beside results, whose tables need the room.
    "secondary_sidebar_items": {
        page: ["page-toc"] for page in ("api/*", "explanation/*", "guides/*", "contributing", "reliability", "units")
    },
}
html_show_sourcelink = False
# Pages without pages below them have nothing to show there.
html_sidebars = {
    page: [] for page in ("index", "quickstart", "units", "reliability", "contributing", "changelog", "results/*")
}


class Names(Directive):
    """List the public names of the modules that a page describes, each with the first sentence of its docstring."""

    has_content = True

    def run(self) -> list[Node]:
        lines: list[str] = []
        for module in self.content:
            found = [getattr(ezmsg.mlx, name) for name in ezmsg.mlx.__all__]
            found = [kind for kind in found if getattr(kind, "__module__", "").startswith(module)]
            for kind in found:
                summary = " ".join(inspect.getdoc(kind).partition("\n\n")[0].split())
                lines.append(f"- :obj:`~{kind.__module__}.{kind.__qualname__}`: {summary}")
        container = nodes.container(classes=["names"])
        self.state.nested_parse(StringList(lines, source="names"), self.content_offset, container)
        return [container]


_attributes: dict[str, list[str]] = {}


def _keep(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    if what in ("attribute", "data"):
        _attributes[name] = list(lines)


def _put_back(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    if name in _attributes:
        lines[:] = _attributes.pop(name)


def _defining_module(app: Sphinx, env: BuildEnvironment, node: pending_xref, contnode: Element) -> Element | None:
    """Resolve ``ezmsg.mlx.Name``, the name that users import, to where the module that defines it is described."""
    target = node["reftarget"]
    name = target.rpartition(".")[2]
    if target in (name, f"ezmsg.mlx.{name}"):
        for full_name, entry in env.domains.python_domain.objects.items():
            if full_name.startswith("ezmsg.mlx.") and full_name.endswith(f".{name}") and not entry.aliased:
                return make_refnode(app.builder, node["refdoc"], entry.docname, entry.node_id, contnode)
    return None


def setup(app: Sphinx) -> None:
    app.add_directive("names", Names)
    app.connect("missing-reference", _defining_module)
    # Napoleon takes the text before a colon for a type where an attribute is described, which has its annotation.
    app.connect("autodoc-process-docstring", _keep, priority=400)
    app.connect("autodoc-process-docstring", _put_back, priority=600)
