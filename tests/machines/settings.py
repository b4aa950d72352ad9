"""The settings of machines on which imports and runs of a few megabytes are cut into parts."""

from inspector.settings import *  # noqa: F403
from inspector.settings import INSTALLED_APPS

INSTALLED_APPS = [*INSTALLED_APPS, "tests.machines.small_parts.SmallParts"]
