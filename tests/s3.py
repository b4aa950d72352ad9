"""An S3 server on loopback, in the process of the tests."""

import secrets
import socket
from urllib.parse import urlencode

LOGIN = {"access_key": "test", "secret_key": "test", "region_name": "us-east-1"}


class S3Server:
    """``stop()`` and ``start()`` make an outage: the address and what the server holds stay the same."""

    def __init__(self) -> None:
        from moto.server import ThreadedMotoServer

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._server = ThreadedMotoServer("127.0.0.1", port, verbose=False)
        self.start()

    def start(self) -> None:
        self._server.start()

    def stop(self) -> None:
        self._server.stop()
        assert self._server._server is not None
        self._server._server.server_close()  # else who asks waits instead of being refused

    def new_bucket(self) -> str:
        """INSPECTOR_FILES of an empty bucket."""
        import boto3

        login = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
        name = f"inspector-test-{secrets.token_hex(6)}"
        boto3.client("s3", endpoint_url=self.url, **login).create_bucket(Bucket=name)
        return f"s3://{name}/some/prefix?{urlencode({'endpoint_url': self.url, **LOGIN})}"
