"""Figures of a training for other programs: `Tracker` is the interface; TensorBoard, MLflow and W&B implement it."""

import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nearkin.core import files

if TYPE_CHECKING:
    from nearkin.training.config.recipe import Recipe
    from nearkin.training.trainer import Trainer

__all__ = ["TRACKERS", "Tracker", "check_installed", "numbers", "tracked"]

ID_FILE = "tracking.json"
_TEXT = 500  # characters of a setting, MLflow's limit in older versions


class Tracker:
    """Receives the figures of a training. Override what you need, and pass it as `callback=` of `training.train`.

    Of several ranks only the first calls it. A training that is resumed calls `on_start` again, with the step that it
    resumes after; the steps between that one and its end before come again, with the same figures.
    """

    def on_start(self, folder: Path, settings: dict[str, Any], step: int) -> None:
        """settings: the keys of the settled recipe, as {"loss.name": "triplet"}. step: 0, or that of a resume."""

    def on_step(self, step: int, metrics: dict[str, float]) -> None:
        """Every `training.log_steps` steps: loss, learning rates, gradient norm, items per second."""

    def on_epoch(self, epoch: int, step: int, metrics: dict[str, float]) -> None:
        """After every epoch: its mean loss, and the figures on validation classes."""

    def on_end(self, metrics: dict[str, float], finished: bool) -> None:
        """metrics: on test classes. Of a training that was stopped or failed there are none, and finished is False."""

    def __call__(self, event: dict[str, Any]) -> None:
        match event["event"]:
            case "training_start":
                self.on_start(Path(event["folder"]), event["settings"], event["step"])
            case "step":
                self.on_step(event["step"], numbers(event))
            case "epoch":
                self.on_epoch(event["epoch"], event["step"], numbers(event))
            case "training_end":
                self.on_end(event["metrics"], event["finished"])


class _TensorBoard(Tracker):
    """Event files in RUN/tensorboard; those of steps that come again are marked as outdated."""

    repeats = True

    def on_start(self, folder: Path, settings: dict[str, Any], step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        writer: Any = SummaryWriter
        self.step, self.writer = step, writer(str(folder / "tensorboard"), purge_step=step + 1 if step else None)

    def on_step(self, step: int, metrics: dict[str, float]) -> None:
        self._write("step", step, metrics)

    def on_epoch(self, epoch: int, step: int, metrics: dict[str, float]) -> None:
        self._write("epoch", step, metrics)

    def on_end(self, metrics: dict[str, float], finished: bool) -> None:
        self._write("test", self.step, metrics)
        self.writer.close()

    def _write(self, group: str, step: int, metrics: dict[str, float]) -> None:
        self.step = step
        for name, value in metrics.items():
            self.writer.add_scalar(f"{group}/{name}", value, step)
        self.writer.flush()


class _MLflow(Tracker):
    """A run in RUN/mlflow.db, or where MLFLOW_TRACKING_URI says; a training that is resumed continues its run."""

    repeats = False

    def on_start(self, folder: Path, settings: dict[str, Any], step: int) -> None:
        mlflow: Any = import_module("mlflow")
        self.entities: Any = import_module("mlflow.entities")
        self.step = step
        place = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(folder / 'mlflow.db').absolute()}"
        self.client = mlflow.MlflowClient(tracking_uri=place)
        experiment = self.client.get_experiment_by_name("nearkin")
        number = experiment.experiment_id if experiment else self.client.create_experiment("nearkin")
        tag = {"nearkin.id": _id_of(folder)}
        known = self.client.search_runs([number], f"tags.`nearkin.id` = '{tag['nearkin.id']}'")
        if known:
            self.run = known[0].info.run_id
            self.client.set_terminated(self.run, "RUNNING")
            return
        self.run = self.client.create_run(number, run_name=folder.name, tags=tag).info.run_id
        texts = {key: str(value)[:_TEXT] for key, value in settings.items()}
        self.client.log_batch(self.run, params=[self.entities.Param(key, text) for key, text in texts.items()])

    def on_step(self, step: int, metrics: dict[str, float]) -> None:
        self._write("step", step, metrics)

    def on_epoch(self, epoch: int, step: int, metrics: dict[str, float]) -> None:
        self._write("epoch", step, metrics)

    def on_end(self, metrics: dict[str, float], finished: bool) -> None:
        self._write("test", self.step, metrics)
        self.client.set_terminated(self.run, "FINISHED" if finished else "KILLED")

    def _write(self, group: str, step: int, metrics: dict[str, float]) -> None:
        self.step, now = step, int(1000 * time.time())
        names = {
            name: f"{group}/{name}".replace("@", "_at_").replace("=", "_") for name in metrics
        }  # others it refuses
        points = [self.entities.Metric(names[name], value, now, step) for name, value in metrics.items()]
        self.client.log_batch(self.run, points)


class _WandB(Tracker):
    """An offline run in RUN/wandb, which `wandb sync` uploads; another WANDB_MODE may be set."""

    repeats = False

    def on_start(self, folder: Path, settings: dict[str, Any], step: int) -> None:
        wandb: Any = import_module("wandb")
        self.run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "nearkin"),
            id=_id_of(folder),
            name=folder.name,
            dir=str(folder),
            config=settings,
            resume="allow",
            mode=None if "WANDB_MODE" in os.environ else "offline",
            settings=wandb.Settings(console="off", silent=True, disable_git=True, save_code=False),
        )

    def on_step(self, step: int, metrics: dict[str, float]) -> None:
        self.run.log({f"step/{name}": value for name, value in metrics.items()}, step=step)

    def on_epoch(self, epoch: int, step: int, metrics: dict[str, float]) -> None:
        self.run.log({f"epoch/{name}": value for name, value in metrics.items()}, step=step)

    def on_end(self, metrics: dict[str, float], finished: bool) -> None:
        for name, value in metrics.items():
            self.run.summary[f"test/{name}"] = value
        self.run.finish(exit_code=0 if finished else 1)


TRACKERS: dict[str, Any] = {"tensorboard": _TensorBoard, "mlflow": _MLflow, "wandb": _WandB}
_INSTALL = {"tensorboard": "'nearkin[track]'", "mlflow": "mlflow", "wandb": "wandb"}


def names_of(recipe: "Recipe") -> list[str]:
    """The trackers that a recipe asks for."""
    options = recipe.training
    return list(dict.fromkeys([*options.log, *(["tensorboard"] if options.tensorboard else [])]))


def check_installed(recipe: "Recipe") -> None:
    for name in names_of(recipe):
        if find_spec(name) is None:
            key = "training.log" if name in recipe.training.log else "training.tensorboard"
            raise ValueError(f"{key} needs {name}: pip install {_INSTALL[name]}")


@contextmanager
def tracked(
    trainer: "Trainer", callback: Callable[[dict[str, Any]], None]
) -> Iterator[Callable[[dict[str, Any]], None]]:
    """The callback, with the recipe's trackers before it in the first rank; begins and ends them.

    A run that was tested already is only tested again, which is not tracked.
    """
    names = names_of(trainer.recipe) if trainer.group.first and not (trainer.out / "results.json").is_file() else []
    active = {name: TRACKERS[name]() for name in names}
    sent = trainer.metrics_log.cut_lines
    metrics: dict[str, float] = {}

    def forward(event: dict[str, Any]) -> None:
        if event["event"] == "tested":
            metrics.update(_tested(event["results"]))
        known = (event["event"], event.get("step")) in sent
        for name, tracker in list(active.items()):
            if known and not tracker.repeats:
                continue
            try:
                tracker(event)
            except Exception as error:  # of another program's: no reason to end a training
                del active[name]
                text = f"{name} is not written from here on: {' '.join(str(error).split()) or type(error).__name__}"
                trainer.state.notes.append(text)
                callback({"event": "note", "text": text})
        callback(event)

    settings, step = _settings(trainer.recipe), trainer.state.step
    start = {"event": "training_start", "folder": str(trainer.out), "settings": settings, "step": step}
    for name, tracker in active.items():
        _begin(name, tracker, start)
    callback(start)
    finished = False
    try:
        yield forward
        finished = True
    finally:
        forward({"event": "training_end", "metrics": metrics, "finished": finished})


def _begin(name: str, tracker: Tracker, start: dict[str, Any]) -> None:
    try:
        tracker(start)
    except Exception as error:  # of another program's, whatever it raises
        raise ValueError(f"training.log: {name} cannot start: {' '.join(str(error).split())}") from error


def numbers(line: Mapping[str, Any], before: str = "") -> dict[str, float]:
    """The numbers in a log line, as {"loss": 0.5, "val/recall@1": 0.8}; step and epoch are not among them."""
    flat: dict[str, float] = {}
    for name, value in line.items():
        if isinstance(value, dict):
            flat |= numbers(value, f"{before}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool) and name not in ("step", "epoch"):
            flat[before + name] = float(value)
    return flat


def _tested(results: dict[str, Any]) -> dict[str, float]:
    figures = results["test"]["trained"]
    return {name: figure["value"] for name, figure in figures.items() if figure["value"] is not None}


def _settings(recipe: "Recipe") -> dict[str, Any]:
    sections = recipe.model_dump(exclude_none=True)
    return {f"{section}.{key}": value for section, keys in sections.items() for key, value in keys.items()}


def _id_of(folder: Path) -> str:
    """An id of the run, the same after a resume, and another for an equal run in another folder."""
    path = folder / ID_FILE
    if not path.is_file():
        files.write_json(path, {"id": uuid.uuid4().hex[:12]})
    return str(files.read_json(path)["id"])
