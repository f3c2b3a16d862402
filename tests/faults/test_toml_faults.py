"""TOML that would cost its reader memory or recursion is refused before it is read."""

import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearkin.core import toml
from nearkin.training.config.recipe import read

pytestmark = pytest.mark.slow

DEEP = {
    "brackets": "[loss]\nx = " + "[" * 5000 + "]" * 5000,
    "inline tables": "[loss]\nx = " + "{a=" * 3000 + "1" + "}" * 3000,
    "mixed": "[loss]\nx = " + "[{a=" * 3000,
    "after strings": '[loss]\ny = "a\\"]" # [[\nz = """b"""""\nx = ["""b"""", ' + "[" * 3000 + ' "',
    "after literals": "[loss]\ny = 'a'\nz = '''b'''''\nx = " + "[" * 3000,
    "a dotted key": "a." * 8000 + "a = 1\n",
    "in a section": "[loss]\n" + "b." * 3000 + "c = 1\n",
    "quoted": "[loss]\n" + "\"b\" . 'b'." * 2000 + "c = 1\n",
    "a header": "[" + "a." * 8000 + "a]\n",
    "in an inline table": "[loss]\nx = {" + "a." * 3000 + "a = 1}\n",
}


@pytest.mark.parametrize("case", DEEP)
def test_deep_toml_is_refused_before_it_costs_memory(case, tmp_path):
    file = tmp_path / "recipe.toml"
    file.write_text(DEEP[case])
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"recipe.toml: not a readable recipe \(more than 16 .* in line \d\)"):
            read(file)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_a_long_file_is_refused_before_it_is_read(tmp_path):
    file = tmp_path / "recipe.toml"
    file.write_text("# a long story\n" * 20_000)
    with pytest.raises(ValueError, match=r"not a readable recipe \(larger than 256 KiB\)"):
        read(file)


@pytest.mark.parametrize("text", ['"' * 100_000, '"""\\' * 60_000, "'''a''" * 40_000, "'\"" * 100_000, '"\\' * 100_000])
def test_strings_without_an_end_take_no_time(text, tmp_path):
    """A look at each character, not one at all others from each."""
    file = tmp_path / "recipe.toml"
    file.write_text(f"x = {text}")
    with pytest.raises(ValueError, match="not valid TOML"):
        read(file)


def test_a_value_on_the_command_line():
    with pytest.raises(ValueError, match=r"--set loss\.x=…: the value has more than 16 brackets within brackets"):
        read(None, ["loss.x=" + "[" * 5000])
    far = "../" * 40 + "photos.v1.0"
    assert read(None, [f"data.source={far}"]).data.source == far
    assert read(None, [f'data.source="{"[" * 40}"']).data.source == "[" * 40


def test_a_number_without_end_is_one_sentence(tmp_path):
    (tmp_path / "recipe.toml").write_text("[training]\nepochs = " + "9" * 5000)
    with pytest.raises(ValueError, match=r"recipe.toml: not valid TOML \(Exceeds the limit|epochs must be"):
        read(tmp_path / "recipe.toml")


VALUES = st.recursive(
    st.integers(-9, 9)
    | st.booleans()
    | st.text(max_size=8)
    | st.sampled_from(["[[[", "{{", "a.b.c", '"""', "'''", "#"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)


@settings(deadline=None, max_examples=50)
@given(table=st.dictionaries(st.text(max_size=5), VALUES, max_size=4))
def test_honest_toml_is_read(table):
    assert toml.read(toml.text(table)) == table
