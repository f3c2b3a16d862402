"""How a verb is read: the groups of its options in --help, --json and --quiet, exit codes, errors as JSON."""

import json
import math
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from nearkin.core.text import visible

__all__ = ["EXIT_CODES", "VERB_GROUPS", "App", "Verbs", "as_json", "echo", "group_verbs", "is_quiet"]
__all__ += ["print_error", "print_json", "print_result"]

# What `nearkin --help` and docs/commands.md show; a test reads both.
EXIT_CODES = {
    0: "done",
    1: "a check found corrupt rows or points; or an error of nearkin's own, with a traceback",
    2: "bad input, a missing file or package, no memory: one sentence says what to do",
    3: "training diverged",
    4: "another rank was lost (torchrun)",
    130: "interrupted by Ctrl-C; what was saved is said",
    143: "ended by SIGTERM; what was saved is said",
}

VERB_GROUPS = {
    "Train and measure": ("train", "compare", "evaluate", "report", "runs"),
    "Use an encoder": ("embed", "group", "verify", "explain", "export"),
    "Search a gallery": ("enrol", "search", "identify", "serve", "gallery"),
    "Look up": ("losses", "encoders", "sources", "doctor"),
}
# Options of the long helps, by what they are about; the others are "Options".
_OPTION_GROUPS = {
    "Data": "root split_folders leaf_classes allow_outside part levels labels targets groups group_pattern "
    "group_column gallery_labels gallery_targets gallery_groups skip_single skip_unreadable without drop_near closed "
    "partial no_cache unlabelled pairs",
    "Training": "recipe set_ compatible_with loss losses encoder epochs batch chunk lr seed strategy resume steps "
    "trials folds seeds",
    "What is measured": "retrieval clustering verification one_shot open_set graded diagnose examples fpir repeats "
    "cohort far rerank rerank_validation ks similarity ways shots episodes interval label_errors",
    "Machine": "device jobs budget host port token",
    "Output": "out json quiet silent report log browser",
}
_GROUP_OF = {name: group for group, names in _OPTION_GROUPS.items() for name in names.split()}
_LONG = 12  # options, from which on they are grouped

_Function = TypeVar("_Function", bound=Callable[..., Any])
_options: ContextVar[Mapping[str, Any]] = ContextVar("options", default=MappingProxyType({}))


def as_json() -> bool:
    """Whether the present verb is to print one JSON document and nothing else on stdout."""
    wanted = _options.get().get("json")
    return wanted is True or wanted == Path("-")


def is_quiet() -> bool:
    """Whether the present verb is to show no progress and no notes."""
    options = _options.get()
    return as_json() or bool(options.get("quiet") or options.get("silent"))


def echo(text: str, err: bool = False, lines: bool = False) -> None:
    """Prints a line; control characters in names, labels and files are shown, not sent to the terminal."""
    typer.echo(visible(text, lines), err=err)


def print_json(content: Any) -> None:
    """Standard JSON: what is not a finite number is null."""
    echo(json.dumps(_plain(content), indent=2, ensure_ascii=False, allow_nan=False, default=str), lines=True)


def _plain(content: Any) -> Any:
    if isinstance(content, Mapping):
        return {str(key): _plain(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_plain(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def print_result(text: str, document: Mapping[str, Any]) -> None:
    """What a verb has done: a line; with --json the document; nothing with --quiet."""
    if as_json():
        print_json(document)
    elif not is_quiet():
        echo(text)


def print_error(sentence: str, code: int) -> None:
    """The sentence on stderr; with --json also {"error": …, "exit_code": …} on stdout."""
    if as_json():
        print_json({"error": sentence, "exit_code": code})
    echo(sentence, err=True)


class Verb(TyperCommand):
    """A verb whose options are grouped and known to the functions above, and whose errors in parsing may be JSON."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if len(self.params) >= _LONG:
            for param in self.params:
                if param.param_type_name == "option" and param.name in _GROUP_OF:
                    param.rich_help_panel = _GROUP_OF[param.name]  # type: ignore[attr-defined]

    def make_context(self, info_name: Any, args: list[str], *rest: Any, **extra: Any) -> Any:
        wants_json = "--json" in args
        try:
            return super().make_context(info_name, args, *rest, **extra)
        except Exception as error:
            message = getattr(error, "format_message", None)  # of click's errors, or of those that typer has of its own
            if wants_json and message is not None and (sentence := message()):
                print_json({"error": sentence, "exit_code": 2})
            raise

    def invoke(self, ctx: Any) -> Any:
        before = _options.set(dict(ctx.params))
        try:
            return super().invoke(ctx)
        finally:
            _options.reset(before)


class Verbs(TyperGroup):
    """The verbs, in their order; an unknown one is answered with the known ones."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)  # in the order of their definition, which typer before 0.13 does not keep

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in self.commands:
            import difflib

            verbs = [name for name, command in self.commands.items() if not command.hidden]
            near = difflib.get_close_matches(args[0], verbs, 1)
            hint = f'; did you mean "{near[0]}"?' if near else ";"
            sentence = f'unknown verb "{args[0]}"{hint} known: {", ".join(verbs)}'
            if "--json" in args:
                print_json({"error": sentence, "exit_code": 2})
            echo(sentence, err=True)
            raise typer.Exit(2)
        return super().resolve_command(ctx, args)


class App(typer.Typer):
    """Commands are `Verb`s."""

    def command(self, name: str | None = None, **options: Any) -> Callable[[_Function], _Function]:
        options.setdefault("cls", Verb)
        return super().command(name, **options)


def group_verbs(app: typer.Typer) -> None:
    """Sorts the verbs into the groups of --help."""
    group_of = {name: group for group, names in VERB_GROUPS.items() for name in names}
    for verb in app.registered_commands:
        verb.rich_help_panel = group_of.get(verb.name or verb.callback.__name__)  # type: ignore[union-attr]
    for part in app.registered_groups:
        part.rich_help_panel = group_of.get(part.name or "")
