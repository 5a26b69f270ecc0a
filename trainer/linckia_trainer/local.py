"""The run's folder on this machine: ``runs/NAME`` with config, metrics, curves, summary and where the run lasts."""

import json
import os
import time
from dataclasses import asdict
from pathlib import Path

import yaml

from linckia.api.access import RUN_FILE, RunFile
from linckia.api.config import RunConfig
from linckia_trainer.log.process import this_host
from linckia_trainer.log.store import Store
from linckia_trainer.saving import COPIED


def prepare_folder(config: RunConfig) -> tuple[RunConfig, Path]:
    """The config with an absolute run directory, and the run's local folder."""
    folder = Path("runs", config.run.name).absolute()
    place = config.run.dir if "://" in config.run.dir else str(Path(config.run.dir).absolute())
    return config.model_copy(update={"run": config.run.model_copy(update={"dir": place})}), folder


def fetch_local(store: Store, folder: Path) -> None:
    """Metrics of earlier attempts that ran on another machine."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in COPIED:
        if not (folder / name).exists() and store.exists(f"local/{name}"):
            (folder / name).write_bytes(store.get(f"local/{name}"))


def write_run_file(folder: Path, config: RunConfig, config_path: str, attempt: int, api_address: str) -> None:
    """``run.json``: what a command needs to find the run again (storage options may hold keys: for the owner alone)."""
    found = RunFile(
        name=config.run.name,
        uri=config.run.dir,
        options=config.storage.options,
        attempt=attempt,
        api_address=api_address,
        host=this_host(),
        pid=os.getpid(),
        config=str(Path(config_path).absolute()),
        started=time.time(),
    )
    path = folder / RUN_FILE
    partial = path.with_suffix(".partial")
    partial.touch(mode=0o600)
    partial.write_text(json.dumps(asdict(found), indent=2) + "\n")
    partial.replace(path)
    shown = config.model_dump(mode="json", exclude={"storage": {"options"}})
    (folder / "config.yaml").write_text(yaml.safe_dump(shown, sort_keys=False))
