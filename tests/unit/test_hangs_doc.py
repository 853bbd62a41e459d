"""Every sentence of docs/hangs.md is shown by a test, which is named here.

Who edits the page edits this table: a sentence that is new needs a test that would fail if it were
not so, and one that has changed may need another. A sentence that promises nothing has a reason in
the place of tests; there are to be few of these, and none that a reader relies on.
"""

# ruff: noqa: E501  (a sentence is one line, as it is compared)

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.sentences import DOCS, code_blocks, nearest, sentences

TESTS = Path(__file__).parents[1]
PAGE = (DOCS / "hangs.md").read_text()

RECOVERY = "integration/test_recovery.py::"
MISMATCH = "integration/test_mismatch.py::"
PAGES = "integration/test_hangs_doc.py::"
OLD = "integration/test_old_sessions.py::"
DIAGNOSIS = "unit/test_diagnosis.py::"
RENDER = "unit/test_render.py::"

SLOW = f"{RECOVERY}test_a_slow_rank_is_never_cut_off_and_a_notice_says_who_it_is"
FAILING = f"{RECOVERY}test_a_failing_rank_frees_the_others"
DEATH = f"{RECOVERY}test_a_dead_rank_is_named_and_replaced"
FINISHED = f"{RECOVERY}test_a_wait_that_nobody_can_end_ends_by_itself"
EACH_OTHER = f"{RECOVERY}test_ranks_that_wait_for_each_other_are_freed"
STOPPED = f"{RECOVERY}test_stop_ends_a_wait_for_a_rank_that_never_comes"
STUCK = f"{RECOVERY}test_stop_ends_what_all_ranks_are_stuck_in"
REPLACED = f"{PAGES}test_a_dead_rank_is_replaced_and_the_others_stay"
UNKNOWN_GROUP = f"{PAGES}test_groups_that_a_replaced_rank_does_not_know_are_named"
CANNOT_BE_STOPPED = f"{PAGES}test_a_rank_that_cannot_be_stopped_is_named_and_replaced_alone"
SYNCHRONOUS = f"{MISMATCH}test_a_mismatch_raises_on_every_rank_and_changes_nothing"
ASYNCHRONOUS = f"{MISMATCH}test_an_asynchronous_mismatch_raises_on_every_rank"

SENTENCES: dict[str, tuple[str, ...] | str] = {
}

EXAMPLES: dict[str, tuple[str, ...]] = {
}
"""What the page shows in code blocks marked ``text``, by the first line of each."""

MOST_REASONS = 9
"""Sentences without a test. Rather write one than raise this."""


@cache
def tests_of(file: str) -> frozenset[str]:
    """The names of a file's tests, those of classes with the class before them."""
    tree = ast.parse((TESTS / file).read_text())
    found = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found |= {f"{node.name}::{n.name}" for n in node.body if isinstance(n, ast.FunctionDef)}
    return frozenset(found)


def unknown(sentence: str, table: list[str], page: list[str]) -> str:
    """What to do about a sentence of the page that the table does not have."""
    gone = [entry for entry in table if entry not in page]
    near = nearest(sentence, gone)
    text = f'docs/hangs.md says\n    "{sentence}"\nand no entry of this file does. '
    if near:
        return (
            f'{text}Is it what was\n    "{near}"\nbefore? Then look whether its tests still show '
            "it, and change the entry."
        )
    return f"{text}Name the tests that would fail if it were not so, or write one."


def outdated(entry: str, page: list[str]) -> str:
    """What to do about an entry whose sentence the page does not have."""
    near = nearest(entry, page)
    text = f'this file has an entry for\n    "{entry}"\nwhich docs/hangs.md does not say any more. '
    return f'{text}The nearest that it says is\n    "{near}"' if near else f"{text}Take it away."


def check(table: list[str], page: list[str]) -> None:
    problems = [unknown(sentence, table, page) for sentence in page if sentence not in table]
    problems += [outdated(entry, page) for entry in table if entry not in page]
    if problems:
        pytest.fail("\n\n".join(problems), pytrace=False)


def test_every_sentence_of_the_page_has_its_tests() -> None:
    check(list(SENTENCES), sentences(PAGE))


def test_every_example_of_the_page_has_its_tests() -> None:
    check(list(EXAMPLES), [block.splitlines()[0] for block in code_blocks(PAGE, "text")])


@pytest.mark.parametrize(
    "name",
    sorted({n for value in [*SENTENCES.values(), *EXAMPLES.values()] if not isinstance(value, str) for n in value}),
)  # fmt: skip
def test_a_test_that_is_named_is_there(name: str) -> None:
    file, _, test = name.partition("::")
    assert (TESTS / file).is_file(), f"there is no file tests/{file}"
    there = tests_of(file)
    near = nearest(test.replace("_", " "), [t.replace("_", " ") for t in there])
    assert test in there, f"tests/{file} has no {test}; its nearest is {near.replace(' ', '_')}"
    assert test.split("::")[-1].startswith("test_"), f"{name} is no test"


def test_no_sentence_is_without_tests_or_a_reason() -> None:
    without = [sentence for sentence, shown in SENTENCES.items() if not shown]
    assert not without, f"neither a test nor a reason: {without}"


def test_few_sentences_promise_nothing() -> None:
    reasons = {sentence: why for sentence, why in SENTENCES.items() if isinstance(why, str)}
    assert len(reasons) <= MOST_REASONS, f"more have only a reason than may: {reasons}"


def test_a_page_falls_into_its_sentences() -> None:
    page = """# A heading. Not said.

**A lead.** It says {py:class}`this <a.b.this>` and
[that](there.md#x). So `a. b` is one?

```text
Code. Not said.
```

- **First** of all.
  And more.
- Second

`term`
: What it is. What
  not.
<!-- gone -->
"""
    assert sentences(page) == [
        "A lead: It says this and that.",
        "So `a. b` is one?",
        "First of all.",
        "And more.",
        "Second",
        "`term`: What it is.",
        "What not.",
    ]
    assert code_blocks(page, "text") == ["Code. Not said."]


def test_whoever_edits_the_page_is_told_what_to_do() -> None:
    page = ["A rank waits for all others.", "A new one."]
    table = ["A rank waits for the others.", "Gone for good, whatever it was."]
    with pytest.raises(pytest.fail.Exception) as caught:
        check(table, page)
    told = str(caught.value)
    assert 'Is it what was\n    "A rank waits for the others."' in told
    assert 'The nearest that it says is\n    "A rank waits for all others."' in told
    assert '"A new one."\nand no entry of this file does. Name the tests' in told
    assert "any more. Take it away." in told
