"""Everything that can be found wrong before anything starts: model, tokenizer, prompts, reward, run directory's origin."""

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from linckia.api.config import RunConfig
from linckia.api.errors import UserError
from linckia.api.load import changed_keys, content_paths, deciding_values, refuse_changes
from linckia_trainer.experience.prompts import PromptSet, load_prompts
from linckia_trainer.experience.rewards import load_function
from linckia_trainer.log.chain import origin_hash
from linckia_trainer.log.framing import canonical_json
from linckia_trainer.log.store import Store
from linckia_trainer.made_model import fetch_kept
from linckia_trainer.state.fork import read_fork

ORIGIN_KEY = "origin.json"
_SLOW_CONTENT = ("data.train", "model.path", "reward.model")  # to hash these takes a tokenizer or a whole model


@dataclass(frozen=True)
class Checked:
    """A config that can run, with what checking it brought."""

    config: RunConfig
    tokenizer: Any
    pad_token: int
    prompts: PromptSet
    held_out: PromptSet | None
    content: dict[str, str]


def check(config: RunConfig, say: Callable[[str], None], store: Store | None = None) -> Checked:
    """Make the model if asked to, unless ``store`` keeps it, and read everything the run needs. Raises UserError."""
    config = make_model(config, say, store)
    if config.reward.function is not None:
        load_function(config.reward.function)
    tokenizer, model = open_model(config.model.path)
    context = int(getattr(model, "max_position_embeddings", 0) or 1 << 30) - config.rollout.max_new_tokens
    prompts = load_prompts(config.data.train, config.data, tokenizer, context, "data.train")
    held_out = None
    if config.data.held_out is not None:
        held_out = load_prompts(config.data.held_out, config.data, tokenizer, context, "data.held_out")
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    content = {key: hash_path(path) for key, path in sorted(content_paths(config).items())}
    content["data.train"] = prompts.content_hash
    return Checked(config, tokenizer, int(pad or 0), prompts, held_out, content)


def make_model(config: RunConfig, say: Callable[[str], None], store: Store | None = None) -> RunConfig:
    """Run ``model.make`` unless it has run before with the same code and seed; the model then lies in a folder of its own.

    The folder is ``{model.path}/{hash}``, so that runs with other seeds, or after the code has changed, keep their models.
    """
    if config.model.make is None:
        return config
    load_function(config.model.make, "model.make")
    file, _, function = config.model.make.rpartition(":")
    key = hashlib.sha256(canonical_json([Path(file).read_text(), function, config.run.seed])).hexdigest()[:12]
    folder = Path(config.model.path, key)
    if not folder.is_dir() and not (store is not None and fetch_kept(folder, store)):
        say(f"making the model in {folder} (once)")
        partial = folder.with_suffix(".partial")
        # In a process of its own, so that the controller stays free of what the user's code loads.
        made = subprocess.run(
            [sys.executable, "-m", "linckia_trainer.make_model", config.model.make, str(partial), str(config.run.seed)],
            check=False,
            capture_output=True,
            text=True,
        )
        if made.returncode:
            reason = (made.stderr.strip().splitlines() or ["no message"])[-1]
            raise UserError("model.make", config.model.make, f"it failed: {reason}", "correct the function")
        partial.rename(folder)
    return config.model_copy(update={"model": config.model.model_copy(update={"path": str(folder)})})


def open_model(path: str) -> tuple[Any, Any]:
    """(tokenizer, model config) of a folder or hub name. UserError if the folder lacks one of them."""
    if Path(path).is_absolute() and not Path(path).is_dir():
        raise UserError("model.path", path, "there is no such folder", "correct the path, or set model.make")
    from transformers import AutoConfig, AutoTokenizer

    try:
        model = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise UserError(
            "model.path",
            path,
            f"no model config can be read ({_first_line(error)})",
            "give a Hugging Face causal LM folder",
        ) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            "model.path", path, f"it has no tokenizer ({_first_line(error)})", "save the tokenizer into the folder"
        ) from error
    if not len(tokenizer):
        raise UserError("model.path", path, "it has no tokenizer", "save the tokenizer into the folder")
    if len(tokenizer) > model.get_text_config().vocab_size:
        raise UserError(
            "model.path",
            path,
            f"the tokenizer has {len(tokenizer)} tokens and the model embeds {model.get_text_config().vocab_size}",
            "use the tokenizer that belongs to the model",
        )
    return tokenizer, model


def identity(checked: Checked, fork: Mapping[str, Any] | None) -> str:
    """log_hash(0) of a run."""
    content = dict(checked.content) | ({"fork": dict(fork)} if fork else {})
    return origin_hash(deciding_values(checked.config), content)


def check_origin(store: Store, checked: Checked) -> str:
    """log_hash(0); UserError if the run directory was made with another name, other deciding keys, model or data."""
    forked = read_fork(store)
    source = {"run": forked.run, "step": forked.step, "log_hash": forked.log_hash} if forked else None
    origin = identity(checked, source)
    deciding = deciding_values(checked.config)
    mine = {"name": checked.config.run.name, "origin": origin, "deciding": deciding, "content": checked.content}
    if store.put_if_absent(ORIGIN_KEY, canonical_json(mine)):
        return origin
    refuse_changed(mine, json.loads(store.get(ORIGIN_KEY)), store)
    return origin


def check_unchanged(store: Store, config: RunConfig) -> None:
    """UserError if the run in ``store`` was made with other deciding keys, data or code, as far as that is seen at once:
    no model is read and no prompt tokenised."""
    try:
        theirs = json.loads(store.get(ORIGIN_KEY))
    except FileNotFoundError:
        return
    content = {key: hash_path(path) for key, path in content_paths(config).items() if path.is_file()}
    seen = {key: value for key, value in theirs["content"].items() if key not in _SLOW_CONTENT}
    mine = {"name": config.run.name, "deciding": deciding_values(config), "content": content}
    refuse_changed(mine, {**theirs, "content": seen}, store)


def refuse_changed(mine: Mapping[str, Any], theirs: Mapping[str, Any], store: Store) -> None:
    """UserError if a run's name, or what decides it (``origin.json``), is not what it was made with."""
    if theirs.get("name", mine["name"]) != mine["name"]:
        raise UserError(
            "run.name", mine["name"], f"the run in {store.uri} is called {theirs['name']}",
            f"set run.name={theirs['name']} to go on with it, give another run.dir, or --fork NAME",
        )  # fmt: skip
    refuse_changes(theirs["deciding"], json.loads(canonical_json(mine["deciding"])))
    changed = changed_keys(theirs["content"], mine["content"])
    if changed:
        raise UserError(
            ", ".join(changed),
            None,
            f"its content is not what the run in {store.uri} was made with",
            "bring the old content back, give --fork NAME to go on from the newest checkpoint as a new run, or start "
            "afresh with another run.name",
        )


def hash_path(path: Path) -> str:
    """sha256 over a file, or over all files of a folder with their names."""
    digest = hashlib.sha256()
    files = [path] if path.is_file() else sorted(one for one in path.rglob("*") if one.is_file())
    for file in files:
        with file.open("rb") as stream:
            digest.update(f"{file.relative_to(path)}\n{hashlib.file_digest(stream, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
