"""Template checks in the background: rendering may take as long as the sandbox allows."""

from __future__ import annotations

from celery import shared_task

from rollouts.models import TemplateCheck
from rollouts.work import template_checks


@shared_task(name="rollouts.check_template")
def check_template(check_id: int, repair: bool = True) -> None:
    """Answer a stored question; one that is answered already stays as it is, unless its repair is still sought."""
    check = TemplateCheck.objects.select_related("tokenizer", "chat_template").filter(pk=check_id).first()
    if check is None:
        return
    unanswered = check.status in (TemplateCheck.Status.QUEUED, TemplateCheck.Status.RUNNING)
    if unanswered or (repair and check.progress):
        template_checks.answer(check, repair)


def order(check: TemplateCheck, repair: bool = True) -> None:
    """Send a question to a worker; a broker that does not answer fails it with a sentence."""
    try:
        check_template.delay(check.pk, repair)
    except Exception as error:  # kombu's OperationalError, and what redis raises below it
        sentence = f"Redis does not answer ({type(error).__name__}). Start it (make run starts an embedded one)"
        if check.status == TemplateCheck.Status.DONE:
            check.progress = ""
            check.report = (check.report or {}) | {"repair_detail": f"No repair was looked for: {sentence}."}
        else:
            check.status = TemplateCheck.Status.FAILED
            check.error = f"The check could not be sent to a worker: {sentence} and press Check again."
        check.save(update_fields=["status", "error", "report", "progress"])


def order_repair(check: TemplateCheck) -> None:
    """Have a worker look for the repair of an answered question."""
    if template_checks.wants_repair(check):
        check.progress = template_checks.SEARCHING
        check.save(update_fields=["progress"])
        order(check)
