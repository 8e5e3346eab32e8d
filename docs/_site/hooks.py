"""Hooks of MkDocs: files outside `docs/` that a page links to become part of the site, so that it needs no other host.

A Markdown file becomes a page, a Python file a page with its highlighted source, anything else is copied. A link to a Python file whose
title names a function of it, `[text](../tests/test_x.py "test_name")`, leads to that function.
"""

import ast
import re
from pathlib import Path
from posixpath import dirname, join, normpath, relpath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "repository"
"""Where files from outside `docs/` lie in the site."""
LINK = re.compile(r"(\]\()((?:\.\./|(?!\w+:|#|/))[^)\s#\"]*)(#[^)\s\"]*)?(?:\s+\"([^\"]*)\")?(\))")


def _place(uri: str) -> str:
    """The path inside the repository of a page of the site."""
    if not uri.startswith(f"{FOLDER}/"):
        return f"docs/{uri}"
    path = uri.removeprefix(f"{FOLDER}/")
    return path.removesuffix(".md") if _is_source(path) else path


def _is_source(uri: str) -> bool:
    """Whether a page shows the source of a Python file."""
    return uri.removesuffix(".md").endswith(".py")


def _uri(path: str) -> str | None:
    """The path inside the site of a file of the repository; None for what is no file of it."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path.startswith("..") or not (ROOT / path).is_file():
        return None
    return f"{FOLDER}/{path}.md" if path.endswith(".py") else f"{FOLDER}/{path}"


def _rewritten(text: str, uri: str) -> tuple[str, set[str]]:
    """A page whose links to files outside `docs/` lead to their copies in the site, and the paths of these files."""
    found: set[str] = set()

    def link(match: re.Match[str]) -> str:
        target = normpath(join(dirname(_place(uri)), match[2]))
        there = _uri(target)
        if there is None or not match[2]:
            return match[0]
        fragment = match[3] or ""
        if not target.startswith("docs/"):
            found.add(target)
        if target.endswith(".py") and match[4]:
            fragment = f"#{match[4]}"
        return f"{match[1]}{relpath(there, dirname(uri) or '.')}{fragment}{match[5]}"

    parts = re.split(r"(^```.*?^```$)", text, flags=re.DOTALL | re.MULTILINE)  # links in a program are none
    return "".join(part if part.startswith("```") else LINK.sub(link, part) for part in parts), found


def _source(path: str) -> str:
    """The text of a file as the site shows it: a Python file has a heading for each function and class."""
    text = (ROOT / path).read_text()
    if not path.endswith(".py"):
        return text
    lines = text.splitlines()
    starts = {1: ""}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            starts[min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])] = node.name
    parts = ["---\nsearch: {exclude: true}\n---\n", f"# {path}\n"]
    for (start, name), end in zip(starts.items(), [*list(starts)[1:], len(lines) + 1], strict=True):
        parts += [f"## {name} {{ #{name} }}\n"] * bool(name)
        parts.append("````python\n" + "\n".join(lines[start - 1 : end - 1]).strip("\n") + "\n````\n")
    return "\n".join(parts)


def on_config(config: MkDocsConfig, **_: Any) -> MkDocsConfig:
    """Pages of `docs/` that the menu leaves out come at its end."""
    menu = set(re.findall(r"[\w/-]+\.md", str(config.nav)))
    pages = sorted(path.relative_to(config.docs_dir).as_posix() for path in Path(config.docs_dir).rglob("*.md"))
    more = [page for page in pages if page not in menu]
    if more:
        config.nav = [*(config.nav or []), {"More": more}]
    return config


def on_files(files: Files, config: MkDocsConfig, **_: Any) -> Files:
    """Adds every file outside `docs/` that is linked to from the site, directly or through another such file."""
    waiting = [(page.src_uri, page.content_string) for page in files.documentation_pages()]
    seen: set[str] = set()
    while waiting:
        uri, text = waiting.pop()
        for path in _rewritten(text, uri)[1] - seen:
            seen.add(path)
            there = str(_uri(path))
            if there.endswith(".md"):
                files.append(File.generated(config, there, content=_source(path)))
                if not path.endswith(".py"):
                    waiting.append((there, _source(path)))
            else:
                files.append(File.generated(config, there, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Rewrites the links of a page to the copies that `on_files` added."""
    return markdown if _is_source(page.file.src_uri) else _rewritten(markdown, page.file.src_uri)[0]
