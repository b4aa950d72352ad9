"""The question of a template check that follows from a run or a finding: template, tools, kwargs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from django.http import QueryDict

from inspector.chat_templates.check_forms import MAX_JSON_CHARACTERS
from inspector.web.twins import whole_number
from rollouts.jobs import template_checks
from rollouts.store.chat_templates.chat_templates import find_chat_template
from rollouts.store.chat_templates.template_checks import find_check, find_request
from rollouts.store.models import ChatTemplate, Content, Run, TemplateCheck, Tokenizer
from rollouts.store.people.access import Access


def filled_in(tokenizer: Tokenizer | None, chat_template: ChatTemplate) -> dict[str, str]:
    """The form's fields for a tokenizer and a template. The tokenizer's own template stays empty."""
    own = tokenizer is not None and tokenizer.chat_template_id == chat_template.pk
    return {"tokenizer": tokenizer.name if tokenizer else "", "chat_template": "" if own else chat_template.text}


@dataclass(frozen=True)
class Subject:
    """A run's chat template in the run's project, with the tools and kwargs of one of its requests."""

    run: Run
    chat_template: ChatTemplate
    tools: list[Any] = field(default_factory=list)
    kwargs: dict[str, Any] = field(default_factory=dict)

    def check(self) -> TemplateCheck | None:
        """The check of exactly this question, if it exists, without its report."""
        question = template_checks.question_of(self.tools, self.kwargs)
        code = template_checks.code_of(self.run.project, self.run.tokenizer, self.chat_template, question)
        return find_check(code, report=False)

    def initial(self) -> dict[str, Any]:
        """The initial values of the form for this question."""
        return {
            **filled_in(self.run.tokenizer, self.chat_template),
            "tools": json.dumps(self.tools, indent=1, ensure_ascii=False) if self.tools else "",
            "kwargs": json.dumps(self.kwargs, ensure_ascii=False) if self.kwargs else "",
        }


def subject(access: Access, params: QueryDict) -> Subject | None:
    """``?run=`` asks about the first request of a run, ``?trajectory=&step=`` about a step; else None.

    With ``rows=1`` the template is that of the run's rows. None also for what may not be seen.
    """
    code, run_code = (params.get(name, "").replace("\0", "")[:64] for name in ("trajectory", "run"))
    if not code and not run_code:
        return None
    request = find_request(access, code, run_code, whole_number(params.get("step")) or 0)
    if request is None:
        return None
    run, step = request
    chat_template = run.rows_chat_template if params.get("rows") else run.chat_template
    if step is not None and step.chat_template_sha256 and not params.get("rows"):
        chat_template = find_chat_template(run.project, step.chat_template_sha256) or chat_template
    if chat_template is None:
        return None
    kwargs = _value(step.template_kwargs if step else None, dict) or run.settings.get("template_kwargs") or {}
    return Subject(run, chat_template, _value(step.tools if step else None, list), kwargs)


def _value(content: Content | None, kind: type[list[Any]] | type[dict[str, Any]]) -> Any:
    """A stored JSON value if it has that type and the form accepts it; else an empty value of the type."""
    if content is None or len(content.body) > MAX_JSON_CHARACTERS:
        return kind()
    value: Any = json.loads(content.body)
    fits = isinstance(value, kind) and (kind is dict or all(isinstance(item, dict) for item in value))
    return value if fits else kind()


def failing_probe(cells: Mapping[str, Any] | None, probe: str) -> str:
    """The probe that shows the fault. When the named probe passes, it is the first of its purpose that fails."""
    probes = (cells or {}).get("probes", {})
    probe_asked = probes.get(probe)
    if probe_asked is None or probe_asked["status"] == "broken":
        return probe
    for name, other_probe in probes.items():
        if (
            other_probe["purpose"] == probe_asked["purpose"]
            and other_probe["status"] == "broken"
            and other_probe["decisive"]
        ):
            return str(name)
    return probe
