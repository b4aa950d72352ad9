"""All registered tokenizers against all probes: the cells, the missing checks, and the same as CSV."""

import csv
import io
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from django.http import QueryDict

from inspector.chat_templates.tokenizers_page import TokenizerValues
from inspector.web.twins import Page
from rollouts.jobs import template_checks
from rollouts.store.chat_templates.template_checks import find_checks, renderer_checks
from rollouts.store.chat_templates.tokenizers import list_tokenizers, tokenizers_with_template
from rollouts.store.models import TemplateCheck, Tokenizer
from rollouts.store.people.access import Access

LETTERS = {"ok": "o", "broken": "B", "raises": "R", "unsupported": "–", "void": "v", "differs": "d"}
WORDS = {
    "ok": "ok",
    "broken": "broken",
    "raises": "the template raises",
    "unsupported": "not rendered",
    "void": "void: passes because nothing is rendered",
    "differs": "differs, without harm for training",
}
SHOW_CHOICES = ("all", "failing", "differing")


@dataclass(frozen=True)
class MatrixPage(Page):
    """Every registered tokenizer's template against every probe."""

    tokenizers: list[TokenizerValues]
    """Those that pass the filter; revisions of one source stand together, the oldest first."""
    probes: list[dict[str, str]]
    """Name, title and purpose of each probe that passes the filter."""
    purposes: list[str]
    """Every purpose that a probe has."""
    filter: dict[str, str]
    """The parameters as they were understood."""
    n_tokenizers: int
    """Before the filter."""
    n_probes: int
    """Of the chosen purpose, before ``show``."""
    answered: int
    """Tokenizers whose check has ended."""
    missing: int
    """Tokenizers whose check nobody has asked for."""
    under_way: bool
    """A worker has not answered yet."""
    revisions: list[dict[str, Any]]
    """What turned from each revision of a source to the next one that differs."""
    versions: list[dict[str, Any]]
    """What an earlier version of the checks answered in another way."""


def word_of(probe: Mapping[str, Any]) -> str:
    """One of :data:`WORDS`."""
    if probe["void"]:
        return "void"
    return "differs" if probe["status"] == "broken" and not probe["decisive"] else str(probe["status"])


def is_missing(check: TemplateCheck | None) -> bool:
    """Whether nobody has asked for the check, or its worker was lost."""
    return check is None or (template_checks.is_stale(check) and check.status != TemplateCheck.Status.FAILED)


def with_template(access: Access, project_code: str) -> list[Tokenizer]:
    """Every tokenizer with a chat template that may be seen; with a code only those of that project. The revisions of
    one source are neighbours, the oldest first."""
    tokenizers = tokenizers_with_template(list_tokenizers(access, project_code))
    first = {
        tokenizer.source: tokenizer.name for tokenizer in sorted(tokenizers, key=lambda one: one.name, reverse=True)
    }
    return sorted(tokenizers, key=lambda one: (first[one.source], one.created_at))


Asked = Mapping[str | None, Mapping[str, Any]]  # Code of a check -> its probes, each with title, purpose and outcome.


def matrix(access: Access, params: QueryDict, names_projects: bool) -> MatrixPage:
    """The matrix with the filter of an address. Three queries. ``names_projects``: each column names its project."""
    name, purpose = params.get("name", "")[:100], params.get("purpose", "")[:60]
    show = params.get("show", "all") if params.get("show") in SHOW_CHOICES else "all"
    project = params.get("project", "")[:64]
    tokenizers = with_template(access, project)
    codes = {
        tokenizer.pk: template_checks.code_of(tokenizer.project, tokenizer, tokenizer.chat_template_id or "", {})
        for tokenizer in tokenizers
    }
    checks = find_checks(codes.values())
    columns = [_column(tokenizer, checks.get(codes[tokenizer.pk]), names_projects) for tokenizer in tokenizers]
    for check in renderer_checks(access):
        if (tokenizer := check.tokenizer) and check.code not in checks and project in ("", check.project.code):
            checks[check.code] = check
            of_check = {"chat_template": check.chat_template_id, "source": ""}
            of_check["name"] = f"{tokenizer.name}, {check.template_name}"
            columns.append(_column(tokenizer, check, names_projects, **of_check))
    probes_by_code: Asked = {code: (check.cells or {}).get("probes", {}) for code, check in checks.items()}
    columns_shown = [column for column in columns if name.lower() in column.name.lower()]
    revisions = _revisions(columns, probes_by_code)
    newest = params.get("revisions") == "newest"
    if newest:
        older = {(tokenizer["source"], tokenizer["before"]["name"]) for tokenizer in revisions}
        columns_shown = [column for column in columns_shown if (column.source, column.name) not in older]
    probes = _probes(columns_shown, probes_by_code)
    purposes = list(dict.fromkeys(probe["purpose"] for probe in probes))
    probes = [probe for probe in probes if not purpose or probe["purpose"] == purpose]
    return MatrixPage(
        tokenizers=list(columns_shown),
        probes=[probe for probe in probes if _is_kept(probe["name"], columns_shown, show)],
        purposes=purposes,
        filter={"name": name, "purpose": purpose, "show": show, "revisions": "newest" if newest else "all"}
        | ({"project": project} if project else {}),
        n_tokenizers=len(columns),
        n_probes=len(probes),
        answered=sum(column.status in ("done", "failed") for column in columns),
        missing=sum(column.status == "missing" for column in columns),
        under_way=any(column.status in ("queued", "running") for column in columns),
        revisions=list(revisions),
        versions=_versions(columns_shown, checks),
    )


def _column(
    tokenizer: Tokenizer, check: TemplateCheck | None, names_projects: bool, **of_check: str
) -> TokenizerValues:
    cells = (check.cells or {}) if check else {}
    return TokenizerValues.of(
        tokenizer, tokenizer.project.name if names_projects else None, code=check.code if check else None,
        status="missing" if check is None or is_missing(check) else check.status, error=check.error if check else "",
        prefix_preserving=cells.get("prefix_preserving"),
        cells={probe: word_of(cell) for probe, cell in cells.get("probes", {}).items()}, **of_check,
    )


def _probes(columns: list[TokenizerValues], asked: Asked) -> list[dict[str, str]]:
    """The probes of all columns, purpose by purpose in the order in which the first columns have them."""
    cells: dict[str, dict[str, str]] = {}
    for column in columns:
        for name, cell in asked.get(column.code, {}).items():
            cells.setdefault(name, {"name": name, "title": cell["title"], "purpose": cell["purpose"]})
    order = list(dict.fromkeys(probe["purpose"] for probe in cells.values()))
    return sorted(cells.values(), key=lambda probe: order.index(probe["purpose"]))


def _is_kept(probe: str, columns: list[TokenizerValues], show: str) -> bool:
    words = {column.cells[probe] for column in columns if probe in column.cells}
    if show == "failing":
        return bool(words & {"broken", "raises"})
    return show == "all" or len(words) > 1


def _revisions(columns: list[TokenizerValues], asked: Asked) -> list[dict[str, Any]]:
    """Sources with several revisions: the outcomes that changed between neighbouring revisions."""
    revisions = []
    for before, after in itertools.pairwise(columns):
        if after.source and before.source == after.source and before.chat_template != after.chat_template:
            older, other = before.cells, after.cells
            titles = {probe: cell["title"] for probe, cell in asked.get(after.code, {}).items()}
            turned = [
                {"name": probe, "before": older[probe], "after": other[probe], "title": titles[probe]}
                for probe in other
                if probe in older and older[probe] != other[probe]
            ]
            both_known = bool(older and other)
            change = {"source": after.source, "known": both_known, "turned": turned}
            revisions.append(change | {"before": _short(before), "after": _short(after)})
    return revisions


def _versions(columns: list[TokenizerValues], checks: Mapping[str, TemplateCheck]) -> list[dict[str, Any]]:
    """Templates with answers of several versions of the checks: the outcomes that changed between versions."""
    versions = []
    for column in columns:
        check = checks.get(column.code or "")
        cells = (check.cells or {}) if check else {}
        answers = [{"version": check.version if check else 0, **cells}, *cells.get("older", [])]
        for after, before in itertools.pairwise(answers):
            older, other = before["probes"], after["probes"]
            turned = [
                {"name": name, "title": cell["title"], "before": word_of(older[name]), "after": word_of(cell)}
                for name, cell in other.items()
                if name in older and word_of(older[name]) != word_of(cell)
            ]
            change = {"before": before["version"], "after": after["version"], "turned": turned}
            versions.append({"name": column.name, "code": column.code, **change})
    return versions


def _short(column: TokenizerValues) -> dict[str, Any]:
    names = ("name", "revision", "chat_template", "prefix_preserving", "created_at", "code")
    return {name: getattr(column, name) for name in names}


def rows(shown: MatrixPage) -> list[dict[str, Any]]:
    """The matrix for its template: a group per purpose, a row per probe, a cell per tokenizer."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for probe in shown.probes:
        cells = [_cell(probe, column) for column in shown.tokenizers]
        groups.setdefault(probe["purpose"], []).append({**probe, "cells": cells})
    return [{"purpose": purpose, "probes": probes} for purpose, probes in groups.items()]


def _cell(probe: Mapping[str, str], column: TokenizerValues) -> dict[str, Any]:
    word = column.cells.get(probe["name"], "")
    return {
        "tone": word or "none",
        "letter": LETTERS.get(word, ""),
        "says": f"{column.name}: {WORDS[word]}" if word else f"{column.name}: not asked",
        "code": column.code if word else "",
    }


def as_csv(shown: MatrixPage) -> str:
    """A row per tokenizer, a column per probe. A name that looks like a formula gets a leading quote."""
    out = io.StringIO()
    writer = csv.writer(out)
    names = [probe["name"] for probe in shown.probes]
    writer.writerow(["tokenizer", "revision", "chat_template_sha256", "status", "prefix_preserving", *names])
    for column in shown.tokenizers:
        preserving = column.prefix_preserving
        answer = "" if preserving is None else "yes" if preserving else "no"
        first = [_plain(column.name), _plain(column.revision), column.chat_template, column.status, answer]
        writer.writerow([*first, *(column.cells.get(name, "") for name in names)])
    return out.getvalue()


def _plain(text: str) -> str:
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text
