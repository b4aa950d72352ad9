"""``python -m rollout_inspector.commands``: the same as ``rollout-inspector``."""

import sys

from rollout_inspector.commands.main import main

sys.exit(main())
