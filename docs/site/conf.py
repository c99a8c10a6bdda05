"""Sphinx's settings for the site. `scripts/build_site.py` lays out the sources and runs it."""

import re
import sys
import tomllib
from pathlib import Path

from coursekit.publish import home

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(HERE))  # our own extensions

# Where a Chinese text is cut into words for the search: the terms of the glossary are words.
GLOSSARY = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
WORDS = ROOT / "build/search_words.txt"
WORDS.parent.mkdir(exist_ok=True)
terms = [
    name for line in re.findall(r"^\*\*(.+?)\.\*\*", GLOSSARY, re.MULTILINE) for name in line.split("，")
]
WORDS.write_text(
    "".join(f"{term} 100000\n" for term in [*terms, "显存", "前缀"] if " " not in term), encoding="utf-8"
)

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


project, version = PROJECT["name"], PROJECT["version"]
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "docstrings",
    "repository",
    "players",
    "languages",
]
root_doc = "index"
templates_path = [str(HERE / "templates")]  # autosummary looks from the sources
repository = f"https://github.com/{home.repository()}"

# Notebooks are shown as they are stored; a link to a heading uses the name that GitHub gives it.
nb_execution_mode = "off"
nb_render_markdown_format = "myst"  # the tables that cells print
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 6
# Lessons begin sections at any level; a shape such as [num_tokens] is no name of an object.
suppress_warnings = ["myst.header", "ref.python"]

autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_mock_imports = ["triton"]  # its decorator hides a kernel's docstring and signature
autosummary_generate = True
napoleon_use_ivar = True  # else the attributes of a class are described twice
add_module_names = False
toc_object_entries_show_parents = "hide"
python_display_short_literal_types = True
python_maximum_signature_line_length = 100

html_search_language = "zh"  # cuts Chinese with jieba; English words are found as before
html_search_options = {"dict": str(WORDS)}
html_theme = "sphinx_book_theme"
html_title = project
LAID_BESIDE = ["mathjax", "players"]  # by scripts/build_site.py
html_static_path = [
    "static",
    *(f"../../build/site/{name}" for name in LAID_BESIDE if (ROOT / "build/site" / name).exists()),
]
html_css_files = ["site.css"]
html_sourcelink_suffix = ""
html_context = {"default_mode": "auto"}  # light or dark as the system says; without it the theme complains
html_show_sphinx = False
mathjax_path = "es5/tex-chtml.js"
mathjax3_config = {"options": {"enableMenu": False}}  # the menu offers parts that are not here
html_theme_options = {
    "use_download_button": True,
    "navbar_persistent": [],  # the sidebar has the search already
    "footer_content_items": [],
    "collapse_navbar": True,  # the whole tree on every page makes the build three times as long
    "show_toc_level": 2,
    "pygments_light_style": "a11y-light",
    "pygments_dark_style": "a11y-dark",
}
if home.repository() != home.UNSET:  # else the buttons would lead nowhere
    html_theme_options |= {
        "repository_url": repository,
        "repository_branch": home.BRANCH,
        "use_repository_button": True,
        "launch_buttons": {"colab_url": "https://colab.research.google.com"},
    }
