"""The form of a launch, filled in with defaults, an earlier run, or the chat template of a check."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from django import forms

from inspector.chat_templates.check_forms import JsonField
from inspector.chat_templates.repair_page import named
from inspector.web.forms import PlainForm, TemplateFileField, code_area
from rollout_inspector.diagnose.full_render import COMPARE
from rollout_inspector.formats.training_step import MAX_STEP
from rollout_inspector.streams.alternatives import MAX_ALTERNATIVES
from rollout_inspector.streams.strategies import STRATEGIES
from rollouts.jobs.launch import LaunchSettings, served_models
from rollouts.sampling.engines import engine_spec
from rollouts.sampling.environments import ENVIRONMENTS, FAMILY_OF, Prompt, PromptsRejected, read_prompts
from rollouts.store.chat_templates.chat_templates import (
    chat_template_labels,
    find_chat_template,
    newest_chat_templates,
    register_chat_template,
)
from rollouts.store.chat_templates.template_checks import find_check
from rollouts.store.models import Project, Run
from rollouts.store.people.access import Access
from rollouts.store.runs.runs import find_run

MAX_PROBLEMS = 10
MAX_TEMPLATES = 200
"""The newest chat templates are offered; the address can name any other."""
TEMPLATES = ("chat_template", "rows_chat_template")


def _choices(names: Any) -> list[tuple[str, str]]:
    return [(name, name.replace("_", " ")) for name in names]


def _strategies() -> list[tuple[str, str]]:
    return [
        (slug, f"{words} (not installed)" if STRATEGIES[slug].missing() else words)
        for slug, words in _choices(STRATEGIES)
    ]


def _environments() -> list[Any]:
    """Choices: the environments without a heading, then each heading with its own."""
    plain = [(name, name) for name in ENVIRONMENTS if name not in FAMILY_OF]
    families: dict[str, list[tuple[str, str]]] = {}
    for name, heading in FAMILY_OF.items():
        families.setdefault(heading, []).append((name, name.partition(":")[2].replace("_", " ")))
    return [*plain, *families.items()]


def _pasted(label: str) -> forms.CharField:
    return forms.CharField(required=False, strip=False, max_length=1 << 20, label=label, widget=code_area(4))


class NewRunForm(PlainForm):
    """The settings of a launch. Sent unchanged, the form makes a run that works."""

    name = forms.CharField(
        max_length=200,
        required=False,
        help_text="Optional. Left empty, the run is called after its model and environment.",
    )
    model = forms.ChoiceField(help_text="Served by a worker of its own.")
    strategy = forms.ChoiceField(help_text="How observations become the next prompt.")
    environment = forms.ChoiceField(help_text="Makes the tasks, answers tool calls, scores.")
    prompts_file = forms.FileField(
        required=False,
        label="File of prompts",
        help_text="For the environment “prompts”: JSON Lines with “messages”, where wanted “answer” and “tools”.",
    )
    prompts = forms.IntegerField(label="Prompts", min_value=1, max_value=20_000, help_text="Different tasks.")
    group = forms.IntegerField(label="Group size", min_value=1, max_value=1024, help_text="Trajectories per prompt.")
    max_turns = forms.IntegerField(label="Turns, at most", min_value=1, max_value=200, help_text="Engine calls.")
    environment_seconds = forms.FloatField(
        required=False,
        label="Seconds per tool call",
        min_value=0,
        max_value=3600,
        help_text="At most. An environment that takes longer fails the trajectory.",
    )
    max_tokens = forms.IntegerField(
        label="Tokens per turn, at most",
        min_value=1,
        max_value=131_072,
        help_text="A cut completion is kept as it is.",
    )
    temperature = forms.FloatField(min_value=0, max_value=10, help_text="0 always takes the likeliest token.")
    top_p = forms.FloatField(label="top_p", min_value=0, max_value=1, help_text="1 keeps every token.")
    top_k = forms.IntegerField(
        required=False, label="top_k", min_value=0, max_value=1_000_000, help_text="0 keeps every token."
    )
    min_p = forms.FloatField(
        required=False,
        label="min_p",
        min_value=0,
        max_value=1,
        help_text="Drops what is less likely than this share of the likeliest; 0 drops nothing.",
    )
    stop = forms.CharField(
        required=False,
        strip=False,
        max_length=4000,
        label="Stop texts",
        widget=code_area(2),
        help_text="Optional, one a line, beside the model's own stop tokens; \\n stands for a line break.",
    )
    alternatives = forms.IntegerField(
        required=False,
        label="Alternatives per token",
        min_value=0,
        max_value=MAX_ALTERNATIVES,
        help_text="Keeps so many of the likeliest tokens at each place, for the card of a token and two lenses.",
    )
    seed = forms.IntegerField(
        required=False, min_value=0, max_value=2**31 - 1, help_text="Optional. Left empty, one is drawn and kept."
    )
    training_step = forms.IntegerField(
        required=False,
        min_value=0,
        max_value=MAX_STEP,
        label="Training step",
        help_text="Optional: the step of your trainer that these trajectories are for.",
    )
    chat_template = forms.ChoiceField(required=False, label="For the prompts")
    chat_template_text = _pasted("… or paste one for the prompts")
    chat_template_file = TemplateFileField(label="… or upload one for the prompts", help_text="A .jinja file.")
    chat_template_label = forms.CharField(required=False, max_length=300, widget=forms.HiddenInput)
    rows_chat_template = forms.ChoiceField(
        required=False,
        label="For the training rows",
        help_text="The model's answers stay as sampled; what stands between them is this template's.",
    )
    rows_chat_template_text = _pasted("… or paste one for the rows")
    rows_chat_template_file = TemplateFileField(label="… or upload one for the rows", help_text="A .jinja file.")
    rows_chat_template_label = forms.CharField(required=False, max_length=300, widget=forms.HiddenInput)
    template_kwargs = JsonField(
        dict,
        '{"enable_thinking": false}',
        label="Template arguments",
        widget=code_area(2),
        help_text="Passed to every render, as JSON. Optional.",
    )
    compare = forms.ChoiceField(
        required=False,
        label="Compare with a full render",
        choices=[(mode, f"{mode.replace('_', ' ')}: {words}") for mode, words in COMPARE.items()],
        help_text="At a trajectory's end; a difference becomes a finding.",
    )

    def __init__(
        self, project: Project, data: Any = None, files: Any = None, initial: Mapping[str, Any] | None = None
    ) -> None:
        self.project = project
        self._defaults = asdict(LaunchSettings())
        self._defaults |= {"stop": "", "template_kwargs": ""}
        super().__init__(data, files, initial={**self._defaults, **(initial or {})})
        for name, choices in (
            ("model", [(one, one) for one in served_models()]),
            ("strategy", _strategies()),
            ("environment", _environments()),
        ):
            self._field(name).choices = choices
        for name in ("temperature", "top_p", "min_p", "environment_seconds"):
            self.fields[name].widget.attrs["step"] = "any"
        self._offer_templates()

    def _field(self, name: str) -> forms.ChoiceField:
        field = self.fields[name]
        assert isinstance(field, forms.ChoiceField)
        return field

    def _offer_templates(self) -> None:
        newest = newest_chat_templates(self.project, MAX_TEMPLATES)
        offered = {one.chat_template_id: one.label for one in newest}
        chosen = {str(self[name].value() or "")[:64].replace("\0", "") for name in TEMPLATES}
        offered |= chat_template_labels(self.project, chosen - {""} - offered.keys())
        choices = [(key, f"{label or 'without a name'} ({key[:8]})") for key, label in offered.items()]
        self._field("chat_template").choices = [("", "The model's own"), *choices]
        self._field("rows_chat_template").choices = [("", "The same as for the prompts"), *choices]

    @staticmethod
    def strategies_explained() -> list[tuple[str, str]]:
        """Each strategy by name, in one sentence."""
        return [(words, STRATEGIES[slug].about) for slug, words in _choices(STRATEGIES)]

    @staticmethod
    def seeds_explained() -> list[tuple[str, str]]:
        """For each served model, how far a seed repeats its output."""
        return [(name, engine_spec(model.engine).seed_note) for name, model in served_models().items()]

    @staticmethod
    def alternatives_explained() -> list[tuple[str, str]]:
        """For each served model, how many alternatives its engine returns, and whether it knows the entropy."""
        found = []
        for name, model in served_models().items():
            spec = engine_spec(model.engine)
            most = f"At most {spec.most_alternatives} for each token" if spec.most_alternatives else "None"
            entropy = ", and the entropy." if spec.knows_entropy else "; the entropy is not known."
            found.append((name, most + (entropy if spec.most_alternatives else ".")))
        return found

    def opens_templates(self) -> bool:
        """Whether the part about chat templates has values or errors, and so is shown open."""
        names = [f"{name}{part}" for name in TEMPLATES for part in ("", "_text", "_file")] + ["template_kwargs"]
        return any(name in self.errors or self[name].value() for name in names)

    def opens_more(self) -> bool:
        """Whether a folded field has an error or another value than its default, and so is shown open."""
        names = self._folded()
        return any(name in self.errors or self[name].value() not in ("", self._defaults.get(name)) for name in names)

    def _folded(self) -> list[str]:
        """The fields under "Change something"."""
        shown = {"model", "strategy", "environment", "prompts", "template_kwargs"}
        return [name for name in self.fields if name not in shown and not name.startswith(TEMPLATES)]

    def clean_prompts_file(self) -> list[Prompt]:
        upload = self.cleaned_data.get("prompts_file")
        if not upload:
            return []
        try:
            return read_prompts(upload.file)
        except PromptsRejected as refusal:
            raise forms.ValidationError([str(problem) for problem in refusal.problems[:MAX_PROBLEMS]]) from refusal

    def clean_stop(self) -> list[str]:
        lines: str = self.cleaned_data["stop"]
        return [line.replace("\\n", "\n").replace("\\t", "\t") for line in lines.splitlines() if line]

    def clean_template_kwargs(self) -> dict[str, Any]:
        return self.cleaned_data["template_kwargs"] or {}

    def clean(self) -> dict[str, Any]:
        cleaned = super().clean() or {}
        for name in ("top_k", "min_p", "alternatives", "environment_seconds", "compare"):
            if cleaned.get(name) in (None, ""):
                cleaned[name] = self._defaults[name]
        for name in TEMPLATES:
            self._one_template(name, cleaned)
        return cleaned

    def _one_template(self, name: str, cleaned: dict[str, Any]) -> None:
        """Put the text of a pasted or uploaded template under ``NAME_new``, with a label."""
        pasted, uploaded = (cleaned.get(f"{name}_text") or "").strip(), cleaned.get(f"{name}_file")
        parts = [part for part, value in (("", cleaned.get(name)), ("_text", pasted), ("_file", uploaded)) if value]
        if len(parts) > 1:
            self.add_error(name + parts[-1], "Choose, paste or upload one template, not several.")
        elif pasted:
            # A browser sends CRLF; the file the template came from has LF, and its hash is its identity.
            text = cleaned[f"{name}_text"].replace("\r\n", "\n")
            sha256, _, label = (cleaned.get(f"{name}_label") or "").partition(" ")
            cleaned[f"{name}_new"] = (text, label if sha256 == _sha256(text) else "pasted for a run")
        elif uploaded:
            cleaned[f"{name}_new"] = (uploaded, str(self.files[f"{name}_file"]))

    def launch_form(self) -> LaunchSettings:
        """The launch that a valid form asks for. New templates are registered."""
        known = {field.name for field in fields(LaunchSettings)}
        values = {name: value for name, value in self.cleaned_data.items() if name in known}
        for name in TEMPLATES:
            if new := self.cleaned_data.get(f"{name}_new"):
                values[name] = _registered(self.project, *new)
        return LaunchSettings(**values)

    def add_problems(self, problems: dict[str, str]) -> None:
        """Put the errors of the launch beside their fields."""
        for name, sentence in problems.items():
            self.add_error(name if name in self.fields else None, sentence)


def _registered(project: Project, text: str, label: str) -> str:
    return register_chat_template(text, label, project).sha256


def form_labels() -> dict[str, str]:
    """Setting -> what the form calls it."""
    return {name: str(field.label) for name, field in NewRunForm.base_fields.items() if field.label}


def project_of_run(access: Access, code: str) -> Project | None:
    """The project of a run that may be seen; None without such a run. At most one query."""
    run = find_run(templates=True, code=code[:64].replace("\0", "")) if code else None
    return run.project if run is not None and access.role_in(run.project_id) is not None else None


def filled_in(access: Access, project: Project, query: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """Initial values from an address, and sentences about parameters that have no effect.

    ``?again=<run>`` takes a run's settings; ``?chat_template=<sha256 or check>`` (or ``rows_chat_template=``) chooses a
    template, with ``&repaired=repair`` (or ``wider``) the repaired one of that check.
    """
    initial: dict[str, Any] = {}
    notices: list[str] = []
    asked = {name: query.get(name, "")[:64].replace("\0", "") for name in ("again", *TEMPLATES, "repaired")}
    if asked["again"]:
        run = find_run(code=asked["again"], kind=Run.Kind.LAUNCH)
        if run is None or access.role_in(run.project_id) is None:
            notices.append("There is no launched run with this code, so the form has its usual values.")
        else:
            initial, notices = _of_run(run, project)
    for name in TEMPLATES:
        if asked[name]:
            found = _template(access, project, name, asked[name], asked["repaired"])
            if found is None:
                notices.append("There is no such chat template here. Choose one of the list, or paste it.")
            else:
                initial |= found
                notices.append("A chat template is chosen below.")
    return initial, notices


def _of_run(run: Run, project: Project) -> tuple[dict[str, Any], list[str]]:
    initial = {key: value for key, value in run.settings.items() if key in NewRunForm.base_fields}
    stops = initial.get("stop") or []
    initial["stop"] = "\n".join(str(one).replace("\n", "\\n").replace("\t", "\\t") for one in stops)
    initial["template_kwargs"] = initial.get("template_kwargs") or ""
    initial["name"] = run.name
    own = run.tokenizer.chat_template_id if run.tokenizer else None
    initial["chat_template"] = "" if run.chat_template_id in (None, own) else run.chat_template_id
    initial["rows_chat_template"] = run.rows_chat_template_id or ""
    for name in TEMPLATES:
        if initial[name] and run.project_id != project.pk:  # the form offers templates of its own project alone
            initial |= {name: "", f"{name}_text": getattr(run, name).text}
    notices = ["These are the settings of an earlier run, its seed included."]
    if run.environment == "prompts":
        notices.append("Its prompts came from a file: choose that file again.")
    return initial, notices


def _template(access: Access, project: Project, name: str, asked: str, repaired: str) -> dict[str, Any] | None:
    """The initial values that choose a template; None when the template does not exist."""
    if len(asked) == 64:
        return {name: asked, f"{name}_text": ""} if find_chat_template(project, asked) else None
    check = find_check(asked)
    if check is None or access.role_in(check.project_id) is None:
        return None
    if not repaired and check.project_id != project.pk:  # the form offers templates of its own project alone
        label = f"{check.chat_template_id} {check.template_name}"
        return {name: "", f"{name}_text": check.chat_template.text, f"{name}_label": label}
    if not repaired:
        return {name: check.chat_template_id, f"{name}_text": ""}
    repair = named(check.report or {}).get(repaired)
    if repair is None:
        return None
    # The label holds as long as nobody changes the text.
    label = f"{_sha256(repair['template'])} {check.template_name}, repaired"
    return {name: "", f"{name}_text": repair["template"], f"{name}_label": label}


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()
