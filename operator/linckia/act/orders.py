"""Orders to a run's controller."""

import httpx

from linckia.api.names import TOKEN_HEADER
from linckia.decide.rules import Decision

TIMEOUT_SECONDS = 5.0
REASON_LENGTH = 1000


class OrderError(Exception):
    """The order was not taken; the next look gives it again if it is still due."""


def restart_group(http: httpx.Client, address: str, token: str, decision: Decision) -> str:
    """Order the restart of the generation that was seen: ``accepted``, or ``outdated`` where another one stands already.

    OrderError if the controller does not answer or refuses for another reason.
    """
    try:
        answer = http.post(
            f"http://{address}/v1/groups/{decision.group}/restart",
            json={"generation": decision.generation, "reason": f"operator: {decision.reason}"[:REASON_LENGTH]},
            headers={TOKEN_HEADER: token},
            timeout=TIMEOUT_SECONDS,
        )
    except httpx.HTTPError as error:
        raise OrderError(f"the control API does not answer ({type(error).__name__})") from error
    if answer.status_code == 409:
        return "outdated"
    if answer.status_code != 202:
        raise OrderError(f"the control API answers HTTP {answer.status_code}")
    return "accepted"
