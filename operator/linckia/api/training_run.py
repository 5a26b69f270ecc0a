"""The TrainingRun: what a person reads of a run in Kubernetes. Status only; the operator can write all of it anew at any time."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

Phase = Literal["Pending", "Starting", "Running", "Recovering", "Succeeded", "Stopped", "Failed", "Unknown"]


class Part(BaseModel):
    """In Kubernetes keys are written in camelCase; what is not known is left out."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, frozen=True, extra="ignore")


class Condition(Part):
    """By the convention of Kubernetes: ``last_transition_time`` (RFC 3339) moves when ``status`` changes."""

    type: str
    status: Literal["True", "False", "Unknown"]
    reason: str = Field(description="one CamelCase word, for programs")
    message: str = Field(default="", description="for a person, with the next step")
    last_transition_time: str


class GroupStatus(Part):
    """One group. Example: ``GroupStatus(name="policy", role="policy", generation=2, members=8, ready=True)``"""

    name: str
    role: str
    generation: int
    members: int = Field(default=0, description="actors of this generation")
    answering: int = Field(default=0, description="members that answered their control call")
    ready: bool = Field(default=False, description="it stands and is not being replaced")
    standbys: int = 0
    restarts_left: int | None = Field(default=None, description="restarts left within this step")
    weight_version: str | None = Field(default=None, description="step of the weights that an engine serves")


class RecoveryStatus(Part):
    """One recovery, as the run's log has it. Times in seconds."""

    group: str
    generation: int
    step: int
    stage: str
    cause: str
    time: str = Field(description="when it was over, RFC 3339")
    seconds: float = Field(description="from the loss to a group that works")


class Recoveries(Part):
    """All recoveries of the present attempt."""

    total: int = 0
    lost_seconds: float = Field(default=0.0, description="seconds from loss to whole, all recoveries together")
    last: tuple[RecoveryStatus, ...] = Field(default=(), description="the last five, oldest first")


class TrainingRunStatus(Part):
    """Everything that is known of a run. Times of day are RFC 3339, lengths of time seconds."""

    phase: Phase = "Pending"
    message: str = Field(default="", description="the one thing to know now, in words")
    ray_cluster: str | None = None
    ray_job: str | None = Field(default=None, description="the RayJob whose controller works now")
    run_directory: str | None = Field(default=None, description="URI of the run directory")
    attempt: int | None = None
    step: int | None = None
    steps: int | None = None
    progress: str | None = Field(default=None, description="share of the steps made, such as 42%")
    stage: str | None = None
    seconds_left: int | None = None
    held_out_score: float | None = None
    groups_ready: str | None = Field(default=None, description="such as 5/6")
    groups: tuple[GroupStatus, ...] = ()
    recoveries: Recoveries = Recoveries()
    last_checkpoint: int | None = Field(default=None, description="step of the newest checkpoint")
    warnings: tuple[str, ...] = Field(default=(), description="what the run has warned of last, at most five")
    attempts_made: int = Field(default=0, description="RayJobs that the operator has made to go on with this run")
    conditions: tuple[Condition, ...] = ()
