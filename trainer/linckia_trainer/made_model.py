"""A model that ``model.make`` wrote on one node, for all the others: kept whole in the run directory, fetched where it is missing.

So a run needs no shared folder beside its run directory, and a controller on another machine finds the very bytes that the run
was made with, which making them again there need not give.
"""

import fcntl
import io
import tarfile
from pathlib import Path

from linckia.api.config import RunConfig
from linckia_trainer.log.store import Store


def kept_key(folder: Path) -> str:
    return f"made/{folder.name}.tar"


def keep_model(config: RunConfig, store: Store) -> None:
    """Write the model that was made for this run into its run directory, unless it is there."""
    folder = Path(config.model.path)
    if config.model.make is None or store.exists(kept_key(folder)):
        return
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for path in sorted(folder.iterdir()):
            archive.add(path, path.name)
    store.put_if_absent(kept_key(folder), data.getbuffer())


def fetch_model(config: RunConfig) -> None:
    """On a node that lacks the model that was made for this run: bring it here. The first of its members does it for all."""
    folder = Path(config.model.path)
    if config.model.make is not None and not folder.is_dir():
        fetch_kept(folder, Store(config.run.dir, config.storage.options, config.storage.single_writer))


def fetch_kept(folder: Path, store: Store) -> bool:
    """Write ``folder`` as the run directory keeps it; False if it keeps none. The folder is there whole or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.is_dir():
            return True
        try:
            data = store.get(kept_key(folder))
        except FileNotFoundError:
            return False
        partial = folder.with_suffix(".partial")
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            archive.extractall(partial, filter="data")
        partial.rename(folder)
    return True
