"""The governor over real sockets: routes, tokens, TLS, strictness, bounds, and a disk that refuses."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tessera.errors import ArgumentError, GovernorError, GovernorRefusal
from tessera.fleet.governor import http_server
from tessera.fleet.governor.client import GovernorAddress
from tessera.fleet.governor.messages import ROUTES, describe_api
from tessera.fleet.governor.serve import bind_listener
from tessera.fleet.governor.service import GovernorService
from tessera.fleet.governor.store import LeaseStore
from tessera.fleet.governor.tokens import Role
from tessera.fleet.leases import BudgetPolicy, JobState, PowerRequest
from tessera.report.governor import describe_event

from fakes.redfish_server import Pki
from governor_process import LocalGovernor

POLICY = BudgetPolicy(cap_w=10_000.0, breaker_margin=1.0, soft_start_s=0.0)


@pytest.fixture
def governor(tmp_path):
    with LocalGovernor(tmp_path, POLICY) as running:
        yield running


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """One for all that must not change it."""
    with LocalGovernor(tmp_path_factory.mktemp("shared"), POLICY) as running:
        running.client().join("n0", 1.0, session="s")
        yield running


def talk(governor, data: bytes, *, shut: bool = True) -> bytes:
    """Send bytes on a new connection; all that comes back."""
    with socket.create_connection(("127.0.0.1", governor.port), timeout=600.0) as sock:
        sock.sendall(data)
        if shut:
            sock.shutdown(socket.SHUT_WR)
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while chunk := sock.recv(65536):
                answer += chunk
        return answer


def test_a_job_from_request_to_release(governor):
    client = governor.client()
    client.join("n0", 500.0, session="s")
    assert client.request(PowerRequest(job="a", watts={"n0": 4000.0})).state is JobState.ACTIVE
    grant = client.heartbeat("n0", session="s", acked=0, measured_w=450.0)
    assert (grant.cap_w, grant.guaranteed_w, grant.lease_s) == (4000.0, 500.0, 20.0)
    assert client.renew("a", 500.0).ends_in_s > 490.0
    client.report_power(5000.0)
    status = client.describe()
    assert (status.measured_w, status.exposure_w, status.limit_w) == (5000.0, 4000.0, 10_000.0)
    client.declare_emergency("test", 1000.0)
    assert client.show_job("a").state is JobState.SHED
    assert client.end_emergency().ended.reason == "test"
    assert client.end_emergency().ended is None  # once more does nothing
    assert client.release("a").state is JobState.ENDED
    with pytest.raises(GovernorRefusal, match="jobs or a lease") as refused:
        client.remove("n0")
    assert refused.value.code == "busy"


def test_every_refusal_says_why(governor):
    client = governor.client()
    client.join("n0", 500.0, session="s", max_w=5000.0)
    client.request(PowerRequest(job="a", watts={"n0": 4000.0}))
    refused = [
        lambda: client.declare_emergency("more", 10_001.0),
        lambda: client.request(PowerRequest(job="a", watts={"n0": 3000.0})),
        lambda: client.request(PowerRequest(job="b", watts={"n0": 30_000.0})),
        lambda: client.request(PowerRequest(job="b", watts={"n1": 3000.0})),
        lambda: client.show_job("b"),
        lambda: client.remove("n0"),
        lambda: client.join("n1", 50_000.0, session="s"),
        lambda: governor.client(Role.READ).join("n0", 1.0, session="s"),
    ]
    for call in refused:
        with pytest.raises(GovernorRefusal) as said:
            call()
        assert said.value.what and said.value.why and said.value.fix
    assert client.describe().emergency is None


def test_every_route_is_answered_and_described(governor):
    answer = talk(governor, b"GET /v1/openapi.json HTTP/1.1\r\nConnection: close\r\n\r\n")
    document = json.loads(answer.split(b"\r\n\r\n")[1])
    assert document == json.loads(json.dumps(describe_api()))
    assert document["openapi"].startswith("3.1")
    for route in ROUTES:
        operation = document["paths"][route.path][route.method.lower()]
        assert operation["summary"]
        path = route.path.replace("{node}", "n0").replace("{job}", "a")
        head = f"{route.method} {path} HTTP/1.1\r\nContent-Length: 0\r\n\r\n".encode()
        status = int(talk(governor, head).split()[1])
        assert status == (200 if route.role is None else 401), route.path
    for name in ("JobBody", "CapGrant", "BudgetStatus", "ErrorAnswer"):
        assert name in document["components"]["schemas"]


@pytest.mark.parametrize(
    ("role", "allowed"),
    [
        (Role.READ, {"describe", "show_job"}),
        (Role.JOB, {"describe", "show_job", "request", "renew", "release"}),
        (Role.NODE, {"describe", "show_job", "join", "heartbeat", "report_power"}),
    ],
)
def test_a_token_may_do_what_its_role_says(governor, role, allowed):
    client = governor.client(role)
    calls = {
        "describe": client.describe,
        "show_job": lambda: client.show_job("a"),
        "request": lambda: client.request(PowerRequest(job="a", watts={"n0": 1.0})),
        "renew": lambda: client.renew("a"),
        "release": lambda: client.release("a"),
        "join": lambda: client.join("n0", 1.0, session="s"),
        "heartbeat": lambda: client.heartbeat("n0", session="s", acked=0, measured_w=None),
        "remove": lambda: client.remove("n0"),
        "report_power": lambda: client.report_power(1.0),
        "declare_emergency": lambda: client.declare_emergency("x"),
        "end_emergency": client.end_emergency,
    }
    assert set(calls) == {r.call for r in ROUTES if r.call}
    for name, call in calls.items():
        code = None
        try:
            call()
        except GovernorRefusal as exc:
            code = exc.code
        assert (code != "forbidden") == (name in allowed), name


def test_a_nodes_token_speaks_for_that_node_only(governor):
    secret = governor.token_file.create("n7", Role.NODE)
    client = governor.client(token=secret)
    client.join("n7", 1.0, session="s")
    with pytest.raises(GovernorRefusal) as refused:
        client.join("n8", 1.0, session="s")
    assert refused.value.code == "forbidden"
    governor.token_file.revoke("n7")
    with pytest.raises(GovernorRefusal) as refused:
        client.heartbeat("n7", session="s", acked=0, measured_w=None)
    assert refused.value.code == "unauthorized"


GOOD = b'{"job": "a", "watts": {"n0": 100.0}}'


def post(body: bytes = GOOD, *, path=b"/v1/jobs", headers=b"", token=b"TOKEN", kind=b"application/json") -> bytes:
    return (
        b"POST " + path + b" HTTP/1.1\r\nAuthorization: Bearer " + token + b"\r\nContent-Type: " + kind + b"\r\n"
        b"Content-Length: " + str(len(body)).encode() + b"\r\n" + headers + b"\r\n" + body
    )


MALFORMED = {
    "no token": (post().replace(b"Authorization: Bearer TOKEN\r\n", b""), 401),
    "wrong token": (post(token=b"tsg_wrong"), 401),
    "token twice": (post(headers=b"Authorization: Bearer TOKEN\r\n"), 400),
    "another scheme": (post().replace(b"Bearer", b"Basic"), 401),
    "not json": (post(b"watts=100"), 400),
    "an unknown key": (post(b'{"job": "a", "watts": {"n0": 100.0}, "wats": 1}'), 400),
    "a text for a number": (post(b'{"job": "a", "watts": {"n0": "100"}}'), 400),
    "nan": (post(b'{"job": "a", "watts": {"n0": NaN}}'), 400),
    "infinite": (post(b'{"job": "a", "watts": {"n0": 1e999}}'), 400),
    "negative": (post(b'{"job": "a", "watts": {"n0": -1}}'), 400),
    "no node": (post(b'{"job": "a", "watts": {}}'), 400),
    "a name with a line break": (post(b'{"job": "a\\n", "watts": {"n0": 100.0}}'), 400),
    "a name with a slash": (post(b'{"job": "../a", "watts": {"n0": 100.0}}'), 400),
    "deep": (post(b'{"job":' + b"[" * 5000 + b"]" * 5000 + b"}"), 400),
    "another type": (post(kind=b"text/plain"), 415),
    "no length": (post().replace(b"Content-Length: %d\r\n" % len(GOOD), b""), 411),
    "length twice": (post(headers=b"Content-Length: 3\r\n"), 400),
    "a wrong length": (post().replace(b"Content-Length: ", b"Content-Length: +"), 400),
    "too long": (post().replace(b"Content-Length: %d" % len(GOOD), b"Content-Length: 99999999"), 413),
    "chunks": (post(headers=b"Transfer-Encoding: chunked\r\n"), 501),
    "a long header": (post(headers=b"X: " + b"a" * 10_000 + b"\r\n"), 431),
    "a folded header": (post(headers=b"X: a\r\n b\r\n"), 400),
    "a header without colon": (post(headers=b"nonsense\r\n"), 400),
    "a null byte": (post(headers=b"X: \x00\r\n"), 400),
    "another method": (post().replace(b"POST", b"PUT"), 405),
    "another version": (post().replace(b"HTTP/1.1", b"HTTP/2.0"), 400),
    "another path": (post(path=b"/v1/job"), 404),
    "a path outside": (post(path=b"/v1/jobs/../nodes"), 404),
    "a wrong method for the path": (post(path=b"/v1/status"), 405),
    "not http": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_what_is_wrong_changes_nothing(shared, name):
    data, status = MALFORMED[name]
    token = shared.tokens[Role.JOB].encode()
    answer = talk(shared, data.replace(b"TOKEN", token))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert int(head.split()[1]) == status, answer
    error = json.loads(body)["error"]
    assert error["code"] and error["what"] and error["why"] and error["fix"]
    assert token not in answer
    budget = shared.service.budget
    assert (budget.queue.jobs, budget.ended, list(budget.ledger.nodes)) == ({}, {}, ["n0"])


def test_the_same_request_in_the_right_form_does_change_something(governor):
    governor.client().join("n0", 1.0, session="s")
    assert talk(governor, post().replace(b"TOKEN", governor.tokens[Role.JOB].encode())).startswith(b"HTTP/1.1 200")
    assert list(governor.service.budget.queue.jobs) == ["a"]


def test_a_cut_request_changes_nothing(shared):
    whole = post().replace(b"TOKEN", shared.tokens[Role.JOB].encode())
    for end in range(1, len(whole), 7):
        talk(shared, whole[:end])
    assert shared.service.budget.queue.jobs == {}


def test_requests_that_come_together_are_all_answered(governor):
    governor.client().join("n0", 1.0, session="s")
    bodies = [b'{"job": "j%d", "watts": {"n0": 100.0}}' % i for i in range(20)]
    data = b"".join(post(body).replace(b"TOKEN", governor.tokens[Role.JOB].encode()) for body in bodies)
    assert talk(governor, data).count(b"HTTP/1.1 200") == 20
    assert len(governor.service.budget.queue.jobs) == 20


def test_slow_and_silent_clients_keep_nobody_out(tmp_path, monkeypatch):
    """More strangers than connections: each new one closes the oldest; a client with a token stays."""
    monkeypatch.setattr(http_server, "CONNECTIONS", 8)
    monkeypatch.setattr(http_server, "REQUEST_S", 60.0)
    with LocalGovernor(tmp_path, POLICY) as governor, contextlib.ExitStack() as stack:
        client = governor.client()
        client.join("n0", 1.0, session="s")
        for i in range(30):
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", governor.port), timeout=600.0))
            sock.sendall(b"POST /v1/jobs HTTP/1.1\r\nX: " + b"a" * i)  # and no more
        assert client.heartbeat("n0", session="s", acked=0, measured_w=None).seq == 1
        assert client._connection is not None  # still the first connection
        assert governor.client().describe().nodes


def test_a_request_that_takes_too_long_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(http_server, "REQUEST_S", 0.2)
    with LocalGovernor(tmp_path, POLICY) as governor:
        assert talk(governor, b"POST /v1/jobs HT", shut=False) == b""  # closed, or this would wait for ever


def test_tls_and_a_certificate_that_is_not_trusted(tmp_path):
    (tmp_path / "other").mkdir()
    pki, other = Pki(tmp_path), Pki(tmp_path / "other")
    with LocalGovernor(tmp_path / "state", POLICY, chain_file=pki.chain_file) as governor:
        assert governor.url.startswith("https://")
        assert governor.client(ca_file=pki.ca_file).join("n0", 1.0, session="s").joined
        with pytest.raises(GovernorError, match="cannot be trusted"):
            governor.client(ca_file=other.ca_file).describe()
        with pytest.raises(GovernorError, match="cannot be trusted"):
            governor.client().describe()
        assert not talk(governor, post()).startswith(b"HTTP")


def test_plain_http_is_for_this_machine_only():
    with pytest.raises(ArgumentError, match="without TLS"):
        bind_listener(socket.AF_INET, ("0.0.0.0", 0), tls=False)
    with pytest.raises(ArgumentError, match="in the clear"):
        GovernorAddress(url="http://10.0.0.1:9410", token="x")
    address = GovernorAddress(url="https://10.0.0.1:9410", token="tsg_secret")
    assert "secret" not in repr(address)


def test_a_disk_that_refuses_ends_the_governor_without_an_answer(tmp_path):
    governor = LocalGovernor(tmp_path, POLICY)
    with governor:
        client = governor.client()
        client.join("n0", 1.0, session="s")
        governor.service.store._db.execute("PRAGMA query_only=1")
        with pytest.raises(GovernorError, match="cannot be asked"):
            client.request(PowerRequest(job="a", watts={"n0": 100.0}))
    assert isinstance(governor.error, GovernorError)
    with LocalGovernor(tmp_path, POLICY) as again:
        assert again.service.budget.queue.jobs == {}


def test_many_clients_at_once_lose_and_double_nothing(governor):
    governor.client().join("n0", 1.0, session="s")
    failed = []

    def work(number):
        client = governor.client(Role.JOB)
        try:
            for i in range(20):
                client.request(PowerRequest(job=f"w{number}-{i}", watts={"n0": 10.0}))
                if i % 2:
                    client.release(f"w{number}-{i}")
        except Exception as exc:
            failed.append(exc)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert not failed
    assert len(governor.service.budget.queue.jobs) == 80
    assert len(governor.service.budget.ended) == 80


def test_a_client_finds_a_governor_that_was_started_again(tmp_path):
    with LocalGovernor(tmp_path, POLICY) as governor:
        client = governor.client()
        client.join("n0", 1.0, session="s")
    started = time.monotonic()
    with pytest.raises(GovernorError, match="cannot be asked"):
        client.describe()
    assert time.monotonic() - started < 300.0  # of the 600 s that it waits for an answer


def test_the_log_has_a_line_for_each_event_and_metrics_count_them(governor):
    seen = []
    governor.service.journal.on_event = seen.append
    client = governor.client()
    client.join("n0", 500.0, session="s")
    client.request(PowerRequest(job="a", watts={"n0": 8000.0}, min_share=1.0))
    client.request(PowerRequest(job="b", watts={"n0": 6000.0}, min_share=1.0))
    client.heartbeat("n0", session="s", acked=0, measured_w=9000.0)
    client.heartbeat("n0", session="s", acked=1, measured_w=9000.0)  # nothing new
    client.declare_emergency("feed B lost", 1000.0)
    client.end_emergency()
    client.release("a")
    assert [describe_event(e) for e in seen] == [
        "node n0: joined, guaranteed 500 W",
        "job a: active, asks for 8 kW",
        "job b: queued, asks for 6 kW (it needs 6 kW, 2 kW are free)",
        "job a: shed, asks for 8 kW (feed B lost)",
        "emergency: declared to 1 kW (feed B lost)",
        "job a: active, asks for 8 kW",
        "emergency: over",
        "job a: ended, asks for 8 kW (released)",
        "job b: active, asks for 6 kW",
    ]
    with pytest.raises(GovernorRefusal, match="this token is not one of this governor"):
        governor.client(token="tsg_" + "x" * 43).describe()
    assert describe_event(seen[-1]) == "refused 127.0.0.1: GET /v1/status: unauthorized"
    for _ in range(3):
        talk(governor, b"GET /v1/status HTTP/1.1\r\nConnection: close\r\n\r\n")
    assert sum(e.what == "refused" for e in seen) == 1  # a stranger does not fill the disk
    token = governor.tokens[Role.READ].encode()
    head = b"GET /metrics HTTP/1.1\r\nConnection: close\r\nAuthorization: Bearer " + token + b"\r\n\r\n"
    answer = talk(governor, head)
    assert b"Content-Type: text/plain; version=0.0.4" in answer
    text = answer.partition(b"\r\n\r\n")[2].decode()
    samples = {(s.name, *s.labels.values()): s.value for f in text_string_to_metric_families(text) for s in f.samples}
    assert samples["tessera_governor_refused_total", "unauthorized"] == 4.0
    assert samples["tessera_governor_refused_total", "forbidden"] == 0.0
    assert samples["tessera_governor_events_total", "job", "shed"] == 1.0
    assert samples["tessera_governor_jobs", "active"] == 1.0 and samples["tessera_governor_emergency",] == 0.0
    assert samples["tessera_governor_node_measured_watts", "n0"] == 9000.0


def test_a_node_that_falls_silent_is_told(tmp_path):
    now_s, seen = [1000.0], []
    service = GovernorService(POLICY, LeaseStore(tmp_path / "leases.db"), clock=lambda: now_s[0])
    service.journal.on_event = seen.append
    service.join("n0", 500.0, None, "s")
    service.take_changes()
    now_s[0] += POLICY.lease_s + 1
    service.advance()
    service.look_for_silence()
    service.look_for_silence()
    assert [e.state for e in seen] == ["joined", "silent"]
    service.heartbeat("n0", "s", 0, None)
    service.take_changes()
    assert [e.state for e in seen] == ["joined", "silent", "joined"]
    service.store.close()
    again = GovernorService(POLICY, LeaseStore(tmp_path / "leases.db"), clock=lambda: now_s[0])
    again.journal.on_event = seen.append
    again.look_for_silence()
    assert len(seen) == 3  # what a restart finds is no news
    again.store.close()


def test_a_job_is_renewed_and_ended_by_the_token_that_asked(governor):
    governor.client().join("n0", 500.0, session="s")
    other = governor.client(token=governor.token_file.create("other", Role.JOB))
    governor.client(Role.JOB).request(PowerRequest(job="a", watts={"n0": 4000.0}))
    for call in (other.release, other.renew):
        with pytest.raises(GovernorRefusal, match="may not do that") as refused:
            call("a")
        assert refused.value.code == "forbidden" and "asked for by the token 'jobs'" in refused.value.why
    assert other.show_job("a").state is JobState.ACTIVE
    assert governor.client(Role.JOB).renew("a").state is JobState.ACTIVE
    with pytest.raises(GovernorRefusal) as unknown:
        other.release("b")
    assert unknown.value.code == "unknown_job"
    assert governor.client().release("a").state is JobState.ENDED  # an operator may
