"""The texts of the page: one file per language, with the same keys and placeholders; every key is used and exists."""

import json
import re
from importlib.resources import files

import pytest

pytest.importorskip("fastapi", reason="the service needs pip install 'nearkin[serve]'")
from nearkin.web.app import LANGUAGES

FOLDER = files("nearkin.web").joinpath("page")
SCRIPTS = {path.name: path.read_text("utf-8") for path in FOLDER.iterdir() if path.name.endswith(".js")}
PAGE = FOLDER.joinpath("index.html").read_text("utf-8")
CALLS = r"\b(?:t|fill)\("  # the two functions of texts.js


def flat(texts, before=""):
    """{"find": {"title": …}} as {"find.title": …}, in order."""
    pairs = {}
    for key, value in texts.items():
        pairs |= flat(value, f"{before}{key}.") if isinstance(value, dict) else {before + key: value}
    return pairs


def read(language):
    def once(pairs):
        keys = [key for key, _ in pairs]
        assert len(keys) == len(set(keys)), f"{language}: a key is there twice in {keys}"
        return dict(pairs)

    return flat(json.loads(FOLDER.joinpath("texts", f"{language}.json").read_text("utf-8"), object_pairs_hook=once))


TEXTS = {language: read(language) for language in LANGUAGES}


def placeholders(text):
    """Of each form; forms are separated by |."""
    return [sorted(set(re.findall(r"\{(\w+)\}", form))) for form in text.split("|")]


def test_every_language_has_the_same_keys_in_the_same_order():
    for language in LANGUAGES:
        assert list(TEXTS[language]) == list(TEXTS["en"]), language
        assert all(text.strip() for text in TEXTS[language].values()), language


def test_every_language_has_the_same_placeholders():
    for language in LANGUAGES:
        for key, text in TEXTS[language].items():
            names = placeholders(TEXTS["en"][key])[-1]
            assert all(form == names for form in placeholders(text)), f"{language}: {key}"
            assert len(placeholders(text)) <= 2 and ("|" not in text or "n" in names), f"{language}: {key}"
            assert not re.search(r"[{}]", re.sub(r"\{\w+\}", "", text)), f"{language}: {key}"


def test_every_text_is_used_and_every_used_text_exists():
    used = set(re.findall(r'\bdata-t(?:-[a-z-]+)?="([^"]+)"', re.sub("<!--.*?-->", "", PAGE, flags=re.DOTALL)))
    families = set()
    for script in SCRIPTS.values():
        code = re.sub(r"/\*.*?\*/", "", script, flags=re.DOTALL)
        used |= set(re.findall(CALLS + r'"([^"]+)"', code))
        families |= set(re.findall(CALLS + r"`([\w.]+\.)\$\{", code))  # as t(`error.service.${kind}`)
    used |= set(re.findall(r'\["(noscript)"\]', FOLDER.joinpath("..", "app.py").read_text("utf-8")))
    assert used <= set(TEXTS["en"]), used - set(TEXTS["en"])
    unused = {key for key in TEXTS["en"] if key not in used and not key.startswith(tuple(families))}
    assert not unused, unused


def test_values_of_a_call_are_the_placeholders_of_its_text():
    """Where the values stand in the call itself."""
    checked = 0
    for name, script in SCRIPTS.items():
        for key, values in re.findall(CALLS + r'"([^"]+)"(?:, \{([^{}]*)\})?\)', script):
            if "..." in values:
                continue
            names = re.findall(r"(?:^|, )\s*(\w+)(?=:|,|$|\s*$)", values.strip())
            assert set(names) >= set(placeholders(TEXTS["en"][key])[-1]), f"{name}: {key} gets {names}"
            checked += 1
    assert checked > 50


def test_no_text_is_left_in_the_page_and_its_scripts():
    body = re.sub(r"<!--.*?-->|<title>.*?</title>|<h1>nearkin</h1>|<kbd>.*?</kbd>", "", PAGE, flags=re.DOTALL)
    said = [text.strip() for text in re.findall(r">([^<]+)<", body)]
    assert not [text for text in said if re.search(r"\w", text)], "in index.html"
    assert not re.findall(r'(?<![-\w])(?:aria-label|placeholder|title|alt|value)="([^"]+)"', body), "in index.html"
    for name, script in SCRIPTS.items():
        code = re.sub(r"/\*.*?\*/|//[^\n]*", "", script, flags=re.DOTALL)
        strings = [a or b for a, b in re.findall(r'"([^"\n]*)"|`([^`]*)`', code)]
        sentences = [one for one in strings if re.search(r"[A-Za-z]{2,}[.!?]$|[A-Za-z]{2,} [a-z]{2,} [a-z]{2,}", one)]
        assert not [one for one in sentences if not one.startswith(INTERNAL)], f"{name}: {sentences}"


# Selectors, and the two errors of texts.js itself, which are for who writes the page.
INTERNAL = ("no text", "text ${key}", "input:not", ".tabs [")
