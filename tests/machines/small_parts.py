"""Parts that are smaller than those of a large run, in the processes of a test."""

from django.apps import AppConfig

PART_BYTES = 400_000
PART_TRAJECTORIES = 60


class SmallParts(AppConfig):
    """Makes the parts of this process small."""

    name = "tests.machines.small_parts"

    def ready(self) -> None:
        from rollouts.jobs import run_parts
        from rollouts.jobs.imports import import_shards

        import_shards.PART_BYTES = PART_BYTES
        run_parts.PART_TRAJECTORIES = PART_TRAJECTORIES
