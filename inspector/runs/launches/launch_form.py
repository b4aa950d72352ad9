"""The form of a launch, filled in with defaults, an earlier run, or the chat template of a check."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import Field, asdict, dataclass, field, fields
from typing import Any, get_args

from django import forms

from inspector.chat_templates.check_forms import JsonField
from inspector.web.forms import PlainForm, TemplateFileField, code_area
from inspector.web.twins import Page
from rollout_inspector.diagnose.full_render import COMPARE
from rollout_inspector.streams.strategies import STRATEGIES
from rollout_inspector.text.chat_templates import is_renderer
from rollouts.jobs.launch import LaunchSettings, served_models
from rollouts.jobs.template_checks import repairs_of
from rollouts.sampling.engines import engine_spec
from rollouts.sampling.environments import ENVIRONMENTS, FAMILY_OF, PromptsRejected, Task, read_prompts
from rollouts.store.chat_templates.chat_templates import (
    chat_template_labels, find_chat_template, newest_chat_templates, register_chat_template
)
from rollouts.store.chat_templates.template_checks import find_check
from rollouts.store.models import Project, Run
from rollouts.store.people.access import Access
from rollouts.store.runs.runs import find_run


@dataclass(frozen=True)
class NewRunPage(Page):
    """The form of a new run."""

    project: str
    """Code of the project that takes the run, unless the form names another one."""
    errors: dict[str, list[str]]
    """Field -> what is wrong with it; empty before a POST."""
    fields: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Of a launch: each field with its default, its help and its choices, so that a script can fill the form in."""
    notices: list[str] = field(default_factory=list)
    """Of a launch: where the form's values come from, and what in the address leads nowhere."""
    tokenizers: list[str] = field(default_factory=list)
    """Of an import: names of the tokenizers of the project."""
    upload_max_bytes: int | None = None
    """Of an import: the most bytes of one request."""


MAX_PROBLEMS = 10
MAX_TEMPLATES = 200  # The newest chat templates are offered; the address can name any other.
TEMPLATES = ("chat_template", "rows_chat_template")


def _choices(names: Any) -> list[tuple[str, str]]:
    return [(name, name.replace("_", " ")) for name in names]


def strategy_choices() -> list[tuple[str, str]]:
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
    words: dict[str, Any] = {"label": label, "help_text": "Jinja text, or renderer:NAME."}
    return forms.CharField(required=False, strip=False, max_length=1 << 20, widget=code_area(4), **words)


class NewRunForm(PlainForm):
    """The settings of a launch, and what a browser sends beside them. Sent unchanged, it makes a run that works."""

    name = forms.CharField(
        max_length=200,
        required=False,
        help_text="Optional. Left empty, the run is called after its model and environment.",
    )
    prompts_file = forms.FileField(
        required=False,
        label="File of prompts",
        help_text="For the environment “prompts”: JSON Lines with “messages”, where wanted “answer” and “tools”.",
    )
    chat_template_text = _pasted("… or paste one for the prompts")
    chat_template_file = TemplateFileField(label="… or upload one for the prompts", help_text="A .jinja file.")
    chat_template_label = forms.CharField(required=False, max_length=300, widget=forms.HiddenInput)
    rows_chat_template_text = _pasted("… or paste one for the rows")
    rows_chat_template_file = TemplateFileField(label="… or upload one for the rows", help_text="A .jinja file.")
    rows_chat_template_label = forms.CharField(required=False, max_length=300, widget=forms.HiddenInput)

    def __init__(
        self, project: Project, data: Any = None, files: Any = None, initial: Mapping[str, Any] | None = None
    ) -> None:
        self.project = project
        self._defaults = asdict(LaunchSettings())
        self._defaults |= {"stop": "", "template_kwargs": ""}
        super().__init__(data, files, initial={**self._defaults, **(initial or {})})
        for name, choices in (
            ("model", [(model, model) for model in served_models()]),
            ("strategy", strategy_choices()),
            ("environment", _environments()),
            ("compare", [(mode, f"{mode.replace('_', ' ')}: {words}") for mode, words in COMPARE.items()]),
        ):
            self._field(name).choices = choices
        self._offer_templates()

    def _field(self, name: str) -> forms.ChoiceField:
        field = self.fields[name]
        assert isinstance(field, forms.ChoiceField)
        return field

    def _offer_templates(self) -> None:
        newest = newest_chat_templates(self.project, MAX_TEMPLATES)
        offered = {template.chat_template_id: template.label for template in newest}
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
        sentences = []
        for name, model in served_models().items():
            spec = engine_spec(model.engine)
            most = f"At most {spec.most_alternatives} for each token" if spec.most_alternatives else "None"
            entropy = ", and the entropy." if spec.knows_entropy else "; the entropy is not known."
            sentences.append((name, most + (entropy if spec.most_alternatives else ".")))
        return sentences

    def opens_templates(self) -> bool:
        """Whether the part about chat templates has values or errors, and so is shown open."""
        names = [f"{name}{part}" for name in TEMPLATES for part in ("", "_text", "_file")] + ["template_kwargs"]
        return any(name in self.errors or self[name].value() for name in names)

    def opens_more(self) -> bool:
        """Whether a folded field has an error or another value than its default, and so is shown open."""
        unfolded = {"model", "strategy", "environment", "prompts", "template_kwargs"}
        names = [name for name in self.fields if name not in unfolded and not name.startswith(TEMPLATES)]
        return any(name in self.errors or self[name].value() not in ("", self._defaults.get(name)) for name in names)

    def clean_prompts_file(self) -> list[Task]:
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
        for name, default in asdict(LaunchSettings()).items():
            if cleaned.get(name) in (None, ""):
                cleaned[name] = default
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

    def launch_settings(self) -> LaunchSettings:
        """The launch that a valid form asks for. New templates are registered."""
        values = dict(self.cleaned_data)
        for name in TEMPLATES:
            if new := self.cleaned_data.get(f"{name}_new"):
                text, label = new
                is_named = is_renderer(text)
                values[name] = text.strip() if is_named else register_chat_template(text, label, self.project).sha256
        return LaunchSettings.of(values)

    def add_problems(self, problems: dict[str, str]) -> None:
        """Put the errors of the launch beside their fields."""
        for name, sentence in problems.items():
            self.add_error(name if name in self.fields else None, sentence)


def setting_field(setting: Field[Any]) -> forms.Field:
    """The input of a setting. The choices of a text are filled in when the form is made."""
    facts = setting.metadata
    words = {"label": facts["label"], "help_text": facts["help"], "required": facts.get("required", False)}
    if "least" in facts:
        number = {**words, "min_value": facts["least"], "max_value": facts["most"]}
        if float not in (setting.type, *get_args(setting.type)):
            return forms.IntegerField(**number)
        return forms.FloatField(**number, widget=forms.NumberInput(attrs={"step": "any"}))
    if setting.name == "stop":
        words["help_text"] += " One a line; \\n stands for a line break."
        return forms.CharField(**words, strip=False, max_length=4000, widget=code_area(2))
    if setting.name == "template_kwargs":
        words.pop("required")
        return JsonField(dict, '{"enable_thinking": false}', **words, widget=code_area(2))
    if setting.type is bool:
        return forms.BooleanField(**words)
    return forms.ChoiceField(**words)


NewRunForm.base_fields |= {
    setting.name: setting_field(setting) for setting in fields(LaunchSettings) if setting.name != "engine"
}


def project_of_run(access: Access, code: str) -> Project | None:
    """The project of a run that may be seen; None without such a run. At most one query."""
    run = find_run(templates=True, code=code[:64].replace("\0", "")) if code else None
    return run.project if run is not None and access.role_in(run.project_id) is not None else None


def filled_in(access: Access, project: Project, query: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """Initial values from an address, and sentences about parameters that have no effect. ``?again=<run>`` takes a
    run's settings; ``?chat_template=<sha256 or check>`` (or ``rows_chat_template=``) chooses a template, with
    ``&repaired=repair`` (or ``wider``) the repaired one of that check."""
    initial: dict[str, Any] = {}
    notices: list[str] = []
    params = {name: query.get(name, "")[:64].replace("\0", "") for name in ("again", *TEMPLATES, "repaired")}
    if params["again"]:
        run = find_run(code=params["again"], kind=Run.Kind.LAUNCH)
        if run is None or access.role_in(run.project_id) is None:
            notices.append("There is no launched run with this code, so the form has its usual values.")
        else:
            initial, notices = _of_run(run, project)
    for name in TEMPLATES:
        if params[name]:
            template = _template(access, project, name, params[name], params["repaired"])
            if template is None:
                notices.append("There is no such chat template here. Choose one of the list, or paste it.")
            else:
                initial |= template
                notices.append("A chat template is chosen below.")
    return initial, notices


def _of_run(run: Run, project: Project) -> tuple[dict[str, Any], list[str]]:
    initial = {key: value for key, value in run.settings.items() if key in NewRunForm.base_fields}
    stops = initial.get("stop") or []
    initial["stop"] = "\n".join(str(stop).replace("\n", "\\n").replace("\t", "\\t") for stop in stops)
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
    repair = repairs_of(check.report or {}).get(repaired)
    if repair is None:
        return None
    # The label holds as long as nobody changes the text.
    label = f"{_sha256(repair['template'])} {check.template_name}, repaired"
    return {name: "", f"{name}_text": repair["template"], f"{name}_label": label}


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()
