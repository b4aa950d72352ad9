"""`/trajectories/<code>/findings/<n>.py`: a finding as a Python script."""

from django.http import Http404, HttpRequest, HttpResponse

from inspector.web.access import reads_trajectory
from rollout_inspector.diagnose.finding import Axis, Finding, Severity
from rollout_inspector.diagnose.kinds import title_of
from rollout_inspector.refusal import Refusal
from rollout_inspector.streams.trajectory import Trajectory
from rollouts.jobs.exports.reproduce import script
from rollouts.store import models
from rollouts.store.chat_templates.chat_templates import chat_template_texts
from rollouts.store.models import StoredTrajectory as Stored
from rollouts.store.trajectories import trajectory_parts
from rollouts.store.trajectories.trajectories import load_trajectories


@reads_trajectory
def finding_script(request: HttpRequest, trajectory: Stored, number: int) -> HttpResponse:
    """The script as plain text, so that the browser shows it and the copy button can fetch it."""
    stored = trajectory_parts.numbered_finding(trajectory, number)
    if stored is None:
        raise Http404(f"This trajectory has {trajectory.n_findings} findings; there is no number {number}.")
    run = trajectory.run
    tokenizer = run.tokenizer
    from_hub = tokenizer is not None and bool(tokenizer.revision)
    name = f"finding_{trajectory.code}_{number}.py"
    (value,) = load_trajectories([trajectory])
    try:
        text = script(
            _value(stored), value, tokenizer=tokenizer.source if tokenizer is not None and from_hub else "",
            revision=tokenizer.revision if tokenizer is not None else "",
            named=(tokenizer.name, tokenizer.sha256) if tokenizer is not None and not from_hub else None,
            chat_template=_template(run, value, stored), name=name, title=title_of(stored.kind),
        )
    except Refusal as error:
        raise Http404(str(error)) from error
    response = HttpResponse(text, content_type="text/plain; charset=utf-8")
    how = "attachment" if "download" in request.GET else "inline"
    response["Content-Disposition"] = f'{how}; filename="{name}"'
    response["X-Content-Type-Options"] = "nosniff"
    return response


def _template(run: models.Run, value: Trajectory, stored: models.StoredFinding) -> str | None:
    """The chat template of the step or the rows, else of the run; None: the tokenizer's own."""
    on_step = stored.step_index is not None and stored.step_index < len(value.steps)
    sha256 = value.steps[stored.step_index or 0].chat_template_sha256 if on_step else run.rows_chat_template_id
    if sha256 and sha256 != run.chat_template_id:
        return chat_template_texts(run.project_id, [sha256]).get(sha256)
    return run.chat_template.text if run.chat_template is not None else None


def _value(stored: models.StoredFinding) -> Finding:
    return Finding(
        Axis(stored.axis), stored.kind, Severity(stored.severity), step=stored.step_index, row=stored.row_index,
        start=stored.start, stop=stored.stop, expected_ids=stored.expected_ids, actual_ids=stored.actual_ids,
        evidence=stored.evidence,
    )
