"""The five roles. Adding one is a class here and a line in ``ROLES`` (see docs/extending.md)."""

from importlib import import_module
from typing import Any

# Role -> where its member class lives. Named, not imported: a member process loads its own role alone.
ROLES = {
    "policy": "linckia_trainer.roles.policy:PolicyMember",
    "critic": "linckia_trainer.roles.critic:CriticMember",
    "reference": "linckia_trainer.roles.reference:ReferenceMember",
    "reward": "linckia_trainer.roles.reward:RewardMember",
    "rollout": "linckia_trainer.roles.rollout:RolloutMember",
}


def member_class(role: str) -> Any:
    module, _, name = ROLES[role].partition(":")
    return getattr(import_module(module), name)
