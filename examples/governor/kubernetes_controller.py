"""A Kubernetes controller in one file: pods wait for watts behind a scheduling gate, and get a lease while they run.

    kubectl apply -f kubernetes.yaml

A pod asks by the annotation tessera.energy/watts ("6000", on the one node it will run on) and starts with the
scheduling gate tessera.energy/watts and a node selector kubernetes.io/hostname. The controller asks the governor for a
lease, takes the gate away once it is active, renews it while the pod is there, and releases it afterwards. Only
Python's own library is used; addresses and tokens come from the environment, as in every pod.
"""

from __future__ import annotations

import json
import os
import ssl
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

GATE = WATTS = "tessera.energy/watts"
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
PERIOD_S, TTL_S = 5.0, 60.0


class JsonService:
    """A service that speaks JSON over HTTPS with a bearer token."""

    def __init__(self, url: str, token_file: Path, ca_file: str | None) -> None:
        self._url, self._token_file = url.rstrip("/"), token_file
        self._tls = ssl.create_default_context(cafile=ca_file) if url.startswith("https") else None

    def call(self, method: str, path: str, body: object = None, kind: str = "application/json") -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self._token_file.read_text().strip()}", "Content-Type": kind}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=10.0, context=self._tls) as answer:
            found: dict[str, Any] = json.load(answer)
        return found


class Controller:
    """Brings pods and leases into line, again and again; it keeps no state of its own."""

    def __init__(self, cluster: JsonService, governor: JsonService) -> None:
        self.cluster, self.governor = cluster, governor

    def reconcile(self) -> None:
        """One round over all pods that ask for watts, and over leases whose pod is gone."""
        alive = set()
        for pod in self.cluster.call("GET", "/api/v1/pods")["items"]:
            meta, spec = pod["metadata"], pod["spec"]
            watts = meta.get("annotations", {}).get(WATTS)
            if watts is None or pod.get("status", {}).get("phase") in ("Succeeded", "Failed"):
                continue
            job = f"pod-{meta['uid']}"
            alive.add(job)
            node = spec.get("nodeName") or spec.get("nodeSelector", {}).get("kubernetes.io/hostname")
            try:
                self.ask(job, node, float(watts), meta["namespace"])
                state = self.governor.call("POST", f"/v1/jobs/{job}/renew", {"ttl_s": TTL_S})["state"]
            except (urllib.error.URLError, ValueError) as error:
                print(f"{meta['namespace']}/{meta['name']}: {error}", file=sys.stderr)
                continue
            gates = spec.get("schedulingGates", [])
            if state == "active" and {"name": GATE} in gates:
                self.open_gate(meta["namespace"], meta["name"], [g for g in gates if g["name"] != GATE])
        for lease in self.governor.call("GET", "/v1/status")["jobs"]:
            if lease["job"].startswith("pod-") and lease["job"] not in alive:
                self.governor.call("DELETE", f"/v1/jobs/{lease['job']}")

    def ask(self, job: str, node: str | None, watts: float, user: str) -> None:
        """The same request in every round: the governor takes it as one."""
        if node is None:
            raise ValueError(f"{job} needs a nodeSelector kubernetes.io/hostname")
        body = {"job": job, "watts": {node: watts}, "user": user, "ttl_s": TTL_S}
        self.governor.call("POST", "/v1/jobs", body)

    def open_gate(self, namespace: str, name: str, gates: list[dict[str, str]]) -> None:
        """Let the scheduler place the pod."""
        patch = [{"op": "replace", "path": "/spec/schedulingGates", "value": gates}]
        path = f"/api/v1/namespaces/{namespace}/pods/{name}"
        self.cluster.call("PATCH", path, patch, "application/json-patch+json")


def main() -> None:
    env = os.environ
    cluster = JsonService("https://kubernetes.default.svc", ACCOUNT / "token", str(ACCOUNT / "ca.crt"))
    governor = JsonService(
        env["TESSERA_GOVERNOR_URL"], Path(env["TESSERA_GOVERNOR_TOKEN_FILE"]), env.get("TESSERA_GOVERNOR_CA")
    )
    controller = Controller(cluster, governor)
    while True:
        try:
            controller.reconcile()
        except (urllib.error.URLError, TimeoutError) as error:
            print(f"next round in {PERIOD_S:g} s: {error}", file=sys.stderr)
        time.sleep(PERIOD_S)


if __name__ == "__main__":
    main()
