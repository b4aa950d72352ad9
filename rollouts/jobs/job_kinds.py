"""The kinds of jobs, one line each. The record of a kind stands in the file of its work."""

from rollouts.jobs import (
    alarm_delivery, damage, diagnosis, gap_reports, loss_weights, parser_comparison, rescore, template_checks
)
from rollouts.jobs.exports import exports
from rollouts.jobs.imports import import_join
from rollouts.jobs.replays import run_replays, trajectory_replays
from rollouts.jobs.storage import token_moves
from rollouts.store.jobs.jobs import JOB_KINDS

for kind in (
    diagnosis.KIND,
    exports.KIND,
    run_replays.KIND,
    import_join.KIND,
    token_moves.KIND,
    diagnosis.PUSHED,
    trajectory_replays.KIND,
    template_checks.CHECK,
    template_checks.REPAIR,
    parser_comparison.KIND,
    loss_weights.KIND,
    alarm_delivery.KIND,
    rescore.KIND,
    gap_reports.KIND,
    damage.KIND,
):
    JOB_KINDS[kind.slug] = kind
