"""Template checks: equal questions have the same code, and each version of the checks answers a question once."""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from django.db import transaction
from django.utils import timezone

from rollout_inspector.refusal import Refusal
from rollout_inspector.streams.interfaces import RenderFailed
from rollout_inspector.text import chat_templates
from rollout_inspector.text.chat_templates import CheckReport
from rollout_inspector.text.chat_templates.repair.search import NOT_FINISHED
from rollout_inspector.text.tokenizers import LoadedTokenizer
from rollouts.jobs.replays.strategy_deltas import strategy_deltas
from rollouts.store.chat_templates.template_checks import check_of, check_of_job, find_check
from rollouts.store.chat_templates.tokenizers import load_tokenizer
from rollouts.store.database import save_columns
from rollouts.store.jobs.jobs import Beat, JobKind, JobLost, ask_job, end_job, is_active, is_silent, take_job
from rollouts.store.models import DEFAULT_PROJECT, ChatTemplate, Job, Project, TemplateCheck, Tokenizer, code_of_number
from rollouts.store.people.members import project_or_default

WAIT_SECONDS = 0.5  # How often it is asked whether another worker has answered a check.
MAX_OLDER = 5  # How many answers of earlier versions of the checks are kept in short.


def code_of(
    project: Project, tokenizer: Tokenizer | None, chat_template_sha256: str, question: Mapping[str, Any]
) -> str:
    """The 12-character code of a question in a project. It follows from contents, so that a link survives a new
    registration. In the default project a check keeps the code of the days before."""
    parts = [tokenizer.sha256 if tokenizer else "", chat_template_sha256, json.dumps(question, sort_keys=True)]
    if project.code != DEFAULT_PROJECT:
        parts.append(project.code)
    return code_of_number(int.from_bytes(hashlib.sha256("\0".join(parts).encode()).digest()[:9], "big"))


def question_of(
    tools: Sequence[Mapping[str, Any]] | None = None, kwargs: Mapping[str, Any] | None = None,
    conversation: Sequence[Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """The parts of a question beside tokenizer and template. Empty parts are left out."""
    parts = {"tools": list(tools or ()), "kwargs": dict(kwargs or {}), "conversation": list(conversation or ())}
    return {name: part for name, part in parts.items() if part}


def ask(
    tokenizer: Tokenizer | None, chat_template: ChatTemplate, tools: Sequence[Mapping[str, Any]] | None = None,
    kwargs: Mapping[str, Any] | None = None, user: Any = None, conversation: Sequence[Mapping[str, Any]] | None = None,
    repair: bool = True, project: Project | None = None,
) -> tuple[TemplateCheck, bool]:
    """The check of a question in a project, and whether a worker has to be sent for its job. The job answers a check
    that is new or stale. ``repair``: then this job, or a second one, looks for a repair. ``project``: None = the
    default one; it has registered the template."""
    question = question_of(tools, kwargs, conversation)
    project = project_or_default(project)
    with transaction.atomic():
        check, created = check_of(
            code_of(project, tokenizer, chat_template.sha256, question), project, chat_template, tokenizer=tokenizer,
            question=question, created_by=user if user is not None and user.is_authenticated else None,
        )
        if not created and not is_stale(check):
            return check, repair and ask_for_repair(check, user)
        check.job, is_new = ask_job(check, CHECK.slug, {"repair": repair}, user)
        if is_new and not created:
            check.created_at = timezone.now()
            save_columns(check, "created_at")
    return check, is_new


def ask_for_repair(check: TemplateCheck, user: Any = None) -> bool:
    """Ask for the search of a repair of an answered check. Returns whether a worker has to be sent for its job."""
    if not wants_repair(check):
        return False
    check.job, is_new = ask_job(check, REPAIR.slug, user=user)
    return is_new


def is_stale(check: TemplateCheck) -> bool:
    """Whether a check failed, was cancelled, was answered by an older version of the checks, or lost its worker."""
    if check.status == TemplateCheck.Status.DONE:
        return check.version != chat_templates.VERSION or check.cells is None
    return check.status in (TemplateCheck.Status.FAILED, TemplateCheck.Status.CANCELLED) or is_silent(check.job)


def wants_repair(check: TemplateCheck) -> bool:
    """Whether a check was answered, and no worker looks or has looked for a repair."""
    searching = is_active(check.job) and not is_silent(check.job)
    detail = (check.report or {}).get("repair_detail")
    return check.is_answered and not searching and check.report is not None and detail in (None, "", NOT_FINISHED)


WHICH = ("repair", "wider", "widest")  # The names of the repairs of a report in addresses, the smallest repair first.


def repairs_of(report: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Name in addresses -> repair of the report, the smallest first."""
    by_name: dict[str, Mapping[str, Any]] = {}
    repair: Mapping[str, Any] | None = report.get("repair")
    for which in WHICH:
        if repair:
            by_name[which] = repair
            repair = repair.get("wider")
    return by_name


def answer_now(check: TemplateCheck, beat: Beat) -> TemplateCheck:
    """The check with its report and repair, for the job of ``beat``, which does its job or waits for who does it.
    Raises :class:`Refusal` where it could not be answered."""
    while is_active(check.job):
        if (job := take_job(check.job.pk)) is None:
            time.sleep(WAIT_SECONDS)
        else:
            try:
                do_job(job, Beat(job, lambda own: beat.now_and_then(progress=own.progress)))
            except Refusal as refusal:
                end_job(job, Job.Status.FAILED, refusal.sentence)
            except JobLost:
                end_job(job, Job.Status.CANCELLED)
        beat()
        check = find_check(check.code) or check
    if check.job.status != Job.Status.DONE:
        raise Refusal(check.job.error or "The search for a repair was cancelled.")
    return find_check(check.code) or check


def do_job(job: Job, beat: Beat) -> None:
    """Run the checks of a job's template check and store the report, then look for a repair and store it too. Pages
    show the report during the search. Raises :class:`Refusal` with what the template does wrong."""
    check = check_of_job(job)
    beat()
    try:
        loaded = load_tokenizer(check.tokenizer.files_sha256) if check.tokenizer else None
        report = chat_templates.check(loaded, check.chat_template.text, **check.question)
        report_json = report.to_dict() | _users_conversation(check, loaded, report)
    except (RenderFailed, OSError, ValueError) as error:
        raise Refusal(str(error)) from error
    check.report, check.cells = report_json, cells_of(report_json) | {"older": _older(check)}
    check.version = chat_templates.VERSION
    with transaction.atomic():
        beat(n_done=1, progress="the first change is tried")
        save_columns(check, "report", "cells", "version")
        if not job.options.get("repair", True):
            end_job(job, Job.Status.DONE)
            return
    check.report = report_json | _repaired(loaded, report, beat).to_dict()
    with transaction.atomic():
        if not end_job(job, Job.Status.DONE):
            raise JobLost
        save_columns(check, "report")


def _older(check: TemplateCheck) -> list[dict[str, Any]]:
    """The answers of earlier versions of the checks in short, the latest first."""
    cells = check.cells or {}
    older: list[dict[str, Any]] = cells.get("older", [])
    if not cells or check.version == chat_templates.VERSION:
        return older
    answered = {name: cells[name] for name in ("prefix_preserving", "probes")}
    return [{"version": check.version, **answered}, *older][:MAX_OLDER]


def _users_conversation(check: TemplateCheck, loaded: LoadedTokenizer | None, report: CheckReport) -> dict[str, Any]:
    """The deltas of every strategy on the user's own conversation; empty without a conversation or a tokenizer."""
    conversation = check.question.get("conversation")
    if not conversation or loaded is None:
        return {}
    renderer = chat_templates.renderer(loaded, check.chat_template.text)
    return {"strategies": strategy_deltas(loaded, renderer, conversation, report.tools, report.kwargs)}


def _repaired(loaded: LoadedTokenizer | None, report: CheckReport, beat: Beat) -> CheckReport:
    """The report with a repair and generation tags, or with the sentences that say why there are none."""
    try:
        repaired = chat_templates.with_repair(loaded, report, lambda told: beat.now_and_then(progress=told[:200]))
        return chat_templates.with_marks(loaded, repaired)
    except (RenderFailed, OSError, ValueError) as error:
        detail = f"The search for a repair ended early: {error}"
        return replace(report, repair_detail=detail, marks_detail=detail)


def cells_of(report: Mapping[str, Any]) -> dict[str, Any]:
    """A report in short: the cells of its row in the matrix, without renders."""
    return {
        "prefix_preserving": report["prefix_preserving"],
        "probes": {
            check["name"]: {key: check[key] for key in ("title", "purpose", "status", "void", "decisive")}
            for check in report["checks"]
        },
    }


CHECK = JobKind("check_template", "Check Template", do_job, activity="template check started")
"""A template check is answered. With ``options["repair"]`` a repair is searched for afterwards."""

REPAIR = JobKind("repair_template", "Repair Template", do_job, activity="template check started")
"""A repair is searched for a template check that was answered before without one."""
