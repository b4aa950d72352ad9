"""Chat-template checks: ask, wait, read the verdict, take the repair."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from django.conf import settings
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import reverse
from django.views.decorators.http import require_http_methods, require_POST

from inspector.access import reads_check
from inspector.api import is_fragment, page
from inspector.check_forms import TemplateCheckForm
from inspector.check_page import check_page, drawn, drawn_repair, summary
from inspector.check_repair import named
from inspector.uploaded_tokenizer import keep_upload
from rollouts import services, template_checks
from rollouts.models import ChatTemplate, Run, TemplateCheck, Tokenizer
from rollouts.tasks.checks import order, order_repair

RECENT = 20
PROBE_NAME = 60


@require_http_methods(["GET", "HEAD", "POST"])
def index(request: HttpRequest) -> HttpResponse:
    """The form, and the checks asked last; ``?run=`` asks about a run's template, ``?tokenizer=`` about its own."""
    subject: str = ""
    if request.method == "POST":
        form = TemplateCheckForm(request.POST, request.FILES)
        answer = _ask(request, form) if form.is_valid() else None
        if answer is not None:
            return answer
    else:
        run = _run(request.GET.get("run", ""))
        template = _template(request, run)
        if run is not None and template is not None:
            known = _of_run(run, template)
            if known is not None:
                return redirect(_address(known, request.GET.get("probe", "")))
            subject = run.name
        form = TemplateCheckForm(initial=_initial(request, run, template))
    recent = TemplateCheck.objects.select_related("tokenizer", "chat_template").defer("chat_template__text", "report")
    data = {"checks": [summary(check) for check in recent.order_by("-created_at", "-pk")[:RECENT]]}
    status = 400 if form.errors else 200
    return page(request, "chat_templates/index.html", data, status=status, form=form, subject=subject)


def _run(code: str) -> Run | None:
    known = Run.objects.select_related("tokenizer", "chat_template", "rows_chat_template")
    return known.filter(code=code[:64].replace("\0", "")).first() if code else None


def _template(request: HttpRequest, run: Run | None) -> ChatTemplate | None:
    """The chat template of a run; with ``?rows=1`` that of its rows."""
    if run is None:
        return None
    return run.rows_chat_template if request.GET.get("rows") else run.chat_template


def _initial(request: HttpRequest, run: Run | None, template: ChatTemplate | None) -> dict[str, Any]:
    if run is None or template is None:
        return {"tokenizer": request.GET.get("tokenizer", "")}
    own = run.tokenizer is not None and run.tokenizer.chat_template_id == template.sha256
    kwargs = run.settings.get("template_kwargs")
    return {
        "tokenizer": run.tokenizer.name if run.tokenizer else "",
        "chat_template": "" if own else template.text,
        "kwargs": json.dumps(kwargs) if kwargs else "",
    }


def _of_run(run: Run, template: ChatTemplate) -> TemplateCheck | None:
    """The check of a run's template with its tokenizer and template arguments, if somebody has asked for it."""
    question = template_checks.question_of(kwargs=run.settings.get("template_kwargs"))
    code = template_checks.code_of(run.tokenizer, template, question)
    return TemplateCheck.objects.filter(code=code).only("code", "status").first()


def _address(check: TemplateCheck, probe: str = "") -> str:
    """The check's page, at a probe when one is named."""
    address = reverse("check", args=[check.code])
    named = probe[:PROBE_NAME]
    return f"{address}#probe-{named}" if named.replace("_", "").isalnum() else address


def _ask(request: HttpRequest, form: TemplateCheckForm) -> HttpResponse | None:
    """The way to the check that a valid form asks for; None with the form's errors filled in."""
    asked = form.cleaned_data
    tokenizer = _tokenizer(form)
    text = form.template_text(tokenizer) if not form.errors else ""
    if form.errors:
        return None
    own = tokenizer is not None and tokenizer.chat_template is not None and tokenizer.chat_template.text == text
    upload = asked["chat_template_file"]
    label = f"{tokenizer.name}'s own" if own and tokenizer else upload.name if upload else asked["label"]
    try:
        chat_template = services.register_chat_template(text, label=label)
    except ValueError as error:
        form.add_error("chat_template", str(error))
        return None
    check, to_do = template_checks.ask(
        tokenizer, chat_template, asked["tools"], asked["kwargs"], request.user, asked["conversation"]
    )
    if to_do:
        order(check)
    else:
        order_repair(check)
    return redirect(_address(check, request.POST.get("probe", "")))


def _tokenizer(form: TemplateCheckForm) -> Tokenizer | None:
    """The tokenizer that a form names; one that is uploaded or fetched is registered. None for none, or with errors."""
    asked = form.cleaned_data
    field = "tokenizer_file" if asked["tokenizer_file"] else "hub_id"
    if not asked.get(field):
        chosen: Tokenizer | None = asked["tokenizer"]
        return chosen
    try:
        if field == "hub_id":
            return services.find_tokenizer(f"{asked['hub_id']}@{asked['revision']}")
        (settings.INSPECTOR_DATA / "tmp").mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=settings.INSPECTOR_DATA / "tmp") as scratch:
            upload = asked["tokenizer_file"]
            folder = keep_upload(upload, Path(scratch))
            return services.register_tokenizer(folder, source=f"upload of {upload.name}")
    except (ValueError, OSError) as error:
        form.add_error(field, str(error) or f"The tokenizer cannot be read ({type(error).__name__}).")
        return None


@reads_check
def detail(request: HttpRequest, check: TemplateCheck) -> HttpResponse:
    """The verdict of one check, or how far it is."""
    if is_fragment(request, "repair"):
        return page(request, "chat_templates/_repair.html", {}, **drawn_repair(check))
    return page(request, "chat_templates/detail.html", check_page(check), **drawn(check))


@reads_check
def repair_file(request: HttpRequest, check: TemplateCheck, kind: str) -> HttpResponse:
    """The repaired template, or its diff, as a file; ``?which=wider`` for a larger change."""
    repair = named(check.report or {}).get(request.GET.get("which", "repair"))
    if not repair:
        raise Http404("This check has no such repair.")
    response = HttpResponse(repair["template" if kind == "jinja" else "diff"], content_type="text/plain; charset=utf-8")
    name = "chat_template.jinja" if kind == "jinja" else "chat_template.diff"
    response["Content-Disposition"] = f'attachment; filename="{name}"'
    return response


@require_POST
def repair(request: HttpRequest, code: str) -> HttpResponse:
    """Have a worker look for a repair of a check that was answered without."""
    check = TemplateCheck.objects.filter(code=code).first()
    if check is None:
        raise Http404("There is no template check with this code.")
    order_repair(check)
    return redirect(reverse("check", args=[code]) + "#repair")
