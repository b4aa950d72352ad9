"""Settings, all from the environment; `docs/configuration.md` lists them and `system_checks` checks them."""

import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any

import dj_database_url
from csp.constants import NONE, SELF

from inspector.server import paths
from inspector.server.env import EnvironmentReader
from inspector.server.file_storage import file_storage
from rollouts.sampling.engines import engine_spec, offered_engines

BASE_DIR = Path(__file__).resolve().parent.parent
env = EnvironmentReader()
# A wheel holds the folders `templates` and `static` inside this package: pyproject.toml says so.
_SHIPPED = BASE_DIR / "inspector" / "shipped"
IS_INSTALLED = _SHIPPED.is_dir()
WEB_FILES = _SHIPPED if IS_INSTALLED else BASE_DIR

# --- where data lives -------------------------------------------------------------------------------------------------
_HOME = Path.cwd() if IS_INSTALLED else BASE_DIR  # nothing of ours is written into site-packages
INSPECTOR_DATA = Path(env.text("INSPECTOR_DATA", str(_HOME / "data"))).expanduser().resolve()
with suppress(OSError):  # system_checks says so when the folder stays open to others, or cannot be written
    paths.private_folder(INSPECTOR_DATA)
SECRET_KEY = env.text("SECRET_KEY")
if not SECRET_KEY:
    try:
        SECRET_KEY = paths.secret_key(INSPECTOR_DATA)
    except OSError as error:
        SECRET_KEY = secrets.token_urlsafe(50)
        env.problem(
            f"The data folder {INSPECTOR_DATA} cannot be used: {error.strerror}.",
            "Make it writable, or set INSPECTOR_DATA to a folder that is.",
        )

DEBUG = env.flag("DEBUG", False)
ALLOWED_HOSTS = env.listed("ALLOWED_HOSTS", ["localhost", "127.0.0.1", "[::1]"])
CSRF_TRUSTED_ORIGINS = env.listed("CSRF_TRUSTED_ORIGINS")

# --- database ---------------------------------------------------------------------------------------------------------
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
DATABASE_URL = env.text("DATABASE_URL", f"sqlite:///{INSPECTOR_DATA / 'inspector.sqlite3'}")
try:
    DATABASES = {"default": dict(dj_database_url.parse(DATABASE_URL, conn_max_age=600, conn_health_checks=True))}
except (dj_database_url.ParseError, dj_database_url.UnknownSchemeError, ValueError):
    DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": INSPECTOR_DATA / "inspector.sqlite3"}}
    env.problem(
        "DATABASE_URL cannot be read.",
        "Write it as postgres://USER:PASSWORD@HOST:5432/NAME or sqlite:////absolute/path.sqlite3, or leave it unset.",
    )
if DATABASES["default"]["ENGINE"] == "django.db.backends.sqlite3":
    DATABASES["default"]["OPTIONS"] = {
        # Take the write lock at BEGIN: a deferred transaction that upgrades fails at once with "database is locked".
        "transaction_mode": "IMMEDIATE",
        "timeout": 20,
        "init_command": (
            "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL; PRAGMA foreign_keys=ON; "
            "PRAGMA mmap_size=134217728; PRAGMA journal_size_limit=67108864; PRAGMA cache_size=-8000;"
        ),
    }
elif "options" not in DATABASE_URL:
    # PostgreSQL compiles a query that it takes for a long one. Compiling took 0.6 s where running takes 0.03.
    _options: Any = DATABASES["default"].setdefault("OPTIONS", {})
    _options["options"] = "-c jit=off"

# --- Redis: broker, cache, progress and cancel flags ------------------------------------------------------------------
REDIS_IS_EMBEDDED = not env.text("REDIS_URL")
REDIS_URL = env.text("REDIS_URL", f"unix://{paths.embedded_redis_socket(INSPECTOR_DATA)}?db=0")
CACHES = {
    "default": {
        "BACKEND": "django.core.cache.backends.redis.RedisCache",
        "LOCATION": REDIS_URL,
        "KEY_PREFIX": "inspector",
        "OPTIONS": {
            "serializer": "inspector.server.page_cache.MsgpackSerializer",
            "socket_connect_timeout": 2,
            "socket_timeout": 5,
        },
    },
    "counts": {"BACKEND": "inspector.server.page_cache.RequestCounts", "OPTIONS": {"MAX_ENTRIES": 100_000}},
}
RATELIMIT_USE_CACHE = "counts"
RATELIMIT_IP_META_KEY = "inspector.web.middleware.client_address"

CELERY_BROKER_URL = paths.broker_url(REDIS_URL)
CELERY_TASK_SERIALIZER = "json"
CELERY_ACCEPT_CONTENT = ["json"]
CELERY_TASK_IGNORE_RESULT = True  # the database row is the result
CELERY_TASK_ACKS_LATE = True
CELERY_TASK_REJECT_ON_WORKER_LOST = True
CELERY_WORKER_PREFETCH_MULTIPLIER = 1
CELERY_TASK_DEFAULT_QUEUE = "default"
CELERY_WORKER_DIRECT = True  # each worker also reads a queue of its own: an idle one sends itself to the run of another
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_BROKER_CHANNEL_ERROR_RETRY = True  # a worker whose Redis refuses each write asks again, and ends no work
CELERY_WORKER_HIJACK_ROOT_LOGGER = False
CELERY_WORKER_CANCEL_LONG_RUNNING_TASKS_ON_CONNECTION_LOSS = False
CELERY_TIMEZONE = "UTC"
# Longer than any task: Redis hands a task out again when it has been unacknowledged for this long.
CELERY_BROKER_TRANSPORT_OPTIONS = {"visibility_timeout": 24 * 3600}
CELERY_TASK_PUBLISH_RETRY_POLICY = {"max_retries": 2, "interval_start": 0.1, "interval_max": 0.5}

# Engine tasks are sent to their engine's queue by name; everything else goes to `default`.
ENGINE_QUEUES = env.listed("INSPECTOR_ENGINE_QUEUES", ["engine.demo"])
ENGINE_WORKER_THREADS = env.whole("INSPECTOR_ENGINE_THREADS", 4, least=1, most=256)
# Where the token arrays of new runs go: a name of rollouts.store.token_arrays.STORES.
INSPECTOR_TOKENS = env.choice("INSPECTOR_TOKENS", "database", ["database", "segments"])
# Jobs of one user that are under way at once. Workers have one process more, for the jobs of other users.
JOBS_PER_USER = env.whole("INSPECTOR_WORKERS", 2, least=1, most=64)

# --- engines, models ----------------------------------------------------------------------------------------------
ENGINE_HOSTS = env.listed("INSPECTOR_ENGINE_HOSTS", ["localhost", "127.0.0.1", "::1"])
# Hosts that may be told of alarms, as HOST or HOST:PORT.
WEBHOOK_HOSTS = env.listed("INSPECTOR_WEBHOOK_HOSTS")
HUB_ALLOWED = env.flag("INSPECTOR_HUB", True)
# Below these a member may name a tokenizer's folder. On one's own machine that is what belongs to its owner.
TOKENIZER_FOLDERS = env.folders(
    "INSPECTOR_TOKENIZER_FOLDERS",
    [] if set(ALLOWED_HOSTS) - paths.LOCAL_HOSTS else [Path(os.path.expanduser("~")), BASE_DIR],
)
# Set by `rollout-inspector open`: what this server shows where it lies.
OPENED = env.text("INSPECTOR_OPENED")
RECORDER_TOKEN = env.text("INSPECTOR_RECORDER_TOKEN")
# The demo's folder is on this machine, so that no engine that asks a server can serve it.
_FOLDER_ENGINES = [name for name in offered_engines() if not engine_spec(name).is_server]
# What can be launched: a name (its worker takes the queue engine.<name>), the engine that serves it, and its folder.
INSPECTOR_MODELS: dict[str, dict[str, Any]] = {
    "demo": {
        "engine": env.choice("INSPECTOR_ENGINE", "transformers", _FOLDER_ENGINES),
        "path": str(BASE_DIR / "rollouts" / "sampling" / "demo_policy" / "model"),
    },
    **env.models("INSPECTOR_MODELS"),
}

# --- the web application ----------------------------------------------------------------------------------------------
INSTALLED_APPS = [
    "inspector.apps.InspectorConfig",  # the first, so that its commands replace Django's
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "whitenoise.runserver_nostatic",
    "inspector.apps.InspectorStaticFiles",
    "csp",
    "django_htmx",
    "ninja",  # the static files of the page /api/docs
    "rollouts",
    # Commands that make what is shipped and prove what is claimed; a checkout has them, a wheel does not.
    *(["tools"] if (BASE_DIR / "tools" / "management").is_dir() and not IS_INSTALLED else []),
]
MIDDLEWARE = [
    "inspector.web.middleware.ClientAddressMiddleware",
    "inspector.web.middleware.ActorMiddleware",
    "inspector.server.metrics_view.RequestMetricsMiddleware",
    "inspector.server.logs.RequestLogMiddleware",
    "django.middleware.security.SecurityMiddleware",
    "csp.middleware.CSPMiddleware",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "inspector.web.middleware.CompressionMiddleware",
    "inspector.web.middleware.PlainTextMiddleware",
    "inspector.web.middleware.PrivateAnswersMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    # The login is decided before the CSRF check, because that check reads the body.
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "inspector.web.login.LoginSessionMiddleware",
    "inspector.web.login.LoginRequiredMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "django_htmx.middleware.HtmxMiddleware",
    "inspector.web.middleware.RefusalMiddleware",
]
ROOT_URLCONF = "inspector.urls"
WSGI_APPLICATION = "inspector.wsgi.application"
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [WEB_FILES / "templates"],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
            "libraries": {"inspector_tags": "inspector.html.inspector_tags"},
        },
    }
]
LANGUAGE_CODE = "en"
TIME_ZONE = "UTC"
USE_I18N = False
USE_TZ = True

STATIC_URL = "/static/"
STATIC_ROOT = INSPECTOR_DATA / "static"
STATICFILES_DIRS = [WEB_FILES / "static"] if (WEB_FILES / "static").is_dir() else []
STORAGES = {
    "default": file_storage(env),  # only `rollouts.store.files` uses it
    "staticfiles": {
        "BACKEND": "django.contrib.staticfiles.storage.StaticFilesStorage"
        if DEBUG
        else "whitenoise.storage.CompressedManifestStaticFilesStorage"
    },
}
# Copies of the bucket's files on this machine's disk.
CACHE_BYTES = env.whole("INSPECTOR_CACHE_MB", 10240, least=100) << 20
WHITENOISE_USE_FINDERS = DEBUG
WHITENOISE_AUTOREFRESH = DEBUG

# --- uploads: every file streams to the disk, never into memory -------------------------------------------------------
FILE_UPLOAD_HANDLERS = ["inspector.web.forms.LimitedUploadHandler"]
FILE_UPLOAD_TEMP_DIR = str(INSPECTOR_DATA / "tmp")
with suppress(OSError):  # system_checks says so when the data folder cannot be written
    paths.private_folder(INSPECTOR_DATA / "tmp")
FILE_UPLOAD_PERMISSIONS = 0o600
UPLOAD_MAX_BYTES = env.whole("INSPECTOR_UPLOAD_MAX_MB", 4096, least=1) << 20
DATA_UPLOAD_MAX_MEMORY_SIZE = 8 << 20  # form fields, among them a pasted chat template; files do not count
DATA_UPLOAD_MAX_NUMBER_FILES = 200
DATA_UPLOAD_MAX_NUMBER_FIELDS = 2000

# --- login and safety -------------------------------------------------------------------------------------------------
TEAM_MODE = env.flag("INSPECTOR_TEAM", False)
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": "django.contrib.auth.password_validation.UserAttributeSimilarityValidator"},
    {"NAME": "django.contrib.auth.password_validation.MinimumLengthValidator", "OPTIONS": {"min_length": 10}},
    {"NAME": "django.contrib.auth.password_validation.CommonPasswordValidator"},
    {"NAME": "django.contrib.auth.password_validation.NumericPasswordValidator"},
]
LOGIN_URL = "/login"
LOGIN_REDIRECT_URL = "/"
API_RATE = f"{env.whole('INSPECTOR_API_RATE', 1200, least=1)}/m"
LOGIN_LINK_SECONDS = env.whole("INSPECTOR_LOGIN_LINK_MINUTES", 720, least=1) * 60

# Sign-in through a provider of OpenID Connect: docs/accounts.md#sign-in-through-a-provider.
OIDC_ISSUER = env.text("INSPECTOR_OIDC_ISSUER").rstrip("/")
OIDC_CLIENT_ID = env.text("INSPECTOR_OIDC_CLIENT_ID")
OIDC_CLIENT_SECRET = env.text("INSPECTOR_OIDC_CLIENT_SECRET")
OIDC_NAME = env.text("INSPECTOR_OIDC_NAME", "your organisation")
OIDC_ALLOWED = env.listed("INSPECTOR_OIDC_ALLOWED")
OIDC_DEFAULT_PROJECT = env.text("INSPECTOR_OIDC_DEFAULT_PROJECT")
OIDC_DEFAULT_ROLE = env.choice("INSPECTOR_OIDC_DEFAULT_ROLE", "viewer", ["viewer", "member"])
# How many proxies in front of the server add the address of their client to X-Forwarded-For.
PROXIES = env.whole("INSPECTOR_PROXIES", 0, most=10)

HTTPS = env.flag("INSPECTOR_HTTPS", False)
AUDIT_DAYS = env.whole("INSPECTOR_AUDIT_DAYS", 365)
SESSION_COOKIE_NAME = "inspector_session"
SESSION_COOKIE_AGE = 30 * 24 * 3600
SESSION_COOKIE_HTTPONLY = True
SESSION_COOKIE_SAMESITE = "Lax"
SESSION_COOKIE_SECURE = CSRF_COOKIE_SECURE = HTTPS
CSRF_COOKIE_SAMESITE = "Lax"
SECURE_CONTENT_TYPE_NOSNIFF = True
SECURE_REFERRER_POLICY = "same-origin"
SECURE_CROSS_ORIGIN_OPENER_POLICY = "same-origin"
SECURE_HSTS_SECONDS = 31536000 if HTTPS else 0
SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https") if HTTPS else None
X_FRAME_OPTIONS = "DENY"
CONTENT_SECURITY_POLICY = {
    "DIRECTIVES": {
        "default-src": [NONE],
        "script-src": [SELF],
        "style-src": [SELF],
        "img-src": [SELF, "data:"],
        "connect-src": [SELF],
        "font-src": [SELF],
        "form-action": [SELF],
        "base-uri": [NONE],
        "frame-ancestors": [NONE],
    }
}
# docs/decisions/0026 says why the proxy redirects, and why HSTS leaves sub-domains and preload alone.
# Columns that an index only includes are for PostgreSQL; SQLite leaves them out (models.W040).
SILENCED_SYSTEM_CHECKS = ["staticfiles.W004", "security.W005", "security.W008", "security.W021", "models.W040"]

# --- retention: 0 = everything is kept -------------------------------------------------------------------------------
KEEP_DAYS = env.whole("INSPECTOR_KEEP_DAYS", 0)
KEEP_BYTES = env.whole("INSPECTOR_KEEP_GB", 0) * 1_000_000_000

# --- metrics ----------------------------------------------------------------------------------------------------------
METRICS_TOKEN = env.text("INSPECTOR_METRICS_TOKEN")

# --- logs -------------------------------------------------------------------------------------------------------------
LOG_FORMAT = env.choice("INSPECTOR_LOG_FORMAT", "text", ["text", "json"])
LOG_LEVEL = env.choice("INSPECTOR_LOG_LEVEL", "INFO", ["DEBUG", "INFO", "WARNING", "ERROR"])
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "filters": {
        "request_id": {"()": "inspector.server.logs.RequestIdFilter"},
        "answered": {"()": "inspector.server.logs.AnsweredFilter"},
    },
    "formatters": {
        "text": {"()": "inspector.server.logs.TextLineFormatter"},
        "json": {"()": "inspector.server.logs.JsonLineFormatter"},
    },
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": LOG_FORMAT, "filters": ["request_id"]}},
    "root": {"handlers": ["stderr"], "level": LOG_LEVEL},
    "loggers": {
        "django": {"level": "INFO", "handlers": [], "propagate": True},
        "django.request": {"filters": ["answered"]},
        # RequestLogMiddleware writes one line for every request; Django's own would be a second one.
        "django.server": {"level": "ERROR", "handlers": [], "propagate": True},
        # The web server's own lines name addresses, so that they pass the formatter which hides tokens.
        "gunicorn.error": {"handlers": [], "propagate": True},
        "httpx": {"level": "WARNING"},
        "filelock": {"level": "WARNING"},
    },
}

ENV_PROBLEMS = env.problems
