"""Celery tasks: they take ids, fetch, call and save. The database row is the result."""

# Modules and not tasks: a task named as its module would hide the module.
from rollouts.worker import jobs, run_rollouts

__all__ = ["jobs", "run_rollouts"]
