"""Chat-template checks: ask for a check, read its verdict, download its repair."""

import json
from collections.abc import Mapping
from typing import Any

from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import reverse
from django.views.decorators.http import require_http_methods

from inspector.chat_templates.check_forms import EXAMPLE, ConversationForm, TemplateCheckForm
from inspector.chat_templates.check_page import drawn, drawn_conversation, drawn_repair
from inspector.chat_templates.check_values import CheckValues, failing_probe, filled_in, subject
from inspector.chat_templates.uploaded_tokenizer import register_upload, unreadable
from inspector.web.access import (
    access, chosen_project, form_project, project_name, projects_to_filter, reads_check, writes_check
)
from inspector.web.twins import is_fragment, page
from rollouts.jobs import template_checks
from rollouts.jobs.broker import send_job
from rollouts.store.chat_templates.chat_templates import register_chat_template
from rollouts.store.chat_templates.template_checks import find_check, recent_checks
from rollouts.store.chat_templates.tokenizers import hub_tokenizer, tokenizers_of, tokenizers_with_template
from rollouts.store.models import Project, TemplateCheck, Tokenizer

RECENT = 20
PROBE_NAME = 60


@require_http_methods(["GET", "HEAD", "POST"])
def index(request: HttpRequest) -> HttpResponse:
    """The form, and the newest checks. A run or a finding (:func:`subject`) fills the form in, or leads to its check.
    ``?check=`` fills in the question of that check, so that a user can change it."""
    name, form, where = "", None, None
    if request.method == "POST":
        where = chosen_project(request)
        form = TemplateCheckForm(where.chosen, request.POST, request.FILES)
        check = ask_check(request, form, where.chosen) if form.is_valid() else None
        if check is not None:
            return redirect(_address(check, request.POST.get("probe", "")))
    else:
        run, earlier_check, initial = subject(access(request), request.GET)
        if earlier_check is not None:
            return redirect(_address(earlier_check, failing_probe(earlier_check.cells, request.GET.get("probe", ""))))
        name = run.name if run else ""
        before = None if run else _asked_before(request, request.GET.get("check", ""))
        where = form_project(request, run.project if run else before.project if before else None)
        if where is not None:
            usual = {"tokenizer": request.GET.get("tokenizer", "")}
            form = TemplateCheckForm(where.chosen, initial=initial if run else _again(before) if before else usual)
    project_code = request.GET.get("project", "")[:64]
    recent = recent_checks(access(request), RECENT, project_code)
    checks_page = {
        "checks": [CheckValues.of(check, project_name(request, check.project_id)) for check in recent],
        "errors": form.sentences() if form is not None else {},
    }
    lists = {"projects": projects_to_filter(request), "asked": project_code}
    status = 400 if form is not None and form.errors else 200
    return page(
        request, "chat_templates/index.html", checks_page, status, form=form, subject=name, where=where, **lists
    )


@require_http_methods(["GET", "HEAD", "POST"])
def conversation(request: HttpRequest) -> HttpResponse:
    """The form of a user's own conversation. ``?check=`` fills in the question of that check."""
    if request.method == "POST":
        where = chosen_project(request)
        form = ConversationForm(where.chosen, request.POST, request.FILES)
        check = ask_check(request, form, where.chosen, repair=False) if form.is_valid() else None
        if check is not None:
            return redirect("check-conversation", code=check.code)
    else:
        before = _asked_before(request, request.GET.get("check", ""))
        where = chosen_project(request, preferred=before.project if before else None)
        usual = _again(before) if before else _first(where.chosen)
        form = ConversationForm(where.chosen, initial={"conversation": EXAMPLE, **usual})
    status = 400 if form.errors else 200
    return page(
        request, "chat_templates/conversation.html", {"errors": form.sentences()}, status, form=form, where=where
    )


def _first(project: Project) -> dict[str, Any]:
    return {"tokenizer": next((tokenizer.name for tokenizer in tokenizers_with_template(tokenizers_of(project))), "")}


def _asked_before(request: HttpRequest, code: str) -> TemplateCheck | None:
    """The check with that code, if the user may see it."""
    check = find_check(code[:64], report=False) if code else None
    return check if check is not None and access(request).role_in(check.project_id) is not None else None


def _again(check: TemplateCheck) -> dict[str, Any]:
    """The initial values of a form with the question of a check."""
    question = {name: json.dumps(value, indent=1, ensure_ascii=False) for name, value in check.question.items()}
    return {**filled_in(check.tokenizer, check.chat_template), **question}


@reads_check
def check_conversation(request: HttpRequest, check: TemplateCheck) -> HttpResponse:
    """The ids that every strategy puts between the completions of a check's own conversation."""
    project = project_name(request, check.project_id)
    conversation_page = CheckValues.of(check, project, strategies=(check.report or {}).get("strategies"))
    return page(request, "chat_templates/strategies.html", conversation_page, **drawn_conversation(check))


def _address(check: TemplateCheck, probe: str = "") -> str:
    """The check's page, at a probe when one is named."""
    address = reverse("check", args=[check.code])
    probe_name = probe[:PROBE_NAME]
    return f"{address}#probe-{probe_name}" if probe_name.replace("_", "").isalnum() else address


def ask_check(
    request: HttpRequest, form: TemplateCheckForm, project: Project, repair: bool = True
) -> TemplateCheck | None:
    """Send the check of a valid form to a worker. Returns None, and fills in the form's errors, on failure."""
    fields = form.cleaned_data
    tokenizer = _tokenizer(form, project)
    text = form.template_text(tokenizer) if not form.errors else ""
    if form.errors:
        return None
    own = tokenizer is not None and tokenizer.chat_template is not None and tokenizer.chat_template.text == text
    upload = form.files.get("chat_template_file")
    label = f"{tokenizer.name}'s own" if own and tokenizer else str(upload) if upload else fields["label"]
    try:
        chat_template = register_chat_template(text, label, project)
    except ValueError as error:
        form.add_error("chat_template", str(error))
        return None
    check, to_do = template_checks.ask(
        tokenizer, chat_template, fields["tools"], fields["kwargs"], request.user, fields["conversation"], repair,
        project,
    )
    if to_do:
        send_job(check.job)
    return check


def _tokenizer(form: TemplateCheckForm, project: Project) -> Tokenizer | None:
    """The tokenizer of a form; an uploaded or fetched one is registered. None without one, or on an error."""
    fields = form.cleaned_data
    if fields["tokenizer_file"]:
        return register_upload(form, "tokenizer_file", fields["tokenizer_file"], project)
    if not fields.get("hub_id"):
        chosen: Tokenizer | None = fields["tokenizer"]
        return chosen
    try:
        return hub_tokenizer(fields["hub_id"], fields["revision"], project)
    except (ValueError, OSError) as error:
        form.add_error("hub_id", unreadable(error))
        return None


@reads_check
def detail(request: HttpRequest, check: TemplateCheck) -> HttpResponse:
    """The verdict of a check, or its progress."""
    if is_fragment(request, "repair"):
        return page(request, "chat_templates/_repair.html", {}, **drawn_repair(check))
    check_page = CheckValues.of(check, project_name(request, check.project_id), report=check.report)
    return page(request, "chat_templates/detail.html", check_page, **drawn(check))


@reads_check
def repair_file(request: HttpRequest, check: TemplateCheck, kind: str) -> HttpResponse:
    """The repaired template, or its diff, as a file; ``?which=wider`` for a larger change."""
    repair = template_checks.repairs_of(check.report or {}).get(request.GET.get("which", "repair"))
    if not repair:
        raise Http404("This check has no such repair.")
    return _file(repair, kind)


@reads_check
def marks_file(request: HttpRequest, check: TemplateCheck, kind: str) -> HttpResponse:
    """The template with generation tags, or the diff that places them, as a file."""
    marks = (check.report or {}).get("marks")
    if not marks:
        raise Http404("This check has no verified generation tags.")
    return _file(marks, kind)


def _file(change: Mapping[str, Any], kind: str) -> HttpResponse:
    response = HttpResponse(change["template" if kind == "jinja" else "diff"], content_type="text/plain; charset=utf-8")
    name = "chat_template.jinja" if kind == "jinja" else "chat_template.diff"
    response["Content-Disposition"] = f'attachment; filename="{name}"'
    return response


@writes_check
def repair(request: HttpRequest, check: TemplateCheck) -> HttpResponse:
    """Have a worker look for a repair of a check that was answered without."""
    if template_checks.ask_for_repair(check, request.user):
        send_job(check.job)
    return redirect(reverse("check", args=[check.code]) + "#repair")
