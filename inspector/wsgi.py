"""The web application as a WSGI server loads it."""

import os
import sys

from django.core.wsgi import get_wsgi_application

from inspector.server.paths import write_privately

write_privately()
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "inspector.settings")
application = get_wsgi_application()

from inspector.server.team_checks import UnsafeTeamServer, refuse_unsafe_team  # noqa: E402  needs the settings

try:
    refuse_unsafe_team()
except UnsafeTeamServer as unsafe:
    sys.exit(str(unsafe))
