"""The control API of a live run: a few routes, served from a thread of the controller.

``view`` is called for each request and must be quick and callable from another thread. The token guards everything
but the page itself, which holds nothing of the run.
"""

import contextlib
import hmac
import ipaddress
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import uvicorn
from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import HTMLResponse, PlainTextResponse
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from pydantic import BaseModel, ConfigDict

from linckia.api.config import ports_of
from linckia.api.errors import UserError
from linckia.api.names import API_VERSION, TOKEN_HEADER
from linckia_trainer.metrics import names

View = Callable[[], dict[str, Any]]
Action = Callable[..., dict[str, Any] | None]
ACTIONS = ("checkpoint", "stop")


class RestartOrder(BaseModel):
    """Restart the generation of a group that whoever orders it has seen; another one answers 409."""

    model_config = ConfigDict(extra="forbid")
    generation: int
    reason: str


class ScaleOrder(BaseModel):
    """How many rollout engines the run should have from now on."""

    model_config = ConfigDict(extra="forbid")
    engines: int


class OrderRefusedError(Exception):
    """An order that does not fit what stands. ``status``: 404 no such group, 409 another generation, or not ready."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True)
class ControlServer:
    """A serving control API. ``address`` is the ``host:port`` where it is reached."""

    address: str
    _server: uvicorn.Server
    _thread: threading.Thread
    _listener: socket.socket

    def close(self) -> None:
        """Stop serving; answers that are being written are finished first, for at most two seconds."""
        self._server.should_exit = True
        self._thread.join(timeout=5)
        self._listener.close()  # a server told to stop before it had started leaves it open


def serve(view: View, actions: Mapping[str, Action], host: str, port: int | str, token: str) -> ControlServer:
    """Serve until ``close``. ``port`` 0 takes any that is free, a range such as ``8470-8489`` the first of it that is.

    UserError if no such address can be had.

    ``actions``: for ``checkpoint``, ``stop``, ``restart`` (group, generation, reason) and ``scale`` (engines) what to call;
    the call asks for it and does not wait for it. What it returns is the answer, ``{"accepted": true}`` if it returns
    nothing; OrderRefusedError and UserError are answered with their reason.
    """
    listener = _bind(host, port)
    bound = f"{_bracketed(reachable(listener.getsockname()[0]))}:{listener.getsockname()[1]}"
    config = uvicorn.Config(
        make_app(view, actions, token),
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=2,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="control-api", daemon=True)
    thread.start()
    return ControlServer(bound, server, thread, listener)


def reachable(host: str) -> str:
    """The address to tell others: ``host``, or where it stands for all addresses, the one that other hosts see."""
    if not ipaddress.ip_address(host.partition("%")[0]).is_unspecified:
        return host
    for family, beyond in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((beyond, 9))  # sends nothing: it asks which of our addresses leads out
            return str(probe.getsockname()[0])
    return "127.0.0.1" if ":" not in host else "::1"


def make_app(view: View, actions: Mapping[str, Action], token: str) -> FastAPI:
    """The routes, apart from the port they are served on."""

    def check_token(request: Request) -> None:
        given = request.headers.get(TOKEN_HEADER)
        if given is None:
            raise HTTPException(401)
        if not hmac.compare_digest(given.encode(), token.encode()):
            raise HTTPException(403)

    app = FastAPI(title="linckia", openapi_url=None)
    guarded = [Depends(check_token)]

    @app.get("/v1/run", dependencies=guarded)
    def run() -> dict[str, Any]:
        return {"api_version": API_VERSION, **view()}

    @app.get("/metrics", dependencies=guarded)
    def metrics() -> PlainTextResponse:
        return PlainTextResponse(prometheus_text(view()), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/")
    def page() -> HTMLResponse:
        return HTMLResponse(files(__package__).joinpath("page.html").read_text(encoding="utf-8"))

    def add(action: str) -> None:
        @app.post(f"/v1/{action}", dependencies=guarded, status_code=202)
        def ask() -> dict[str, Any]:
            return actions[action]() or {"accepted": True}

    for action in ACTIONS:
        add(action)

    @app.post("/v1/groups/{name}/restart", dependencies=guarded, status_code=202)
    def restart(name: str, order: RestartOrder) -> dict[str, Any]:
        return _obeyed(actions["restart"], name, order.generation, order.reason)

    @app.post("/v1/roles/rollout/scale", dependencies=guarded, status_code=202)
    def scale(order: ScaleOrder) -> dict[str, Any]:
        return _obeyed(actions["scale"], order.engines)

    return app


def _obeyed(action: Action, *arguments: Any) -> dict[str, Any]:
    try:
        return action(*arguments) or {"accepted": True}
    except OrderRefusedError as error:
        raise HTTPException(error.status, str(error)) from error
    except UserError as error:
        raise HTTPException(422, str(error)) from error


def prometheus_text(view: Mapping[str, Any]) -> str:
    """The run's step and last metric row in the Prometheus text format, each with the run's name as label."""
    registry = CollectorRegistry()
    registry.register(_View(view))
    return generate_latest(registry).decode()


class _View(Collector):
    def __init__(self, view: Mapping[str, Any]) -> None:
        self._view = view

    def collect(self) -> Any:
        run = str(self._view.get("run", ""))
        for key, text in (
            ("step", "step the run is in"),
            ("attempt", "life of the controller"),
            ("log_head", "last record"),
        ):
            if key in self._view:
                yield _gauge(key, text, run, self._view[key])
        for name, value in self._view.get("metrics", {}).items():
            metric = names.find(name)
            if metric is not None and value is not None:
                unit = f" ({metric.unit})" if metric.unit else ""
                yield _gauge(name, metric.description + unit, run, value)
        yield from _labelled(run, self._view.get("recovery_metrics", []))


def _labelled(run: str, samples: Iterable[Mapping[str, Any]]) -> Iterable[CounterMetricFamily | GaugeMetricFamily]:
    for metric in names.LABELLED:
        kind = CounterMetricFamily if metric.counter else GaugeMetricFamily
        text = f"{metric.description} ({metric.unit})"
        family = kind(names.prometheus_name(metric.name), text, labels=["run", *metric.labels])
        found = [sample for sample in samples if sample["name"] == metric.name]
        for sample in found:
            family.add_metric([run, *(sample["labels"][label] for label in metric.labels)], float(sample["value"]))
        if found:
            yield family


def _gauge(name: str, text: str, run: str, value: float) -> GaugeMetricFamily:
    family = GaugeMetricFamily(names.prometheus_name(name), text, labels=["run"])
    family.add_metric([run], float(value))
    return family


def _bind(host: str, port: int | str) -> socket.socket:
    for one in ports_of(port):
        try:
            return _bind_one(host, one)
        except OSError as error:
            failed = error
    raise UserError(
        "control.port",
        port,
        f"{host}:{port} cannot be bound: {failed.strerror}",
        "stop what listens there, or set control.port to 0 for any free port",
    ) from None


def _bind_one(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise UserError(
            "control.host", host, f"is no address of this machine: {error.strerror}", "use 127.0.0.1"
        ) from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
