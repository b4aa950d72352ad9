"""A trajectory in a notebook: the drawing of the saved file, by its painter and its style sheets, without a server."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader

from rollout_inspector.diagnose.checks import Outcome, check_sentence, totals
from rollout_inspector.diagnose.finding import Finding, Severity, cost_sentence
from rollout_inspector.diagnose.kinds import title_of
from rollout_inspector.formats.writers.exports import rows_of
from rollout_inspector.streams.align import place_in_row
from rollout_inspector.streams.trajectory import Origin, Row, Tokens, Trajectory
from rollout_inspector.text.html.text import visible_text
from rollout_inspector.text.html.tokens import Html, Marks, painter_of
from rollout_inspector.text.tokenizers import ByteTable

MAX_TOKENS = 100_000
STYLES = ("base", "tokens", "trajectory", "offline")
_ROOT = Path(__file__).parents[2]
_TEMPLATES = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
_TEMPLATES.filters["visible"] = lambda value: visible_text(str(value))


@cache
def styles() -> str:
    """The style sheets of the reader as one text. They are ours and hold no ``<``."""
    shipped = _ROOT / "inspector" / "shipped" / "static" / "css"
    folder = shipped if shipped.is_dir() else _ROOT / "static" / "css"
    text = "\n".join((folder / f"{name}.css").read_text(encoding="utf-8") for name in STYLES)
    if "<" in text:
        raise ValueError("A style sheet holds a <, which could end the style element of a file.")
    return text


def framed(page: str) -> str:
    """A page in a frame of its own: it runs no script, and its style touches nothing around it."""
    return f'<iframe sandbox srcdoc="{escape(page)}" style="width:100%;height:32rem;border:1px solid #888"></iframe>'


def drawn_list(name: str, lines: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """Trajectories as a table, without the columns that tell nothing of any of them."""
    filled = [column for column in columns if any(line.get(column) not in (None, "") for line in lines)]
    return _TEMPLATES.get_template("list.html").render(name=name, lines=lines, columns=filled)


def trajectory_page(
    trajectory: Trajectory, findings: Sequence[Finding], checks: Mapping[str, Outcome], table: ByteTable | None,
    line: Mapping[str, Any],
) -> str:
    """The trajectory as a page: its head, its findings, and its rows as text. ``table`` None: ids are numbers."""
    names = ("file", "line", "reward", "stop_reason", "group", "training_step")
    return _TEMPLATES.get_template("trajectory.html").render(
        trajectory=trajectory, findings=findings, has_text=table is not None, styles=Html(styles()),
        facts=[(name.replace("_", " "), line[name]) for name in names], title_of=title_of, cost_of=cost_sentence,
        checked=check_sentence(totals([(checks, 1)])), rows=_rows(trajectory, findings, table),
    )


def _rows(trajectory: Trajectory, findings: Sequence[Finding], table: ByteTable | None) -> Iterator[tuple[Any, ...]]:
    """Each row, its blocks and how many of its tokens are drawn."""
    n_left = MAX_TOKENS
    for index, row in enumerate(rows_of(trajectory)):
        n, mask = min(len(row.ids), n_left), np.zeros(len(row.ids), np.bool_)
        n_left -= n
        mask[: len(row.loss_mask)] = row.loss_mask[: len(row.ids)]
        origin = np.where(mask, np.uint8(Origin.SAMPLED), np.uint8(Origin.PROMPT))
        if row.origin is not None and len(row.origin) == len(row.ids):
            origin = row.origin
        places = list(_places(trajectory, row, index, findings))
        faults, notes = ([place for place, is_note in places if is_note is which] for which in (False, True))
        tokens = Tokens(0, row.ids[:n], origin[:n], mask[:n], n_tokens=len(row.ids))
        yield row, painter_of(table).blocks(tokens, Marks(faults, notes)), n


def _places(
    trajectory: Trajectory, row: Row, index: int, findings: Sequence[Finding]
) -> Iterator[tuple[tuple[int, int], bool]]:
    """Where the row holds the places of findings, and whether each is a note alone."""
    for finding in findings:
        for start, stop in finding.stretches:
            place: tuple[int, int] | None = (start, stop) if finding.row == index else None
            if finding.step is not None and finding.row is None and finding.step < len(trajectory.steps):
                place = place_in_row(trajectory.steps, row, finding.step, start, stop)
            if place is not None:
                yield place, finding.severity is Severity.INFO
