from django.db import migrations


class Migration(migrations.Migration):
    """The models of what is stored get names of their own; tables and columns stay as they are."""

    dependencies = [("rollouts", "0009_replay_job")]

    operations = [
        operation
        for old, new in (
            ("Trajectory", "StoredTrajectory"),
            ("Row", "StoredRow"),
            ("Step", "StoredStep"),
            ("Finding", "StoredFinding"),
        )
        for operation in (
            migrations.AlterModelTable(name=old, table=f"rollouts_{old.lower()}"),
            migrations.RenameModel(old_name=old, new_name=new),
        )
    ]
