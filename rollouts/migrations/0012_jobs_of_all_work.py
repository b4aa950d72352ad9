from django.db import migrations
from django.db.models import Count, Q, Sum
from django.utils import timezone

UNFINISHED = "It was under way when the server was updated. Start it again."
BATCH = 500


def give_jobs(apps, schema_editor):
    """Every template check and replay gets the job that made it; an unfinished one ends with a sentence."""
    Job = apps.get_model("rollouts", "Job")
    checks = apps.get_model("rollouts", "TemplateCheck").objects.only("pk", "status", "error", "progress")
    replays = apps.get_model("rollouts", "Replay").objects.only("pk", "status", "error")
    now = timezone.now()

    def job(kind, status, error, **subject):
        if status in ("queued", "running"):
            status, error = "failed", UNFINISHED
        return Job(kind=kind, status=status, error=error, finished_at=now, n_done=status == "done", **subject)

    jobs = [job("replay_trajectory", one.status, one.error, replay=one) for one in replays.iterator(BATCH)]
    for one in checks.iterator(BATCH):
        if one.status == "done" and one.progress:  # it is answered, and its repair is being searched for
            jobs.append(job("repair_template", "running", "", template_check=one))
        else:
            jobs.append(job("check_template", one.status, one.error, template_check=one))
    Job.objects.bulk_create(jobs, BATCH)


def end_imports(apps, schema_editor):
    """Imports that a worker had to do end; nothing stays of the file that was being read."""
    runs = apps.get_model("rollouts", "Run").objects.filter(kind="import", status__in=("queued", "running"))
    for run in runs.filter(settings__has_key="files"):
        run.trajectories.filter(index__gte=run.settings.get("imported", {}).get("next_index", 0)).delete()
        totals = run.trajectories.aggregate(
            n_trajectories=Count("pk"), n_finished=Count("pk", filter=Q(status="done")), n_steps=Sum("n_steps"),
            n_rows=Sum("n_rows"), n_tokens=Sum("n_tokens"), n_sampled=Sum("n_sampled"), n_rewards=Count("reward"),
            reward_sum=Sum("reward"),
        )
        for name, value in totals.items():
            setattr(run, name, value or 0)
        run.finding_counts = dict(run.findings.values_list("kind").annotate(n=Count("pk")).order_by("kind"))
        run.status, run.error, run.finished_at = "failed", UNFINISHED, timezone.now()
        run.save()


def ask_for_diagnosis(apps, schema_editor):
    """Pushed trajectories whose diagnosis was still ordered get a job for it; a worker takes it up by itself."""
    for run in apps.get_model("rollouts", "Run").objects.filter(settings__has_key="judged_to"):
        if run.trajectories.filter(pk__gt=run.settings["judged_to"]).exists():
            apps.get_model("rollouts", "Job").objects.create(run=run, kind="diagnose_pushed")


class Migration(migrations.Migration):
    """The work of template checks, replays, imports and pushes belongs to jobs."""

    dependencies = [("rollouts", "0011_one_job")]

    operations = [
        migrations.RunPython(give_jobs, migrations.RunPython.noop),
        migrations.RunPython(end_imports, migrations.RunPython.noop),
        migrations.RunPython(ask_for_diagnosis, migrations.RunPython.noop),
    ]
