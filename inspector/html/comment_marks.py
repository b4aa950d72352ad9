"""The sign of comments in a row of tokens: an empty link, whose words CSS draws, so that no copy holds them."""

from __future__ import annotations

from django.utils.html import escape

from inspector.html.text import visible_text


def comment_mark(names: list[str], url: str) -> str:
    """The HTML of a link to comments that begin at one token; ``names``: the author of each."""
    n = len(names)
    people = ", ".join(dict.fromkeys(visible_text(name) for name in names))
    label = escape(f"{n} comments, by {people}" if n > 1 else f"Comment by {people}")
    return f'<a class="gap said" href="{escape(url)}" data-gap="{n}" aria-label="{label}. Read it."></a>'
