"""A provider of OpenID Connect on loopback that lies, hangs, drips, redirects or floods as a test tells it to."""

import hashlib
import hmac
import json
import ssl
import threading
import time
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from joserfc import jws, jwt
from joserfc.jwk import RSAKey

DISCOVERY, TOKEN, KEYS = "/.well-known/openid-configuration", "/token", "/keys"
OWN_KEY = RSAKey.generate_key(2048, {"kid": "first", "use": "sig"})
OTHER_KEY = RSAKey.generate_key(2048, {"kid": "first", "use": "sig"})

Answer = Callable[[BaseHTTPRequestHandler], None]


@dataclass
class Provider:
    """What the provider says at each address; a test changes it."""

    issuer: str
    metadata: dict[str, Any] = field(default_factory=dict)
    claims: dict[str, Any] = field(default_factory=dict)
    """Laid over the claims of a token that is right; None = the claim is left out."""
    header: dict[str, Any] = field(default_factory=lambda: {"alg": "RS256", "kid": "first"})
    key: Any = field(default_factory=lambda: OWN_KEY)
    secret: bytes | None = None
    """Signs with HS256 by this; empty = not at all."""
    keys: list[Any] = field(default_factory=lambda: [OWN_KEY])
    answers: dict[str, Answer] = field(default_factory=dict)
    """Address -> an answer of its own."""
    asked: list[tuple[str, bytes]] = field(default_factory=list)
    nonce: str = ""

    def begin(self, address: str) -> str:
        """Somebody signed in: the way back, for the address to which the server sent the browser."""
        asked = parse_qs(urlsplit(address).query)
        self.nonce = asked["nonce"][0]
        return f"/login/provider/callback?code=c&state={asked['state'][0]}"

    def discovery(self) -> Any:
        return {
            "issuer": self.issuer, "authorization_endpoint": f"{self.issuer}/authorize",
            "token_endpoint": self.issuer + TOKEN, "jwks_uri": self.issuer + KEYS,
            "id_token_signing_alg_values_supported": ["RS256"], **self.metadata,
        }

    def id_token(self) -> str:
        now = int(time.time())
        right = {"iss": self.issuer, "sub": "1", "aud": "inspector", "exp": now + 60, "iat": now, "nonce": self.nonce}
        claims = {name: value for name, value in {**right, **self.claims}.items() if value is not None}
        if self.secret is not None:
            parts = [urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=") for part in (self.header, claims)]
            signed = b".".join(parts)
            signature = hmac.new(self.secret, signed, hashlib.sha256).digest() if self.secret else b""
            return (signed + b"." + urlsafe_b64encode(signature).rstrip(b"=")).decode()
        registry = jws.JWSRegistry(algorithms=[self.header["alg"]], strict_check_header=False)
        return jwt.encode(self.header, claims, self.key, registry=registry)

    def said(self, path: str) -> Any:
        if path == KEYS:
            return {"keys": [key.as_dict(private=False) for key in self.keys]}
        if path == TOKEN:
            return {"access_token": "a", "token_type": "Bearer", "id_token": self.id_token()}
        return self.discovery()


def as_json(value: Any) -> Answer:
    """An answer of this JSON."""

    def answer(request: BaseHTTPRequestHandler) -> None:
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        request.send_response(200)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)

    return answer


def redirect_to(address: str, status: int = 307) -> Answer:
    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(status)
        request.send_header("Location", address)
        request.send_header("Content-Length", "0")
        request.end_headers()

    return answer


def endless(request: BaseHTTPRequestHandler, piece: bytes = b" " * 65536, pause: float = 0.0) -> None:
    """A body without an end, as fast as it is taken, or drop by drop."""
    request.send_response(200)
    request.end_headers()
    while True:
        request.wfile.write(piece)
        time.sleep(pause)


def drip_body(request: BaseHTTPRequestHandler) -> None:
    endless(request, b" ", 0.1)


def drip_head(request: BaseHTTPRequestHandler) -> None:
    request.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
    while True:
        request.wfile.write(b"a")
        time.sleep(0.1)


def endless_head(request: BaseHTTPRequestHandler) -> None:
    request.wfile.write(b"HTTP/1.1 200 OK\r\n")
    for n in range(1 << 30):
        request.wfile.write(b"X-%d: %s\r\n" % (n, b"a" * 4000))


def hang(request: BaseHTTPRequestHandler) -> None:
    request.rfile.read(1)  # until the client goes away


def reset(request: BaseHTTPRequestHandler) -> None:
    request.connection.close()


def certificate(folder: Path) -> Path:
    """A file with a key and a certificate of localhost, signed by itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    made = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    made = made.serial_number(1).not_valid_before(now - timedelta(hours=1)).not_valid_after(now + timedelta(hours=1))
    made = made.add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path = folder / "localhost.pem"
    path.write_bytes(private + made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    return path


@contextmanager
def serving(provider: Callable[[str], Provider], pem: Path | None = None) -> Iterator[Provider]:
    """The provider at an address of its own until the block ends; over TLS with a certificate."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = urlsplit(self.path).path
            lying.asked.append((path, body))
            try:
                answer = lying.answers.get(path) or as_json(lying.said(path))
                answer(self)
            except OSError:
                pass  # the client has gone

        do_POST = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads, server.block_on_close = True, False
        address = f"http://127.0.0.1:{server.server_port}"
        if pem is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(pem)
            server.socket = context.wrap_socket(server.socket, server_side=True)
            address = f"https://localhost:{server.server_port}"
        lying = provider(address)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        try:
            yield lying
        finally:
            server.shutdown()
