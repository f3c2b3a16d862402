"""CSV files: no cell is a formula to a spreadsheet, and every text comes back."""

import csv
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearkin.core.spreadsheet import csv_text, text_of_cell
from nearkin.data import left_out

TEXTS = st.text(st.sampled_from("'=+-@\t\r\n\uff1d\uff20\"a1. ,"), max_size=6)


@given(st.lists(st.tuples(TEXTS, TEXTS), min_size=1))
def test_every_text_comes_back_and_none_is_computed(rows):
    table = list(csv.reader(io.StringIO(csv_text([("a", "b"), *rows]), newline="")))
    assert [tuple(map(text_of_cell, row)) for row in table[1:]] == rows
    for cell in (cell for row in table for cell in row):
        assert not cell or cell[0] not in "=@\t\r\n\uff1d\uff20"
        assert not cell or cell[0] not in "+-" or float(cell) == float(cell)


def test_numbers_stay_as_they_are():
    assert csv_text([(-1, -0.5, "-3", "+4.25", "-3+1")]) == "-1,-0.5,-3,+4.25,'-3+1\n"


@pytest.mark.parametrize("name", ["=1.png", "-a/b.png", "'=x", "a\r=1.png", "@x", "plain"])
def test_a_list_that_nearkin_wrote_names_the_same_items(tmp_path, name):
    (tmp_path / "list.csv").write_bytes(csv_text([("path", "label"), (name, "x")]).encode())
    assert left_out.read(tmp_path / "list.csv") == [name]
