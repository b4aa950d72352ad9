"""The web application as a WSGI server loads it."""

import os

from django.core.wsgi import get_wsgi_application

from inspector.server.paths import write_privately

write_privately()
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "inspector.settings")
application = get_wsgi_application()
