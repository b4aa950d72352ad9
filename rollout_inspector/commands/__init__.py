"""The command ``rollout-inspector``: what needs no server and no database, and ``serve``."""
