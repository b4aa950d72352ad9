"""A chat-template check as pages and the API show it, and the question that follows from a run or a finding."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Self

from django.http import QueryDict
from django.urls import reverse

from inspector.chat_templates.check_forms import MAX_JSON_CHARACTERS
from inspector.web.twins import Page, from_columns, whole_number
from rollout_inspector.text.chat_templates.probes.checks import TITO_POST
from rollout_inspector.text.chat_templates.probes.report import CheckStatus, Purpose
from rollouts.jobs import template_checks
from rollouts.store.chat_templates.chat_templates import find_chat_template
from rollouts.store.chat_templates.template_checks import find_check, find_request
from rollouts.store.jobs.jobs import is_active
from rollouts.store.models import ChatTemplate, Content, Run, TemplateCheck, Tokenizer
from rollouts.store.people.access import Access


@dataclass(frozen=True)
class CheckValues(Page):
    """A chat-template check as pages and the API show it; as a line of a list without its report."""

    code: str
    """Names the check in addresses; follows from its question."""
    tokenizer: str | None
    """Name of its tokenizer; null = characters are compared."""
    chat_template: str
    """What the chat template is called."""
    chat_template_sha256: str
    """Hash of the chat template."""
    status: str
    """``done`` as soon as the verdict is there, although the search for a repair may go on."""
    error: str
    """Why it failed; empty otherwise."""
    created_at: datetime
    """When it was asked for."""
    prefix_preserving: bool | None
    """Whether appending a tool result leaves what was rendered before; null = not known."""
    void: bool
    """Nothing changes only because nothing is rendered."""
    broken_for_tools: int
    """Decisive probes of appended tool results that are broken."""
    own_arguments: bool
    """It asked with tools, template arguments or a conversation."""
    project: str | None
    """Name of its project, for a user who sees several."""
    question: dict[str, Any]
    """The tools, template arguments and conversation that the check asked with."""
    under_way: bool
    """A worker has not answered yet."""
    lost: bool
    """No worker has answered for minutes."""
    progress: str
    """How far the search for a repair is; empty = none is under way."""
    version: int
    """Of the checks that answered it."""
    project_code: str = ""
    """Code of its project; empty on a page, which names it."""
    report: dict[str, Any] | None = None
    """Of the page of the check: what ``rollout_inspector.text.chat_templates`` found; null until a worker answered."""
    strategies: dict[str, Any] | None = None
    """Of the page of its conversation: what each strategy puts between the completions; null until a worker answered.
    """

    @classmethod
    def of(cls, check: TemplateCheck, project: str | None, /, **more: Any) -> Self:
        """A check that was loaded with its tokenizer and template, and what a page shows of its report."""
        cells = check.cells or {}
        under_way = is_active(check)
        probes = cells.get("probes", {})
        return from_columns(
            cls,
            check,
            tokenizer=check.tokenizer.name if check.tokenizer else None,
            chat_template=check.template_name,
            chat_template_sha256=check.chat_template_id,
            prefix_preserving=cells.get("prefix_preserving"),
            void=bool(probes.get(TITO_POST, {}).get("void")),
            broken_for_tools=sum(
                probe["purpose"] == Purpose.TOOLS and probe["decisive"] and probe["status"] == CheckStatus.BROKEN
                for probe in probes.values()
            ),
            own_arguments=bool(check.question),
            project=project,
            under_way=under_way,
            lost=under_way and template_checks.is_stale(check),
            **more,
        )


    @property
    def url(self) -> str:
        """Address of its page."""
        return reverse("check", args=[self.code])

    @property
    def verdicts(self) -> dict[str, str]:
        """Purpose -> what the template is worth for it; empty until the verdict is there."""
        return self._found("verdicts", {})

    @property
    def probes(self) -> list[dict[str, Any]]:
        """Each probe with its outcome, its renders and the lines that decided."""
        return self._found("checks", [])

    @property
    def repair(self) -> dict[str, Any] | None:
        """The smallest verified change of the template, ``wider`` for the next one; null = none was found."""
        return self._found("repair", None)

    @property
    def repair_detail(self) -> str:
        """Why there is no repair, or what it does."""
        return self._found("repair_detail", "")

    @property
    def marks(self) -> dict[str, Any] | None:
        """The template with verified generation tags; null = none were found."""
        return self._found("marks", None)

    @property
    def marks_detail(self) -> str:
        """Why there are none."""
        return self._found("marks_detail", "")

    def _found(self, name: str, otherwise: Any) -> Any:
        return (self.report or {}).get(name) or otherwise


def filled_in(tokenizer: Tokenizer | None, chat_template: ChatTemplate) -> dict[str, str]:
    """The form's fields for a tokenizer and a template. The tokenizer's own template stays empty."""
    own = tokenizer is not None and tokenizer.chat_template_id == chat_template.pk
    return {"tokenizer": tokenizer.name if tokenizer else "", "chat_template": "" if own else chat_template.text}


def subject(access: Access, params: QueryDict) -> tuple[Run | None, TemplateCheck | None, dict[str, Any]]:
    """A run, the check of its question where it exists, without its report, and the initial values of the form.
    ``?run=`` asks about the first request of a run, ``?trajectory=&step=`` about a step; without them there is no run,
    as for what may not be seen. With ``rows=1`` the template is that of the run's rows."""
    code, run_code = (params.get(name, "").replace("\0", "")[:64] for name in ("trajectory", "run"))
    request = find_request(access, code, run_code, whole_number(params.get("step")) or 0) if code or run_code else None
    if request is None:
        return None, None, {}
    run, step = request
    chat_template = run.rows_chat_template if params.get("rows") else run.chat_template
    if step is not None and step.chat_template_sha256 and not params.get("rows"):
        chat_template = find_chat_template(run.project, step.chat_template_sha256) or chat_template
    if chat_template is None:
        return None, None, {}
    kwargs = _value(step.template_kwargs if step else None, dict) or run.settings.get("template_kwargs") or {}
    tools = _value(step.tools if step else None, list)
    question = template_checks.question_of(tools, kwargs)
    check_code = template_checks.code_of(run.project, run.tokenizer, chat_template.sha256, question)
    return run, find_check(check_code, report=False), {
        **filled_in(run.tokenizer, chat_template),
        "tools": json.dumps(tools, indent=1, ensure_ascii=False) if tools else "",
        "kwargs": json.dumps(kwargs, ensure_ascii=False) if kwargs else "",
    }


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
