"""Hand-written stand-ins for what the stages call: groups that answer what the test says, a healer with nothing to do."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from local.tiny import write_config

from linckia.api.config import RunConfig
from linckia.api.load import load_config
from linckia_trainer.groups.failure import GroupLostError
from linckia_trainer.metrics.recovery import Costs


class Answered:
    """A call that has its results, or its error, already; its one object ref is itself."""

    def __init__(self, *results: Any) -> None:
        self.answers = results

    def __iter__(self) -> Any:
        return iter([self])

    def results(self, timeout: float | None = None) -> list[Any]:
        for answer in self.answers:
            if isinstance(answer, Exception):
                raise answer
        return list(self.answers)


class Healer:
    """Everything stands; a loss that is reported is healed at once: the group's generation grows."""

    def __init__(self, groups: Sequence[Any] = ()) -> None:
        self.groups = {group.name: group for group in groups}
        self.losses: list[GroupLostError] = []
        self.costs = Costs()

    def report(self, loss: GroupLostError) -> None:
        self.losses.append(loss)
        if loss.group in self.groups:
            self.groups[loss.group].generation += 1

    def settle(self, *groups: Any) -> None:
        return None

    def loaded(self, engines: list[Any]) -> list[Any]:
        return engines

    def returning(self, group: Any) -> bool:
        return False


def config_of(tmp_path: Path, *overrides: str) -> RunConfig:
    (tmp_path / "model").mkdir(exist_ok=True)  # no model is needed to read a config
    return load_config(write_config(tmp_path, "t"), list(overrides))
