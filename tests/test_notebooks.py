"""The notebooks: every cell runs, and the stored outputs are complete, small and name no machine."""

import ast
import json
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
LARGEST = 300_000  # bytes of a file


def code_of(path):
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def test_there_are_five_and_the_index_names_them():
    index = (FOLDER / "README.md").read_text()
    assert len(NOTEBOOKS) == 5 and all(f"]({path.name})" in index for path in NOTEBOOKS)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_runs(path, tmp_path, monkeypatch):
    plots = pytest.importorskip("matplotlib.pyplot")
    if "comparison" in path.stem:
        pytest.importorskip("optuna")
    plots.switch_backend("Agg")
    monkeypatch.setenv("NEARKIN_NOTEBOOK_STEPS", "4")
    monkeypatch.setenv("NEARKIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    try:
        for number, cell in enumerate(code_of(path), 1):
            shown = run("".join(cell["source"]), names, f"{path.stem}, cell {number}")
            if hasattr(shown, "_repr_html_"):
                assert shown._repr_html_().startswith("<img")
    finally:
        plots.close("all")


def run(source, names, place):
    """The value of the last expression, as a notebook shows it."""
    tree = ast.parse(source)
    last = ast.Expression(tree.body.pop().value) if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, place, "exec"), names)
    return None if last is None else eval(compile(last, place, "eval"), names)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_outputs(path):
    """Every cell was run in its order without an error, and nothing names the machine on which it was."""
    assert path.stat().st_size < LARGEST
    cells = code_of(path)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert outputs and {output["output_type"] for output in outputs} <= {"stream", "display_data", "execute_result"}
    assert all(output.get("name") != "stderr" for output in outputs)
    texts = [re.sub(r"[A-Za-z0-9+/]{200,}", "", json.dumps(output)) for output in outputs]
    assert not [text for text in texts if re.search(r"/(tmp|home|root|work|Users|var)/", text)]
    pictures = [
        output for output in outputs if "image/png" in output.get("data", {}) or "image/gif" in str(output)[:400]
    ]
    assert pictures, "no picture"
