"""What only the user may allow is typed, in every verb that reads a source, and no recipe or run can say it."""

import numpy as np
import pytest
from PIL import Image

from commands import output_of, run
from nearkin import data, training
from nearkin.gallery import Gallery, enrol_source

QUICK = ("--epochs", 1, "--set", "training.batches=2", "--set", "encoder.dim=8", "--set", "encoder.name=small-cnn")
QUICK += ("--set", "data.size=12", "--device", "cpu", "--quiet")
FIRST = ("--set", "unlabelled.epochs=1", "--set", "unlabelled.batches=1", "--set", "encoder.name=small-cnn")
FIRST += ("--set", "data.size=12", "--device", "cpu", "--quiet")
OUTSIDE = "rows name files outside of"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """lists/birds.csv of pictures beside its folder, and a run that was trained on it."""
    folder = tmp_path_factory.mktemp("home")
    draw = np.random.default_rng(0)
    (folder / "photos").mkdir()
    (folder / "lists").mkdir()
    lines = ["path,label"]
    for c in range(36):
        ground = draw.integers(0, 200, (12, 12, 3))
        for i in range(4):
            pixels = (ground + draw.integers(0, 50, (12, 12, 3))).astype(np.uint8)
            Image.fromarray(pixels).save(folder / "photos" / f"{c}-{i}.png")
            lines.append(f"../photos/{c}-{i}.png,class {c}")
    (folder / "lists" / "birds.csv").write_text("\n".join(lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("NEARKIN_CACHE", str(folder / "cache"))
        output_of(run("train", "lists/birds.csv", *QUICK, "--out", "trained", "--allow-outside"))
        output_of(run("train", "lists/birds.csv", *QUICK, "--out", "other", "--allow-outside", "--seed", 1))
    return folder


@pytest.fixture(autouse=True)
def _there(home, monkeypatch):
    monkeypatch.chdir(home)
    monkeypatch.setenv("NEARKIN_CACHE", str(home / "cache"))
    monkeypatch.setenv("COLUMNS", "300")


TYPED = {  # the source is typed, and read anew
    "train": ("train", "lists/birds.csv", *QUICK, "--out", "new"),
    "train --unlabelled": ("train", "--unlabelled", "lists/birds.csv", *FIRST, "--out", "first"),
    "compare": ("compare", "lists/birds.csv", "--losses", "triplet,contrastive", "--folds", 20, "--out", "compared"),
    "evaluate SOURCE": ("evaluate", "trained", "lists/./birds.csv"),
    "embed": ("embed", "trained", "lists/./birds.csv", "--out", "out.npz"),
    "enrol": ("enrol", "trained", "lists/birds.csv", "--gallery", "typed.gallery"),
    "group": ("group", "lists/./birds.csv", "--run", "trained", "--similarity", 0.9, "--quiet"),
    "serve": ("serve", "lists/birds.csv", "--run", "trained", "--host", "0.0.0.0", "--quiet"),
}
RECORDED = {  # the source is that of the run
    "train --resume": ("train", "--resume", "trained", "--quiet"),
    "report": ("report", "trained", "--quiet"),
    "evaluate": ("evaluate", "trained", "--quiet"),
    "export": ("export", "trained", "--onnx"),
    "calibrate": ("gallery", "calibrate", "trained", "--part", "test", "--quiet"),
}
LATER = {"compare": "20 folds need at least 40 training classes", "serve": "token"}  # refused once the source is read


@pytest.mark.parametrize("verb", [*TYPED, *RECORDED])
def test_paths_out_of_the_folder_of_a_table_are_typed(verb):
    words = (TYPED | RECORDED)[verb]
    refused = run(*words)
    assert OUTSIDE in output_of(refused, 2) and "--allow-outside" in refused.output, verb
    allowed = run(*words, "--allow-outside")
    if verb in LATER:
        assert LATER[verb] in output_of(allowed, 2)
    else:
        output_of(allowed)


def test_the_calibration_and_the_model_of_a_run_are_no_way_round(home):
    """`group --run` fits a model of the run's own classes: it is left out where their source is refused."""
    (home / "flat").mkdir()
    for c in range(4):
        (home / "flat" / f"{c}.png").write_bytes((home / "photos" / f"{c}-0.png").read_bytes())
    assert OUTSIDE in output_of(run("group", "flat", "--run", "trained"))
    assert not (home / "trained" / "plda.npz").exists()
    assert OUTSIDE not in output_of(run("group", "flat", "--run", "trained", "--allow-outside"))
    assert (home / "trained" / "plda.npz").is_file()


def test_no_file_allows_it(home):
    (home / "r.toml").write_text('[data]\nsource = "lists/birds.csv"\nallow_outside = true\n')
    assert 'unknown key "data.allow_outside"' in output_of(run("train", "--recipe", "r.toml", *QUICK), 2)
    assert 'unknown key "data.allow_outside"' in output_of(run("train", *QUICK, "--set", "data.allow_outside=true"), 2)
    assert "outside" not in (home / "trained" / "recipe.toml").read_text()
    assert "outside" not in (home / "trained" / "data.json").read_text()
    recipe = training.read_recipe(None, ['data.source="lists/birds.csv"'])
    with pytest.raises(ValueError, match=OUTSIDE):
        training.train(recipe, "never")
    assert recipe.allowing_outside().with_("training", epochs=1).allow_outside


def test_an_upgrade_says_which_originals_it_may_not_read(home):
    output_of(run("enrol", "trained", "lists/birds.csv", "--gallery", "old.gallery", "--allow-outside"))
    words = ("gallery", "upgrade", "old.gallery", "--run", "other", "--device", "cpu")
    result = run(*words)
    assert "originals of lists/birds.csv are not read" in result.output and OUTSIDE in result.output
    allowed = run(*words, "--allow-outside")
    assert OUTSIDE not in allowed.output and "144 embedded again" in output_of(allowed)


def test_python_allows_it_by_an_argument(home):
    assert len(data.load("lists/birds.csv", allow_outside=True)) == 144
    reading = data.Reading(allow_outside=True)
    assert len(training.embed_source("trained", reading=reading, device="cpu").names) == 36
    with pytest.raises(ValueError, match=OUTSIDE):
        training.embed_source("trained", device="cpu")
    assert training.resume("trained", allow_outside=True).recipe.allow_outside
    with Gallery.open("python.gallery", "trained", create=True, device="cpu") as gallery:
        with pytest.raises(ValueError, match=OUTSIDE):
            enrol_source(gallery, "lists/birds.csv")
        assert enrol_source(gallery, "lists/birds.csv", reading=reading).added == 144


# Code


CODE = "dataset:birds_of_mine:birds"
MODULE = """
from pathlib import Path
from PIL import Image

CALLED = Path(__file__).with_name("called")


class Birds:
    def __init__(self):
        CALLED.write_text("called")
        self.paths = sorted(Path(__file__).with_name("photos").glob("*.png"))
        self.targets = [int(path.name.split("-")[0]) for path in self.paths]

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, i):
        return Image.open(self.paths[i]), self.targets[i]


birds = Birds
"""


@pytest.fixture(scope="module")
def code(home):
    """A run and a gallery of a source that is code."""
    (home / "birds_of_mine.py").write_text(MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        patch.syspath_prepend(str(home))
        patch.setenv("NEARKIN_CACHE", str(home / "cache"))
        output_of(run("train", CODE, *QUICK, "--out", "coded"))
        output_of(run("train", CODE, *QUICK, "--out", "recoded", "--seed", 1))
        output_of(run("train", "--unlabelled", CODE, *FIRST, "--out", "pretrained"))
        output_of(run("enrol", "coded", CODE, "--gallery", "coded.gallery"))
        yield home / "called"


CODED = {
    "train --resume": ("train", "--resume", "coded", "--quiet"),
    "report": ("report", "coded", "--quiet"),
    "evaluate": ("evaluate", "coded", "--quiet"),
    "evaluate a part": ("evaluate", "coded", "--part", "val", "--quiet"),
    "export": ("export", "coded", "--onnx"),
    "calibrate": ("gallery", "calibrate", "coded", "--part", "test", "--quiet"),
}


@pytest.mark.parametrize("verb", CODED)
def test_a_run_whose_source_is_code_goes_on_where_it_is_typed_again(verb, code):
    code.unlink(missing_ok=True)
    refused = output_of(run(*CODED[verb]), 2)
    assert "which no file can ask for" in refused and f"--source {CODE}" in refused and not code.exists()
    other = output_of(run(*CODED[verb], "--source", "dataset:shutil:rmtree"), 2)
    assert f"its data.source is {CODE}, as the run has recorded it, and no other" in other and not code.exists()
    output_of(run(*CODED[verb], "--source", CODE))
    assert code.exists()


def test_a_pretraining_on_code_goes_on_where_it_is_typed_again(code):
    code.unlink(missing_ok=True)
    words = ("train", "--resume", "pretrained", "--quiet")
    assert "which no file can ask for" in output_of(run(*words), 2)
    assert "resume takes the recipe of the run" in output_of(run(*words, "--unlabelled", CODE, "--lr", 1), 2)
    assert "resume takes the recipe of the run" in output_of(run(*words, "--unlabelled", "photos"), 2)
    other = output_of(run(*words, "--unlabelled", "dataset:shutil:rmtree"), 2)
    assert f"its unlabelled.folder is {CODE}, as the run has recorded it" in other and not code.exists()
    output_of(run(*words, "--unlabelled", CODE))
    assert code.exists()


def test_group_and_upgrade_leave_code_out_until_it_is_typed(code, home):
    code.unlink(missing_ok=True)
    words = ("group", "photos", "--run", "coded", "--quiet")
    assert "which no file can ask for" in output_of(run("group", "photos", "--run", "coded")) and not code.exists()
    assert "which no file can ask for" not in output_of(run(*words, "--source", CODE)) and code.exists()
    code.unlink()
    words = ("gallery", "upgrade", "coded.gallery", "--run", "recoded", "--device", "cpu")
    refused = run(*words)
    assert f"originals of {CODE} are not read" in refused.output and not code.exists()
    wrong = output_of(run(*words, "--source", "dataset:shutil:rmtree"), 2)
    assert f"has recorded these sources: {CODE}" in wrong and not code.exists()
    assert "144 embedded again" in output_of(run(*words, "--source", CODE)) and code.exists()


def test_code_of_a_recipe_is_typed(code, home):
    code.unlink(missing_ok=True)
    (home / "coded.toml").write_text(f'[data]\nsource = "{CODE}"\n')
    words = ("train", *QUICK, "--recipe", "coded.toml", "--out", "again")
    assert "coded.toml: its source" in output_of(run(*words), 2) and not code.exists()
    compared = ("compare", "lists/birds.csv", "--losses", "triplet,contrastive", "--recipe", "coded.toml")
    assert OUTSIDE in output_of(run(*compared), 2) and not code.exists()  # its source is typed anyway
    assert "beside photos" in output_of(run(*words, "photos", "--source", CODE), 2)
    output_of(run(*words, "--source", CODE))
    assert code.exists()
    with pytest.raises(ValueError, match="which no file can ask for"):
        training.read_recipe("coded.toml")


def test_python_types_code_by_an_argument(code):
    with pytest.raises(ValueError, match="which no file can ask for"):
        training.resume("coded")
    with pytest.raises(ValueError, match="which no file can ask for"):
        training.vectors_of("coded", device="cpu")
    assert training.resume("coded", source=CODE).recipe.data.source == CODE
    assert len(training.vectors_of("coded", device="cpu", reading=data.Reading(own_source=CODE))[0].embeddings) == 36
    assert len(training.embed_source("coded", CODE, device="cpu").names) == 144
