"""A Redfish service for tests: real HTTPS on localhost, with a certificate of a CA made on the spot."""

from __future__ import annotations

import base64
import contextlib
import datetime
import ipaddress
import json
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

USER, PASSWORD = "monitor", "s3cret-pa55"


def _certificate(name, key, issuer, issuer_key, *, is_ca):
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
    )
    return builder.sign(issuer_key, hashes.SHA256())


class Pki:
    """A CA and a server certificate signed by it, as PEM files in a folder."""

    def __init__(self, folder: Path):
        ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
        ca = _certificate("test CA", ca_key, "test CA", ca_key, is_ca=True)
        server = _certificate("bmc", key, "test CA", ca_key, is_ca=False)
        pem = serialization.Encoding.PEM
        self.ca_file = folder / "ca.pem"
        self.ca_file.write_bytes(ca.public_bytes(pem))
        self.chain_file = folder / "server.pem"
        private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        self.chain_file.write_bytes(private + server.public_bytes(pem))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: RedfishServer

    def log_message(self, *args):
        pass

    def _send(self, status, body, headers=None):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body)

    def _allowed(self):
        basic = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        return self.headers.get("Authorization") == basic

    def do_GET(self):
        self.server.requests.append(("GET", self.path))
        if not self._allowed():
            self._send(401, b"{}")
            return
        if self.server.drip is not None:
            self.server.drip(self)
            return
        answer = self.server.resources.get(self.path)
        if answer is None:
            self._send(404, b"{}")
        elif isinstance(answer, int):
            self._send(answer, b"{}", {"Location": "https://example.com/"})
        elif isinstance(answer, bytes):
            self._send(200, answer)
        else:
            self._send(200, json.dumps(answer).encode())


class RedfishServer(ThreadingHTTPServer):
    """Serves `resources` by path: a dict as JSON, bytes as they are, an int as a status."""

    daemon_threads = True

    def __init__(self, pki: Pki, resources: dict):
        super().__init__(("127.0.0.1", 0), _Handler)
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(pki.chain_file)
        self.resources = dict(resources)
        self.drip = None  # answers instead, byte by byte
        self.requests: list[tuple[str, str]] = []
        self._open: list = []
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()

    def finish_request(self, request, client_address):
        # The handshake belongs to the connection's thread, so that a client that refuses it blocks nobody.
        try:
            with self._context.wrap_socket(request, server_side=True) as tls:
                self._open.append(tls)
                super().finish_request(tls, client_address)
        except OSError:
            pass

    @property
    def url(self):
        return f"https://127.0.0.1:{self.server_address[1]}"

    def hang_up(self):
        """Close the connections that clients keep open."""
        for connection in self._open:
            with contextlib.suppress(OSError):
                connection.shutdown(2)
        self._open.clear()

    def die(self):
        """Stop listening and hang up on everybody. May be called twice."""
        self.shutdown()
        self.server_close()
        self.hang_up()
        self._thread.join()


def _links(path, *ids):
    return {"Members": [{"@odata.id": f"{path}/{i}"} for i in ids]}


ROOT = "/redfish/v1"
CHASSIS = f"{ROOT}/Chassis"
LOG = f"{ROOT}/Managers/bmc/LogServices/SEL/Entries"
PDU = f"{ROOT}/PowerEquipment/RackPDUs/A"


def root(**more):
    return {key: {"@odata.id": f"{ROOT}/{key}"} for key in ("Chassis", *more)}


def log_entry(number, message, **more):
    return {"@odata.id": f"{LOG}/{number}", "Id": str(number), "Message": message, "Created": "x", **more}


def old_service():
    """A server of before 2020: one Power resource."""
    power = {
        "PowerControl": [{"PowerConsumedWatts": 512, "PowerLimit": {"LimitInWatts": 900}}],
        "PowerSupplies": [
            {"Name": "PSU1", "PowerInputWatts": 260, "LineInputVoltage": 230, "Status": {"Health": "OK"}},
            {"Name": "PSU2", "LastPowerOutputWatts": 240},
        ],
    }
    return {
        ROOT: root(Managers=1),
        CHASSIS: _links(CHASSIS, "1"),
        f"{CHASSIS}/1": {"Id": "1", "Name": "Server", "Power": {"@odata.id": f"{CHASSIS}/1/Power"}},
        f"{CHASSIS}/1/Power": power,
        f"{ROOT}/Managers": _links(f"{ROOT}/Managers", "bmc"),
        f"{ROOT}/Managers/bmc": {"LogServices": {"@odata.id": f"{ROOT}/Managers/bmc/LogServices"}},
        f"{ROOT}/Managers/bmc/LogServices": _links(f"{ROOT}/Managers/bmc/LogServices", "SEL"),
        f"{ROOT}/Managers/bmc/LogServices/SEL": {"Id": "SEL", "Entries": {"@odata.id": LOG}},
        LOG: {"Members": [log_entry(1, "PSU1 OCP asserted")]},
    }


def new_service():
    """A server with EnvironmentMetrics and PowerSubsystem, and a GPU module as a chassis of its own."""
    base, supplies = f"{CHASSIS}/Self", f"{CHASSIS}/Self/PowerSubsystem/PowerSupplies"
    gpu = f"{CHASSIS}/HGX GPU/0"
    return {
        ROOT: root(),
        CHASSIS: {"Members": [{"@odata.id": base}, {"@odata.id": f"{CHASSIS}/GPU0"}]},
        base: {
            "Id": "Self",
            "ChassisType": "RackMount",
            "EnvironmentMetrics": {"@odata.id": f"{base}/EnvironmentMetrics"},
            "PowerSubsystem": {"@odata.id": f"{base}/PowerSubsystem"},
        },
        f"{base}/EnvironmentMetrics": {"PowerWatts": {"Reading": 4321.5}},
        f"{base}/PowerSubsystem": {"PowerSupplies": {"@odata.id": supplies}},
        supplies: _links(supplies, "a", "b"),
        f"{supplies}/a": {"Name": "PSU a", "Metrics": {"@odata.id": f"{supplies}/a/Metrics"}},
        f"{supplies}/b": {"Name": "PSU b", "Metrics": {"@odata.id": f"{supplies}/b/Metrics"}},
        f"{supplies}/a/Metrics": {
            "InputPowerWatts": {"Reading": 2200},
            "InputCurrentAmps": {"Reading": 9.5, "PeakReading": 12.5},
            "InputVoltage": {"Reading": 231},
        },
        f"{supplies}/b/Metrics": {"OutputPowerWatts": {"Reading": 2000}},
        f"{CHASSIS}/GPU0": {
            "Id": "HGX GPU/0",
            "Name": gpu,
            "Sensors": {"@odata.id": f"{CHASSIS}/GPU0/Sensors"},
        },
        f"{CHASSIS}/GPU0/Sensors": _links(f"{CHASSIS}/GPU0/Sensors", "temp", "total_power"),
        f"{CHASSIS}/GPU0/Sensors/total_power": {
            "Id": "total_power",
            "ReadingType": "Power",
            "Reading": 650.0,
            "ReadingTime": "2024-01-01T00:00:00Z",
        },
    }


def pdu_service(outlets=0):
    """A rack PDU with one three-phase main, one branch and some outlets."""
    ids = [f"o{i}" for i in range(outlets)]
    return {
        ROOT: root(PowerEquipment=1),
        CHASSIS: {"Members": []},
        f"{ROOT}/PowerEquipment": {"RackPDUs": {"@odata.id": f"{ROOT}/PowerEquipment/RackPDUs"}},
        f"{ROOT}/PowerEquipment/RackPDUs": _links(f"{ROOT}/PowerEquipment/RackPDUs", "A"),
        PDU: {
            "Id": "A",
            "Name": "Rack PDU A",
            "Metrics": {"@odata.id": f"{PDU}/Metrics"},
            "Mains": {"@odata.id": f"{PDU}/Mains"},
            "Branches": {"@odata.id": f"{PDU}/Branches"},
            "Outlets": {"@odata.id": f"{PDU}/Outlets"},
        },
        f"{PDU}/Metrics": {"PowerWatts": {"Reading": 8000}, "EnergykWh": {"Reading": 12345}},
        f"{PDU}/Mains": _links(f"{PDU}/Mains", "AC1"),
        f"{PDU}/Mains/AC1": {
            "@odata.id": f"{PDU}/Mains/AC1",
            "Id": "AC1",
            "RatedCurrentAmps": 32,
            "PolyPhaseCurrentAmps": {"Line1": {"Reading": 10}, "Line2": {"Reading": 20, "PeakReading": 24}},
            "BreakerState": "Normal",
        },
        f"{PDU}/Branches": _links(f"{PDU}/Branches", "B1"),
        f"{PDU}/Branches/B1": branch(12.0),
        f"{PDU}/Outlets": _links(f"{PDU}/Outlets", *ids),
        **{
            f"{PDU}/Outlets/{i}": {"@odata.id": f"{PDU}/Outlets/{i}", "Id": i, "PowerWatts": {"Reading": 100}}
            for i in ids
        },
    }


def branch(current_a, state="Normal"):
    """The one branch circuit, rated at 20 A."""
    return {
        "@odata.id": f"{PDU}/Branches/B1",
        "Id": "B1",
        "Name": "Branch 1",
        "RatedCurrentAmps": 20,
        "CurrentAmps": {"Reading": current_a},
        "Voltage": {"Reading": 230},
        "PowerWatts": {"Reading": current_a * 230},
        "BreakerState": state,
    }
