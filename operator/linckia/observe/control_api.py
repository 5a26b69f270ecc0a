"""The run's control API as seen from Kubernetes: who may be asked, what is believed of the answer.

A name in the state API can be chosen by whoever can start an actor. So the address in a beacon's name is asked only if it is
the pod address of a pod of this run's own RayCluster, and what answers there is believed only if it names run and attempt.
"""

import ipaddress
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from linckia.api.names import API_VERSION, TOKEN_HEADER, parse_beacon_name
from linckia.observe.kubernetes import PodSeen
from linckia.observe.observation import ActorSeen, Observation, RayState, group_seen

TIMEOUT_SECONDS = 2.0
LARGEST_ANSWER = 4 * 2**20  # bytes; a view of a thousand members is a fifth of it
VERSIONS = (API_VERSION, API_VERSION - 1)  # of the control API that this code works with

Outcome = Literal["answers", "silent", "refused", "stranger", "version", "damaged"]


@dataclass(frozen=True)
class Beacon:
    """A controller as the state API lists it. Example: ``Beacon(attempt=3, address="10.1.0.7:8470", state="ALIVE")``"""

    attempt: int
    address: str
    state: str


@dataclass(frozen=True)
class ControlSeen:
    """What came of asking a control API.

    ``silent``: nobody listens there or no answer came in time. ``refused``: the token is wrong. ``stranger``: another run or
    attempt answers, or the address is not one of this run's pods and was not asked. ``version``: an API that we do not know.
    ``damaged``: an answer that is no view. Only with ``answers`` is there a ``view``.
    """

    outcome: Outcome
    problem: str = ""
    view: Mapping[str, Any] = field(default_factory=dict)
    address: str | None = None
    attempt: int | None = None


NOBODY = ControlSeen("silent", "no controller of this run is listed")


def beacons(actors: Iterable[ActorSeen], run: str) -> list[Beacon]:
    """The controllers of a run, oldest attempt first."""
    found = []
    for actor in actors:
        parsed = parse_beacon_name(actor.name)
        if parsed is not None and parsed[0] == run:
            found.append(Beacon(parsed[1], parsed[2], actor.state))
    return sorted(found, key=lambda beacon: beacon.attempt)


def is_own_pod(address: str, pods: Iterable[PodSeen], cluster: str) -> bool:
    """Whether ``ip:port`` is on a pod of this RayCluster. ``pods`` are those of our own namespace."""
    host, _, port = address.rpartition(":")
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        return False
    try:
        wanted = ipaddress.ip_address(host.strip("[]"))
    except ValueError:  # a host name could lead anywhere
        return False
    return any(pod.cluster == cluster and pod.running and _same_address(pod.ip, wanted) for pod in pods)


def _same_address(ip: str | None, wanted: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    try:
        return ip is not None and ipaddress.ip_address(ip) == wanted
    except ValueError:
        return False


def ask(http: httpx.Client, beacon: Beacon, run: str, pods: Iterable[PodSeen], cluster: str, token: str) -> ControlSeen:
    """Ask the controller of a beacon where it stands. Never raises."""
    where = {"address": beacon.address, "attempt": beacon.attempt}
    if not is_own_pod(beacon.address, pods, cluster):
        return ControlSeen("stranger", f"{beacon.address} is no pod of RayCluster {cluster}; it is not asked", **where)  # type: ignore[arg-type]
    outcome, problem, view = _get(http, f"http://{beacon.address}/v1/run", token)
    if outcome == "answers":
        outcome, problem = _judge(view, run, beacon.attempt)
    return ControlSeen(outcome, problem, view if outcome == "answers" else {}, beacon.address, beacon.attempt)


def _get(http: httpx.Client, url: str, token: str) -> tuple[Outcome, str, dict[str, Any]]:
    try:
        with http.stream("GET", url, headers={TOKEN_HEADER: token}, timeout=TIMEOUT_SECONDS) as answer:
            if answer.status_code in (401, 403):
                return "refused", f"the controller refuses the operator's token (HTTP {answer.status_code})", {}
            if answer.status_code != 200:
                return "damaged", f"the control API answers HTTP {answer.status_code}", {}
            body = bytearray()
            for chunk in answer.iter_bytes():
                body += chunk
                if len(body) > LARGEST_ANSWER:
                    return "damaged", f"the control API's answer is larger than {LARGEST_ANSWER} bytes", {}
    except httpx.HTTPError as error:
        return "silent", f"the control API does not answer ({type(error).__name__})", {}
    try:
        view = json.loads(bytes(body))
    except ValueError:
        return "damaged", "the control API's answer is no JSON", {}
    return ("answers", "", view) if isinstance(view, dict) else ("damaged", "the answer is no view", {})


def _judge(view: Mapping[str, Any], run: str, attempt: int) -> tuple[Outcome, str]:
    """Whether a view is believed, and if not why."""
    if view.get("run") != run or view.get("attempt") != attempt:
        return "stranger", "another run or attempt answers at the controller's address"
    version = view.get("api_version")
    if version not in VERSIONS:
        return "version", (
            f"the controller's API version {_short(version)} is not known to this operator, which knows "
            f"{' and '.join(str(one) for one in VERSIONS if one > 0)}: upgrade the older of the two"
        )
    return "answers", ""


def _short(value: object) -> str:
    return str(value)[:20]


def observation(view: Mapping[str, Any], ray: RayState, now: float) -> Observation | None:
    """What a believed view and the state API show together; None where the view has no members' answers yet.

    Its time is when the controller asked its members. ``now``: seconds of the watcher's clock.
    """
    heard = view.get("heard")
    if not isinstance(heard, Mapping):
        return None
    try:
        groups = tuple(
            group_seen(str(name), int(group["generation"]), group["members"]) for name, group in heard["groups"].items()
        )
        when = now - max(0.0, float(heard["seconds_ago"]))
        return Observation(when, str(view["run"]), int(view["step"]), str(view["stage"]), groups, ray)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
