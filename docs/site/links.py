"""The site has docs/ and a few pages that lie elsewhere in the repository; links are those of the repository.

So the same page reads well on a code host and here: a link is looked up from where its file lies in the repository, and
leads to the page of the site, or is plain text where the site has none (the source of an example).
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ELSEWHERE = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/protocol.md")
_LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]+)\]\((?P<target>\.{0,2}[\w./-]+)(?P<anchor>#[\w-]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    root = Path(config.docs_dir).parent
    for name in ELSEWHERE:
        files.append(File.generated(config, name, abs_src_path=str(root / name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    here = page.file.src_uri
    folder = posixpath.dirname(here if here in ELSEWHERE else f"docs/{here}")

    def followed(link: re.Match[str]) -> str:
        place = posixpath.normpath(posixpath.join(folder, link["target"]))
        uri = place if place in ELSEWHERE else posixpath.relpath(place, "docs")
        if files.get_file_from_path(uri) is None:
            outside = uri.startswith("..") and (Path(config.docs_dir).parent / place).exists()
            return link["text"] if outside else link[0]  # a dead link stays one, and is reported
        return f"[{link['text']}]({posixpath.relpath(uri, posixpath.dirname(here) or '.')}{link['anchor'] or ''})"

    return _LINK.sub(followed, markdown)
