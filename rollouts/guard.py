"""The earlier name of `rollout_inspector.guard`."""

import sys

import rollout_inspector.guard as _library

sys.modules[__name__] = _library
