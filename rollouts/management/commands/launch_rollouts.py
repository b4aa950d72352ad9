"""Launch a run.

With --wait it prints the result at its end. If no REDIS_URL names a broker and no worker of `make run` serves the
model, --wait makes the rollouts in this process.
"""

from argparse import ArgumentParser
from dataclasses import fields
from pathlib import Path
from typing import Any

from django.core.management.base import CommandError

from rollout_inspector.diagnose.full_render import COMPARE
from rollout_inspector.streams.figures import reward_mean
from rollouts.jobs import launch
from rollouts.jobs.launch import LaunchRefused, LaunchSettings
from rollouts.management import TerminalCommand
from rollouts.management.arguments import add_project_option, json_object, project_named, registered_chat_template
from rollouts.management.jobs import finish_runs, works_here
from rollouts.sampling.environments import PromptsRejected, Task, read_prompts
from rollouts.store.database import reload
from rollouts.store.models import Run
from rollouts.store.trajectories.trajectories import rewards_of

_DEFAULTS = LaunchSettings()
_FILE = {"type": Path, "metavar": "FILE", "default": None}
_OPTIONS: dict[str, dict[str, Any]] = {
    "stop": {"action": "append", "metavar": "TEXT", "help": "also ends a completion; may be repeated"},
    "chat_template": {**_FILE, "help": "for the prompts; default: the model's own"},
    "rows_chat_template": {**_FILE, "help": "for the training rows; default: the prompts'"},
    "template_kwargs": {"default": "", "metavar": "JSON", "help": 'such as {"enable_thinking": false}'},
    "compare": {"choices": list(COMPARE)},
}
"""What a terminal takes otherwise than the form."""


class Command(TerminalCommand):
    def add_arguments(self, parser: ArgumentParser) -> None:
        for setting in fields(LaunchSettings):
            arguments = {"default": getattr(_DEFAULTS, setting.name), "help": setting.metadata["description"]}
            if "least" in setting.metadata:
                arguments |= {"type": float if setting.type is float else int, "metavar": "N"}
            parser.add_argument(
                f"--{setting.name.replace('_', '-')}", **{**arguments, **_OPTIONS.get(setting.name, {})}
            )
        parser.add_argument(
            "--prompts-file", type=Path, metavar="FILE", help="JSONL of prompts, see docs/environments.md"
        )
        parser.add_argument("--name", default="", help="a name for the run")
        add_project_option(parser)
        parser.add_argument("--wait", action="store_true", help="return when the run has ended")
        parser.add_argument("--json", action="store_true", help="print one JSON object")

    def handle(self, *_: Any, **options: Any) -> None:
        project = project_named(options["project"])
        for name in ("chat_template", "rows_chat_template"):
            options[name] = registered_chat_template(options[name], project).sha256 if options[name] else ""
        options["template_kwargs"] = json_object(options["template_kwargs"], "--template-kwargs")
        settings = LaunchSettings.of(options)
        prompts = self._prompts(options["prompts_file"])
        here = works_here(settings.model, options["wait"])
        try:
            run = launch.launch(settings, name=options["name"], enqueue=not here, prompts=prompts, project=project)
        except LaunchRefused as error:  # each setting is an option
            raise CommandError(
                "\n".join(f"--{name.replace('_', '-')}: {sentence}" for name, sentence in error.problems.items())
            ) from error
        if options["wait"]:
            finish_runs([run], here, self.stderr.write)
        reload(run)
        self._print(run, options["json"])
        if run.status == Run.Status.FAILED:
            raise CommandError(f"The run {run.code} failed: {run.error}")

    def _prompts(self, path: Path | None) -> list[Task]:
        if path is None:
            return []
        try:
            return read_prompts(path)
        except OSError as error:
            raise CommandError(f"{path} cannot be read: {error.strerror}.") from error
        except PromptsRejected as error:
            raise CommandError("\n".join(f"{path}: {sentence}" for sentence in error.problems)) from error

    def _print(self, run: Run, as_json: bool) -> None:
        rewards = rewards_of(run)
        mean = reward_mean(sum(rewards), len(rewards))
        result = {
            "run": run.code,
            "status": run.status,
            "trajectories": run.n_finished,
            "failed": run.n_failed,
            "steps": run.n_steps,
            "tokens": run.n_tokens,
            "sampled": run.n_sampled,
            "rewards": {
                "mean": mean, "min": min(rewards, default=None), "max": max(rewards, default=None), "n": len(rewards),
            },
            "findings": run.finding_counts,
            "seed": run.settings["seed"],
        }
        for name in ("chat_template", "rows_chat_template"):
            if sha256 := getattr(run, f"{name}_id"):
                result[name] = sha256
        if run.error:
            result["error"] = run.error
        score = "no reward yet" if mean is None else f"mean reward {mean:.3f}"
        sentence = (
            f"Run {run.code} is {run.status}: {run.n_finished} of {run.n_expected} trajectories, "
            f"{run.n_failed} failed, {run.n_sampled} tokens sampled, {score}."
        )
        self.print_result(as_json, result, sentence)
