"""Template checks as stored questions: the same question has the same code, and is answered once per version."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from django.db import transaction
from django.utils import timezone

from rollouts import chat_templates, tokenizers
from rollouts.chat_templates import CheckReport
from rollouts.models import ALPHABET, ChatTemplate, Job, TemplateCheck, Tokenizer
from rollouts.selectors.activity import is_active, is_silent
from rollouts.services.jobs import Beat, JobFailed, JobLost, ask_job, end_job
from rollouts.tito.interfaces import RenderFailed
from rollouts.tokenizers import LoadedTokenizer
from rollouts.work.strategy_deltas import strategy_deltas

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
    repair: bool = True,
) -> tuple[TemplateCheck, bool]:
    """The check of a question, and whether a worker has to be sent for its job.

    The job answers what is new, failed, lost, or of an older version of the checks. ``repair``: the job, or one more
    job, then looks for a repair.
    """
    question = question_of(tools, kwargs, conversation)
    with transaction.atomic():
        check, created = TemplateCheck.objects.get_or_create(
            code=code_of(tokenizer, chat_template, question),
            defaults={
                "tokenizer": tokenizer,
                "chat_template": chat_template,
                "question": question,
                "created_by": user if user is not None and user.is_authenticated else None,
            },
        )
        if not created and not is_stale(check):
            return check, repair and ask_for_repair(check, user)
        check.job, is_new = ask_job(check, Job.Kind.CHECK_TEMPLATE, {"repair": repair}, user)
        if is_new and not created:
            check.created_at = timezone.now()
            check.save(update_fields=["created_at"])
    return check, is_new


def ask_for_repair(check: TemplateCheck, user: Any = None) -> bool:
    """Have a repair of an answered check looked for; whether a worker has to be sent for its job."""
    if not wants_repair(check):
        return False
    check.job, is_new = ask_job(check, Job.Kind.REPAIR_TEMPLATE, user=user)
    return is_new


def is_stale(check: TemplateCheck) -> bool:
    """It has failed, was answered by an older version, or its worker is lost."""
    if check.status == TemplateCheck.Status.DONE:
        return check.version != chat_templates.VERSION or check.cells is None
    return check.status == TemplateCheck.Status.FAILED or is_silent(check.job)


def wants_repair(check: TemplateCheck) -> bool:
    """It was answered, and nobody looks or has looked for a repair."""
    searching = is_active(check.job) and not is_silent(check.job)
    return check.is_answered and not searching and check.report is not None and not check.report.get("repair_detail")


def do_job(job: Job, beat: Beat) -> None:
    """Run the checks of a job's template check and store the report, then look for a repair and store it too.

    A reader sees the verdict while the search goes on. Raises :class:`JobFailed` with what the template does wrong.
    """
    check = TemplateCheck.objects.select_related("tokenizer", "chat_template").get(job=job)
    beat()
    try:
        loaded = tokenizers.load(check.tokenizer.path) if check.tokenizer else None
        report = _report(check, loaded)
        found = report.to_dict() | _users_conversation(check, loaded, report)
    except (RenderFailed, OSError, ValueError) as error:
        raise JobFailed(str(error)) from error
    check.report, check.cells = found, cells_of(found) | {"older": _older(check)}
    check.version = chat_templates.VERSION
    with transaction.atomic():
        beat(n_done=1, progress="the first change is tried")
        check.save(update_fields=["report", "cells", "version"])
        if not job.options.get("repair", True):
            end_job(job, Job.Status.DONE)
            return
    check.report = found | _repair(loaded, report, beat)
    with transaction.atomic():
        if not end_job(job, Job.Status.DONE):
            raise JobLost
        check.save(update_fields=["report"])


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


def _repair(loaded: LoadedTokenizer | None, report: CheckReport, beat: Beat) -> dict[str, Any]:
    """The keys of a stored report that a search for a repair and for generation tags adds."""
    try:
        repair, detail = chat_templates.find_repair(
            loaded, report, lambda progress: beat.now_and_then(progress=progress[:200])
        )
        marks, marks_detail = chat_templates.find_marks(loaded, report)
    except (RenderFailed, OSError, ValueError) as error:
        repair, marks, detail = None, None, f"The search for a repair ended early: {error}"
        marks_detail = detail
    return {
        "repair": None if repair is None else repair.to_dict(),
        "repair_detail": detail,
        "marks": None if marks is None else marks.to_dict(),
        "marks_detail": marks_detail,
    }


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
