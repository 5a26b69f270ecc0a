"""What the operator says of itself, for Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

REGISTRY = CollectorRegistry()

RUNS = Gauge("linckia_operator_runs", "runs that are looked after", registry=REGISTRY)
RECONCILES = Counter("linckia_operator_reconciles", "reconciles of a run", ["result"], registry=REGISTRY)
RECONCILE_SECONDS = Histogram(
    "linckia_operator_reconcile_seconds",
    "time of one reconcile, what it asked for included",
    buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10),
    registry=REGISTRY,
)
ORDERS = Counter("linckia_operator_orders", "restarts ordered of controllers", ["result"], registry=REGISTRY)
CHILDREN = Counter("linckia_operator_children", "RayJobs made to go on with a run", ["result"], registry=REGISTRY)
WRITES = Counter("linckia_operator_writes", "requests that change something in Kubernetes", ["what"], registry=REGISTRY)
API_ERRORS = Counter(
    "linckia_operator_api_errors", "requests that an API did not answer well", ["api"], registry=REGISTRY
)
