"""The kinds of jobs, one line each. The record of a kind stands in the file of its work."""

from rollouts.services.jobs import JOB_KINDS
from rollouts.work import (
    alarm_delivery,
    diagnosis,
    exporting,
    gap_reports,
    import_join,
    loss_weights,
    parser_audits,
    replays,
    rescore,
    run_replays,
    template_checks,
    token_moves,
)

for kind in (
    diagnosis.KIND,
    exporting.KIND,
    run_replays.KIND,
    import_join.KIND,
    token_moves.KIND,
    diagnosis.PUSHED,
    replays.KIND,
    template_checks.CHECK,
    template_checks.REPAIR,
    parser_audits.KIND,
    loss_weights.KIND,
    alarm_delivery.KIND,
    rescore.KIND,
    gap_reports.KIND,
):
    JOB_KINDS[kind.slug] = kind
