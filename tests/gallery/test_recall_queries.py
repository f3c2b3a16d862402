"""Queries that measure an index scatter about a class as its items do."""

import numpy as np

from nearkin.gallery.schema import unit
from nearkin.gallery.stores.recall_queries import NEAR, like_new_items


def classes(number, each, dim, draw):
    centres = draw.normal(size=(number, dim))
    return unit(np.repeat(centres, each, 0) + 0.7 * draw.normal(size=(number * each, dim)))


def test_as_far_from_the_items_of_a_class_as_these_are_from_one_another():
    draw = np.random.default_rng(0)
    rows = classes(200, NEAR, 128, draw).reshape(200, NEAR, 128)
    queries = like_new_items(rows[:, 0], lambda row: rows[(rows[:, 0] == row).all(1)][0], draw)
    within = np.einsum("cid,cjd->cij", rows, rows)[:, ~np.eye(NEAR, dtype=bool)].mean()
    across = np.einsum("cid,cd->ci", rows, queries).mean()
    assert abs(across - within) < 0.05  # a query shares a ninth of the scatter with each row on average
    assert np.einsum("cid,cd->ci", rows, queries).max() < 0.95  # a row with a little noise is nearer


def test_too_few_neighbours_leave_the_row():
    draw = np.random.default_rng(0)
    rows = classes(5, 1, 8, draw)
    np.testing.assert_allclose(like_new_items(rows, lambda row: rows[:3], draw), rows, atol=1e-6)
