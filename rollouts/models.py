"""Where Django looks for the models of this app; they lie in the store."""

from rollouts.store.models import *  # noqa: F403
