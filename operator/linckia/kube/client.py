"""Every request of the operator to the API server that kopf does not make itself. Each ends within a few seconds."""

from collections.abc import Callable
from typing import Any, Protocol

from urllib3.exceptions import HTTPError

from linckia.act.manifests import Manifest
from linckia.api.kubernetes import GROUP, PLURAL, RAY_GROUP, RAY_VERSION, VERSION
from linckia.kube import metrics

TIMEOUT_SECONDS = 10


class Api(Protocol):
    """What a reconcile needs of Kubernetes. ``False``: it exists already, or is gone already; either is fine."""

    def get_ray_job(self, name: str) -> Manifest | None: ...
    def create_ray_job(self, manifest: Manifest) -> bool: ...
    def delete_ray_job(self, name: str, uid: str) -> bool: ...
    def create_training_run(self, manifest: Manifest) -> bool: ...
    def patch_status(self, name: str, patch: Manifest) -> bool: ...
    def create_event(self, manifest: Manifest) -> bool: ...


class ApiError(Exception):
    """The API server did not answer, or refused; the next reconcile tries again."""


class Client:
    """The API server of the cluster we run in, else of the kubeconfig. One namespace."""

    def __init__(self, namespace: str) -> None:
        from kubernetes import client, config

        try:
            config.load_incluster_config()  # type: ignore[no-untyped-call]
        except config.ConfigException:
            config.load_kube_config()  # type: ignore[no-untyped-call]
        self.namespace = namespace
        self._client = client
        self._objects = client.CustomObjectsApi()
        self._core = client.CoreV1Api()

    def missing_kinds(self) -> list[str]:
        """Which of the kinds that we work with this cluster does not know."""
        kinds = [(RAY_GROUP, RAY_VERSION, "rayjobs"), (RAY_GROUP, RAY_VERSION, "rayclusters"), (GROUP, VERSION, PLURAL)]
        return [
            f"{plural}.{group} {version}" for group, version, plural in kinds if not self._known(group, version, plural)
        ]

    def _known(self, group: str, version: str, plural: str) -> bool:
        return self._ask(lambda: self._list(group, version, plural), 404) is not None

    def _list(self, group: str, version: str, plural: str) -> Any:
        return self._objects.list_namespaced_custom_object(
            group, version, self.namespace, plural, limit=1, _request_timeout=TIMEOUT_SECONDS
        )

    def get_ray_job(self, name: str) -> Manifest | None:
        found: Manifest | None = self._ask(
            lambda: self._objects.get_namespaced_custom_object(
                RAY_GROUP, RAY_VERSION, self.namespace, "rayjobs", name, _request_timeout=TIMEOUT_SECONDS
            ),
            404,
        )
        return found

    def create_ray_job(self, manifest: Manifest) -> bool:
        return self._create(RAY_GROUP, RAY_VERSION, "rayjobs", manifest)

    def delete_ray_job(self, name: str, uid: str) -> bool:
        """Only the very object that was seen: a new one of the same name is left alone."""
        only = self._client.V1DeleteOptions(preconditions=self._client.V1Preconditions(uid=uid))
        return self._write(
            "delete RayJob",
            lambda: self._objects.delete_namespaced_custom_object(
                RAY_GROUP, RAY_VERSION, self.namespace, "rayjobs", name,
                body=only, _request_timeout=TIMEOUT_SECONDS,
            ),
            accept=(404, 409),
        )  # fmt: skip

    def create_training_run(self, manifest: Manifest) -> bool:
        return self._create(GROUP, VERSION, PLURAL, manifest)

    def patch_status(self, name: str, patch: Manifest) -> bool:
        return self._write(
            "patch status",
            lambda: self._objects.patch_namespaced_custom_object_status(
                GROUP, VERSION, self.namespace, PLURAL, name, patch,
                _content_type="application/merge-patch+json", _request_timeout=TIMEOUT_SECONDS,
            ),
            accept=(404,),
        )  # fmt: skip

    def create_event(self, manifest: Manifest) -> bool:
        body: Any = self._client.CoreV1Event.from_dict(manifest)
        return self._write(
            "create Event",
            lambda: self._core.create_namespaced_event(self.namespace, body, _request_timeout=TIMEOUT_SECONDS),
            accept=(409,),
        )

    def _create(self, group: str, version: str, plural: str, manifest: Manifest) -> bool:
        return self._write(
            f"create {manifest['kind']}",
            lambda: self._objects.create_namespaced_custom_object(
                group, version, self.namespace, plural, manifest, _request_timeout=TIMEOUT_SECONDS
            ),
            accept=(409,),
        )

    def _write(self, what: str, call: Callable[[], Any], accept: tuple[int, ...]) -> bool:
        metrics.WRITES.labels(what).inc()
        return self._ask(call, *accept) is not None  # every answer that is no error has a body

    def _ask(self, call: Callable[[], Any], *accepted: int) -> Any:
        """The answer; None for a status that is accepted. ApiError with no word of what was sent."""
        try:
            return call()
        except self._client.ApiException as error:
            if error.status in accepted:
                return None
            metrics.API_ERRORS.labels("kubernetes").inc()
            raise ApiError(f"the API server answers {error.status} {error.reason}") from None
        except (HTTPError, OSError) as error:
            metrics.API_ERRORS.labels("kubernetes").inc()
            raise ApiError(f"the API server does not answer ({type(error).__name__})") from None
