"""The web application as an ASGI server loads it."""

import os

from django.core.asgi import get_asgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "inspector.settings")
application = get_asgi_application()
