"""Real S3 servers, one of each a session."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from forebay.storage.endpoint import RemoteUrl, parse_remote
from forebay.testing.proxy import FaultProxy
from forebay.testing.s3 import BUCKET, S3Server, free_ports


@dataclass(frozen=True)
class Place:
    """A bucket and what a client needs to reach it."""

    endpoint: str
    environment: dict[str, str]

    def url(self, run: str, **options: str) -> RemoteUrl:
        more = "".join(f"&{name}={value}" for name, value in options.items())
        return parse_remote(f"s3://{BUCKET}/{run}?endpoint={self.endpoint}&allow_http=true{more}")


@pytest.fixture(scope="session")
def weed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with S3Server(tmp_path_factory.mktemp("weed")) as server:
        yield server


@pytest.fixture
def seaweed(weed: S3Server, monkeypatch: pytest.MonkeyPatch) -> Place:
    """SeaweedFS, with its keys in the environment."""
    for name, value in weed.environment.items():
        monkeypatch.setenv(name, value)
    return Place(weed.endpoint, weed.environment)


@pytest.fixture
def proxy(seaweed: Place, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """A fault proxy before SeaweedFS, and the one that clients are led to."""
    with FaultProxy(seaweed.endpoint, seed=1) as made:
        monkeypatch.setenv("AWS_ENDPOINT_URL", made.url)
        yield made


@pytest.fixture(scope="session")
def moto_port() -> Iterator[int]:
    (port,) = free_ports(1)
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield port
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture
def moto(moto_port: int, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Moto, an S3 of another maker: it holds everything in memory and checks no keys."""
    import botocore.session

    endpoint = f"http://127.0.0.1:{moto_port}"
    given = {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any", "AWS_REGION": "us-east-1"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    client = botocore.session.Session().create_client(
        "s3", endpoint_url=endpoint, region_name="us-east-1"
    )
    deadline = time.monotonic() + 60
    while True:
        try:
            client.create_bucket(Bucket=BUCKET)
            break
        except Exception:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
    return Place(endpoint, given)
