"""`nearkin runs`, `nearkin report` and `nearkin doctor`: which runs there are, their pages, what is installed."""

from pathlib import Path
from typing import Annotated, Any

import typer

from nearkin.cli import options
from nearkin.cli.screen import app, echo, one_sentence, print_json, print_table, shown, training_screen


@app.command()
def runs(
    folder: Annotated[Path, typer.Argument(help="Where runs are looked for.", metavar="DIR")] = Path("runs"),
    json: options.JsonFlag = False,
    quiet: options.NamesFlag = False,
) -> None:
    """List the runs in a folder with their figures on test classes, the last one first.

    Examples:

      nearkin runs

      nearkin runs studies/ --json
    """
    with one_sentence():
        from nearkin.training.run_list import list_runs

        found = list_runs(folder)
        if json:
            print_json(found)
            return
        if quiet:
            for run in found:
                echo(run["run"])
            return
        metrics = [name for name in ("recall@1", "map@r", "ndcg@10") if any(name in run["test"] for run in found)]
        names = ("run", "source", "encoder", "loss", *(f"{name}, %" for name in metrics), "state")
        print_table(names, [_run_cells(run, metrics) for run in found], f"{folder}: no run in it")


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="The folder of a run.", metavar="RUN", show_default=False)],
    allow_outside: options.AllowOutsideFlag = False,
    own_source: options.OwnSourceOption = None,
    silent: Annotated[bool, typer.Option("--quiet", help="Print only where the report is.")] = False,
    json: options.JsonFlag = False,
) -> None:
    """Test a finished run again and write its report.html anew.

    Example:

      nearkin report runs/birds
    """
    with one_sentence(lambda: "the run is as it was"), training_screen(silent or json) as callback:
        from nearkin import training

        if not (run / "recipe.toml").is_file():
            raise ValueError(f"{run}: not a run: there is no recipe.toml in it; nearkin runs lists the runs")
        if not (run / "results.json").is_file():
            raise ValueError(f"{run}: this run has not ended; nearkin train --resume {run} trains to the end")
        outcome = training.resume(run, callback, report=True, allow_outside=allow_outside, source=own_source)
        if outcome.report is None:
            raise ValueError(f"{run}: it was pretrained without labels, so nothing was tested and there is no report")
        if json:
            print_json({"run": str(run), "report": str(outcome.report), "test": outcome.results["test"]["trained"]})
        else:
            echo(f"report: {outcome.report}")


@app.command()
def doctor(
    json: options.JsonFlag = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only what to do something about.")] = False,
) -> None:
    """Show versions, devices, kernels, extras and room on disk; say what is missing and how to get it.

    Examples:

      nearkin doctor

      nearkin doctor --json
    """
    with one_sentence():
        from nearkin.training import environment

        state = environment.examine()
        notes = environment.sentences(state)
        if json:
            print_json(state | {"notes": notes})
            return
        if not quiet:
            print_table(("", ""), _machine_rows(state), "")
            extras = [(e["name"], e["for"], e["install"] or "installed") for e in state["extras"]]
            print_table(("extra", "for", ""), extras, "extras: unknown, since nearkin is not installed as a package")
        for note in notes:
            echo(note)


def _run_cells(run: dict[str, Any], metrics: list[str]) -> tuple[str, ...]:
    figures = (shown(name, run["test"][name]["value"]) if name in run["test"] else "–" for name in metrics)
    return (run["run"], run["source"] or "–", run["encoder"] or "–", run["loss"] or "–", *figures, run["state"])


def _machine_rows(state: dict[str, Any]) -> list[tuple[str, str]]:
    kernels = state["kernels"]
    rows = [("nearkin", f"{state['nearkin']}, Python {state['python']}, {state['system']}")]
    rows += [("packages", ", ".join(f"{name} {number}" for name, number in state["packages"].items()))]
    rows += [(device["name"], device["line"]) for device in state["devices"]]
    rows += [("kernels", f"triton {kernels['triton']}" if kernels["available"] else f"none: {kernels['why']}")]
    for disk in state["disk"]:
        free = "cannot be written" if disk["free_bytes"] is None else f"{disk['free_bytes'] / 2**30:,.1f} GiB free"
        rows.append((disk["what"], f"{disk['folder']}: {free}"))
    return rows
