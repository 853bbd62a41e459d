"""Which cells go to the ranks by themselves."""

from __future__ import annotations

import pytest

from distsession.notebook.autopx import rewrite


@pytest.mark.parametrize(
    "cell", ["x = 1\n", "%time f()\n", "%debug f(3)\n", "!ls\n", "x?\n", "# why\nx\n"]
)
def test_a_plain_cell_goes_to_the_ranks_only_while_it_is_on(cell: str) -> None:
    assert rewrite(cell, True) == f"%%distributed --auto\n{cell}"
    assert rewrite(cell, False) == cell


@pytest.mark.parametrize(
    "cell",
    [
        "",
        "\n \n",
        "# only a comment\n",
        "%%time\nx\n",
        "%%distributed 0\nx\n",
        "%session auto off\n",
        "x = 1\n%session\n",
        "y = %distributed rank\n",
        "%unload_ext distsession\n",
        "%px rank\n",
        "%debug\n",
        "%pdb on\n",
        "%tb Plain\n",
    ],
)
def test_other_cells_stay_as_they_are(cell: str) -> None:
    assert rewrite(cell, True) == cell


@pytest.mark.parametrize("is_on", [True, False])
def test_local_keeps_a_cell_here_and_its_line_numbers(is_on: bool) -> None:
    assert rewrite("%%local\nx = 1\n", is_on) == "# %%local\nx = 1\n"
    assert rewrite("%%local\n%%time\nx\n", is_on) == "%%time\nx\n"
    assert rewrite("%%local", is_on) == "# %%local\n"
    assert rewrite("%%localities\nx\n", is_on) == "%%localities\nx\n"


@pytest.mark.parametrize("is_on", [True, False])
def test_a_cell_magic_that_only_asks_for_help_gets_a_body(is_on: bool) -> None:
    assert rewrite("%%distributed --help", is_on) == "%%distributed --help\n#\n"
    assert rewrite("%%distributed 0 -h \n\n", is_on) == "%%distributed 0 -h\n#\n"
    assert rewrite("%%distributed --help\nx\n", is_on) == "%%distributed --help\nx\n"
