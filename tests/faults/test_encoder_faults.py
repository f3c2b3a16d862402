"""A description of an encoder that is not that of the weights beside it costs no memory before it is refused."""

import json
import threading
import tracemalloc

import pytest
import torch
from torch import nn

from nearkin import models
from nearkin.models import factory

pytestmark = pytest.mark.slow

resource = pytest.importorskip("resource")
MLP = {"name": "mlp", "features": 12, "hidden": [16], "dim": 8}
HUGE = 10**9


def describe(folder, settings):
    path = folder / "encoder.json"
    description = json.loads(path.read_text())
    path.write_text(json.dumps(description | {"settings": description["settings"] | settings}))


def touched():
    """The most bytes that this process has had in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.parametrize(
    "made, settings, sentence",
    [
        (MLP, {"dim": HUGE}, r"dim must be at most 1,048,576, got 1,000,000,000$"),
        (MLP, {"dim": 2**20}, r"head.projection.weight is \(8, 16\), \(1048576, 16\) expected"),
        (MLP, {"features": HUGE}, r"mean is \(12,\), \(1000000000,\) expected"),
        (MLP, {"hidden": [HUGE]}, r"is \(16, 12\), \(1000000000, 12\) expected|is \(16,\), \(1000000000,\) expected"),
        (MLP, {"hidden": [HUGE, HUGE]}, "names differ|describes no encoder"),
        (
            MLP,
            {"hidden": [1] * 10_000},
            "describes no encoder that can be built: it has more than 1160 tensors, 8 are",
        ),
        (MLP, {"dim": 10**30}, "describes no encoder that can be built"),
        (MLP, {"layer_norm": True, "dim": 0, "hidden": [10**12]}, "names differ"),
        ({"name": "small-cnn", "size": 16, "width": 2}, {"width": 10**6}, "does not fit its description"),
        ({"name": "small-cnn", "size": 16, "width": 2}, {"channels": HUGE}, "does not fit its description"),
        ({"name": "small-cnn", "size": 16, "width": 2}, {"grid": 10**5}, "does not fit its description"),
        ({"name": "efficientnet-lite0", "pretrained": False}, {"dim": 2**20}, r"\(1048576, 1280\) expected"),
        ({"name": "efficientnet-lite0", "pretrained": False}, {"size": 10**6}, "size must be <= 4096, got 1000000"),
    ],
)
def test_a_description_of_something_huge(made, settings, sentence, tmp_path, monkeypatch):
    models.save(models.build(**made), tmp_path)
    models.load(tmp_path)
    describe(tmp_path, settings)
    monkeypatch.setattr("nearkin.models.io.build", lambda **_: pytest.fail("memory is taken"))
    before = touched()
    with pytest.raises(ValueError, match=sentence) as caught:
        models.load(tmp_path)
    assert "\n" not in str(caught.value)
    assert touched() - before < 2**27


def test_shapes_are_those_of_what_is_built():
    for settings in (MLP, {"name": "small-cnn"}, {"name": "efficientnet-lite0", "dim": None}):
        state = models.build(**settings, pretrained=False).state_dict()
        assert factory.shapes(settings, len(state)) == {name: tensor.shape for name, tensor in state.items()}


def test_counting_tensors_is_this_threads_own_business():
    count = factory._TensorLimit(0)
    failed = []

    def other():
        try:
            nn.Linear(2, 2)
        except ValueError as error:
            failed.append(error)

    with count:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        with pytest.raises(ValueError, match="more than 0 tensors"):
            nn.Linear(2, 2)
    assert not failed and nn.Linear(2, 2)(torch.ones(1, 2)).shape == (1, 2)


def test_descriptions_without_end(tmp_path):
    models.save(models.build(**MLP), tmp_path)
    path = tmp_path / "encoder.json"
    path.write_text('{"settings": ' * 100_000)
    with pytest.raises(ValueError, match="is corrupt, not JSON"):
        models.load(tmp_path)
    with path.open("wb") as file:
        file.truncate(2**32)  # a hole, which takes no room
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="it is larger than 16 MiB"):
            models.load(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 2**26
    finally:
        tracemalloc.stop()
