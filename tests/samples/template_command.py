"""The command that checks a chat template, run in this process."""

import io

from django.core.management import call_command


def run(*arguments: str) -> tuple[int, str, str]:
    """Exit status, standard output, standard error."""
    out, err = io.StringIO(), io.StringIO()
    try:
        call_command("check_template", *arguments, stdout=out, stderr=err)
    except SystemExit as ended:
        return int(ended.code or 0), out.getvalue(), err.getvalue()
    return 0, out.getvalue(), err.getvalue()
