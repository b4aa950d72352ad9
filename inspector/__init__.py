"""How a person looks at rollouts: settings, pages, processes. Has no models."""

from inspector.celery import app as celery_app

__all__ = ["celery_app"]
