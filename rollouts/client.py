"""The earlier name of `rollout_inspector.client.client`."""

import sys

import rollout_inspector.client.client as _library

sys.modules[__name__] = _library
