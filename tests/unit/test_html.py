"""The parts of HTML, and that no text becomes HTML by mistake."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distsession.display import html
from distsession.display.html import Cell, Html, element, escape, join, table

EVIL = "<b onclick=\"x('&')\">"


class Page(HTMLParser):
    """The elements of a page with their attributes, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_text_is_escaped_once_and_html_is_not() -> None:
    assert escape("a < b & c") == "a &lt; b &amp; c"
    assert escape(escape("a < b")) == "a &lt; b"
    assert join(("<", Html("<br>"), ">")) == "&lt;<br>&gt;"
    assert element("p", "<", element("b", "&"), title="<&>") == (
        '<p title="&lt;&amp;&gt;">&lt;<b>&amp;</b></p>'
    )


@given(st.text(max_size=20), st.text(min_size=1, max_size=20))
def test_whatever_is_put_in_is_read_back(text: str, value: str) -> None:
    text, value = (each.replace("\r", "").replace("\0", "") for each in (text, value))
    page = Page(element("div", text, title=value))
    assert page.text == text
    assert page.elements == [("div", {"title": value} if value else {})]


def test_attributes_have_their_names_and_empty_ones_are_left_out() -> None:
    page = element("div", class_="a", aria_label="b", style="", tabindex=0)
    assert page == '<div class="a" aria-label="b" tabindex="0"></div>'
    assert element("img", src="x") == '<img src="x">'


def test_a_table_has_a_head_rows_and_escaped_cells() -> None:
    page = Page(table(("name", EVIL), [("a", EVIL), ("b", element("i", "c"))]))
    tags = [tag for tag, _ in page.elements]
    assert tags == ["table", "thead", "tr", "th", "th", "tbody", *("tr", "td", "td") * 2, "i"]
    assert page.text == f"name{EVIL}a{EVIL}bc"
    assert all(
        attributes == ({"scope": "col"} if tag == "th" else {}) | {"style": html.LEFT}
        for tag, attributes in page.elements
        if tag in ("th", "td")
    )


def test_a_table_without_a_head_has_none() -> None:
    assert table((), []) == "<table><tbody></tbody></table>"


@pytest.mark.parametrize("own", ["", "color:red"])
def test_a_cell_has_its_tables_style_and_its_own(own: str) -> None:
    page = Page(
        table(("x", "y"), [(Cell("a", own), "b")], cell_style="margin:0", has_row_heads=True)
    )
    (first,) = [each for tag, each in page.elements if tag == "th" and each["scope"] == "row"]
    assert first["style"] == ("margin:0;color:red" if own else "margin:0")
    assert page.elements[-1] == ("td", {"style": "margin:0"})


def test_details_are_closed_unless_they_are_to_be_open() -> None:
    assert html.details("s", "b").startswith("<details><summary")
    assert html.details("s", "b", is_open=True).startswith('<details open="open">')
    assert Page(html.details(EVIL, EVIL)).text == EVIL * 2
