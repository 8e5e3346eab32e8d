"""Tables of HTML for values that a notebook shows."""

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

_CELL = "padding:2px 8px;text-align:left;vertical-align:top"


def table(title: str, rows: Iterable[Sequence[Any]], *, head: Sequence[Any] = ()) -> str:
    """A table with a caption, every text escaped.

    Args:
      title: the caption.
      rows: cells of each row.
      head: cells of the header row; without one the first cell of each row is its header.
    """

    def row(cells: Sequence[Any], header: bool) -> str:
        texts = [escape(str(cell)).replace("\n", "<br>") for cell in cells]
        tags = ["th" if header or (not head and place == 0) else "td" for place in range(len(texts))]
        return "<tr>" + "".join(f'<{tag} style="{_CELL}">{text}</{tag}>' for tag, text in zip(tags, texts, strict=True)) + "</tr>"

    caption = f'<caption style="text-align:left;font-weight:bold;white-space:nowrap">{escape(title)}</caption>'
    body = ([row(head, True)] if head else []) + [row(cells, False) for cells in rows]
    return f'<table style="margin:4px 0 12px">{caption}{"".join(body)}</table>'
