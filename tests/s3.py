"""An S3 server on loopback, in a process of its own: what it imports does not get into the process of the tests."""

import secrets
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlencode

from tests.ports import HeldPort

LOGIN = {"access_key": "test", "secret_key": "test", "region_name": "us-east-1"}


class S3Server:
    """``stop()`` and ``start()`` make an outage: the address and what the server holds stay the same."""

    def __init__(self) -> None:
        self._port = HeldPort()
        self.url = self._port.url
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.s3", str(self._port.number)], cwd=Path(__file__).parent.parent,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        self.start()

    def start(self) -> None:
        self._ask("start")

    def stop(self) -> None:
        self._ask("stop")

    def close(self) -> None:
        """End the process."""
        self._process.communicate()
        self._port.close()

    def _ask(self, command: str) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == f"{command}\n", "the S3 server ended"

    def new_bucket(self) -> str:
        """INSPECTOR_FILES of an empty bucket."""
        import boto3

        login = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
        name = f"inspector-test-{secrets.token_hex(6)}"
        boto3.client("s3", endpoint_url=self.url, **login).create_bucket(Bucket=name)
        return f"s3://{name}/some/prefix?{urlencode({'endpoint_url': self.url, **LOGIN})}"


def serve(port: int) -> None:
    """Does what the lines of standard input say, and ends with them."""
    import logging

    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    server = ThreadedMotoServer("127.0.0.1", port, verbose=False)
    for line in sys.stdin:
        if line == "start\n":
            server.start()
        else:
            server.stop()
            assert server._server is not None
            server._server.server_close()  # else who asks waits instead of being refused
        print(line, end="", flush=True)


if __name__ == "__main__":
    serve(int(sys.argv[1]))
