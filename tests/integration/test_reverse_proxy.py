"""deploy/nginx/longshore.conf in a real nginx: TLS, streams, closed paths."""

import datetime
import ipaddress
import socket
import ssl
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import openai
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests.conftest import ROOT
from tests.integration.conftest import StartDeployment
from tests.integration.deployment import PATIENCE_S, wait_until

pytestmark = pytest.mark.services

EXAMPLE = ROOT / "deploy" / "nginx" / "longshore.conf"


def write_certificate(folder: Path) -> None:
    """One for 127.0.0.1, signed by itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .sign(key, hashes.SHA256())
    )
    encoding = serialization.Encoding.PEM
    (folder / "longshore.crt").write_bytes(certificate.public_bytes(encoding))
    private_format = serialization.PrivateFormat.PKCS8
    no_encryption = serialization.NoEncryption()
    private = key.private_bytes(encoding, private_format, no_encryption)
    (folder / "longshore.key").write_bytes(private)


@contextmanager
def proxy(upstream: str, folder: Path) -> Iterator[tuple[str, ssl.SSLContext]]:
    """Run nginx with the example, changed to the upstream's `HOST:PORT`, a free port and the
    folder; yields its URL and what trusts its certificate."""
    write_certificate(folder)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    example = EXAMPLE.read_text()
    for place, value in (
        ("server 127.0.0.1:8000;", f"server {upstream};"),
        ("listen 443 ssl;", f"listen 127.0.0.1:{port} ssl;"),
        ("/etc/nginx/", f"{folder}/"),
    ):
        assert place in example
        example = example.replace(place, value)
    temporary = "\n".join(
        f"{kind}_temp_path {folder}/{kind};"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    config = folder / "nginx.conf"
    config.write_text(
        f"daemon off; pid {folder}/pid; error_log stderr;\nevents {{}}\n"
        f"http {{ access_log off; {temporary}\n{example} }}\n"
    )
    with (folder / "nginx.log").open("wb") as log:
        nginx = subprocess.Popen(["nginx", "-p", str(folder), "-c", str(config)], stderr=log)
    try:
        wait_until(lambda: accepts(port) or nginx.poll() is not None)
        assert nginx.poll() is None, (folder / "nginx.log").read_text()
        trust = ssl.create_default_context(cafile=str(folder / "longshore.crt"))
        yield f"https://127.0.0.1:{port}", trust
    finally:
        nginx.terminate()
        nginx.wait(timeout=PATIENCE_S)


def accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_an_event_arrives_before_the_next_one_exists(tmp_path: Path) -> None:
    first_is_read = threading.Event()

    class Stream(BaseHTTPRequestHandler):
        def log_message(self, *_arguments: object) -> None:
            pass

        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            self.wfile.write(b"data: 1\n\n")
            self.wfile.flush()
            if first_is_read.wait(PATIENCE_S):
                self.wfile.write(b"data: 2\n\n")

    with ThreadingHTTPServer(("127.0.0.1", 0), Stream) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            upstream = f"127.0.0.1:{server.server_port}"
            with (
                proxy(upstream, tmp_path) as (url, trust),
                urllib.request.urlopen(f"{url}/v1/stream", context=trust, timeout=10) as response,
            ):
                assert response.readline() == b"data: 1\n"
                first_is_read.set()
                assert response.read() == b"\ndata: 2\n\n"
        finally:
            first_is_read.set()
            server.shutdown()


def test_an_official_client_streams_through_it_and_operators_paths_are_closed(
    start_deployment: StartDeployment, tmp_path: Path
) -> None:
    deployment = start_deployment("--api-key", "secret").wait_until_ready()
    upstream = deployment.url.removeprefix("http://")
    with proxy(upstream, tmp_path) as (url, trust):
        client = openai.OpenAI(
            base_url=f"{url}/v1",
            api_key="secret",
            max_retries=0,
            http_client=openai.DefaultHttpx2Client(verify=trust),
        )
        model = client.models.list().data[0].id
        chunks = list(
            client.completions.create(model=model, prompt="x", max_tokens=20, stream=True)
        )
        assert chunks[-1].choices[0].finish_reason in ("stop", "length")
        for path in ("/metrics", "/engine/report", "/admin/drain"):
            with pytest.raises(urllib.error.HTTPError) as closed:
                urllib.request.urlopen(f"{url}{path}", context=trust, timeout=10)
            assert (closed.value.code, b"nginx" in closed.value.read()) == (404, True), path
        with urllib.request.urlopen(f"{url}/ready", context=trust, timeout=10) as response:
            assert response.status == 200
