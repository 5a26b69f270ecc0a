"""Is a process of this host still the one it was: its pid and the time it started, from Linux's /proc."""

from pathlib import Path


def start_time(pid: int) -> int | None:
    """When a process of this host started, in clock ticks since boot; None if it is gone (or a zombie).

    (pid, start time) names a process for good: a pid that is used again starts later.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # Source: proc_pid_stat(5). The command (field 2) may hold spaces and parentheses: count from its last ")".
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])
