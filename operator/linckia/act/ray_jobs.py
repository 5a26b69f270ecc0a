"""Ray's job API. Only two calls: stop a job, and how it stands.

The job API's manager is built when it is first needed, so after a head replacement nobody notices that a job's driver is
gone until somebody asks to stop it.
"""

from typing import Literal
from urllib.parse import quote

import httpx

from linckia.observe.kubernetes import TERMINAL_JOB

TIMEOUT_SECONDS = 5.0
JobLife = Literal["alive", "ended", "absent", "unknown"]


def stop_job(http: httpx.Client, dashboard: str, job_id: str) -> bool:
    """Have a Ray job stopped; True once Ray has taken it, or does not know the job."""
    try:
        answer = http.post(f"{dashboard}/api/jobs/{quote(job_id, safe='')}/stop", timeout=TIMEOUT_SECONDS)
    except httpx.HTTPError:
        return False
    return answer.status_code in (200, 404)


def job_life(http: httpx.Client, dashboard: str, job_id: str) -> JobLife:
    """Whether a Ray job has ended. What does not answer, or not as we know it, is unknown."""
    try:
        answer = http.get(f"{dashboard}/api/jobs/{quote(job_id, safe='')}", timeout=TIMEOUT_SECONDS)
        if answer.status_code == 404:
            return "absent"
        status = answer.json()["status"] if answer.status_code == 200 else None
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return "unknown"
    if status in TERMINAL_JOB:
        return "ended"
    return "alive" if status in ("PENDING", "RUNNING") else "unknown"
