"""mkdocs hook: pages from outside docs/, links of the repository, and the help of every command.

A page must read well on a code host and on the site. So links are those of the repository. This hook looks up a link
from the place of its file and points it to the page of the site. If the site has no such page (the source of an
example), the link becomes plain text. The command reference is generated from ``mergestream COMMAND --help``.
"""

from __future__ import annotations

import os
import posixpath
import re
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ELSEWHERE = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/protocol.md")
_LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]+)\]\((?P<target>\.{0,2}[\w./-]+)(?P<anchor>#[^\s)]*)?\)")
_HELP = re.compile(r"<!-- help: .*? -->")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are outside docs/."""
    root = Path(config.docs_dir).parent
    for name in ELSEWHERE:
        files.append(File.generated(config, name, abs_src_path=str(root / name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links of a page, and insert the help of the commands where the page asks for it."""
    here = page.file.src_uri
    folder = posixpath.dirname(here if here in ELSEWHERE else f"docs/{here}")

    def rewritten(link: re.Match[str]) -> str:
        place = posixpath.normpath(posixpath.join(folder, link["target"]))
        uri = place if place in ELSEWHERE else posixpath.relpath(place, "docs")
        if files.get_file_from_path(uri) is None:
            outside = uri.startswith("..") and (Path(config.docs_dir).parent / place).exists()
            return link["text"] if outside else link[0]  # mkdocs reports a dead link
        return f"[{link['text']}]({posixpath.relpath(uri, posixpath.dirname(here) or '.')}{link['anchor'] or ''})"

    return _HELP.sub(lambda _: command_help(), _LINK.sub(rewritten, markdown))


def command_help() -> str:
    """The help of every command, as Markdown."""
    overview = help_of()
    commands = re.findall(r"^    ([a-z-]+)(?:\s{2,}|$)", overview, re.MULTILINE)
    return "\n".join(f"### {command}\n\n```text\n{help_of(command).strip()}\n```\n" for command in commands)


def help_of(*command: str) -> str:
    """What ``mergestream COMMAND --help`` prints, 100 characters wide."""
    from mergestream.cli import main

    os.environ["COLUMNS"] = "100"
    output = StringIO()
    with redirect_stdout(output), suppress(SystemExit):
        main([*command, "--help"])
    return output.getvalue()
