"""Template checks as stored questions: the same question has the same code, and is answered once per version."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from django.utils import timezone

from rollouts import chat_templates, tokenizers
from rollouts.chat_templates import CheckReport
from rollouts.models import ALPHABET, ChatTemplate, TemplateCheck, Tokenizer
from rollouts.tito.interfaces import RenderFailed
from rollouts.tokenizers import LoadedTokenizer
from rollouts.work.strategy_deltas import strategy_deltas

LOST = timedelta(minutes=3)
"""A question that nobody has answered for so long is sent again when it is asked again."""
SEARCHING = "waiting for a worker"
PROGRESS_SECONDS = 0.7
MAX_OLDER = 5
"""Answers of so many earlier versions of the checks are kept, in short."""


def code_of(tokenizer: Tokenizer | None, chat_template: ChatTemplate, question: Mapping[str, Any]) -> str:
    """The 12-character code of a question: it depends on contents only, so a link survives a re-registration."""
    return code_of_hashes(tokenizer.sha256 if tokenizer else "", chat_template.sha256, question)


def code_of_hashes(tokenizer_sha256: str, chat_template_sha256: str, question: Mapping[str, Any]) -> str:
    """The same from the two hashes alone."""
    parts = [tokenizer_sha256, chat_template_sha256, json.dumps(question, sort_keys=True)]
    number = int.from_bytes(hashlib.sha256("\0".join(parts).encode()).digest()[:9], "big")
    letters = []
    for _ in range(12):
        number, digit = divmod(number, len(ALPHABET))
        letters.append(ALPHABET[digit])
    return "".join(letters)


def question_of(
    tools: Sequence[Mapping[str, Any]] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    conversation: Sequence[Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """What goes into a question beside tokenizer and template; what is empty is left out."""
    question: dict[str, Any] = {}
    if tools:
        question["tools"] = list(tools)
    if kwargs:
        question["kwargs"] = dict(kwargs)
    if conversation:
        question["conversation"] = list(conversation)
    return question


def ask(
    tokenizer: Tokenizer | None,
    chat_template: ChatTemplate,
    tools: Sequence[Mapping[str, Any]] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    user: Any = None,
    conversation: Sequence[Mapping[str, Any]] | None = None,
) -> tuple[TemplateCheck, bool]:
    """The check of a question, and whether it still has to be answered (it is new, failed, or of an older version)."""
    question = question_of(tools, kwargs, conversation)
    check, created = TemplateCheck.objects.get_or_create(
        code=code_of(tokenizer, chat_template, question),
        defaults={
            "tokenizer": tokenizer,
            "chat_template": chat_template,
            "question": question,
            "created_by": user if user is not None and user.is_authenticated else None,
        },
    )
    if not created and is_stale(check):
        check.status, check.error, check.progress = TemplateCheck.Status.QUEUED, "", ""
        check.created_at = timezone.now()
        check.save(update_fields=["status", "error", "progress", "created_at"])
        return check, True
    return check, created


def is_stale(check: TemplateCheck) -> bool:
    """It has failed, was answered by an older version, or got lost on its way to a worker."""
    if check.status == TemplateCheck.Status.DONE:
        return check.version != chat_templates.VERSION or check.cells is None
    return check.status == TemplateCheck.Status.FAILED or check.created_at < timezone.now() - LOST


def wants_repair(check: TemplateCheck) -> bool:
    """It was answered, and nobody has looked for a repair yet."""
    done = check.status == TemplateCheck.Status.DONE and not check.progress
    return done and check.report is not None and not check.report.get("repair_detail")


def answer(check: TemplateCheck, repair: bool = True) -> None:
    """Run the checks and store the report, then look for a repair and store it too.

    What a template does wrong becomes a sentence in ``error``. A reader sees the verdict while the search goes on.
    """
    if check.status != TemplateCheck.Status.DONE:
        check.status = TemplateCheck.Status.RUNNING
        check.save(update_fields=["status"])
    try:
        loaded = tokenizers.load(check.tokenizer.path) if check.tokenizer else None
        report = _report(check, loaded)
        found = report.to_dict() | _users_conversation(check, loaded, report)
    except (RenderFailed, OSError, ValueError) as error:
        check.status, check.error, check.progress = TemplateCheck.Status.FAILED, str(error), ""
        check.save(update_fields=["status", "error", "progress"])
        return
    check.report, check.cells = found, cells_of(found) | {"older": _older(check)}
    check.status, check.error, check.version = TemplateCheck.Status.DONE, "", chat_templates.VERSION
    check.progress = "the first change is tried" if repair else ""
    check.save(update_fields=["status", "error", "report", "cells", "progress", "version"])
    if repair:
        _repair(check, loaded, report)


def _older(check: TemplateCheck) -> list[dict[str, Any]]:
    """What earlier versions of the checks answered, in short, the latest first."""
    cells = check.cells or {}
    older: list[dict[str, Any]] = cells.get("older", [])
    if not cells or check.version == chat_templates.VERSION:
        return older
    answered = {name: cells[name] for name in ("prefix_preserving", "probes")}
    return [{"version": check.version, **answered}, *older][:MAX_OLDER]


def _report(check: TemplateCheck, loaded: LoadedTokenizer | None) -> CheckReport:
    asked = check.question
    return chat_templates.check(
        loaded,
        check.chat_template.text,
        tools=asked.get("tools"),
        kwargs=asked.get("kwargs"),
        conversation=asked.get("conversation"),
    )


def _users_conversation(check: TemplateCheck, loaded: LoadedTokenizer | None, report: CheckReport) -> dict[str, Any]:
    """The user's own conversation under every strategy, where one was given and there is a tokenizer."""
    conversation = check.question.get("conversation")
    if not conversation or loaded is None:
        return {}
    renderer = chat_templates.renderer(loaded, check.chat_template.text)
    return {"strategies": strategy_deltas(loaded, renderer, conversation, report.tools, report.kwargs)}


def _repair(check: TemplateCheck, loaded: LoadedTokenizer | None, report: CheckReport) -> None:
    last = time.monotonic()

    def tell(progress: str) -> None:
        nonlocal last
        if time.monotonic() - last >= PROGRESS_SECONDS:
            last = time.monotonic()
            TemplateCheck.objects.filter(pk=check.pk).update(progress=progress[:200])

    try:
        repair, detail = chat_templates.find_repair(loaded, report, tell)
        marks, marks_detail = chat_templates.find_marks(loaded, report)
    except (RenderFailed, OSError, ValueError) as error:
        repair, marks, detail = None, None, f"The search for a repair ended early: {error}"
        marks_detail = detail
    check.report = (check.report or {}) | {
        "repair": None if repair is None else repair.to_dict(),
        "repair_detail": detail,
        "marks": None if marks is None else marks.to_dict(),
        "marks_detail": marks_detail,
    }
    check.progress = ""
    check.save(update_fields=["report", "progress"])


def cells_of(report: Mapping[str, Any]) -> dict[str, Any]:
    """A report in short: what a row of the matrix shows, without any render."""
    return {
        "prefix_preserving": report["prefix_preserving"],
        "probes": {
            check["name"]: {
                "title": check["title"],
                "purpose": check["purpose"],
                "status": check["status"],
                "void": check["void"],
                "decisive": check["decisive"],
            }
            for check in report["checks"]
        },
    }
