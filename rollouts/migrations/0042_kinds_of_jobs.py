from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('rollouts', '0041_pushed_figures'),
    ]

    operations = [
        migrations.AlterField(
            model_name='job',
            name='kind',
            field=models.CharField(help_text='Slug of a ``rollouts.store.jobs.jobs.JobKind``.', max_length=20),
        ),
    ]
