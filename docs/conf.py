"""Settings of the documentation, which `sphinx-build -W --keep-going docs build/docs` makes."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "tests"), str(HERE)]

import examples_at_small_size  # noqa: E402
import page_outputs  # noqa: E402
import written_pages  # noqa: E402
from torchvision_operators import define_missing  # noqa: E402

import subnetact  # noqa: E402

define_missing()  # where torchvision was built for another torch
gc.set_threshold(100_000, 20, 20)  # collections took an eighth of the time
gc.freeze()
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

project = "subnetact"
author = "the authors of subnetact"
copyright = "the authors of subnetact, Apache-2.0"
version = release = subnetact.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "myst_parser",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
]
templates_path = ["_templates"]
exclude_patterns = ["examples", "gallery/*.ipynb", "gallery/*.py", "**sg_execution_times.rst"]
suppress_warnings = ["config.cache"]  # The functions below are settings, which no file can hold.
default_role = "py:obj"  # `Engine` in a docstring links to it, where it is a name of this library.

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autosummary_ignore_module_all = False
autosummary_imported_members = True
autosummary_generate = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
napoleon_custom_sections = [("Parts", "params_style"), "Source"]
napoleon_preprocess_types = False

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

html_theme = "pydata_sphinx_theme"  # PyTorch's own theme is made of it, and needs a Sphinx of 2023
html_title = f"subnetact {release}"
html_static_path = ["_static", "../subnetact/serve/palette.css"]
html_css_files = ["palette.css", "style.css"]
html_show_sourcelink = False
html_theme_options = {
    "show_toc_level": 2,
    "collapse_navigation": True,
    "navigation_with_keys": False,
    "header_links_before_dropdown": 5,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": ["theme-version"],
    "pygments_light_style": "tango",
    "pygments_dark_style": "monokai",
}
html_sidebars = {page: [] for page in ("index", "concepts", "bundle", "limits", "glossary", "measured")}

sphinx_gallery_conf = {
    "examples_dirs": ["examples"],
    "gallery_dirs": ["gallery"],
    "filename_pattern": examples_at_small_size.PATTERN,
    "reset_argv": examples_at_small_size.arguments,
    "reset_modules": (examples_at_small_size.start,),
    "image_scrapers": (examples_at_small_size.figures,),
    "within_subsection_order": "FileNameSortKey",
    "download_all_examples": False,
    "show_memory": False,
    "show_signature": False,
    "min_reported_time": 1,
    "abort_on_example_error": False,
    "only_warn_on_example_error": False,
    "copyfile_regex": r"^$",
    "remove_config_comments": True,
    "plot_gallery": "True",
}

linkcheck_timeout = 10
linkcheck_ignore = [r"http://(localhost|127\.0\.0\.1)", r"mailto:"]


def setup(app: object) -> None:
    """Write the pages that follow from the code and from the results, before Sphinx looks for pages."""
    written_pages.write(HERE)
    app.connect("source-read", written_pages.link_to_pages)  # type: ignore[attr-defined]
    app.connect("source-read", page_outputs.insert)  # type: ignore[attr-defined]
    app.connect("missing-reference", written_pages.short_name)  # type: ignore[attr-defined]
    app.connect("autodoc-process-docstring", written_pages.markdown_blocks, priority=100)  # type: ignore[attr-defined]
