"""Pages that are made from the code itself: public names, command line, recipe keys, HTTP API."""

import asyncio
import importlib
import inspect
import json
import logging
import re
import tokenize
from enum import Enum
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nearkin

__all__ = ["command_line", "http_api", "modules", "names_of", "recipe_keys"]


def modules() -> dict[str, str]:
    """Public modules of the package: their short name and their full one."""
    named = {name: getattr(nearkin, name) for name in nearkin.__all__}
    return {name: thing.__name__ for name, thing in named.items() if inspect.ismodule(thing)}


def _target(module: Any, name: str) -> str:
    """Where mkdocstrings finds a public name: where it is defined, for a name may hide a module of its package."""
    thing = getattr(module, name)
    if inspect.ismodule(thing):
        return thing.__name__
    if inspect.isclass(thing) or inspect.isfunction(thing):
        return f"{thing.__module__}.{thing.__qualname__}"
    return f"{module.__name__}.{name}"


def _entry(path: str, target: str, options: str = "") -> str:
    name = path.rpartition(".")[2]
    return (
        f'<a id="{path}"></a>\n\n::: {target}\n    options:\n      heading: {name}\n      toc_label: {name}\n{options}'
    )


def names_of(name: str) -> str:
    """The page of a public module: every name of its `__all__`; one without a docstring ends the build."""
    module = importlib.import_module(modules()[name])
    missing = [n for n in module.__all__ if not inspect.getdoc(getattr(module, n))]
    if missing:
        raise ValueError(f"nearkin.{name} has public names without a docstring: {', '.join(missing)}")
    lines = [f"# nearkin.{name}", "", (inspect.getdoc(module) or "").replace("*", r"\*"), ""]
    for public in module.__all__:
        thing = getattr(module, public)
        if inspect.ismodule(thing):
            lines += [f'<a id="nearkin.{name}.{public}"></a>', f"## {public}", "", inspect.getdoc(thing) or "", ""]
        elif inspect.isclass(thing) or inspect.isfunction(thing):
            lines += [_entry(f"nearkin.{name}.{public}", _target(module, public)), ""]
        else:
            lines += [f'<a id="nearkin.{name}.{public}"></a>', f"## {public}", "", f"`{thing!r}`"[:400], ""]
    return "\n".join(lines)


def functions() -> str:
    """The page of the package itself: what stands in `nearkin.__all__` beside modules."""
    lines = ["# nearkin", "", "What can be called without a module's name.", ""]
    for name in nearkin.__all__:
        thing = getattr(nearkin, name)
        if not inspect.ismodule(thing):
            lines += [_entry(f"nearkin.{name}", f"{thing.__module__}.{thing.__qualname__}"), ""]
    lines += ["## Modules", ""]
    for name, full in modules().items():
        first = (inspect.getdoc(importlib.import_module(full)) or "").splitlines()[0]
        lines.append(f"- [`nearkin.{name}`]({name}.md): {first}")
    return "\n".join(lines) + "\n"


def _cell(text: object) -> str:
    """Text for a table; square brackets would be read as a link, and < as markup."""
    return re.sub(r"([|\[\]*_])", r"\\\1", " ".join(str(text).split())).replace("<", "&lt;")


def _default(parameter: Any) -> str:
    shown = getattr(parameter, "show_default", None)
    if isinstance(shown, str):
        return _cell(shown)
    value = parameter.default
    if parameter.required:
        return "required"
    if value is None or value == () or value == [] or type(value).__name__ in ("Sentinel", "_UnsetType"):
        return "none"
    if getattr(parameter, "is_flag", False) and isinstance(value, bool):
        return "on" if value else "off"
    return f"`{getattr(value, 'value', value)}`"


def _kind(parameter: Any) -> str:
    """What follows an option; newer releases of typer hold annotations, older ones types of click."""
    if getattr(parameter, "is_flag", False):
        return ""
    annotation = getattr(getattr(parameter, "type_descriptor", None), "annotation", None)
    if inspect.isclass(annotation) and issubclass(annotation, Enum):
        return " ".join(f"`{choice.value}`" for choice in annotation)
    if choices := getattr(getattr(parameter, "type", None), "choices", None):
        return " ".join(f"`{choice}`" for choice in choices)
    plain = getattr(annotation, "__name__", "") or getattr(getattr(parameter, "type", None), "name", "")
    return _cell(parameter.metavar or _KINDS.get(plain, plain))


_KINDS = {"str": "text", "int": "integer", "float": "number"}


def _verb(path: str, command: Any) -> list[str]:
    lines = [f"## {path}" if path.count(" ") == 1 else f"### {path}", "", *_help(command.help or ""), ""]
    rows = []
    for parameter in command.params:
        if getattr(parameter, "hidden", False) or parameter.name == "help":
            continue
        if getattr(parameter, "param_type_name", "") == "argument":
            names = f"`{parameter.metavar or parameter.name}`"
        else:
            names = " ".join(f"`{n}`" for n in [*parameter.opts, *parameter.secondary_opts])
        environment = f" Environment: `{parameter.envvar}`." if getattr(parameter, "envvar", None) else ""
        meaning = _cell(getattr(parameter, "help", "") or "") + environment
        rows.append(f"| {names} | {meaning} | {_kind(parameter)} | {_default(parameter)} |")
    if rows:
        lines += ["| argument or option | meaning | value | default |", "|---|---|---|---|", *rows, ""]
    return lines


def _help(text: str) -> list[str]:
    """The help of a verb: sentences, then its examples as one block."""
    sentences, _, examples = text.replace("\b", "").partition("Examples:")
    lines = [" ".join(p.split()) for p in sentences.split("\n\n") if p.strip()]
    lines = [line for paragraph in lines for line in (_cell(paragraph), "")]
    if examples.strip():
        lines += ["```bash", *(line.strip() for line in examples.splitlines() if line.strip()), "```"]
    return lines


def command_line() -> str:
    """Every verb with every option and its default."""
    import typer

    from nearkin.cli import app

    root = typer.main.get_command(app)
    lines = ["# Command line", "", "Made from the program. `nearkin VERB --help` prints the same.", ""]
    for name, command in root.commands.items():
        if getattr(command, "hidden", False):
            continue
        lines += _verb(f"nearkin {name}", command)
        for inner, verb in getattr(command, "commands", {}).items():
            if not getattr(verb, "hidden", False):
                lines += _verb(f"nearkin {name} {inner}", verb)
    return "\n".join(lines)


def _comments(source: str) -> dict[int, str]:
    """Comments by the line they stand on."""
    tokens = tokenize.tokenize(BytesIO(source.encode()).readline)
    return {t.start[0]: t.string.lstrip("# ") for t in tokens if t.type == tokenize.COMMENT}


def _meanings(model: type) -> dict[str, str]:
    """What the source says of each key: the comment behind it, or on the lines before it."""
    source = inspect.getsource(model)
    comments, meanings, above = _comments(source), {}, ""
    for number, line in enumerate(source.splitlines(), 1):
        key = re.match(r"    (\w+): ", line)
        if key:
            meanings[key[1]] = comments.get(number, above)
            last, above = key[1], ""
        elif line.strip().startswith("#"):
            above = (above + " " + comments[number]).strip()
        elif number in comments and meanings:  # a long line that was broken
            meanings[last] = meanings[last] or comments[number]
        else:
            above = ""
    return meanings


def _type(annotation: Any) -> str:
    text = str(annotation) if not isinstance(annotation, type) else annotation.__name__
    text = re.sub(r"typing\.|Annotated\[(\w+), FieldInfo\(.*?\)\]+(?=\]|$)|NoneType", lambda m: m[1] or "", text)
    text = re.sub(r"Literal\[(.*?)\]", lambda m: m[1].replace(", ", " or "), text)
    return _cell(text.replace(" | None", "").replace("Optional[", "").rstrip("]") if "list" not in text else "list")


def recipe_keys() -> str:
    """Every key of a recipe with its type, its default and its meaning."""
    from nearkin.training.config import recipe

    lines = ["# Recipe keys", "", _RECIPE, ""]
    for section, field in recipe.Recipe.model_fields.items():
        model = field.annotation
        lines += [f"## {section}", ""]
        if not (inspect.isclass(model) and issubclass(model, recipe.BaseModel)):
            lines += [_NAMED[section], ""]
            continue
        meanings = _meanings(model)
        lines += [inspect.getdoc(model) or "", "", "| key | meaning | type | default |", "|---|---|---|---|"]
        for key, entry in model.model_fields.items():
            if not meanings.get(key):
                raise ValueError(f"{section}.{key} has no comment in {recipe.__name__} that says what it is")
            default = "by the data" if entry.default is None else f"`{json.dumps(entry.default)}`"
            limits = " ".join(
                str(m).split("(")[0].lower() + " " + str(m).split("=")[-1].rstrip(")") for m in entry.metadata
            )
            shown = _type(entry.annotation) + (f" ({_LIMITS(limits)})" if limits else "")
            lines.append(f"| `{section}.{key}` | {_cell(meanings[key])} | {shown} | {default} |")
        lines.append("")
    return "\n".join(lines)


def _LIMITS(text: str) -> str:
    for word, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<")):
        text = re.sub(rf"\b{word} ", f"{sign} ", text)
    return text.replace("minlen", "length ≥").replace("maxlen", "length ≤").replace("<", "&lt;")


_RECIPE = """A recipe is a TOML file: `nearkin train photos/ --recipe my.toml`. On the command line any key is
`--set section.key=value`. A key without a default of its own ("by the data") is settled by the data and the machine, or
has no effect while it is absent; the settled recipe is saved as `recipe.toml` in the run. An unknown key, and one that
would have no effect beside the others, is refused with a sentence."""

_NAMED = {
    "encoder": "`name` and the settings of that encoder: `nearkin encoders` lists them ([Encoders](../models.md)).",
    "augment": "`preset` and its settings ([Images](../images.md)).",
    "loss": "`name` and the settings of that loss: `nearkin losses` lists them ([nearkin.losses](losses.md)).",
    "sampler": "`name` and the settings of that sampler ([nearkin.samplers](samplers.md)).",
}


async def _described(app: Any) -> dict[str, Any]:
    """Asks the app for /openapi.json, as a client would."""
    body = b""

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        nonlocal body
        body += message.get("body", b"")

    scope = {"type": "http", "method": "GET", "path": "/openapi.json", "raw_path": b"/openapi.json", "root_path": ""}
    scope |= {"query_string": b"", "headers": [(b"host", b"127.0.0.1")], "client": ("127.0.0.1", 1), "scheme": "http"}
    await app({**scope, "server": ("127.0.0.1", 80), "http_version": "1.1", "asgi": {"version": "3.0"}}, receive, send)
    return json.loads(body)


def http_api() -> str:
    """Every address of the service, from its OpenAPI description."""
    from nearkin import gallery, web

    with TemporaryDirectory() as folder:
        opened = gallery.Gallery.open(Path(folder) / "empty.db", dim=8)
        try:
            schema = asyncio.run(_described(web.build(opened, log=logging.getLogger(__name__))))
        finally:
            opened.close()
    lines = ["# HTTP API", "", _HTTP, "", *_statuses(schema), ""]
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            lines += _operation(method.upper(), path, operation)
    return "\n".join(lines)


def _statuses(schema: dict[str, Any]) -> list[str]:
    """A table of every status that an address may answer."""
    meanings: dict[str, list[str]] = {}
    for operations in schema["paths"].values():
        for operation in operations.values():
            for code, answer in operation.get("responses", {}).items():
                known = meanings.setdefault(code, [])
                if answer.get("description") not in (*known, None, ""):
                    known.append(answer["description"].rstrip("."))
    rows = [f"| {code} | {_cell('; '.join(dict.fromkeys(known)))} |" for code, known in sorted(meanings.items())]
    return ["| status | meaning |", "|---|---|", *rows]


_HTTP = """Made from the OpenAPI description, which a running service answers at `/openapi.json`.
[The service](../serving.md) explains access, limits and errors."""


def _operation(method: str, path: str, operation: dict[str, Any]) -> list[str]:
    lines = [f"## {method} {path}".replace("{", "\\{"), "", operation.get("summary", "") + ".", ""]
    if operation.get("description"):
        lines += [_cell(operation["description"]), ""]
    rows = []
    for parameter in operation.get("parameters", []):
        schema = parameter.get("schema", {})
        rows.append((parameter["name"], parameter["in"], schema, parameter.get("required", False)))
    for kind, body in operation.get("requestBody", {}).get("content", {}).items():
        for name, schema in body.get("schema", {}).get("properties", {}).items():
            rows.append((name, kind, schema, name in body["schema"].get("required", [])))
    if rows:
        lines += ["| field | meaning | in | type | default |", "|---|---|---|---|---|"]
        for name, where, schema, required in rows:
            default = (
                "required" if required else f"`{json.dumps(schema['default'])}`" if "default" in schema else "none"
            )
            kind = schema.get("type") or " or ".join(s.get("type", "object") for s in schema.get("anyOf", [{}]))
            lines.append(f"| `{name}` | {_cell(schema.get('description', ''))} | {where} | {kind} | {default} |")
        lines.append("")
    return [*lines, "Answers: " + ", ".join(operation.get("responses", {})) + ".", ""]
