"""The web application as an ASGI server loads it."""

import os

from django.core.asgi import get_asgi_application

from inspector.server.paths import write_privately

write_privately()
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "inspector.settings")
application = get_asgi_application()
