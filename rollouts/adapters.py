"""The earlier name of `rollout_inspector.client.adapters`."""

import sys

import rollout_inspector.client.adapters as _library

sys.modules[__name__] = _library
