"""What the operator writes to Kubernetes, as plain dicts. Pure: the same facts give the same objects and the same names.

A name that follows from the facts is the lock: of two operators one creates, the other is told that it exists.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from linckia.api.kubernetes import (
    ATTEMPT_OF_LABEL,
    GROUP,
    KIND,
    MANAGER,
    RAY_GROUP,
    RAY_VERSION,
    RUN_LABEL,
    STEP_ANNOTATION,
    VERSION,
    child_name,
)
from linckia.api.training_run import TrainingRunStatus
from linckia.decide.notes import Note
from linckia.observe.kubernetes import RayJobSeen, TrainingRunSeen, timestamp

Manifest = dict[str, Any]

MANAGED_BY = "app.kubernetes.io/managed-by"
QUICK = ("stage", "secondsLeft", "message")  # what changes many times a minute while all is well
QUICK_SECONDS = 15.0  # so often at most a status is written for those alone
_NOT_COPIED = ("kubectl.kubernetes.io/", "meta.helm.sh/", f"{GROUP}/")


def training_run(run: str, namespace: str, root: RayJobSeen) -> Manifest:
    """The TrainingRun of a run: it goes when its root RayJob goes."""
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": KIND,
        "metadata": {
            "name": run,
            "namespace": namespace,
            "labels": {RUN_LABEL: run, MANAGED_BY: MANAGER},
            "ownerReferences": [_owner(f"{RAY_GROUP}/{RAY_VERSION}", "RayJob", root.name, root.uid)],
        },
    }


def child_ray_job(root: Mapping[str, Any], owner: TrainingRunSeen, number: int, step: int) -> Manifest:
    """The RayJob that goes on with a run: what the root says, without what belongs to one submission.

    ``root``: the root RayJob as the API server has it. ``step``: where the run stands, to see whether the child moves it.
    """
    metadata, spec = root["metadata"], dict(root["spec"])
    for key in ("jobId", "suspend"):  # a used id takes the old job's result
        spec.pop(key, None)
    spec["backoffLimit"] = 0
    labels = {**metadata.get("labels", {}), ATTEMPT_OF_LABEL: metadata["name"]}
    annotations = {
        key: value for key, value in metadata.get("annotations", {}).items() if not key.startswith(_NOT_COPIED)
    }
    return {
        "apiVersion": f"{RAY_GROUP}/{RAY_VERSION}",
        "kind": "RayJob",
        "metadata": {
            "name": child_name(metadata["name"], number),
            "namespace": metadata["namespace"],
            "labels": labels,
            "annotations": {**annotations, STEP_ANNOTATION: str(step)},
            "ownerReferences": [_owner(f"{GROUP}/{VERSION}", KIND, owner.name, owner.uid)],
        },
        "spec": spec,
    }


def event(note: Note, about: Manifest, now: float) -> Manifest:
    """An event about ``about`` (a reference from ``reference``). The same note about the same object has the same name."""
    what = f"{about['uid']}/{note.reason}/{note.words}"
    when = timestamp(now)
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {
            "name": f"{about['name'][:40].rstrip('.-')}.{hashlib.sha256(what.encode()).hexdigest()[:16]}",
            "namespace": about["namespace"],
        },
        "involvedObject": about,
        "type": "Warning" if note.warning else "Normal",
        "reason": note.reason,
        "message": note.words[:1000],
        "source": {"component": MANAGER},
        "reportingComponent": MANAGER,
        "firstTimestamp": when,
        "lastTimestamp": when,
        "count": 1,
    }


def reference(api_version: str, kind: str, namespace: str, name: str, uid: str) -> Manifest:
    """What an event is about."""
    return {"apiVersion": api_version, "kind": kind, "namespace": namespace, "name": name, "uid": uid}


def read_status(found: Mapping[str, Any]) -> TrainingRunStatus:
    """A status as it stands; an empty one for what is none, because somebody wrote it by hand."""
    try:
        return TrainingRunStatus.model_validate(found)
    except ValidationError:
        return TrainingRunStatus()


def status_patch(found: Mapping[str, Any], wanted: TrainingRunStatus, since_last: float) -> Manifest | None:
    """The merge patch that makes the status as wanted; None if it is, or differs only in what changes all the time.

    ``since_last``: seconds since this status was last written.
    """
    new = wanted.model_dump(by_alias=True, exclude_none=True, mode="json")
    changed = {key: value for key, value in new.items() if found.get(key) != value}
    gone: dict[str, Any] = {key: None for key in found if key not in new}
    if not changed and not gone:
        return None
    if set(changed) | set(gone) <= set(QUICK) and since_last < QUICK_SECONDS:
        return None
    return {"status": {**changed, **gone}}


def _owner(api_version: str, kind: str, name: str, uid: str) -> Manifest:
    return {"apiVersion": api_version, "kind": kind, "name": name, "uid": uid, "controller": False}
