"""Training by several processes: the same curve, checkpoints for any number of ranks, and no rank left behind.

Ranks that must agree run in worlds of `worlds.py`; ranks that are killed, stopped or fail run under torchrun, as a user
starts them.
"""

import copy
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import tiny_vit
import worlds
from nearkin import dist, training
from nearkin.dist import collectives, parallel, sync_batchnorm
from nearkin.training import run_dir
from nearkin.training.checkpoint.checkpoints import Checkpoints
from nearkin.training.config.recipe import read
from nearkin.training.prepare import prepare
from nearkin.training.trainer import assemble

sys.path.insert(0, str(Path(__file__).parents[2] / "studies"))
from killing import ranks_of

from commands import noisy_vectors, photos

pytestmark = pytest.mark.slow

SMALL = ["training.epochs=2", "training.batches=25", "training.log_steps=1", "encoder.hidden=[16, 16]"]
SMALL += ["encoder.dim=8", "sampler.batch=21", "sampler.per_class=3", "training.workers=0", "evaluation.interval=false"]
SMALL += ["training.device=cpu"]
SHARDED = ["loss.name=arcface", "loss.shard=true"]
needs_cpu_fsdp = pytest.mark.skipif(not parallel.shards_on_cpu(), reason="FSDP on a CPU needs torch 2.7")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with an .npz of 20 classes of 8 noisy vectors."""
    home = tmp_path_factory.mktemp("torchrun")
    noisy_vectors(home / "vectors.npz", 20)
    return home


def recipe_of(home, *sets):
    small = [s for s in SMALL if "per_class" not in s or "sampler.name=hard-negatives" not in sets]
    return read(None, [f'data.source="{home}/vectors.npz"', *small, *sets])


def trained(rank, size, home, name, *sets):
    """Trains into home/name; a rank returns how many times it was told that a step was made."""
    step_ends = []
    training.train(
        recipe_of(Path(home), *sets), Path(home) / name, lambda e: step_ends.append(e["event"] == "step_end")
    )
    return sum(step_ends)


def stopped(rank, size, home, name, step, *sets):
    """The last rank alone is asked to stop after a step: all save and stop."""

    def callback(event):
        if event["event"] == "step_end" and event["step"] == step and rank == size - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        training.train(recipe_of(Path(home), *sets), Path(home) / name, callback)
    except training.Stopped as error:
        return str(error)
    except SystemExit as error:
        return error.code
    raise AssertionError("it did not stop")


def resumed(rank, size, out):
    training.resume(out)


def copied(rank, size, out, copy):
    """What a resumed run begins with, saved again by as many ranks as there are here."""
    with dist.join() as group:
        trainer = assemble(prepare(run_dir.recipe_of(Path(out))), Path(out), group)
        trainer.restore()
        trainer.checkpoints = Checkpoints(Path(copy), group=group)
        trainer.save()
        return [p.to_local().shape[0] if hasattr(p, "to_local") else len(p) for p in trainer.parameters if p.dim() > 1]


def curve(out):
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return np.array([line["loss"] for line in lines if line["event"] == "step"])


def weights(out):
    from safetensors.torch import load_file

    return torch.cat([value.flatten().float() for _, value in sorted(load_file(out / "model.safetensors").items())])


def all_tensors(checkpoints):
    """All tensors of the newest checkpoint that do not depend on how many ranks there were."""
    tensors, state, _ = Checkpoints(checkpoints).newest()
    assert state["step"] > 0
    return {name: value for name, value in tensors.items() if not name.startswith("chance.")}


def same(first, second):
    assert first.keys() == second.keys()
    for name, value in first.items():
        torch.testing.assert_close(value, second[name], rtol=0, atol=0, msg=name)


@pytest.fixture(scope="module")
def alone(place):
    trained(0, 1, place, "alone")
    return place / "alone"


# --- the same result


def test_fifty_steps_of_two_ranks_are_those_of_one(place, alone):
    """21 items are 10 and 11; the curve, the weights and every figure are those of one process."""
    assert worlds.run(2, trained, str(place), "two") == [50, 50]
    assert len(curve(alone)) == 50
    np.testing.assert_allclose(curve(place / "two"), curve(alone), rtol=0, atol=1e-6)
    torch.testing.assert_close(weights(place / "two"), weights(alone), rtol=0, atol=1e-6)
    results, expected = (json.loads((out / "results.json").read_text()) for out in (place / "two", alone))
    assert results["test"] == expected["test"] and results["val"] == expected["val"] and results["ranks"] == 2
    assert sorted(p.name for p in (place / "two").iterdir()) == sorted(p.name for p in alone.iterdir())


@pytest.mark.parametrize(
    "name, sets",
    [
        pytest.param("fsdp", ["training.strategy=fsdp"], marks=needs_cpu_fsdp),
        pytest.param(
            "fsdp, chunks, average, clipped",
            ["training.strategy=fsdp", "training.chunk=4", "training.ema=0.9"],
            marks=needs_cpu_fsdp,
        ),
        ("chunks, average, clipped", ["training.chunk=4", "training.ema=0.9"]),
        ("sharded classes", SHARDED),
        ("memory", ["loss.name=contrastive", "memory.size=64"]),
        ("hard classes", ["sampler.name=hard-classes", "loss.name=proxy-anchor", "training.epochs=3"]),
        (
            "negatives of the whole set",
            [
                "sampler.name=hard-negatives",
                "sampler.pairs=4",
                "loss.name=triplet",
                "training.epochs=5",
                "sampler.every=2",
            ],
        ),
        ("a rank without items", ["sampler.batch=2", "sampler.per_class=2", "loss.name=arcface", "optimizer.lr=1e-4"]),
    ],
)
def test_every_way_of_several_ranks_is_that_of_one(name, sets, place):
    ranks = 3 if "without" in name else 2
    sets = [*sets, "training.batches=10", *(["optimizer.clip=0.1"] if "clipped" in name else [])]
    plain = [text for text in sets if "strategy" not in text and "shard" not in text]
    trained(0, 1, place, f"{name} of one", *plain)
    worlds.run(ranks, trained, str(place), f"{name} of all", *sets)
    np.testing.assert_allclose(curve(place / f"{name} of all"), curve(place / f"{name} of one"), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(weights(place / f"{name} of all"), weights(place / f"{name} of one"), rtol=0, atol=1e-5)


def norms_agree(rank, size):
    """A synced batch norm of unequal parts, also an empty one, beside torch's of the whole batch, in float64.

    The objective has the gradient in it, so that the second derivative is compared as well.
    """

    def check(a, b):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)

    def differentiate(y, x, by):
        (gradient,) = torch.autograd.grad((y * by).sum(), x, create_graph=True)
        (gradient.square().sum() + (y * by).sum()).backward()
        return gradient

    with dist.ProcessGroup() as group:
        for shape, counts in ((9, 3, 2, 2), group.share_sizes(9)), ((size, 3), (0, *[1] * (size - 2), 2)):
            torch.manual_seed(1)
            x, by = torch.randn(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)
            plain = (nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d)(3).double()
            nn.init.normal_(plain.weight)
            synced = nn.Sequential(copy.deepcopy(plain))
            sync_batchnorm.sync(synced, torch.device("cpu"), group)
            synced = copy.deepcopy(synced)  # as an average of the weights is made
            local = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
            full, own = x.clone().requires_grad_(), x[local].clone().requires_grad_()
            expected, y = plain(full), synced(own)
            check(y, expected[local])
            check(differentiate(y, own, by[local]), differentiate(expected, full, by)[local])
            check(own.grad, full.grad[local])
            for name in ("weight", "bias"):
                check(collectives.total(getattr(synced[0], name).grad), getattr(plain, name).grad)
            check(synced[0].running_var, 0.9 + 0.1 * x.movedim(1, 0).flatten(1).var(1))
            plain.load_state_dict(synced[0].state_dict())  # the same names
            check(synced.eval()(x[:2]), plain.eval()(x[:2]))


@pytest.mark.parametrize("size", [2, 3])
def test_synced_norms_are_those_of_the_whole_batch(size):
    worlds.run(size, norms_agree)


def test_a_norm_that_computes_more_is_not_replaced():
    """Such as timm's BatchNormAct2d, which would lose its activation without a word."""

    class Activated(nn.BatchNorm2d):
        def forward(self, x):
            return super().forward(x).relu()

    sentence = (
        r"training\.sync_norms takes torch's own batch norms, got a Activated, which computes something else as well"
    )
    for device in ("cpu", "cuda"):
        with pytest.raises(ValueError, match=sentence):
            sync_batchnorm.sync(nn.Sequential(nn.Sequential(Activated(3))), torch.device(device), dist.ProcessGroup())


PICTURES = ["data.size=16", "data.stored=16", "encoder.name=small-cnn", "encoder.width=4"]
PICTURES += ["encoder.dim=8", "sampler.batch=12", "sampler.per_class=2", "training.epochs=1", "training.batches=6"]
PICTURES += ["training.log_steps=1", "training.workers=0", "evaluation.interval=false", "training.device=cpu"]


def seen(rank, size, home, name, *sets):
    training.train(read(None, [f'data.source="{home}/photos"', *PICTURES, *sets]), Path(home) / name)


def test_pictures_and_synced_norms_of_two_ranks(place):
    """Augmented alike and normalised together, pictures give the curve of one process; apart they do not."""
    rng = np.random.default_rng(0)
    for number in range(60):
        (place / "photos" / f"class{number % 10}").mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 200, (20, 20, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(place / "photos" / f"class{number % 10}" / f"{number}.png")
    seen(0, 1, place, "pictures of one", "data.cache=false")
    worlds.run(2, seen, str(place), "pictures of two", "data.cache=false", "training.sync_norms=true")
    expected = curve(place / "pictures of one")
    np.testing.assert_allclose(curve(place / "pictures of two"), expected, rtol=2e-5)
    worlds.run(2, seen, str(place), "apart", "data.cache=false")
    assert np.abs(curve(place / "apart") - expected).max() > 1e-3
    few = ["data.cache=false", "training.sync_norms=true", "sampler.batch=2", "training.batches=3"]
    seen(0, 1, place, "few of one", *few)
    worlds.run(3, seen, str(place), "few of three", *few)
    np.testing.assert_allclose(curve(place / "few of three"), curve(place / "few of one"), rtol=2e-5)
    notes = json.loads((place / "apart" / "results.json").read_text())["notes"]
    assert any("takes its statistics from the 6 items of each rank" in note for note in notes)


def skips(rank, size):
    """fp16: a gradient that is not finite on one rank keeps all of them from moving; the next step is made by all."""
    weight = nn.Parameter(torch.ones(3))
    with dist.ProcessGroup() as group:
        scaler = parallel.Scaler("cpu", group=group, init_scale=4.0)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    weights_after = []
    for gradient in (float("inf") if rank == 0 else 1.0, 1.0):
        scaler.scale((weight * gradient).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        weights_after.append(weight.detach()[0].item())
    return weights_after, scaler.get_scale()


def test_a_step_that_overflows_on_one_rank_is_skipped_by_all():
    assert worlds.run(2, skips) == [([1.0, 0.0], 2.0)] * 2


def elsewhere(rank, size, home):
    os.chdir(Path(home) / str(rank))
    training.train(read(None, ["data.source=vectors.npz", *SMALL]), "run")


def test_ranks_that_see_other_items_are_named(place):
    for rank in range(2):
        (place / str(rank)).mkdir()
        with np.load(place / "vectors.npz") as whole_set:
            np.savez(
                place / str(rank) / "vectors.npz", embeddings=whole_set["embeddings"] + rank, labels=whole_set["labels"]
            )
    with pytest.raises(worlds.RankFailed, match="all ranks must find the same items, rank 1 finds others than rank 0"):
        worlds.run(2, elsewhere, str(place))
    assert not (place / "0" / "run").exists()


def at_odds(rank, size):
    with dist.join() as group:
        group.on_rank0("asking" if rank else "answering", str)


def test_ranks_that_make_different_calls_do_not_wait_for_ever():
    with pytest.raises(worlds.RankFailed, match="ranks must make the same calls in the same order; rank"):
        worlds.run(2, at_odds)


# --- checkpoints for any number of ranks


STRATEGIES = {
    "ddp": [],
    "fsdp": ["training.strategy=fsdp", "training.ema=0.9"],
    "sharded": SHARDED,
    "both": [*SHARDED, "training.strategy=fsdp", "optimizer.name=sgd"],
}


@pytest.fixture(scope="module")
def saved(place):
    """Runs on 4 ranks, stopped at a signal to one of them."""

    def find(strategy):
        if "training.strategy=fsdp" in STRATEGIES[strategy] and not parallel.shards_on_cpu():
            pytest.skip("FSDP on a CPU needs torch 2.7")
        out = place / f"stopped {strategy}"
        if not out.exists():
            sentence, *codes = worlds.run(4, stopped, str(place), out.name, 7, *STRATEGIES[strategy])
            assert codes == [143] * 3 and "stopped and saved at step 8; go on with nearkin train --resume" in sentence
        return out

    return find


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_checkpoints_reshard(strategy, saved, place):
    """What 1, 2 and 3 ranks begin with is what 4 have saved, to the last bit; and the other way round."""
    out = saved(strategy)
    files = {path.name for path in (out / "checkpoints").iterdir()}
    assert ("step-00000008.json" if strategy != "ddp" else "step-00000008.safetensors") in files
    assert not any(name.startswith(".") for name in files)
    expected, rows = all_tensors(out / "checkpoints"), {}
    for size in (1, 2, 3):
        copy = place / f"{strategy} on {size}"
        spread = worlds.run(size, copied, str(out), str(copy)) if size > 1 else [copied(0, 1, out, copy)]
        same(all_tensors(copy), expected)
        rows[size] = np.array(spread)  # (ranks, weights): how many rows of each a rank holds
    assert (rows[3][:, :-1].sum(0) if strategy in ("fsdp", "both") else rows[3][0, :-1]).tolist() == rows[1][
        0, :-1
    ].tolist()
    classes = rows[3][:, -1].tolist()
    assert classes == (
        [4, 4, 4] if strategy in ("sharded", "both") else [rows[1][0, -1]] * 3 if strategy == "ddp" else classes
    )
    again = place / f"{strategy} again"
    again.mkdir()
    for name in ("recipe.toml", "data.json"):
        (again / name).write_bytes((out / name).read_bytes())
    os.rename(place / f"{strategy} on 1", again / "checkpoints")
    worlds.run(2, copied, str(again), str(place / f"{strategy} of 1 on 2"))
    same(all_tensors(place / f"{strategy} of 1 on 2"), expected)


def test_a_run_goes_on_with_fewer_ranks(saved, alone, place):
    """Begun by 4 ranks, to the end by 3: the curve and the weights of one process."""
    out = saved("ddp")
    worlds.run(3, resumed, str(out))
    np.testing.assert_allclose(curve(out), curve(alone), rtol=0, atol=1e-6)
    torch.testing.assert_close(weights(out), weights(alone), rtol=0, atol=1e-6)


@pytest.mark.parametrize("damage", ["a part", "the manifest", "no manifest"])
def test_a_checkpoint_of_several_files_is_whole_or_not_there(damage, saved, place):
    import shutil

    out = saved("both")
    copy = place / damage
    shutil.copytree(out / "checkpoints", copy)
    hurt = copy / "step-00000008.json" if "manifest" in damage else sorted(copy.glob("part-step-00000008*2-of-4*"))[0]
    content = bytearray(hurt.read_bytes())
    content[-3] ^= 1
    hurt.unlink() if damage == "no manifest" else hurt.write_bytes(content)
    _, state, notes = Checkpoints(copy).newest()
    assert state["step"] == 0
    assert damage == "no manifest" or (hurt.name in notes[0] and "the previous one is used" in notes[0])


# --- faults, as a user meets them


LONG = ["training.epochs=3", "training.batches=20", "training.save_minutes=0.001", "training.patience=99"]
FAULTY = """
import os
from nearkin.training.trainer import Trainer
original_step = Trainer.optimizer_step
def faulty_step(self, measure):
    if self.state.step == 5 and os.environ["RANK"] == "1":
        raise ValueError("there is a fire")
    return original_step(self, measure)
Trainer.optimizer_step = faulty_step
from nearkin.cli import main
main()
"""


class Launched:
    """`torchrun ... nearkin train` on two ranks, in a process group of its own."""

    def __init__(self, home, out, *options, script=("-m", "nearkin"), sets=LONG, silent="8"):
        self.out, self.errors = home / out, home / f"{out}.txt"
        sets = [part for text in [*SMALL, *sets] for part in ("--set", text)]
        arguments = [*options, "--nproc-per-node", "2", *script, "train", str(home / "vectors.npz")]
        arguments += ["--out", str(self.out), *sets]
        env = {**os.environ, "NEARKIN_RANK_TIMEOUT": silent, "OMP_NUM_THREADS": "1"}
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *arguments],
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env=env,
                start_new_session=True,
            )

    def ranks(self):
        """The processes of the ranks."""
        return ranks_of(self.process.pid)

    def at(self, steps, seconds=120):
        """Waits until so many steps are in the log."""
        end, log = time.monotonic() + seconds, self.out / "metrics.jsonl"
        while not log.exists() or log.read_text().count('"step"') < 2 * steps:
            assert self.process.poll() is None and time.monotonic() < end, self.errors.read_text()
            time.sleep(0.02)
        return self

    def ended(self, seconds=60):
        """The exit code and what was said, without torchrun's own words."""
        try:
            self.process.wait(seconds)
        finally:
            for process in [*self.ranks().values(), self.process.pid]:
                try:
                    os.kill(process, signal.SIGKILL)
                except ProcessLookupError:
                    continue
                self.process.wait()
        lines = self.errors.read_text().splitlines()
        return self.process.returncode, [line for line in lines if line.startswith(("rank ", "stopped"))]


needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds ranks in /proc")


@needs_proc
def test_a_killed_rank_is_named_and_training_goes_on_after_a_restart(place):
    worlds.run(2, trained, str(place), "never stopped", *LONG)
    run = Launched(place, "killed", "--max-restarts", "1").at(25)
    first = run.ranks()
    os.kill(first[1], signal.SIGKILL)
    code, lines = run.ended(150)
    assert code == 0, run.errors.read_text()
    named = f"rank 0: rank 1 (process {first[1]} on "
    assert sum(line.startswith(named) and "was killed or died" in line for line in lines) == 1, lines
    assert any("resuming in epoch" in line for line in lines)
    assert torch.equal(weights(place / "killed"), weights(place / "never stopped"))
    np.testing.assert_array_equal(curve(place / "killed"), curve(place / "never stopped"))


@needs_proc
def test_a_stopped_rank_ends_all_and_is_named(place):
    run = Launched(place, "hanging", sets=[*LONG, "training.epochs=50"], silent="4").at(25)
    ranks = run.ranks()
    os.kill(ranks[0], signal.SIGSTOP)
    began = time.monotonic()
    code, lines = run.ended()
    assert code != 0 and time.monotonic() - began < 60
    assert lines[-1].startswith(f"rank 1: rank 0 (process {ranks[0]} on ") and "no sign of life for" in lines[-1]
    assert not any(Path(f"/proc/{process}").exists() for process in ranks.values())
    assert Checkpoints(run.out / "checkpoints").newest()[1]["step"] > 0


@needs_proc
def test_an_error_of_one_rank_is_one_sentence(place):
    (place / "faulty.py").write_text(FAULTY)
    run = Launched(place, "failing", script=(str(place / "faulty.py"),))
    code, lines = run.ended(120)
    assert code != 0
    assert [line for line in lines if "fire" in line] == ["rank 1: there is a fire"], run.errors.read_text()
    assert Checkpoints(run.out / "checkpoints").newest()[1]["step"] <= 5


@needs_proc
def test_ctrl_c_saves_and_ends_all(place):
    run = Launched(place, "interrupted", sets=[*LONG, "training.epochs=50"]).at(5)
    ranks = run.ranks()
    os.kill(run.process.pid, signal.SIGINT)
    code, lines = run.ended()
    assert code != 0 and not any(Path(f"/proc/{process}").exists() for process in ranks.values())
    assert sum("stopped and saved at step" in line for line in lines) == 1, lines
    saved = Checkpoints(run.out / "checkpoints").newest()[1]["step"]
    assert f"stopped and saved at step {saved};" in lines[-1]


def test_fsdp_on_a_cpu_is_refused_where_torch_cannot(monkeypatch):
    monkeypatch.setattr(parallel, "shards_on_cpu", lambda: False)
    with pytest.raises(ValueError, match=r"training\.strategy=fsdp needs torch 2\.7 or newer on a CPU, got"):
        parallel.shard(nn.Linear(2, 2), torch.device("cpu"), dist.ProcessGroup())


# --- fine-tuning


FINETUNED = ["data.size=32", "data.stored=32", "data.cache=false", "encoder.dim=8", "sampler.batch=9"]
FINETUNED += ["sampler.per_class=3", "training.epochs=2", "training.batches=4", "training.log_steps=1"]
FINETUNED += [
    "finetune.interpolate=false",
    "training.workers=0",
    "evaluation.interval=false",
    "training.device=cpu",
    "training.on_collapse=warn",
]


def finetuned(rank, size, home, name, *sets, stop=None):
    def callback(event):
        if event["event"] == "step_end" and event["step"] == stop and rank == size - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    sources = [f"data.source={home}/pictures", f"encoder.name=hf:{home}/vit"]
    training.train(read(None, [*sources, *FINETUNED, *sets]), Path(home) / name, callback)


def finetuning_stopped(rank, size, home, name, stop, *sets):
    try:
        finetuned(rank, size, home, name, *sets, stop=stop)
    except (training.Stopped, SystemExit):
        return True
    raise AssertionError("it did not stop")


@pytest.fixture(scope="module")
def pretrained(place):
    tiny_vit.save(place / "vit")
    photos(place / "pictures")
    return place


@pytest.mark.parametrize(
    "name, sets",
    [
        ("lora", ["finetune.train=lora", "training.ema=0.9"]),
        ("head", ["finetune.train=head"]),
        ("head first, lora", ["finetune.train=lora", "schedule.frozen_epochs=1", "finetune.layer_decay=0.75"]),
        ("head first, all", ["finetune.train=all", "schedule.frozen_epochs=1", "training.chunk=2"]),
        pytest.param("fsdp, lora", ["finetune.train=lora", "training.strategy=fsdp"], marks=needs_cpu_fsdp),
        pytest.param("fsdp, head", ["finetune.train=head", "training.strategy=fsdp"], marks=needs_cpu_fsdp),
        pytest.param(
            "fsdp, rates",
            ["finetune.train=all", "finetune.layer_decay=0.75", "training.strategy=fsdp", "training.ema=0.9"],
            marks=needs_cpu_fsdp,
        ),
    ],
)
def test_fine_tuning_of_two_ranks_is_that_of_one(name, sets, pretrained):
    """9 items are 4 and 5; the same curve, and the same plain encoder."""
    finetuned(0, 1, pretrained, f"{name} of one", *[text for text in sets if "strategy" not in text])
    worlds.run(2, finetuned, str(pretrained), f"{name} of two", *sets, timeout=240)
    one, two = pretrained / f"{name} of one", pretrained / f"{name} of two"
    assert len(curve(one)) == 8
    np.testing.assert_allclose(curve(two), curve(one), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(weights(two), weights(one), rtol=0, atol=1e-4)
    names = [json.loads((out / "encoder.json").read_text())["settings"] for out in (one, two)]
    assert names[0] == names[1]


@pytest.mark.parametrize(
    "name, sets, stop",
    [
        pytest.param("sharded lora", ["finetune.train=lora", "training.strategy=fsdp"], 3, marks=needs_cpu_fsdp),
        ("the change", ["finetune.train=lora", "schedule.frozen_epochs=1"], 4),
    ],
)
def test_fine_tuning_goes_on_with_another_number_of_ranks(name, sets, stop, pretrained):
    finetuned(0, 1, pretrained, f"{name} at once", *[text for text in sets if "strategy" not in text])
    assert all(worlds.run(2, finetuning_stopped, str(pretrained), f"{name} stopped", stop, *sets, timeout=240))
    training.resume(pretrained / f"{name} stopped")
    torch.testing.assert_close(
        weights(pretrained / f"{name} stopped"), weights(pretrained / f"{name} at once"), rtol=0, atol=1e-4
    )
