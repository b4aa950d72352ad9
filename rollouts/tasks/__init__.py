"""Celery tasks: they take ids, fetch, call and save. The database row is the result."""

from rollouts.tasks.checks import check_template
from rollouts.tasks.imports import import_files
from rollouts.tasks.jobs import do_job
from rollouts.tasks.pushed import diagnose_pushed
from rollouts.tasks.replays import replay_trajectory
from rollouts.tasks.run_rollouts import run_rollouts

__all__ = ["check_template", "diagnose_pushed", "do_job", "import_files", "replay_trajectory", "run_rollouts"]
