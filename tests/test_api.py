"""What a user of the Python interface meets: names, arrays, own objects; and what must not get lost on the way."""

import inspect
import json
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import nearkin
from nearkin import data, evaluation, training
from nearkin.data import vector_files, vectors
from nearkin.evaluation.protocols import results_table, runner

GENERATOR = np.random.default_rng(0)
LABELS = np.repeat(np.arange(4), 6)
ROWS = (np.eye(4)[LABELS] + 0.05 * GENERATOR.normal(size=(24, 4))).astype(np.float32)
NAMES = [f"photos/{'abcd'[label]}/{i}.jpg" for i, label in enumerate(LABELS)]
CLASSES = ["ant", "bee", "cat", "dog"]

# Modules


def test_import_nearkin_gives_every_module_and_loads_none():
    code = (
        "import sys, nearkin; assert 'torch' not in sys.modules, 'torch'; print(*dir(nearkin));"
        "assert nearkin.training.train and nearkin.gallery.Gallery and nearkin.compare.compare;"
        "assert nearkin.relations.of and nearkin.strict and nearkin.losses.TripletLoss and nearkin.data.load"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {"training", "data", "models", "evaluation", "gallery", "compare", "report", "strict"} <= set(out)
    with pytest.raises(AttributeError, match="no attribute 'trainig'"):
        nearkin.trainig  # noqa: B018


MODULES = [name for name in nearkin.__all__ if name not in ("open", "strict")]


@pytest.mark.parametrize("name", MODULES)
def test_dir_lists_only_own_names(name):
    module = getattr(nearkin, name)
    assert set(dir(module)) == set(module.__all__)
    for listed in dir(module):
        thing = getattr(module, listed)
        origin = getattr(thing, "__module__", None) or getattr(thing, "__name__", "nearkin")
        if not inspect.isbuiltin(thing) and isinstance(origin, str) and not isinstance(thing, int | tuple):
            assert origin.startswith(("nearkin", "types", "typing")), f"{name}.{listed} is {origin}'s"


# The bars


def test_a_bar_never_calls_elapsed_time_left():
    import io

    from rich.console import Console
    from rich.progress import Progress

    from nearkin.cli.screen import bar_columns

    shown = io.StringIO()
    now = [0.0]
    with Progress(
        *bar_columns(), console=Console(file=shown, force_terminal=True, width=100), get_time=lambda: now[0]
    ) as bars:

        def line(task):
            shown.truncate(0)
            bars.console.print(bars.make_tasks_table([bars._tasks[task]]))
            return shown.getvalue()

        unknown = bars.add_task("testing", total=None, status="")
        now[0] = 5.0
        assert "left" not in line(unknown)
        known = bars.add_task("training", total=100, status="")
        assert "left" not in line(known)  # nothing is known of the speed
        for done in (10, 20, 30):
            now[0] += 10.0
            bars.update(known, completed=done)
        assert "0:01:10 left" in line(known)
        bars.update(known, completed=100)
        assert "left" not in line(known)


# Names of vectors


@pytest.mark.parametrize("ending", [".npz", ".safetensors", ".parquet"])
def test_names_survive_being_written_and_read(tmp_path, ending):
    if ending == ".parquet":
        pytest.importorskip("pyarrow")
    path = tmp_path / f"some{ending}"
    vector_files.write(path, torch.from_numpy(ROWS), LABELS, None, NAMES, CLASSES)
    assert vectors.read(path).names == NAMES
    items = data.load(path)
    assert items.names == NAMES and items.classes == CLASSES and items.labels.tolist() == LABELS.tolist()
    swapped = LABELS.copy()
    swapped[0] = 2
    vector_files.write(path, torch.from_numpy(ROWS), swapped, None, NAMES, CLASSES)
    results = runner.evaluate(vectors.read(path), settings=runner.Settings(protocols=("diagnose",)))
    diagnosis = results["results"]["diagnose"]
    assert all(one["name"] == NAMES[one["item"]] for one in diagnosis["hubs"])
    printed = [row.value for row in results_table.table(results) if row.metric == "suspect label"]
    assert printed and printed[0].startswith(f"{NAMES[diagnosis['label_errors'][0]['item']]}: ")


def test_enrolled_vectors_keep_their_names(tmp_path):
    from nearkin import gallery

    path = tmp_path / "some.npz"
    vector_files.write(path, torch.from_numpy(ROWS), LABELS, None, NAMES, CLASSES)
    with gallery.Gallery.open(tmp_path / "g.db", dim=4) as opened:
        gallery.enrol_source(opened, str(path))
        assert {Path(hit.name).name for hit, _ in opened.rows()} == {Path(name).name for name in NAMES}


def test_rows_of_one_name_are_told_apart_and_other_keys_are_no_names(tmp_path):
    path = tmp_path / "some.npz"
    np.savez(path, embeddings=ROWS, labels=LABELS, names=["same", "same", "", *NAMES[3:]])
    assert data.load(path).names == ["same (row 0)", "same (row 1)", "(row 2)", *NAMES[3:]]
    np.savez(path, embeddings=ROWS, labels=LABELS, names=np.array(CLASSES))
    assert data.load(path).names[0] == "row 0"


# One training at a time in a folder

HOLD = (
    "import sys, pathlib; from nearkin.core.files import Lock;"
    "lock = Lock(pathlib.Path(sys.argv[1]), 'taken'); print('held', flush=True); sys.stdin.read()"
)
TINY = ["training.epochs=1", "training.batches=2", "encoder.dim=4", "evaluation.interval=false"]


@pytest.fixture
def holder():
    """Starts processes that hold a lock until they are ended."""
    started = []

    def start(path):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout.readline().strip() == "held"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def stored(tmp_path):
    path = tmp_path / "rows.npz"
    labels = np.repeat(np.arange(8), 6)
    rows = np.eye(8)[labels] + 0.1 * np.random.default_rng(1).normal(size=(48, 8))
    np.savez(path, embeddings=rows.astype(np.float32), labels=labels)
    return path


def test_a_folder_is_trained_in_once_at_a_time(tmp_path, stored, holder):
    recipe = training.read_recipe(None, [f'data.source="{stored.as_posix()}"', *TINY])
    run = tmp_path / "run"
    training.train(recipe, run)
    assert not (run / ".lock").exists()
    process = holder(run / ".lock")
    sentence = rf"run: a training is running in it already \(process {process.pid} on .+\)"
    before = sorted((path.name, path.stat().st_mtime_ns) for path in run.iterdir())
    with pytest.raises(ValueError, match=sentence):
        training.resume(run)
    with pytest.raises(ValueError, match=sentence):
        training.train(recipe, run)
    assert before == sorted((path.name, path.stat().st_mtime_ns) for path in run.iterdir())
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    other = holder(fresh / ".lock")  # one that has begun and written nothing yet
    with pytest.raises(ValueError, match=rf"fresh: a training is running in it already \(process {other.pid} on"):
        training.train(recipe, fresh)
    for killed in (process, other):
        killed.kill()  # leaves its file behind
        killed.wait()
    assert (run / ".lock").exists() and (fresh / ".lock").exists()
    assert training.resume(run).results["test"]
    assert training.train(recipe, fresh).results["test"]


def test_two_trainings_of_one_process_cannot_share_a_folder(tmp_path, stored):
    recipe = training.read_recipe(None, [f'data.source="{stored.as_posix()}"', *TINY])
    refused = []

    def callback(event):
        if event["event"] == "settled" and not refused:
            with pytest.raises(ValueError, match="a training is running in it already"):
                training.train(recipe, tmp_path / "run")
            refused.append(True)

    training.train(recipe, tmp_path / "run", callback)
    assert refused


def test_a_folder_that_nothing_came_of_is_gone_and_one_that_cannot_be_made_is_said_first(tmp_path, stored):
    events = []
    wrong = training.read_recipe(None, [f'data.source="{stored.as_posix()}"', "sampler.batch=7", *TINY])
    with pytest.raises(ValueError, match="sampler"):
        training.train(wrong, tmp_path / "a" / "b" / "run")
    assert not (tmp_path / "a").exists()
    (tmp_path / "file").write_text("")
    recipe = training.read_recipe(None, [f'data.source="{stored.as_posix()}"', *TINY])
    with pytest.raises(ValueError, match=r"run: cannot be written \("):
        training.train(recipe, tmp_path / "file" / "run", events.append)
    assert [event["event"] for event in events] == ["folder"]  # nothing was read yet


# What can be known is said before a picture is decoded


def pictures_in(folder, classes=8, each=4, side=80, seed=0):
    from PIL import Image

    drawn = np.random.default_rng(seed)
    for c in range(classes):
        (folder / f"class{c}").mkdir(parents=True)
        base = drawn.integers(40, 216, 3)
        for i in range(each):
            pixels = np.clip(base + drawn.normal(0, 12, (side, side, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"class{c}" / f"{i}.png")
    return folder


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return pictures_in(tmp_path_factory.mktemp("photos") / "photos")


@pytest.fixture
def decoded(monkeypatch):
    """Counts the pictures that are decoded."""
    from PIL import ImageFile

    loaded = []
    load = ImageFile.ImageFile.load

    def counting(self, *arguments):
        loaded.append(self)
        return load(self, *arguments)

    monkeypatch.setattr(ImageFile.ImageFile, "load", counting)
    return loaded


WRONG = [
    (["loss.margn=0.3"], "margn"),
    (["loss.name=arcfase"], 'did you mean "arcface"'),
    (["loss.name=triplet", "loss.margin=wide"], "loss.margin must be"),
    (["loss.name=triplet", "loss.margin=-1"], "loss.margin must be"),
    (["sampler.nmae=x"], "nmae"),
    (["sampler.name=balanced"], "class-balanced"),
    (["sampler.batch=7"], "sampler.batch must be a multiple"),
    (["sampler.per_class=2", "sampler.batch=4000"], "sampler.batch must hold at most all"),
    (["encoder.widht=3"], "widht"),
    (["encoder.name=small-cn"], "small-cnn"),
    (["encoder.name=small-cnn", "encoder.hidden=3"], "hidden"),
    (["encoder.name=small-cnn", "encoder.width=-3"], "width"),
    (["encoder.name=small-cnn", "encoder.freeze_backbone=true", "encoder.dim=0"], "nothing of the encoder can learn"),
    (["encoder.name=timm:no_such_model_at_all", "encoder.pretrained=false"], "no_such_model_at_all|pip install"),
    (["augment.flpi=0.5"], "flpi"),
    (["augment.preset=foto"], "photo"),
    (["augment.flip=3"], "augment.flip"),
    (["schedule.patience=3"], "schedule.patience would have no effect"),
    (["optimizer.momentum=0.5"], "optimizer.momentum would have no effect"),
    (["memory.size=9", "loss.name=proxy-anchor"], "memory.size needs a loss that takes references"),
    (["loss.name=logratio"], "needs continuous targets"),
    (["data.official=false"], "data.official would have no effect"),
    (["data.partial=true"], "data.partial would have no effect"),
    (["training.graphs=true", "training.device=cpu"], "training.graphs would have no effect"),
]


@pytest.mark.parametrize("sets, sentence", WRONG, ids=lambda value: ",".join(value) if isinstance(value, list) else "")
def test_nothing_is_decoded_before_an_error_that_could_be_known(sets, sentence, photos, tmp_path, decoded):
    recipe = training.read_recipe(None, [f'data.source="{photos.as_posix()}"', "data.cache=false", *sets])
    with pytest.raises((ValueError, TypeError, ModuleNotFoundError), match=sentence):
        training.train(recipe, tmp_path / "run")
    assert not decoded and not (tmp_path / "run").exists()


def test_a_missing_extra_is_said_before_anything_is_decoded(photos, tmp_path, decoded, monkeypatch):
    from nearkin.training import tracking

    source = [f'data.source="{photos.as_posix()}"', "data.cache=false"]
    monkeypatch.setattr(tracking, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install 'nearkin\\[track\\]'"):
        training.train(training.read_recipe(None, [*source, "training.tensorboard=true"]), tmp_path / "run")
    for module, name, extra in (("timm", "timm:resnet18", "vision"), ("transformers", "hf:some/model", "hf")):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(ModuleNotFoundError, match=f"nearkin\\[{extra}\\]"):
            training.train(training.read_recipe(None, [*source, f"encoder.name={name}"]), tmp_path / "run")
    assert not decoded and not (tmp_path / "run").exists()


def test_comparing_says_a_misspelt_key_before_it_decodes(photos, tmp_path, decoded):
    pytest.importorskip("optuna")
    for wrong, sentence in (("encoder.widht=3", "widht"), ("encoder.name=timm:no_such_model", "no_such_model|pip")):
        recipe = training.read_recipe(None, [f'data.source="{photos.as_posix()}"', "data.cache=false", wrong])
        with pytest.raises((ValueError, ModuleNotFoundError), match=sentence):
            nearkin.compare.compare(recipe, ["triplet", "supcon"], tmp_path / "run")
    assert not decoded


# Which encoder a size gets


@pytest.mark.parametrize("side, size, lite", [(300, 64, True), (300, None, True), (28, None, False), (300, 16, False)])
def test_a_size_does_not_silently_swap_the_pretrained_encoder(side, size, lite, monkeypatch):
    from nearkin.training.config import defaults

    monkeypatch.setattr(defaults, "find_spec", lambda name: object())
    recipe = training.read_recipe(None, [] if size is None else [f"data.size={size}"])
    settled, notes = defaults.settle_images(recipe, side, False, torch.device("cpu"))
    assert settled.encoder["name"] == ("efficientnet-lite0" if lite else "small-cnn")
    assert settled.data.size == (size or settled.data.size)
    assert bool(notes) == (side > 64 and not lite)  # another encoder than the pictures would have is said
    assert not notes or "data.size=16 is less than the 32 px that efficientnet-lite0 needs" in notes[0]


# NumPy arrays and lists in evaluation


def pairs_like(x):
    pairs = np.array([[i, (i + step) % len(LABELS)] for step in (1, 9) for i in range(len(LABELS))])
    return pairs if isinstance(x, np.ndarray) else torch.from_numpy(pairs)


CALLS = {
    "retrieval": lambda x, y: evaluation.retrieval(x, y, metrics=("recall", "map@r", "map", "mrr")),
    "retrieval of a gallery": lambda x, y: evaluation.retrieval(x[:8], y[:8], gallery=x[8:], gallery_labels=y[8:]),
    "clustering": lambda x, y: evaluation.clustering(x, y, seed=1),
    "one_shot": lambda x, y: evaluation.one_shot(x, y, ways=3, episodes=5),
    "open_set": lambda x, y: evaluation.open_set(x, y, examples=(1, 2), fpirs=(0.3,), repeats=2, cohort=-x[:5]),
    "all_pairs": lambda x, y: evaluation.all_pairs(x, y),
    "diagnose": lambda x, y: evaluation.diagnose(x, y, k=3),
    "compare": lambda x, y: evaluation.compare(x, -x, y, samples=50),
    "graded": lambda x, y: evaluation.graded(x, x[:, :2], classes=y, interval=True),
    "graded of a gallery": lambda x, y: evaluation.graded(x[:8], x[:8, 0], gallery=x[8:], gallery_targets=x[8:, 0]),
    "bootstrap": lambda x, y: evaluation.bootstrap(x[:, 0], y, samples=50),
    "verification": lambda x, y: evaluation.verification(embeddings=x, pairs=pairs_like(x), labels=y),
    "nearest": lambda x, y: evaluation.nearest(x, k=2).indices.tolist(),
    "nearest_negatives": lambda x, y: evaluation.nearest_negatives(x, y, k=2).indices.tolist(),
    "kmeans": lambda x, y: evaluation.kmeans.kmeans(x, 4).assignment.tolist(),
}


def same(one, other):
    """Equal but for how a NaN is written."""
    np.testing.assert_equal(
        json.loads(json.dumps(one, default=str)) if isinstance(one, dict | list | tuple) else one,
        json.loads(json.dumps(other, default=str)) if isinstance(other, dict | list | tuple) else other,
    )


@pytest.mark.parametrize("name", CALLS)
def test_arrays_do_what_tensors_do(name):
    call = CALLS[name]
    expected = call(torch.from_numpy(ROWS), torch.from_numpy(LABELS))
    frozen = ROWS.copy()
    frozen.setflags(write=False)
    for rows, labels in ((ROWS, LABELS), (frozen, LABELS.astype(np.uint16)), (np.asfortranarray(ROWS), LABELS)):
        same(call(rows, labels), expected)
    if name not in ("verification", "graded"):  # pairs of arrays; classes are no labels
        same(call(torch.from_numpy(ROWS), LABELS.tolist()), expected)


@pytest.mark.parametrize("name", [name for name in CALLS if name not in ("diagnose", "nearest", "kmeans")])
def test_names_of_classes_are_labels_too(name):
    call = CALLS[name]
    expected = call(torch.from_numpy(ROWS), torch.from_numpy(LABELS))
    names = np.array(CLASSES)[LABELS]
    for labels in (names, names.astype(object), names.astype("S")):
        same(call(ROWS, labels), expected)


def test_a_diagnosis_of_named_classes_names_them():
    swapped = LABELS.copy()
    swapped[0] = 2
    by_id = evaluation.diagnose(ROWS, swapped, k=3)
    by_name = evaluation.diagnose(ROWS, np.array(CLASSES)[swapped], k=3)
    assert [one["class"] for one in by_name["worst_classes"]] == [
        CLASSES[one["class"]] for one in by_id["worst_classes"]
    ]
    assert by_id["confused_pairs"] and by_id["label_errors"]
    for one, other in zip(by_name["confused_pairs"], by_id["confused_pairs"], strict=True):
        assert one["classes"] == [CLASSES[place] for place in other["classes"]]
    assert by_name["label_errors"][0]["suggested"] == CLASSES[by_id["label_errors"][0]["suggested"]]


def test_what_no_tensor_can_be_made_of_is_one_sentence():
    for rows, labels, sentence in (
        (ROWS.tolist(), LABELS, "embeddings must be a torch tensor or a NumPy array, got list"),
        (
            ROWS.astype(object),
            LABELS,
            "embeddings must be a torch tensor or a NumPy array of numbers, got an array of Py",
        ),
        (ROWS.astype(int), LABELS, "embeddings must be floating point"),
        (ROWS, LABELS.astype(float), "labels must be"),
        (ROWS, [*LABELS[:-1].tolist(), "ant"], "labels must be whole numbers or names of classes, got a mixture"),
        (
            ROWS,
            [*LABELS[:-1].tolist(), None],
            "labels must be a torch tensor or a NumPy array of numbers, got an array",
        ),
        (ROWS, LABELS[:-1], "labels must have one entry"),
    ):
        with pytest.raises((TypeError, ValueError), match=sentence):
            evaluation.retrieval(rows, labels)
    with pytest.raises(ValueError, match="labels and gallery_labels must be of one kind"):
        evaluation.retrieval(ROWS, np.array(CLASSES)[LABELS], ROWS, LABELS)


def test_a_calibration_takes_an_array_of_scores():
    curve = evaluation.calibrate(np.array([0.1, 0.2, 0.3, 0.7, 0.8, 0.9]), np.array([0, 0, 0, 1, 1, 1]))
    scores = np.array([0.15, 0.5])
    assert torch.equal(curve.probability(scores), curve.probability(torch.from_numpy(scores)))


# training.train, and objects of the user's own


class Blobs(torch.utils.data.Dataset):
    """Pictures (1, 16, 16) or vectors of 12 classes."""

    def __init__(self, kind="pictures", labels="numbers"):
        drawn = torch.Generator().manual_seed(0)
        self.y = torch.arange(12).repeat_interleave(6)
        shape = (1, 16, 16) if kind == "pictures" else (24,)
        centres = torch.randn(12, *shape, generator=drawn)
        self.x = (centres[self.y] + torch.randn(72, *shape, generator=drawn)).sigmoid()
        self.labels_as = labels

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        kinds = {"numbers": int, "names": lambda y: f"class {int(y)}", "floats": lambda y: float(y) / 3}
        return self.x[i], kinds[self.labels_as](self.y[i])


class Net(torch.nn.Module):
    def __init__(self, width=8, inside=None):
        super().__init__()
        self.layer = torch.nn.LazyLinear(width) if inside is None else torch.nn.Linear(inside, width)
        self.drop = torch.nn.Dropout(0.1)

    def forward(self, x):
        return self.layer(self.drop(x.flatten(1)))


class Pull(torch.nn.Module):
    """Kin together, strangers apart; with a weight of its own."""

    def __init__(self, classes=12, dim=8):
        super().__init__()
        self.centres = torch.nn.Parameter(torch.zeros(classes, dim))

    def forward(self, embeddings, labels):
        logits = -(embeddings[:, None] - self.centres).pow(2).sum(2)
        return torch.nn.functional.cross_entropy(logits, labels.long())


FEW = {"training": {"epochs": 2, "batches": 3}, "evaluation.interval": False, "sampler.batch": 12}


def weights(module):
    return torch.cat([value.detach().double().flatten() for value in module.state_dict().values()])


def test_own_objects_train_validate_report_and_end_with_the_best_weights(tmp_path):
    net, pull, events = Net(inside=256), Pull(), []
    before = weights(net), weights(pull)
    outcome = training.train(Blobs(), tmp_path / "run", events.append, encoder=net, loss=pull, settings=FEW)
    assert not torch.equal(weights(net), before[0]) and not torch.equal(weights(pull), before[1])
    assert {"trained", "untrained", "baseline"} == set(outcome.results["test"]) and outcome.results[
        "baseline"
    ] == "pixels"
    assert [event["val"] for event in events if event["event"] == "epoch"]
    assert outcome.report == tmp_path / "run" / "report.html" and "data:image" in outcome.report.read_text()
    from safetensors.torch import load_file

    again = Net(inside=256)
    again.load_state_dict(load_file(tmp_path / "run" / "model.safetensors"))
    assert torch.equal(weights(again), weights(net))
    rows = again.eval()(Blobs().x[outcome.test.indices])
    assert torch.allclose(rows, outcome.embeddings, atol=1e-6)


class Noisy(Blobs):
    """Never the same item twice: what it draws is part of the run."""

    def __getitem__(self, i):
        item, label = super().__getitem__(i)
        return item + 0.1 * torch.randn(item.shape), label


class Enough(Exception):
    pass


def stopped_run(folder, dataset):
    """A run that ended in its second epoch."""

    def stop(event):
        if event["event"] == "step_end" and event["step"] == 5:
            raise Enough

    torch.manual_seed(1)
    with pytest.raises(Enough):
        training.train(dataset, folder, stop, encoder=Net(inside=256), loss=Pull(), settings=FEW)


def test_a_run_with_own_objects_goes_on_to_the_same_weights(tmp_path):
    torch.manual_seed(1)
    uninterrupted = Net(inside=256)
    straight = training.train(Noisy(), tmp_path / "a", encoder=uninterrupted, loss=Pull(), settings=FEW, report=False)
    stopped_run(tmp_path / "b", Noisy())
    torch.manual_seed(2)  # made anew, with other random weights
    again = Net(inside=256)
    outcome = training.train(Noisy(), encoder=again, loss=Pull(), resume=tmp_path / "b", report=False)
    assert torch.equal(weights(again), weights(uninterrupted))
    assert outcome.results["test"] == straight.results["test"]  # also of the untrained one


def test_a_run_with_own_objects_goes_on_with_no_others(tmp_path):
    stopped_run(tmp_path / "run", Blobs())
    same = {"dataset": Blobs(), "encoder": Net(inside=256), "loss": Pull()}

    class Other(Net):
        pass

    for change, sentence in (
        ({"encoder": None}, r"run: the encoder is an object of the user's own \(Net\); give it again in Python"),
        ({"dataset": None}, r"run: the dataset is an object of the user's own \(Blobs\); give it again"),
        ({"loss": None}, r"run: the loss is an object of the user's own \(Pull\); give it again"),
        ({"encoder": Other(inside=256)}, "run: the encoder was a Net, got a Other"),
        (
            {"encoder": Net(width=7, inside=256)},
            r"run: the encoder is not the one that the run started with: encoder\.",
        ),
        ({"loss": Pull(classes=13)}, r"run: the loss is not the one that the run started with: loss\.centres differs"),
        ({"dataset": Blobs(labels="names")}, "has changed since the run started"),
    ):
        with pytest.raises(ValueError, match=sentence):
            training.resume(tmp_path / "run", **(same | change))
    with pytest.raises(ValueError, match="leave all other choices out"):
        training.train(Blobs(), encoder=Net(inside=256), loss="triplet", resume=tmp_path / "run")


def test_what_the_command_line_cannot_do_with_own_objects_names_the_way_out(tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from nearkin.cli import app

    monkeypatch.chdir(tmp_path)
    training.train(Blobs(), "run", encoder=Net(inside=256), loss=Pull(), settings=FEW, report=False)
    for arguments, sentence in (
        (["embed", "run", "glyphs", "--out", "x.npz"], 'safetensors.torch.load_file("run/model.safetensors")'),
        (["evaluate", "run"], "which only its own code can build"),
        (["export", "run", "--onnx"], "which only its own code can build|ONNX export needs torch"),
        (["train", "--resume", "run"], "training.resume(folder, dataset=…)"),
    ):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 2 and any(part in result.output for part in sentence.split("|")), result.output
        assert len(result.output.strip().splitlines()) == 1


@pytest.mark.parametrize(
    "labels, objects",
    [
        ("numbers", {"loss": "supcon"}),
        ("names", {"loss": Pull(dim=128)}),
        ("numbers", {"encoder": Net(inside=24), "loss": "proxy-anchor"}),
        ("floats", {"encoder": Net(inside=24)}),
        ("floats", {"encoder": "mlp", "loss": torch.nn.MSELoss()}),
    ],
    ids=["named loss", "own loss", "own encoder", "targets", "own loss of targets"],
)
def test_own_and_named_objects_mix(labels, objects, tmp_path):
    if isinstance(objects.get("loss"), torch.nn.MSELoss):

        class Regress(torch.nn.Module):
            def forward(self, embeddings, targets):
                return (embeddings[:, 0] - targets).pow(2).mean()

        objects = objects | {"loss": Regress()}
    dataset = Blobs("vectors", labels)
    outcome = training.train(dataset, tmp_path / "run", settings=FEW, report=False, **objects)
    expected = "ndcg@10" if labels == "floats" else "recall@1"
    assert expected in outcome.results["test"]["trained"] and outcome.results["baseline"] == "vectors"
    if labels == "names":
        assert set(outcome.prepared.items.classes) == {f"class {i}" for i in range(12)}


def test_an_own_encoder_takes_a_folder_of_pictures_and_a_file_of_vectors(photos, stored, tmp_path):
    settings = FEW | {"data.size": 16, "data.stored": 16, "data.cache": False, "sampler.batch": 8}
    of_pictures = training.train(photos, tmp_path / "a", encoder=Net(inside=768), settings=settings, report=False)
    assert of_pictures.recipe.encoder == {"name": "own:Net"} and of_pictures.embeddings.shape[1] == 8
    of_vectors = training.train(
        str(stored), tmp_path / "b", encoder=Net(inside=8), loss=Pull(), settings=FEW, report=False
    )
    assert of_vectors.embeddings.shape[1] == 8


def test_bad_own_objects_are_one_sentence_before_anything_is_written(tmp_path):
    class Loose(Blobs):
        def __getitem__(self, i):
            return self.x[i]

    class Growing(Blobs):
        def __getitem__(self, i):
            return self.x[i][:, : 4 + i % 3], int(self.y[i])

    class Flat(torch.nn.Module):
        def forward(self, x):
            return x.flatten()

    net = {"encoder": Net(inside=256), "loss": Pull()}
    for source, objects, sentence in (
        (Loose(), net, r"dataset\[0\] must be \(tensor, label\), got Tensor"),
        (Growing(), {"loss": "supcon"}, r"items of shape|all items of the dataset must have one shape"),
        ([1, 2], net, "source must be a path, a name, a Recipe or a dataset"),
        (Blobs(), net | {"encoder": Flat()}, r"encoder Flat must give floats of shape \(2, dimensions\) for 2 items"),
        (Blobs(), net | {"encoder": torch.relu}, "encoder must be a name or a torch.nn.Module, got builtin"),
        (
            Blobs(),
            net | {"settings": {"encoder.dim": 3}},
            'unknown key "encoder.dim" of encoder "own:Net", which has its',
        ),
        (Blobs(), net | {"settings": {"data.size": 32}}, "data.size would have no effect: the dataset is an object of"),
        (Blobs(), {"encoder": "mlp"}, 'encoder "mlp" does not take pictures, which the dataset holds; use small-cnn'),
        (Blobs(), {"settings": "training.epochs=1"}, "settings must be a dictionary, or a list"),
        (Blobs(), {"settings": {"training.epochs": object()}}, "must be a number, text, true or false, or a list"),
    ):
        with pytest.raises((ValueError, TypeError), match=sentence):
            training.train(source, tmp_path / "run", **({"report": False} | objects))
        assert not (tmp_path / "run").exists()


def test_the_function_and_the_command_agree(photos, tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from nearkin.cli import app

    monkeypatch.chdir(tmp_path)
    sets = ["training.epochs=1", "training.batches=2", "data.size=16", "data.stored=16", "encoder.width=4"]
    sets += ["data.cache=false", "sampler.batch=8", "training.workers=0"]
    command = ["train", str(photos), "--loss", "triplet", "--encoder", "small-cnn", "--quiet"]
    result = CliRunner().invoke(app, [*command, *(part for one in sets for part in ("--set", one))])
    assert result.exit_code == 0 and result.output.strip() == str(Path("runs/photos-triplet")), result.output
    as_keys = {key: json.loads(value) for key, value in (one.split("=") for one in sets)}
    outcome = training.train(photos, loss="triplet", encoder="small-cnn", settings=as_keys)
    assert outcome.folder == Path("runs/photos-triplet-2") and outcome.report.is_file()
    first, second = (
        json.loads((Path(f) / "results.json").read_text()) for f in ("runs/photos-triplet", outcome.folder)
    )
    assert first["test"] == second["test"]
    assert (Path("runs/photos-triplet") / "recipe.toml").read_text() == (outcome.folder / "recipe.toml").read_text()
    again = training.train(recipe=outcome.folder / "recipe.toml", out="again", settings={"training.seed": 1})
    assert again.recipe.training.seed == 1 and again.recipe.loss == outcome.recipe.loss
    assert training.train(resume="again", report=False).results["test"] == again.results["test"]


def test_progress_is_shown_if_asked(stored, tmp_path, capsys):
    training.train(stored, tmp_path / "a", settings=FEW, report=False)
    assert not capsys.readouterr().err
    training.train(stored, tmp_path / "b", settings=FEW, report=False, progress=True)
    assert "epoch   2/2" in capsys.readouterr().err


def test_the_example_runs(tmp_path, monkeypatch, capsys):
    example = Path(__file__).parents[1] / "examples" / "own_objects.py"
    small = ["--classes", "16", "--epochs", "1", "--batches", "2", "--out", str(tmp_path / "run")]
    monkeypatch.setattr(sys, "argv", [str(example), *small])
    runpy.run_path(str(example), run_name="__main__")
    assert capsys.readouterr().out.count("recall@1") == 4


def test_the_training_page_runs(photos, tmp_path, monkeypatch):
    import re

    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[1] / "docs" / "training.md").read_text()
    run, own = re.findall(r"```python\n(.*?)```", page, re.S)
    pictures_in(Path("photos"), classes=6, each=3, side=16)
    exec(run, names := {})
    assert names["outcome"].report == Path("runs/try/report.html") and names["outcome"].report.is_file()
    assert len(names["embedded"].embeddings)
    few = {"training.epochs": 1, "training.batches": 2, "evaluation.interval": False}
    train = training.train
    monkeypatch.setattr(
        training, "train", lambda *a, **k: train(*a, **k, report=False, **({} if "resume" in k else {"settings": few}))
    )
    exec(own, {"training": training, "dataset": Blobs(), "network": Net(inside=256), "criterion": Pull()})
    assert Path("runs/mine/results.json").is_file()


# On a GPU

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@on_gpu
def test_labels_of_a_list_meet_embeddings_on_a_gpu():
    rows = torch.from_numpy(ROWS).cuda()
    expected = evaluation.retrieval(rows, torch.from_numpy(LABELS).cuda())
    assert evaluation.retrieval(rows, LABELS) == evaluation.retrieval(rows, LABELS.tolist()) == expected


@on_gpu
def test_own_objects_train_on_a_gpu(tmp_path):
    settings = FEW | {"training.device": "cuda"}
    net = Net(inside=256)
    outcome = training.train(Blobs(), tmp_path / "run", encoder=net, loss=Pull(), settings=settings, report=False)
    assert next(net.parameters()).is_cuda and outcome.results["test"]["trained"]["recall@1"]["value"] > 0
