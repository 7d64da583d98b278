"""The governor as a service: a budget (fleet/budget.py) with a disk, a network, tokens and node daemons around it.

::

    tessera governor serve   HttpServer ──► GovernorApp (routes, tokens) ──► GovernorService (Budget, LeaseStore, clock)
    tessera governor join    NodeDaemon (sensors, CapHolder, lease file, driver) ──► GovernorClient ──► HTTP/JSON
    a job, Slurm, Kubernetes ─────────────────────────────────────────────────────► HTTP/JSON
    on Ray                   the service and the daemons as actors (ray_adapter.py), without HTTP
"""
