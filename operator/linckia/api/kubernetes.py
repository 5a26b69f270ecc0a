"""Every name that Linckia has in Kubernetes: kinds, labels, condition types, reasons, ports, what a container is told."""

GROUP = "linckia.dev"
VERSION = "v1alpha1"
KIND = "TrainingRun"
PLURAL = "trainingruns"
SHORT = "trun"

RAY_GROUP = "ray.io"
RAY_VERSION = "v1"

RUN_LABEL = f"{GROUP}/run"  # on a RayJob: its entrypoint trains this run, and the operator looks after it
ATTEMPT_OF_LABEL = f"{GROUP}/attempt-of"  # on a RayJob that the operator made: the name of the root RayJob
STEP_ANNOTATION = f"{GROUP}/at-step"  # on a RayJob that the operator made: the step the run had come to
CHILDREN_KEPT = 3

RAY_CLUSTER_LABEL = "ray.io/cluster"  # KubeRay's own, on the pods of a RayCluster
RAY_NODE_TYPE_LABEL = "ray.io/node-type"
SUBMITTER_ACTOR = "_ray_internal_job_actor_"  # with the submission id behind it: the supervisor of a Ray job

DASHBOARD_PORT = 8265  # state API and job API of the Ray head
CONTROL_PORTS = range(8470, 8490)  # where the control API of a run may listen
HEALTH_PORT = 8080  # of the operator: /healthz
METRICS_PORT = 8081  # of the operator: /metrics

# What the chart tells the operator's container, beside LINCKIA_TOKEN.
NAMESPACE_VARIABLE = "LINCKIA_NAMESPACE"  # the one namespace it works in
CLUSTER_VARIABLE = "LINCKIA_RAY_CLUSTER"  # the one RayCluster it looks after; empty: all in the namespace

MANAGER = "linckia-operator"  # field manager, event source, value of app.kubernetes.io/managed-by

# Condition types of a TrainingRun.
READY = "Ready"  # every group stands and works
PROGRESSING = "Progressing"  # steps are being made
REACHABLE = "Reachable"  # the control API of the run's own controller answers
DETACHED = "Detached"  # the RayJob says it has ended while the controller lives
MISCONFIGURED = "Misconfigured"  # a person has to change something, the message says what
COMPLETE = "Complete"
FAILED = "Failed"


def child_name(root: str, number: int) -> str:
    """The RayJob that goes on with a root RayJob for the ``number``-th time; the name is the lock. At most 47 characters.

    Example: ``child_name("first-run", 2)`` is ``first-run-attempt-2``
    """
    ending = f"-attempt-{number}"
    return root[: 47 - len(ending)].rstrip("-.") + ending
