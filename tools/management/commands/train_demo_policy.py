"""Train the demo policy on calculator dialogues, and write it to a folder.

About 20 minutes on two cores. With --grpo STEPS: go on by reinforcement learning, and write or push the trajectories
of each step.
"""

import math
import os
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.core.management.base import CommandError

from rollout_inspector.client.client import Client, ServerError
from rollout_inspector.formats.readers.inspector_jsonl import encode
from rollout_inspector.streams.strategies import STRATEGIES
from rollouts.management import TerminalCommand
from rollouts.sampling.demo_policy import MODEL_DIR, STEPS


class Command(TerminalCommand):
    # Training needs neither a database nor correct settings.
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--output",
            type=Path,
            help="folder to write: the policy (default: in the repository), or a file of each step",
        )
        parser.add_argument("--steps", type=int, default=STEPS, help="batches of 48 dialogues (default: %(default)s)")
        parser.add_argument("--seed", type=int, default=0)
        grpo = parser.add_argument_group("GRPO", "rollouts of the demo policy, scored and trained on the CPU")
        grpo.add_argument("--grpo", type=int, metavar="STEPS", help="go on with the trained policy for so many updates")
        grpo.add_argument("--push", metavar="URL", default="", help="send each step to the server at this address")
        grpo.add_argument("--token", default="", help="API key for --push (default: ROLLOUT_INSPECTOR_TOKEN)")
        grpo.add_argument("--name", default="grpo", help="name of the run on the server (default: %(default)s)")
        grpo.add_argument("--groups", type=int, default=4, help="prompts of a step (default: %(default)s)")
        grpo.add_argument("--group-size", type=int, default=4, help="trajectories of a prompt (default: %(default)s)")
        grpo.add_argument("--repeated", type=int, default=0, help="prompts that every step has (default: %(default)s)")
        grpo.add_argument("--rate", type=float, default=3e-4, help="learning rate (default: %(default)s)")
        grpo.add_argument("--strategy", choices=STRATEGIES, default="tool_delta")
        grpo.add_argument("--temperature", type=float, default=1.2, help="of sampling (default: %(default)s)")
        grpo.add_argument("--trainer-temperature", type=float, help="a fault (default: that of sampling)")
        grpo.add_argument("--sampler-dtype", choices=("float32", "bfloat16"), default="float32")
        grpo.add_argument("--deliver-every", type=int, default=1, metavar="N", help="updates; 0 = never, a fault")
        grpo.add_argument("--keep-cache", action="store_true", help="a fault: no cache reset after an update")
        parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: %(default)s)")

    def handle(self, *args: Any, **options: Any) -> None:
        if options["grpo"] is not None:
            self._grpo(options)
            return
        if options["steps"] < 1:
            raise CommandError("--steps must be at least 1.")
        if options["threads"] < 1:
            raise CommandError("--threads must be at least 1.")
        # Torch takes seconds to import. It is imported here so that --help and the other commands stay quick.
        from tools.demo_policy.train import train

        output = options["output"] or MODEL_DIR
        train(output, options["steps"], options["seed"], options["threads"], self._say)
        self.stdout.write(f"The demo policy is in {output}.", self.style.SUCCESS)

    def _say(self, line: str) -> None:
        self.stdout.write(line)
        self.stdout.flush()

    def _grpo(self, options: dict[str, Any]) -> None:
        output, url = options["output"], options["push"]
        if sentence := _refused(options):
            raise CommandError(sentence)
        from tools.demo_policy.grpo import GrpoSettings, train

        settings = GrpoSettings(
            options["grpo"], options["groups"], options["group_size"], options["repeated"], options["rate"],
            options["strategy"], options["temperature"], options["trainer_temperature"], options["deliver_every"],
            not options["keep_cache"], options["sampler_dtype"], seed=options["seed"], threads=options["threads"],
        )
        server = Client(url, options["token"] or os.environ.get("ROLLOUT_INSPECTOR_TOKEN", "")) if url else None
        if output is not None:
            try:
                output.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise CommandError(f"The folder {output} cannot be made: {error.strerror}.") from error
        try:
            if server is not None:
                self._say(f"Run {server.create_run(options['name'])} on {url}.")
            for step in train(settings):
                lines = [encode(trajectory).decode() for trajectory in step.trajectories]
                if output is not None:
                    (output / f"step_{step.step:06d}.jsonl").write_text("".join(f"{line}\n" for line in lines))
                if server is not None:
                    server.push(lines, step=step.step)
                self._say(f"step {step.step + 1}/{settings.steps}  reward {step.reward:.3f}  gap {step.gap:.5f}")
        except ServerError as error:
            raise CommandError(str(error)) from error
        if output is not None:
            self.stdout.write(f"The steps are in {output}: manage.py import_rollouts {output}", self.style.SUCCESS)


def _refused(options: dict[str, Any]) -> str:
    """Why the settings of GRPO cannot be used, as a sentence; empty = they can."""
    if options["output"] is None and not options["push"]:
        return "Say where the steps go: --output FOLDER, --push URL, or both."
    for name in ("grpo", "groups", "group_size", "threads"):
        if options[name] < 1:
            return f"--{name.replace('_', '-')} must be at least 1."
    if not 0 <= options["repeated"] <= options["groups"]:
        return "--repeated is a number of the prompts of a step, from 0 to --groups."
    if options["deliver_every"] < 0:
        return "--deliver-every must be at least 0."
    for name in ("rate", "temperature", "trainer_temperature"):
        if options[name] is not None and not 0 < options[name] < math.inf:
            return f"--{name.replace('_', '-')} must be a number above 0."
    return ""
