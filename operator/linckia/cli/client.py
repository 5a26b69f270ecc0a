"""Calls to the control API of a live run."""

from typing import Any

import httpx

from linckia.api.access import find_token, token_path
from linckia.api.errors import UserError
from linckia.api.names import TOKEN_HEADER, TOKEN_VARIABLE
from linckia.cli.runs import RunPlace


def get_view(place: RunPlace, timeout: float = 3.0) -> dict[str, Any] | None:
    """What ``GET /v1/run`` answers; None if no controller of this run answers. UserError for a token it refuses."""
    answer = _call(place, "GET", "/v1/run", timeout)
    if answer is None:
        return None
    view: dict[str, Any] = answer.json()
    return view if view.get("run") == place.name else None  # else another run has taken over the port


def ask(place: RunPlace, action: str) -> dict[str, Any]:
    """``POST /v1/{action}``, to the run that really is there. UserError if it is not live."""
    if get_view(place) is not None and (answer := _call(place, "POST", f"/v1/{action}", 10.0)) is not None:
        found: dict[str, Any] = answer.json()
        return found
    raise not_live(place)


def order(place: RunPlace, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """``POST {path}`` with a body. UserError with the controller's reason if it refuses, or if the run is not live."""
    if get_view(place) is not None and (answer := _call(place, "POST", path, 10.0, body)) is not None:
        found: dict[str, Any] = answer.json()
        return found
    raise not_live(place)


def not_live(place: RunPlace) -> UserError:
    return UserError(
        "RUN", place.name, "no controller of this run answers", f"`linckia status {place.name}` shows its end"
    )


def _call(
    place: RunPlace, method: str, path: str, timeout: float, body: dict[str, Any] | None = None
) -> httpx.Response | None:
    if place.file is None or not place.file.api_address:
        return None
    headers = {TOKEN_HEADER: find_token(place.name) or ""}
    try:
        with httpx.Client(trust_env=False, timeout=timeout) as client:
            answer = client.request(method, f"http://{place.file.api_address}{path}", headers=headers, json=body)
    except httpx.TransportError:
        return None
    if answer.status_code in (401, 403):
        raise UserError(
            TOKEN_VARIABLE,
            None,
            f"the controller at {place.file.api_address} refuses the token",
            f"set {TOKEN_VARIABLE} to the run's token; its owner has it in {token_path(place.name)}",
        )
    if body is not None and answer.is_client_error:
        words = answer.json().get("detail", answer.text)
        raise UserError(
            path, body, f"the controller refuses it: {words}", f"`linckia status {place.name}` shows what stands"
        )
    return answer if answer.is_success else None
