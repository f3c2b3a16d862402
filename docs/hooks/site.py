"""What mkdocs calls while it builds the site: generated pages, links out of docs/, formulas as MathML."""

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))
import pages

ROOT = Path(__file__).parents[2]
# Pages of the repository that are part of the site too, by the name they have there.
TEXTS = {
    "README.ko.md": "korean.md",
    "notebooks/README.md": "notebooks.md",
    "CHANGELOG.md": "changes.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
SOURCES = {uri: name for name, uri in TEXTS.items()}
_LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")


def on_files(files: Files, config: Any) -> Files:
    """Adds what is made from the code, and the pages and files of the repository that pages point to."""
    made = {f"reference/{name}.md": (lambda name=name: pages.names_of(name)) for name in pages.modules()}
    made |= {"reference/nearkin.md": pages.functions, "reference/cli.md": pages.command_line}
    made |= {"reference/recipe.md": pages.recipe_keys, "reference/http.md": pages.http_api}
    try:
        contents = {uri: content() for uri, content in made.items()}
    except ValueError as error:
        raise PluginError(str(error)) from error
    for uri, content in contents.items():
        if (stub := files.get_file_from_path(uri)) is not None:  # what a reader of the repository finds there
            files.remove(stub)
        files.append(File.generated(config, uri, content=content))
    for name, uri in TEXTS.items():
        files.append(File.generated(config, uri, content=(ROOT / name).read_text(encoding="utf-8")))
    for target in sorted(_files_beside(files)):
        files.append(File.generated(config, f"files/{target}", abs_src_path=str(ROOT / target)))
    return files


def _files_beside(files: Files) -> set[str]:
    """Files of the repository outside docs/ that a page links to: recipes, examples."""
    found = set()
    for page in files.documentation_pages():
        for match in _LINK.finditer(page.content_string):
            target = _outside(match[2], page.src_uri)
            if (
                target
                and not target.startswith("docs/")
                and target not in ("README.md", *TEXTS)
                and (ROOT / target).is_file()
            ):
                found.add(target)
    return found


def _outside(target: str, page: str) -> str | None:
    """The path from the repository's root of a link that leaves docs/, or None."""
    if "://" in target:
        return None
    source = SOURCES.get(page, f"docs/{page}")
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    return None if path.startswith("docs/") and page not in SOURCES else path


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Leads links out of docs/ to where the same thing stands on the site."""
    here = page.file.src_uri

    def there(match: re.Match[str]) -> str:
        target = _outside(match[2], here)
        if target is None:
            return match[0]
        if target.startswith("docs/"):
            uri = target.removeprefix("docs/")
        else:
            uri = {"README.md": "index.md", **TEXTS}.get(target, f"files/{target}")
        relative = posixpath.relpath(uri, posixpath.dirname(here) or ".")
        return f"{match[1]}{relative}{match[3] or ''}{match[4]}"

    return _LINK.sub(there, markdown)


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Sets formulas as MathML, which browsers draw without a script."""

    def formula(match: re.Match[str]) -> str:
        display = match[1] == "div"
        source = match[2].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&").strip()
        source = source.removeprefix(r"\[").removesuffix(r"\]").removeprefix(r"\(").removesuffix(r"\)")
        drawn = convert(source.strip(), display="block" if display else "inline")
        if "\\" in drawn:  # a command that the converter does not know stays as it is
            raise PluginError(f"{page.file.src_uri}: the formula {source.strip()} has a command that is not drawn")
        return drawn

    return re.sub(r'<(div|span) class="arithmatex">(.*?)</\1>', formula, html, flags=re.S)
