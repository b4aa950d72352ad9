import django.db.models.deletion
from django.conf import settings
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('rollouts', '0017_sign_in'),
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
    ]

    operations = [
        migrations.RemoveConstraint(
            model_name='job',
            name='job_of_one_subject',
        ),
        migrations.AddField(
            model_name='job',
            name='whole',
            field=models.ForeignKey(help_text='Of a shard: the job of which it is a part.', null=True, on_delete=django.db.models.deletion.CASCADE, related_name='shards', to='rollouts.job'),
        ),
        migrations.AlterField(
            model_name='job',
            name='progress',
            field=models.CharField(blank=True, help_text='Of a search for a repair, and of a job in shards: how far it is.', max_length=200),
        ),
        migrations.AlterField(
            model_name='job',
            name='reached',
            field=models.BigIntegerField(default=-1, help_text='Index of the last trajectory that is done for good; of a shard of an import, bytes that are read.'),
        ),
        migrations.AlterField(
            model_name='job',
            name='report',
            field=models.JSONField(help_text='Of a replay: figures so far, in the end of the whole run. Of a shard: what it found.', null=True),
        ),
        migrations.AddIndex(
            model_name='job',
            index=models.Index(condition=models.Q(('status__in', ('queued', 'running'))), fields=['status'], name='job_active'),
        ),
        migrations.AddConstraint(
            model_name='job',
            constraint=models.CheckConstraint(condition=models.Q(models.Q(('replay', None), ('run__isnull', False), ('template_check', None), ('whole', None)), models.Q(('replay__isnull', False), ('run', None), ('template_check', None), ('whole', None)), models.Q(('replay', None), ('run', None), ('template_check__isnull', False), ('whole', None)), models.Q(('replay', None), ('run', None), ('template_check', None), ('whole__isnull', False)), _connector='OR'), name='job_of_one_subject'),
        ),
    ]
