"""What ranks show beside text, side by side: figures, tables and other HTML.

Pure functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from distsession.display import html
from distsession.display.html import Html, element
from distsession.display.render import Bundle, fold_bundles, note_of
from distsession.ranks import ranks_text

__all__ = ["IMAGES", "edge", "figures_html"]

IMAGES = ("image/png", "image/jpeg", "image/gif")
_ROW = "display:flex;flex-wrap:wrap;gap:1em;align-items:flex-start"


def edge(ranks: Sequence[int]) -> str:
    """The border that tells ranks apart, by colour."""
    return f"3px solid {html.RANK_COLORS[ranks[0] % len(html.RANK_COLORS)]}"


def figures_html(
    shown: Mapping[int, Bundle],
    text_html: Callable[[str], Html] = html.escape,
    *,
    notes: Mapping[int, str] | None = None,
) -> Html:
    """What each rank shows, ranks that show the same together.

    Args:
        shown: By rank, as MIME bundles of text, HTML and images.
        text_html: Makes HTML of plain text.
        notes: What is said of ranks that show the same.
    """
    folded = fold_bundles(shown)
    width = "48%" if len(folded) > 1 else "100%"  # two fit beside each other on any page
    said = notes or {}
    figures = [
        _figure_html(ranks, bundle, width, text_html, said.get(ranks[0], note_of(bundle)))
        for ranks, bundle in folded
    ]
    return element("div", *figures, style=_ROW) if figures else Html()


def _figure_html(
    ranks: tuple[int, ...],
    bundle: Bundle,
    width: str,
    text_html: Callable[[str], Html],
    note: str,
) -> Html:
    name = ranks_text(ranks)
    style = f"margin:0;padding-top:.2em;max-width:{width};border-top:{edge(ranks)}"
    caption = html.label(f"{name} ({note})" if note else name, tag="figcaption")
    content = _content_html(bundle, name, text_html)
    return element("figure", caption, content, aria_label=name, style=style)


def _content_html(bundle: Bundle, name: str, text_html: Callable[[str], Html]) -> Html:
    data, metadata = bundle
    if "text/html" in data:
        return element("div", Html(data["text/html"]), style="overflow-x:auto")
    if "image/svg+xml" in data:
        return element("div", Html(data["image/svg+xml"]))
    for kind in IMAGES:
        if kind in data:
            given = metadata.get(kind)
            size = given if isinstance(given, Mapping) else {}
            source = str(data[kind]).replace("\n", "")
            return element(
                "img",
                src=f"data:{kind};base64,{source}",
                alt=f"{name}: {data.get('text/plain', '')}",
                width=str(size.get("width", "")),
                height=str(size.get("height", "")),
                style="max-width:100%",
            )
    return element("pre", text_html(str(data["text/plain"])), style=html.PRE)
