"""Launching a run: checks the settings, stores the run with its trajectories, and sends the run to a worker."""

import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from django.conf import settings
from django.db import transaction

from rollout_inspector.diagnose.full_render import COMPARE
from rollout_inspector.formats.containers.json_text import json_problem
from rollout_inspector.formats.training_step import MAX_STEP
from rollout_inspector.refusal import Refusal
from rollout_inspector.streams.alternatives import MAX_ALTERNATIVES
from rollout_inspector.streams.batches import batched
from rollout_inspector.streams.interfaces import Conversation, RenderFailed
from rollout_inspector.streams.strategies import STRATEGIES
from rollout_inspector.text import chat_templates, tokenizers
from rollout_inspector.text.tokenizers import TokenizerUnusable
from rollouts.jobs.broker import RUN_ROLLOUTS, engine_queue, send_task
from rollouts.sampling.engines import EngineError, EngineSpec, engine_spec, offered_engines
from rollouts.sampling.engines.http import check_host
from rollouts.sampling.environments import ENVIRONMENTS, Task, environment
from rollouts.store.chat_templates.chat_templates import find_chat_template, register_chat_template
from rollouts.store.chat_templates.tokenizers import (
    files_of, is_stored, load_tokenizer, register_tokenizer, registered_from
)
from rollouts.store.database import reload
from rollouts.store.jobs.jobs import is_active, is_silent
from rollouts.store.models import ChatTemplate, Project, Run, StoredTrajectory, Tokenizer
from rollouts.store.people.activity_log import Action, record
from rollouts.store.people.members import key_of
from rollouts.store.runs.forks import add_fork
from rollouts.store.runs.runs import create_run, fail_run
from rollouts.store.text import without_paths
from rollouts.store.trajectories.launched_trajectories import add_queued_trajectories, resume_run

MAX_TRAJECTORIES = 100_000
MAX_STOPS, MAX_STOP_LENGTH = 16, 200
MAX_KWARGS_LENGTH = 20_000
TASKS_PER_INSERT = 500


@dataclass(frozen=True)
class ServedModel:
    """A model that can be launched: one entry of ``settings.INSPECTOR_MODELS``."""

    name: str
    engine: str
    path: str  # Folder with the weights and the tokenizer; for an engine that is a server, the tokenizer alone.
    options: dict[str, Any] = field(default_factory=dict)
    """Of the engine: ``max_live``, ``max_model_len``, ...; of a server also ``url`` and ``model``."""

    @property
    def queue(self) -> str:
        return engine_queue(self.name)

    def faults(self, engine: str = "") -> str:
        """Why no engine can be built of this entry, as a sentence; empty = no fault was found."""
        engine = engine or self.engine
        if engine not in offered_engines():
            return f"There is no engine named {engine!r}; choose one of {_listed(offered_engines())}."
        if engine_spec(engine).is_server:
            if not self.options.get("url"):
                return (
                    f"The engine {engine} asks a server, and the options of the model {self.name!r} name none: set "
                    '{"url": "http://HOST:PORT"} in INSPECTOR_MODELS.'
                )
            try:
                check_host(str(self.options["url"]), settings.ENGINE_HOSTS)
            except EngineError as error:
                return str(error)
        return ""

    def engine_arguments(self, engine: str) -> tuple[str, dict[str, Any]]:
        """The arguments of ``build_engine``: the folder of the model or the address of its server, and the options."""
        options = dict(self.options)
        url = str(options.pop("url", ""))
        options.pop("tool_call_parser", None)
        if not engine_spec(engine).is_server:
            return self.path, options
        # A server does not tell how many ids its model has. The tokenizer does.
        vocab_size = options.pop("vocab_size", 0) or tokenizers.load(self.path).vocab_size
        return url, {**options, "vocab_size": vocab_size, "allowed_hosts": settings.ENGINE_HOSTS}


def served_models() -> dict[str, ServedModel]:
    """The models that this installation serves, by name."""
    entries: dict[str, dict[str, Any]] = settings.INSPECTOR_MODELS
    return {
        name: ServedModel(name, entry["engine"], str(entry["path"]), dict(entry.get("options", {})))
        for name, entry in entries.items()
    }


def setting(label: str, default: Any, help: str = "", **facts: Any) -> Any:
    """A field of ``LaunchSettings`` with what the form, the command and the API say of it.

    ``facts``: the bounds ``least`` and ``most``, where ``is_above`` excludes ``least`` itself; ``fault``, the sentence
    about a value outside them; ``required``, whether a form refuses an empty input; ``description`` for the API, where
    it takes something else than the form.
    """
    metadata = {"label": label, "help": help, "description": f"{label}. {help}".strip(), **facts}
    if isinstance(default, list | dict):
        return field(default_factory=type(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class LaunchSettings:
    """The settings of a launch. With the defaults a run works. The form, the command ``launch_rollouts`` and the API
    are made from these fields."""

    model: str = setting("Model", "demo", "Served by a worker of its own.", required=True)
    engine: str = setting("Engine", "", "Empty = the one that the model is served with.")
    environment: str = setting(
        "Environment", "calculator", "Makes the tasks, answers tool calls, scores.", required=True
    )
    strategy: str = setting("Strategy", "tool_delta", "How observations become the next prompt.", required=True)
    prompts: int = setting("Prompts", 16, "Different tasks.", least=1, most=20_000, required=True)
    group: int = setting("Group size", 4, "Trajectories per prompt.", least=1, most=1024, required=True)
    temperature: float = setting(
        "Temperature", 1.0, "0 always takes the likeliest token.", least=0, most=10, required=True,
        fault="Choose a temperature from 0 (always the likeliest token) to 10.",
    )
    top_p: float = setting(
        "top_p", 1.0, "1 keeps every token.", least=0, most=1, is_above=True, required=True,
        fault="Choose a top_p above 0 and at most 1 (all tokens).",
    )
    top_k: int = setting("top_k", 0, "0 keeps every token.", least=0, most=1_000_000)
    min_p: float = setting(
        "min_p", 0.0, "Drops what is less likely than this share of the likeliest; 0 drops nothing.", least=0, most=1,
        fault="Choose a min_p from 0 (off) to 1.",
    )
    max_tokens: int = setting(
        "Tokens per turn, at most", 96, "A cut completion is kept as it is.", least=1, most=131_072, required=True
    )
    stop: list[str] = setting("Stop texts", [], "Optional, beside the model's own stop tokens.")  # noqa: RUF009
    max_turns: int = setting("Turns, at most", 6, "Engine calls.", least=1, most=200, required=True)
    alternatives: int = setting(
        "Alternatives per token", 0,
        "Keeps so many of the likeliest tokens at each place, for the card of a token and two lenses.",
        least=0, most=MAX_ALTERNATIVES,
    )
    seed: int | None = setting(
        "Seed", None, "Optional. Left empty, one is drawn and kept.", least=0, most=2**31 - 1,
        fault="Choose a seed from 0 to 2147483647, or leave it empty to have one drawn.",
    )
    training_step: int | None = setting(
        "Training step", None, "Optional: the step of your trainer that these trajectories are for.", least=0,
        most=MAX_STEP, fault=f"Choose a training step from 0 to {MAX_STEP}, or leave it empty.",
    )
    environment_seconds: float = setting(
        "Seconds per tool call", 30.0, "At most. An environment that takes longer fails the trajectory.", least=0,
        most=3600, is_above=True, fault="Choose a time limit above 0 and of at most 3600 seconds.",
    )
    chat_template: str = setting(
        "For the prompts", "", description="Hash of a registered one, or renderer:NAME; empty = the model's own."
    )
    rows_chat_template: str = setting(
        "For the training rows", "",
        "The model's answers stay as sampled; what stands between them is this template's.",
        description="The same for the template that the training rows are made with; empty = ``chat_template``.",
    )
    template_kwargs: dict[str, Any] = setting(  # noqa: RUF009
        "Template arguments", {}, "Passed to every render, as JSON. Optional.", description="Passed to every render."
    )
    compare: str = setting(
        "Compare with a full render", "ignore_whitespace", "At a trajectory's end; a difference becomes a finding."
    )

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """The settings among some values, such as those that are stored with a run."""
        return cls(**{setting.name: values[setting.name] for setting in fields(cls) if setting.name in values})

    def problems(self) -> dict[str, str]:
        """One sentence for each faulty field, by its name; empty = a run can be launched."""
        problems: dict[str, str] = {}
        models = served_models()
        if self.model not in models:
            problems["model"] = f"There is no model named {self.model!r}; choose one of {_listed(models)}."
        elif fault := models[self.model].faults(self.engine):
            problems["engine" if self.engine else "model"] = fault
        if self.environment not in ENVIRONMENTS:
            try:
                environment(self.environment)
            except Refusal as error:
                problems["environment"] = str(error)
        if self.strategy not in STRATEGIES:
            problems["strategy"] = f"There is no strategy named {self.strategy!r}; choose one of {_listed(STRATEGIES)}."
        elif lacking := STRATEGIES[self.strategy].missing():
            problems["strategy"] = lacking
        problems |= out_of_bounds(self)
        if "prompts" not in problems and "group" not in problems and self.prompts * self.group > MAX_TRAJECTORIES:
            problems["group"] = (
                f"{self.prompts} prompts of {self.group} make {self.prompts * self.group} trajectories; "
                f"one run holds at most {MAX_TRAJECTORIES}."
            )
        if "temperature" not in problems and (sentence := self._engine().temperature_problem(self.temperature)):
            problems["temperature"] = sentence
        if "alternatives" not in problems and (sentence := self._engine().alternatives_problem(self.alternatives)):
            problems["alternatives"] = sentence
        if self.compare not in COMPARE:
            problems["compare"] = f"There is no comparison named {self.compare!r}; choose one of {', '.join(COMPARE)}."
        stops = [text for text in self.stop if 0 < len(text) <= MAX_STOP_LENGTH and not json_problem(text)]
        if len(self.stop) > MAX_STOPS or len(stops) < len(self.stop):
            problems["stop"] = f"Name at most {MAX_STOPS} texts, each of 1 to {MAX_STOP_LENGTH} characters."
        if problem := json_problem(self.template_kwargs):
            problems["template_kwargs"] = f"This {problem}."
        elif len(json.dumps(self.template_kwargs)) > MAX_KWARGS_LENGTH:
            problems["template_kwargs"] = f"Write at most {MAX_KWARGS_LENGTH:,} characters."
        return problems

    def _engine(self) -> EngineSpec:
        model = served_models().get(self.model)
        return engine_spec(self.engine or (model.engine if model else ""))


def out_of_bounds(settings: Any) -> dict[str, str]:
    """One sentence for each number outside its bounds, by the name of its setting."""
    problems = {}
    for setting in fields(settings):
        name, facts, value = setting.name, setting.metadata, getattr(settings, setting.name)
        if "least" in facts and value is not None:
            is_enough = value > facts["least"] if facts.get("is_above") else value >= facts["least"]
            if not (is_enough and value <= facts["most"]):  # so that NaN is refused too
                problems[name] = facts.get("fault", f"Choose a number from {facts['least']} to {facts['most']}.")
    return problems


def setting_labels() -> dict[str, str]:
    """Setting -> what the form calls it."""
    return {setting.name: setting.metadata["label"] for setting in fields(LaunchSettings)}


class LaunchRefused(Refusal):
    """The settings cannot be launched; ``problems`` holds one sentence for each faulty field."""

    def __init__(self, problems: dict[str, str]) -> None:
        super().__init__(" ".join(f"{name}: {sentence}" for name, sentence in problems.items()))
        self.problems = problems


def launch(
    settings: LaunchSettings,
    name: str = "",
    user: Any = None,
    enqueue: bool = True,
    prompts: Sequence[Task] = (),
    project: Project | None = None,
    fork: tuple[Task, Mapping[str, Any]] | None = None,
) -> Run:
    """Store a run with all its trajectories queued, and send it to the worker of its model.

    ``prompts`` come from an uploaded file (``read_prompts``), for an environment that takes its tasks from a file.
    ``project``: None = the default one. ``fork``: the task of its trajectories, and the fields of its ``Fork``.
    Raises :class:`LaunchRefused`. When the broker does not answer, the run fails
    with the reason.
    """
    problems = settings.problems()
    if problems:
        raise LaunchRefused(problems)
    model = served_models()[settings.model]
    try:
        tokenizer = model_tokenizer(model, project)
    except TokenizerUnusable as error:
        sentence = without_paths(f"The tokenizer of {model.name} cannot be used: {error}")
        raise LaunchRefused({"model": sentence}) from error
    template = _chosen_template(project, settings.chat_template, "chat_template")
    rows_template = _chosen_template(project, settings.rows_chat_template, "rows_chat_template")
    if template is None:
        template = tokenizer.chat_template
    if template is None:
        sentence = f"The model {model.name} has no chat template, so no prompt can be rendered; choose one."
        raise LaunchRefused({"chat_template": sentence})
    rows_template = None if rows_template == template else rows_template
    seed = secrets.randbelow(2**31) if settings.seed is None else settings.seed
    try:
        tasks = [fork[0]] if fork else environment(settings.environment, prompts).tasks(settings.prompts, seed)
    except Refusal as error:
        raise LaunchRefused({"environment": str(error)}) from error
    for field_name, chosen in (("chat_template", template), ("rows_chat_template", rows_template)):
        if chosen is None or chat_templates.is_renderer(chosen.text):
            continue  # a worker alone runs installed code
        if chosen.sha256 != tokenizer.chat_template_id and fork is None:
            _try_template(field_name, tokenizer, chosen, tasks[0], settings.template_kwargs)
    with transaction.atomic():
        run = create_run(
            Run.Kind.LAUNCH,
            name or f"{settings.model} on {settings.environment}",
            user=user,
            project=project,
            model=settings.model,
            engine=settings.engine or model.engine,
            environment=settings.environment,
            strategy=settings.strategy,
            tokenizer=tokenizer,
            chat_template=template,
            rows_chat_template=rows_template,
            settings=asdict(settings) | {"seed": seed},
        )
        place = add_fork(run, **fork[1]) if fork else None
        for batch in batched(tasks, TASKS_PER_INSERT):
            places = [(task, member) for task in batch for member in range(settings.group)]
            add_queued_trajectories(run, [
                (
                    StoredTrajectory(
                        external_id=f"{task.index}-{member}", group=str(task.index),
                        seed=_seed(seed, task.index, member), training_step=settings.training_step,
                    ),
                    asdict(task),
                )
                for task, member in places
            ], place)
    record(Action.LAUNCHED, run)
    if enqueue:
        send_run(run)
    return run


def _chosen_template(project: Project | None, sha256: str, field: str) -> ChatTemplate | None:
    """The template with a hash that a project registered, or ``renderer:NAME``, which is registered; None for none.
    Raises :class:`LaunchRefused`."""
    if not sha256:
        return None
    if chat_templates.is_renderer(sha256):
        try:
            return register_chat_template(sha256, project=project)
        except Refusal as refusal:
            raise LaunchRefused({field: refusal.sentence}) from refusal
    template = find_chat_template(key_of(project), sha256[:64].replace("\0", ""))
    if template is None:
        sentence = f"No chat template with the hash {sha256[:12]}… is registered here. Choose another one, or paste it."
        raise LaunchRefused({field: sentence})
    return template


def _try_template(field: str, tokenizer: Tokenizer, template: ChatTemplate, task: Task, kwargs: dict[str, Any]) -> None:
    """Render the first prompt once, so that a template that cannot render it is refused before the launch."""
    try:
        renderer = chat_templates.renderer(load_tokenizer(tokenizer.files_sha256), template.text)
        renderer.render_text(Conversation(task.messages, task.tools, kwargs, True))
    except RenderFailed as error:
        raise LaunchRefused({field: f"This template cannot render the first prompt: {error}"}) from error


def can_resume(run: Run) -> bool:
    """Whether a launched run has unfinished trajectories and no worker: the run has ended, or is silent."""
    if run.kind != Run.Kind.LAUNCH or run.n_finished >= run.n_expected:
        return False
    return not is_active(run) or is_silent(run)


def resume(run: Run) -> int:
    """Send what is left of a stopped run. Returns the number of trajectories. Raises :class:`Refusal`."""
    if not can_resume(run):
        raise Refusal("This run is done, or a worker is at it: there is nothing to resume.")
    if run.model not in served_models():
        raise Refusal(f"This installation serves no model named {run.model!r}, so the run cannot go on here.")
    n = resume_run(run)
    send_run(run)
    return n


def send_run(run: Run) -> None:
    """Send the run to a worker of its model. When the broker does not answer, the run fails with a sentence."""
    if sentence := send_task(RUN_ROLLOUTS, run.pk, served_models()[run.model].queue):
        fail_run(run, f"{sentence} Then resume the run.")
        reload(run)


def model_tokenizer(model: ServedModel, project: Project | None = None) -> Tokenizer:
    """The tokenizer of a model in a project. It is registered when the first run there needs it. A machine that has the
    model's folder reads it. Another one takes what was registered last. Raises :class:`Refusal`."""
    source = f"served model {model.name}"
    registered, folder = registered_from(source, key_of(project)), Path(model.path)
    if not folder.exists():
        newest = registered_from(source)
        if newest is None:
            raise TokenizerUnusable(
                f"The folder of the model {model.name} is not on this machine, and its tokenizer is not registered. "
                f"Start a worker of the queue {model.queue} on the machine that has the folder: it registers it."
            )
        folder = files_of(newest.files_sha256)
    if registered is not None and is_stored(registered, folder):
        return registered
    try:
        return register_tokenizer(folder, name=model.name, source=source, project=project)
    except TokenizerUnusable:
        raise
    except ValueError:  # the name belongs to another tokenizer, perhaps of an earlier training
        sha256 = tokenizers.load(folder).sha256
        name = f"{model.name} {sha256[:8]}"
        return register_tokenizer(folder, name=name, source=source, project=project)


def _seed(seed: int, task: int, member: int) -> int:
    """The seed of a trajectory follows from the run's seed and the trajectory's place, so a run can be repeated."""
    return int.from_bytes(hashlib.sha256(f"{seed} {task} {member}".encode()).digest()[:4], "big") >> 1


def _listed(names: Any) -> str:
    return ", ".join(sorted(names))
