"""``python -m rollout_inspector``: the command, from a checkout."""

import sys

from rollout_inspector.commands.main import main

sys.exit(main())
