"""Names every cell of the site's tables by its column, so that style.css can stack them on a phone.

mkdocs.yml runs this as a hook on each page.
"""

import re
from typing import Any


def named(table: str) -> str:
    """A table in which each cell has the name of its column as `data-name`."""
    names = [re.sub(r"<[^>]+>|\"", "", name) for name in re.findall(r"<th[^>]*>(.*?)</th>", table)]

    def name_cells(row: re.Match[str]) -> str:
        columns = iter(names)
        return re.sub("<td", lambda _: f'<td data-name="{next(columns, "")}"', row[0])

    return re.sub(r"<tr>.*?</tr>", name_cells, table, flags=re.S)


def on_page_content(html: str, **others: Any) -> str:
    """Names the cells of a page's tables; MkDocs calls this with each page's HTML."""
    return re.sub(r"<table>.*?</table>", lambda table: named(table[0]), html, flags=re.S)
