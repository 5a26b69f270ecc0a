"""``linckia train --fresh``: an earlier run is moved aside whole, to NAME.old-1, -2, ... beside it; nothing is deleted."""

import json
from itertools import count
from pathlib import Path

from linckia.api.errors import UserError
from linckia_trainer.log.framing import canonical_json
from linckia_trainer.log.store import Store

MARK = "set-aside.json"

Place = tuple[Store, str]  # what holds a run, and the run's key in it


def set_aside(store: Store, folder: Path) -> str | None:
    """Move the run in ``store`` and its local ``folder`` aside; returns its new name, None if there was nothing to move.

    A folder is renamed. The objects of a bucket are moved one by one, so that until all are moved a mark among them says
    where to: killed before, the same call goes on. UserError for a run that is a whole bucket. It must not be live.
    """
    places = [_beside(store)]
    if store.folder != folder:
        places.insert(0, (Store(str(folder.parent)), folder.name))
    filled = [(parent, key) for parent, key in places if parent.list(key)]
    if not filled:
        return None
    number = _begun(store) or _free_number(places)
    for parent, key in filled:
        if parent.folder is None:
            _move_objects(store, parent, key, number)
        else:
            parent.move(key, _aside(key, number))
    return _aside(places[-1][1], number)


def refuse_half_moved(store: Store) -> None:
    """UserError for a run of which a killed ``--fresh`` has moved a part: what is left of it is no run."""
    number = _begun(store)
    if number is not None:
        raise UserError(
            "run.dir", store.uri, f"a start with --fresh was killed while it moved this run to {_aside('', number)[1:]}",
            "give --fresh again, which moves the rest, or another run.name",
        )  # fmt: skip


def _beside(store: Store) -> Place:
    if store.folder is not None:
        return Store(str(store.folder.parent)), store.folder.name
    parent, _, name = store.uri.rstrip("/").rpartition("/")
    if parent.endswith((":", "/")):
        raise UserError(
            "run.dir", store.uri, "is a whole bucket, and --fresh moves an earlier run to a place beside it",
            "use a folder in the bucket, such as s3://bucket/{name}, or another run.name without --fresh",
        )  # fmt: skip
    return Store(parent, store.options, store.single_writer), name


def _aside(key: str, number: int) -> str:
    return f"{key}.old-{number}"


def _free_number(places: list[Place]) -> int:
    """The first number that is free in every place."""

    def taken(parent: Store, key: str) -> bool:
        return parent.exists(key) or bool(parent.list(key))

    return next(number for number in count(1) if not any(taken(parent, _aside(key, number)) for parent, key in places))


def _begun(store: Store) -> int | None:
    """The number to which a move of this run has begun; None if none has."""
    try:
        return int(json.loads(store.get(MARK))["number"])
    except FileNotFoundError:
        return None


def _move_objects(store: Store, parent: Store, key: str, number: int) -> None:
    store.put(MARK, canonical_json({"number": number}))
    for one in store.list():
        if one != MARK:
            parent.move(f"{key}/{one}", f"{_aside(key, number)}/{one}")
    store.delete(MARK)
