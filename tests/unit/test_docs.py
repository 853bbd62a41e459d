"""Each code block of the documentation is run by a test, or says why it is not."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

from tests.pages import ELSEWHERE, PAGES, ROOT, SHOWN, blocks, is_as_shown, steps

RUN = {"python", "shell", SHOWN}
HANGS = "hangs.md"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_block_is_run_or_says_why_not(page: Path) -> None:
    if page.name in ELSEWHERE:
        assert (ROOT / ELSEWHERE[page.name]).is_file()
        return
    steps(page.read_text())  # no text is shown that nothing has put out
    for block in blocks(page.read_text()):
        is_directive = block.language.startswith("{")
        assert is_directive or block.language in RUN, f"{page.name}, line {block.line}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_test_that_is_said_to_run_a_block_is_there(page: Path) -> None:
    reasons = [block.not_run for block in blocks(page.read_text())]
    named = re.findall(r"tests/[\w/]+\.py", " ".join(reasons))

    assert [path for path in named if not (ROOT / path).is_file()] == []


def test_no_comment_is_misspelt() -> None:
    for page in PAGES:
        comments = re.findall(r"^<!-- *([^:>]*:)", page.read_text(), re.MULTILINE)
        assert set(comments) <= {"not run:", "run:", "file:", "typed:"}, page.name


def test_what_hangs_md_shows_is_compared() -> None:
    """Each of its examples is asked for by words that only it has."""
    shown = [block.text for block in blocks((ROOT / "docs" / HANGS).read_text())]
    tree = ast.parse((ROOT / ELSEWHERE[HANGS]).read_text())
    asked = [
        [word.value for word in call.args if isinstance(word, ast.Constant)]
        for call in ast.walk(tree)
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.func.id == "on_the_page"
    ]

    for text in shown[1:]:  # the first is the cell that hangs
        if "session.restart([2], restore=" not in text:  # a call that the tests make
            assert any(all(word in text for word in words) for words in asked if words), text


def test_modules_that_pages_name_are_there() -> None:
    [drawing] = [b.text for b in blocks((ROOT / "docs/concepts.md").read_text()) if b.not_run]
    named = {f"{module}.py" for module in re.findall(r"\bnotebook/\w+", drawing)}
    for page in PAGES:
        named |= set(re.findall(r"`([\w/.]+\.py)`", page.read_text()))

    missing = {path for path in named if "/" in path and not _is_there(path)}
    assert missing == set()


def _is_there(path: str) -> bool:
    return any((ROOT / folder / path).is_file() for folder in ("", "distsession"))


def test_pictures_that_pages_show_are_there_and_small() -> None:
    for page in PAGES:
        for path in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page.read_text()):
            if not path.startswith("https:"):
                assert 0 < (page.parent / path).stat().st_size < 1_500_000, f"{page.name}: {path}"


def test_the_layers_are_those_that_are_checked() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    [layers] = [c["layers"] for c in contracts["contracts"] if c["type"] == "layers"]
    [told] = [b for b in blocks((ROOT / "CONTRIBUTING.md").read_text()) if b.language == SHOWN]

    assert told.text.splitlines() == layers[1:]  # without __main__


# --- what the comments of a page mean -------------------------------------------------------------


def test_comments_say_what_is_done_with_a_block() -> None:
    page = """
<!-- run:
x = 1

print(x)
-->
```text
1
```

- in a list

  <!-- not run: needs
       two GPUs -->
  ```python
  y
  ```

<!-- file: a.py -->
```python
z
```

<!-- typed: n | c -->
```python
w
```
"""
    hidden, shown, marked, file, typed = blocks(page)

    assert (hidden.language, hidden.text) == ("python", "x = 1\n\nprint(x)")
    assert (shown.language, shown.text) == ("text", "1")
    assert (marked.text, marked.not_run) == ("y", "needs two GPUs")
    assert (file.file, file.not_run) == ("a.py", "")
    assert typed.typed == ("n", "c")
    assert [step.shown for step in steps(page)] == [shown, None, None, None]


def test_a_text_that_nothing_has_put_out_is_an_error() -> None:
    with pytest.raises(ValueError, match="line 1: nothing that is run"):
        steps("```text\n1\n```\n")


@pytest.mark.parametrize(
    ("shown", "came"),
    [
        ("took 1.4 s, 3 MiB", "took 12 ms, 1,024 kB"),
        ("on rank 1 (host1, cpu) at In[5] line 3", "on rank 1 (vm, cpu) at In[12] line 3"),
        ("first\n...\nlast", "first\nlast"),
        ("first\n...\nlast", "first\nsecond\nthird\nlast"),
        ("a  b\n\n\nc", "a b\nc"),
        ("pid 12 in #3", "pid 34567 in #41"),
    ],
)
def test_what_varies_is_not_compared(shown: str, came: str) -> None:
    assert is_as_shown(shown, came)


@pytest.mark.parametrize(
    ("shown", "came"),
    [
        ("6.0", "5.0"),
        ("rank 1", "rank 2"),
        ("line 3", "line 4"),
        ("[rank 0] 6.0", "rank 0  6.0"),
        ("first\n...\nlast", "first\nsecond"),
        ("first", "first\nsecond"),
        ("first\nsecond", "first"),
    ],
)
def test_what_does_not_vary_is_compared(shown: str, came: str) -> None:
    assert not is_as_shown(shown, came)
