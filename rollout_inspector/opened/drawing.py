"""A trajectory in a notebook: the drawing of the saved file, by its painter and its style sheets, without a server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from html import escape
from pathlib import Path

import numpy as np

from rollout_inspector.diagnose.checks import Outcome, check_sentence, totals
from rollout_inspector.diagnose.finding import Finding, Severity, cost_sentence
from rollout_inspector.diagnose.kinds import title_of
from rollout_inspector.formats.writers.exports import rows_of
from rollout_inspector.streams.row_places import place_in_row
from rollout_inspector.streams.trajectory import Origin, Row, Tokens, Trajectory
from rollout_inspector.text.html.text import visible_text
from rollout_inspector.text.html.tokens import Marks, TokenPainter, painter_of
from rollout_inspector.text.tokenizers import ByteTable

MAX_TOKENS = 100_000
MAX_FINDINGS = 100
STYLES = ("base", "tokens", "trajectory", "offline")
_ROOT = Path(__file__).parents[2]


@cache
def styles() -> str:
    """The style sheets of the reader as one text. They are ours and hold no ``<``."""
    folders = (_ROOT / "inspector" / "shipped" / "static" / "css", _ROOT / "static" / "css")
    folder = next((folder for folder in folders if folder.is_dir()), None)
    text = "".join((folder / f"{name}.css").read_text(encoding="utf-8") for name in STYLES) if folder else ""
    if "<" in text:
        raise ValueError("A style sheet holds a <, which could end the style element of a file.")
    return text


def framed(page: str) -> str:
    """A page in a frame of its own: it runs no script, and its style touches nothing around it."""
    return f'<iframe sandbox srcdoc="{escape(page)}" style="width:100%;height:32rem;border:1px solid #888"></iframe>'


def trajectory_page(
    trajectory: Trajectory, findings: Sequence[Finding], checks: Mapping[str, Outcome], table: ByteTable | None,
    where: str,
) -> str:
    """The trajectory as a page: its head, its findings, and its rows as text. ``table`` None: ids are numbers."""
    facts = {"file": where, "reward": trajectory.reward, "ended by": trajectory.stop_reason, "error": trajectory.error,
             "training step": trajectory.training_step}
    head = "".join(
        f"<div><dt>{name}</dt><dd>{_line(value)}</dd></div>" for name, value in facts.items() if value not in (None, "")
    )
    unnamed = "" if table else '<p class="notice warning">No text: no tokenizer was named, so ids are shown as ids.</p>'
    cards = "".join(_card(finding) for finding in findings[:MAX_FINDINGS])
    if len(findings) > MAX_FINDINGS:
        cards += f"<li>and {len(findings) - MAX_FINDINGS:,} more</li>"
    title = _line(trajectory.external_id)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'\">"
        f'<meta name="color-scheme" content="light dark"><title>{title}</title><style>{styles()}</style></head>'
        '<body class="wide offline"><main class="trajectory"><header class="traj-head"><div class="traj-title"><h1>'
        f'{title}</h1></div><dl class="properties">{head}</dl>{unnamed}</header><section class="findings"><h2>Findings '
        f'<span class="count">{len(findings)}</span></h2><ol class="finding-list">{cards}</ol>'
        f'<p class="quiet">{escape(check_sentence(totals([(checks, 1)])))}</p></section>'
        f"{''.join(_rows(trajectory, findings, painter_of(table)))}</main></body></html>"
    )


def _line(value: object) -> str:
    return escape(visible_text(str(value)))


def _card(finding: Finding) -> str:
    place = "the trajectory" if finding.step is None and finding.row is None else (
        f"row {finding.row}" if finding.step is None else f"step {finding.step}"
    )
    lines = {"evidence": finding.evidence, "cost": cost_sentence(finding.cost, finding.severity),
             "remedy": finding.remedy}
    texts = "".join(f'<p class="{name}">{_line(text)}</p>' for name, text in lines.items() if text)
    return (
        f'<li class="finding {finding.severity}"><p class="finding-head"><span class="severity">{finding.severity}'
        f'</span> <span class="finding-place">{place}, tokens {finding.start:,}-{finding.stop:,}</span> '
        f"<strong>{_line(title_of(finding.kind))}</strong></p>{texts}</li>"
    )


def _rows(trajectory: Trajectory, findings: Sequence[Finding], painter: TokenPainter) -> Iterator[str]:
    n_left = MAX_TOKENS
    for index, row in enumerate(rows_of(trajectory)):
        n = min(len(row.ids), n_left)
        n_left -= n
        places = list(_places(trajectory, row, index, findings))
        faults, notes = ([place for place, is_note in places if is_note is which] for which in (False, True))
        blocks = painter.blocks(_tokens(row, n), Marks(faults, notes), size=512)
        drawn = "".join(f'<div class="toks blk" data-a={a} data-b={b}>{html}</div>' for a, b, html in blocks)
        whole = "" if n == len(row.ids) else f", of which the first {n:,} are here"
        yield (
            f'<section class="reader" data-lens="origin"><h2>Row {index} <small>· {len(row.ids):,} tokens{whole}; '
            f'{row.n_trained:,} trained, which are underlined</small></h2><div class="pane" data-view="runs" '
            f'data-lens="origin">{drawn}</div></section>'
        )


def _tokens(row: Row, n: int) -> Tokens:
    mask = np.zeros(n, np.bool_)
    mask[: len(row.loss_mask[:n])] = row.loss_mask[:n]
    origin = np.where(mask, np.uint8(Origin.SAMPLED), np.uint8(Origin.PROMPT))
    if row.origin is not None and len(row.origin) == len(row.ids):
        origin = row.origin[:n]
    return Tokens(0, row.ids[:n], origin, mask, n_tokens=len(row.ids))


def _places(
    trajectory: Trajectory, row: Row, index: int, findings: Sequence[Finding]
) -> Iterator[tuple[tuple[int, int], bool]]:
    """Where the row holds the places of findings, and whether each is a note alone."""
    for finding in findings:
        for start, stop in finding.places or ((finding.start, finding.stop),):
            place: tuple[int, int] | None = (start, stop) if finding.row == index else None
            if finding.step is not None and finding.row is None and finding.step < len(trajectory.steps):
                place = place_in_row(trajectory.steps, row, finding.step, start, stop)
            if place is not None:
                yield place, finding.severity is Severity.INFO
