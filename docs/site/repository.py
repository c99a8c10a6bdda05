"""A Sphinx extension: links from a document to files of the repository that are no pages of the site.

A Python module leads to its source, a package to its page in the reference. Anything else leads to the
published repository, and where no address is known it is plain text.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform

ROOT = Path(__file__).resolve().parent.parent.parent


class RepositoryLinks(SphinxPostTransform):
    """Resolve what MyST has left open, before it looks for labels of that name."""

    default_priority = 8

    def run(self, **kwargs: Any) -> None:
        for link in list(self.document.findall(addnodes.pending_xref)):
            if link.get("reftype") == "myst" and not link.get("refdomain"):
                path = posixpath.normpath(
                    posixpath.join(posixpath.dirname(link["refdoc"]), link["reftarget"].partition("#")[0])
                )
                if path != "." and not path.startswith("..") and (ROOT / path).exists():
                    link.replace_self(self.resolved(path, link.children))

    def resolved(self, path: str, content: list[nodes.Node]) -> nodes.Node:
        """A reference to the place of `path`, or an inline node when it has none."""
        docname = self.page_of(path)
        address = self.config.repository
        if docname:
            uri = self.app.builder.get_relative_uri(self.env.docname, docname)
        elif address:
            uri = f"{address}/{'tree' if (ROOT / path).is_dir() else 'blob'}/main/{path}"
        else:
            return nodes.inline("", "", *content)
        return nodes.reference("", "", *content, refuri=uri, internal=bool(docname))

    def page_of(self, path: str) -> str | None:
        """The page of the site that shows `path`."""
        if path == "README.md":
            return self.config.root_doc
        module = re.fullmatch(r"(minipaged(?:/\w+)*?)(?:/__init__)?(\.py)?", path)
        if not module:
            return None
        page = "api/" + module[1].replace("/", ".")
        if page not in self.env.all_docs:
            return None
        has_source = module[1].replace("/", ".") in self.env._viewcode_modules
        return f"_modules/{module[1]}" if module[2] and has_source else page


def forget_modules_without_source(app: Sphinx, env: Any) -> None:
    """Viewcode's list of modules would link to pages that it does not write, as for builtins."""
    env._viewcode_modules = {name: entry for name, entry in env._viewcode_modules.items() if entry}


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_config_value("repository", "", "html")
    app.add_post_transform(RepositoryLinks)
    app.connect("env-check-consistency", forget_modules_without_source)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
