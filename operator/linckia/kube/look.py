"""What can be seen of a run at one moment: through the Ray state API, its controller's API and Ray's job API."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from linckia.act import ray_jobs
from linckia.api.kubernetes import DASHBOARD_PORT, SUBMITTER_ACTOR
from linckia.decide.attempts import Life
from linckia.kube import metrics
from linckia.observe import control_api
from linckia.observe.control_api import NOBODY, Beacon, ControlSeen
from linckia.observe.kubernetes import PodSeen, head_ip
from linckia.observe.observation import RayState
from linckia.observe.ray_state import RayStateClient, StateApiError, bearer


@dataclass(frozen=True)
class Look:
    """``ray`` is None where there is no head to ask. ``beacon``: the newest controller that is listed alive."""

    ray: RayState | None = None
    beacon: Beacon | None = None
    control: ControlSeen = NOBODY
    beacon_life: Life = "unknown"
    control_life: Life = "unknown"

    @property
    def ray_answers(self) -> bool | None:
        return None if self.ray is None else self.ray.actors is not None


class Looker:
    """Asks for all runs of a namespace; connections are shared. ``transport`` is given by tests."""

    def __init__(
        self,
        token: str,
        ray_token: str = "",
        transport: httpx.BaseTransport | None = None,
        dashboard_port: int = DASHBOARD_PORT,
    ) -> None:
        self.token = token
        self.ray_headers = bearer(ray_token) if ray_token else {}
        self.dashboard_port = dashboard_port
        limits = httpx.Limits(max_connections=512, max_keepalive_connections=256, keepalive_expiry=30)
        # One pool for all: none of its requests is encrypted, follows a redirect or goes through a proxy.
        self.transport = transport or httpx.HTTPTransport(verify=False, trust_env=False, limits=limits)
        self.http = self._client()
        self.ray_http = self._client(headers=self.ray_headers)

    def _client(self, **keys: Any) -> httpx.Client:
        return httpx.Client(transport=self.transport, trust_env=False, follow_redirects=False, **keys)

    def dashboard(self, pods: Sequence[PodSeen], cluster: str | None) -> str | None:
        """The Ray dashboard of a RayCluster, at its head pod's own address."""
        ip = head_ip(pods, cluster or "")
        if ip is None:
            return None
        return f"http://{f'[{ip}]' if ':' in ip else ip}:{self.dashboard_port}"

    def look(self, run: str, cluster: str | None, pods: Sequence[PodSeen], last: Beacon | None) -> Look:
        """Look at a run. ``last``: where its controller last answered, asked again where no beacon is listed any more."""
        dashboard = self.dashboard(pods, cluster)
        if dashboard is None or cluster is None:
            return Look()
        ray = self._state(dashboard).look(run)
        if ray.problems:
            metrics.API_ERRORS.labels("ray state").inc()
        if ray.actors is None:
            return Look(ray)
        listed = control_api.beacons(ray.actors, run)
        alive = [beacon for beacon in listed if beacon.state != "DEAD"]
        if alive:
            control = self.ask_control(alive[-1], run, pods, cluster)
            return Look(ray, alive[-1], control, "alive", _life(control))
        control = self.ask_control(last, run, pods, cluster) if last is not None else NOBODY
        life = _life(control)
        # An answer that was cut may have left a beacon out. Of what is gone every operator says the same.
        return Look(ray, None, NOBODY if life == "gone" else control, "gone" if ray.complete else "unknown", life)

    def ask_control(self, beacon: Beacon, run: str, pods: Sequence[PodSeen], cluster: str) -> ControlSeen:
        control = control_api.ask(self.http, beacon, run, pods, cluster, self.token)
        if control.outcome != "answers":
            metrics.API_ERRORS.labels("control").inc()
        return control

    def supervisor(self, dashboard: str, job_id: str) -> Life:
        """The actor in which Ray runs a job's entrypoint."""
        try:
            rows, complete = self._state(dashboard).rows("actors", ("name", "=", f"{SUBMITTER_ACTOR}{job_id}"))
            if any(row["state"] != "DEAD" for row in rows if row["name"] == f"{SUBMITTER_ACTOR}{job_id}"):
                return "alive"
        except (StateApiError, KeyError):
            return "unknown"
        return "gone" if complete else "unknown"

    def stop_job(self, dashboard: str, job_id: str) -> bool:
        return ray_jobs.stop_job(self.ray_http, dashboard, job_id)

    def job_life(self, dashboard: str, job_id: str) -> Life:
        lives: dict[ray_jobs.JobLife, Life] = {
            "alive": "alive",
            "ended": "gone",
            "absent": "gone",
            "unknown": "unknown",
        }
        return lives[ray_jobs.job_life(self.ray_http, dashboard, job_id)]

    def _state(self, dashboard: str) -> RayStateClient:
        return RayStateClient(dashboard, self.ray_headers, transport=self.transport)


def _life(control: ControlSeen) -> Life:
    """Whether a controller of this run is behind an answer: whoever answers without saying who it is may be it."""
    if control.outcome == "answers":
        return "alive"
    return "gone" if control.outcome in ("silent", "stranger") else "unknown"


Looked = Callable[[str], Look]
