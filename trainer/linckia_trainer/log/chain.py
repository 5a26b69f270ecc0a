"""The records of a run in order: each names the hash of the chain before it.

``log_hash(0)`` is the run's origin, ``log_hash(step) = sha256(log_hash(step - 1) + payload)``, and where the step must
not be trained on ``sha256(log_hash(step) + "skip")``. A state of a group is a fold over the records up to its step, and
holds the log_hash there: equal hashes, equal states.

Objects: ``log/{step:08d}`` a record, ``log/{step:08d}.skip`` a skip mark, ``log/{step:08d}.partial/`` see ``spool``.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from linckia.api.errors import DamagedError
from linckia_trainer.log import framing
from linckia_trainer.log.framing import Buffer, canonical_json, damaged
from linckia_trainer.log.objects import ObjectInfo
from linckia_trainer.log.records import Arrays, Carried, RecordHeader, carried, decode
from linckia_trainer.log.store import Store

_RECORD = re.compile(r"log/(\d{8})")
_SKIP = re.compile(r"log/(\d{8})\.skip")


def origin_hash(deciding_values: Mapping[str, Any], content_hashes: Mapping[str, Any]) -> str:
    """``log_hash(0)``: the config keys that decide results, and the content hashes of model and data, as sha256."""
    identity = {"config": dict(deciding_values), "content": dict(content_hashes)}
    return hashlib.sha256(canonical_json(identity)).hexdigest()


def next_hash(previous: str, payload: Buffer) -> str:
    digest = hashlib.sha256(previous.encode())
    digest.update(payload)
    return digest.hexdigest()


def skip_hash(log_hash: str) -> str:
    return hashlib.sha256(f"{log_hash}skip".encode()).hexdigest()


def record_key(step: int) -> str:
    return f"log/{step:08d}"


def skip_key(step: int) -> str:
    return f"log/{step:08d}.skip"


@dataclass(frozen=True)
class Record:
    """One step's record as the chain sees it now. ``log_hash`` is that of the chain after this step, skip included.

    ``skipped``: applying it advances only applied_step and log_hash.
    """

    step: int
    header: RecordHeader
    arrays: Arrays
    log_hash: str
    previous: str
    skipped: bool

    def carried(self) -> Carried:
        """Cursor, KL coefficient and normaliser that the next step starts from."""
        return carried(self.header, self.skipped)


@dataclass(frozen=True)
class Link:
    """What a record's own header says: the hash before it, and the hash it makes when it is trained on."""

    previous: str
    log_hash: str


@dataclass(frozen=True)
class Broken:
    """A record whose header cannot be read."""

    reason: str


class RunLog:
    """The log in ``store``, as it was at the last ``refresh`` (construction, commit and mark_skip refresh).

    ``origin`` is log_hash(0); None (for tools that only look) takes it from record 1. Only names and headers are held.
    """

    def __init__(self, store: Store, origin: str | None) -> None:
        self.store = store
        self._origin = origin
        self._links: dict[int, Link | Broken] = {}
        self._marks: set[int] = set()
        self.refresh()

    def refresh(self) -> None:
        """Look again: new records, records taken away, skip marks. Reads headers of new records only."""
        found = self.store.scan("log")
        sizes = {int(match[1]): info for key, info in found.items() if (match := _RECORD.fullmatch(key))}
        self._marks = {int(match[1]) for key in found if (match := _SKIP.fullmatch(key))}
        links = {step: link for step, link in self._links.items() if step in sizes and isinstance(link, Link)}
        new = sorted(sizes.keys() - links.keys())
        starts = self.store.read_starts([record_key(step) for step in new], framing.FIRST_READ_BYTES)
        read = {
            step: self._read_link(step, start, sizes[step])
            for step, start in zip(new, starts, strict=True)
            if start is not None
        }
        self._links = {**links, **read}

    def head(self) -> int:
        """The last step that has a record; 0 if none has."""
        return max(self._links, default=0)

    def steps(self) -> list[int]:
        """The steps that have a record here, in order."""
        return sorted(self._links)

    def log_hash(self, step: int) -> str:
        """The chain's hash after ``step``, skip included. KeyError if this log cannot say it."""
        found = self.hash_at(step)
        if found is None:
            raise KeyError(f"the log in {self.store.uri} does not hold the hash of step {step}")
        return found

    def hash_at(self, step: int) -> str | None:
        """``log_hash``, or None: beyond the head, pruned, or damaged.

        What the next record names is believed over the record itself and its mark: it is what the run went on from.
        """
        if step == 0 and self._origin is not None:
            return self._origin
        link, following = self._links.get(step), self._links.get(step + 1)
        if isinstance(following, Link):
            return following.previous
        if not isinstance(link, Link):
            return None
        return skip_hash(link.log_hash) if step in self._marks else link.log_hash

    def marked(self) -> list[int]:
        """The steps that have a skip mark, whether it counts or not."""
        return sorted(self._marks)

    def skipped(self, step: int) -> bool:
        """Whether a step's skip mark counts: the step is the head, or the next record goes on from it."""
        link = self._links.get(step)
        return isinstance(link, Link) and self.hash_at(step) == skip_hash(link.log_hash)

    def commit(self, step: int, payload: Buffer, attempt: int, extra: Mapping[str, Any] | None = None) -> Record:
        """Make ``payload`` (see ``records.encode``) the record of ``step``, which must be head + 1.

        If someone was faster and theirs chains, theirs is the step's record and is returned: the caller's experience is
        dropped. It may follow the other reading of a skip mark, so ``log_hash(step - 1)`` may have changed. ``extra``
        (times, policy generations) stands in the object's header, outside the hash. DamagedError if what is there does
        not chain.
        """
        if step != self.head() + 1:
            raise ValueError(f"step {step} does not follow the head, {self.head()}")
        if step > 1 and self.store.exists(skip_key(step - 1)):
            self._marks.add(step - 1)
        previous = self.log_hash(step - 1)
        link = Link(previous, next_hash(previous, payload))
        header = {
            "kind": "record", "step": step, "previous": previous, "log_hash": link.log_hash, "attempt": attempt,
            "extra": dict(extra or {}),
        }  # fmt: skip
        if self.store.put_if_absent(record_key(step), framing.frame(header, [payload])):
            self._links[step] = link
            return self._record(step, payload)
        self.refresh()
        problems = self.problems(step - 1) + self.problems(step)
        if problems:
            raise self._damaged(step, problems[0])
        return self.read(step)

    def read(self, step: int) -> Record:
        """A step's record, every byte checked. KeyError if there is none, DamagedError if it is not what it was."""
        if step not in self._links:
            raise KeyError(f"the log in {self.store.uri} has no record of step {step}; its head is {self.head()}")
        try:
            header, payload = framing.unpack(self.store.get(record_key(step)), record_key(step))
        except DamagedError as error:
            raise self._damaged(step, error.reason) from error
        if next_hash(header["previous"], payload) != header["log_hash"]:
            raise self._damaged(step, "its hash is not that of its content")
        self._links[step] = Link(header["previous"], header["log_hash"])
        return self._record(step, payload)

    def mark_skip(self, step: int, reason: str) -> str:
        """Say that the head must not be trained on; returns the log_hash of the step as it is now.

        If a record has followed meanwhile, that record decides and the mark may count for nothing: look at ``skipped``.
        """
        if step not in self._links:
            raise ValueError(f"step {step} has no record to skip; the head is {self.head()}")
        self.store.put_if_absent(skip_key(step), canonical_json({"step": step, "reason": reason}))
        self.refresh()
        return self.log_hash(step)

    def verify(self, needed_after: int, deep: bool = False) -> list[str]:
        """Check the chain over all headers, and every byte of the records after ``needed_after`` (of all, if ``deep``).

        ``needed_after`` is the smallest applied_step that any group can be restored to: records up to it are needed by
        nobody, but for the head, from which the next step goes on. What is wrong with those comes back as warnings;
        anything else raises DamagedError and names the way out.
        """
        warnings: list[str] = []
        first = min(self._links, default=1)
        for step in range(min(first, needed_after + 1), self.head() + 1):
            needed = step > needed_after or step == self.head()
            reasons = self.problems(step, deep=needed or deep)
            if reasons and needed:
                raise self._damaged(step, reasons[0])
            if step >= first:
                warnings += [f"{record_key(step)}: {reason} (no group needs it)" for reason in reasons]
        return warnings

    def problems(self, step: int, deep: bool = False) -> list[str]:
        """What is wrong with a step's record and its place in the chain: by headers, or (``deep``) by every byte."""
        link, before = self._links.get(step), self._links.get(step - 1)
        if step == 0:
            return []
        if link is None:
            return ["the record is missing"]
        if isinstance(link, Broken):
            return [link.reason]
        if step == 1 and self._origin is not None and link.previous != self._origin:
            return ["it does not follow this run's origin: config, model or data were others"]
        if isinstance(before, Link) and link.previous not in (before.log_hash, skip_hash(before.log_hash)):
            return [f"it does not follow {record_key(step - 1)}"]
        if deep:
            try:
                self.read(step)
            except DamagedError as error:
                return [error.reason]
        return []

    def prune(self, steps: Iterable[int]) -> None:
        """Remove the records of ``steps`` (see ``retention.records_to_prune``) and their skip marks; never the head."""
        for step in sorted(set(steps) & self._links.keys() - {self.head()}):
            self.store.delete(record_key(step))
            if step in self._marks:
                self.store.delete(skip_key(step))
        self.refresh()

    def _read_link(self, step: int, start: bytes, info: ObjectInfo) -> Link | Broken:
        name = record_key(step)

        def read(num_bytes: int) -> bytes:
            return start if num_bytes == framing.FIRST_READ_BYTES else self.store.read_start(name, num_bytes)

        try:
            header, payload_start = framing.read_header_with(read, name)
            framing.check_size(header, payload_start, info.size, name)
        except DamagedError as error:
            return Broken(error.reason)
        if header.get("step") != step:
            return Broken(f"it is the record of step {header.get('step')}")
        return Link(header["previous"], header["log_hash"])

    def _record(self, step: int, payload: Buffer) -> Record:
        link = self._links[step]
        assert isinstance(link, Link)
        header, arrays = decode(payload)
        return Record(step, header, arrays, self.log_hash(step), link.previous, self.skipped(step))

    def _damaged(self, step: int, reason: str) -> DamagedError:
        to_step = step - 1
        return damaged(record_key(step), reason, f"linckia checkpoints rewind {self.store.uri} --to {to_step}")
