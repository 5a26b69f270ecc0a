"""Write docs/faults.md: every fault, stage and role, and what became of it when the tests struck there on this commit.

Rows come from build/faults/strikes.jsonl, which the tests under tests/faults append to. What has no row was not run, or
cannot strike: the reasons stand below.
"""

import json
import statistics
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
STAGES = ("generate", "score", "record", "update", "sync", "save")
ROLES = ("policy", "critic", "reference", "reward", "rollout")
PARTS = ("wait", "fence", "place", "start", "rendezvous", "load", "restore", "replay", "refit")
FAULTS = {
    "kill": "SIGKILL of one member",
    "hang": "SIGSTOP of one member: it lives and does nothing",
    "node loss": "all processes of one node killed at once",
}
# Struck where they bite, not in every stage and role: the rows are what was struck.
ELSEWHERE = {
    "full disk": "no space left in node memory while a state is saved",
    "corrupt state": "a byte of the newest state in node memory changed, then SIGKILL",
    "truncate state": "the newest state in node memory cut in half, then SIGKILL",
    "slow storage": "each access to log and states takes tenths of a second longer",
    "failing storage": "every access to log and states fails for some seconds",
    "flaky storage": "every third access to log and states fails, writes after they were done",
    "straggler": "one rank runs a tenth of the time for some seconds",
    "no memory": "a member gets no further memory (RLIMIT_AS)",
}
CANNOT = {
    "record": "no member is called in this stage: a member that is lost then is found when the next stage calls it",
}


def main() -> None:
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT, check=True
    ).stdout.strip()
    rows = [json.loads(line) for line in (ROOT / "build/faults/strikes.jsonl").read_text().splitlines()]
    (ROOT / "docs/faults.md").write_text(table([row for row in rows if row["commit"] == commit], commit))


def table(rows: list[dict[str, Any]], commit: str) -> str:
    found: dict[tuple[str, str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        found[row["fault"], row["stage"], row["role"]].append(row)
    lines = [
        "# Faults that were struck",
        "",
        f"Made by `make faults` on commit {commit}. Every run that was struck ended with the records, weights and optimizer",
        "states of a run that was not, bit for bit; no recorded trajectory was lost or generated again. Seconds are medians",
        "on two CPU cores with a model of 0.4M parameters: they are imports and process starts, not model size.",
        "",
        "| fault | stage | role | what became of it | seconds, by part |",
        "|---|---|---|---|---|",
    ]
    for fault, words in FAULTS.items():
        for stage in STAGES:
            for role in ROLES:
                lines.append(f"| {words} | {stage} | {role} | {outcome(found.get((fault, stage, role), []), stage)} |")
    for fault, words in ELSEWHERE.items():
        places = [(stage, role) for known, stage, role in found if known == fault]
        for stage, role in places:
            lines.append(f"| {words} | {stage} | {role} | {outcome(found[fault, stage, role], stage)} |")
        if not places:
            lines.append(f"| {words} | | | not run | |")
    return "\n".join(lines) + "\n"


def outcome(struck: list[dict[str, Any]], stage: str) -> str:
    if struck and not any(row["seconds"] for row in struck):
        return f"nobody was lost, the run went on (n = {len(struck)}) | "
    if struck:
        total = statistics.median(row["seconds_total"] for row in struck)
        parts = {part: statistics.median(row["seconds"].get(part, 0.0) for row in struck) for part in PARTS}
        shown = ", ".join(f"{part} {seconds:.1f}" for part, seconds in parts.items() if seconds >= 0.05)
        return f"healed (n = {len(struck)}) | {total:.1f}: {shown}"
    return f"cannot strike: {CANNOT[stage]} | " if stage in CANNOT else "not run | "


if __name__ == "__main__":
    main()
