"""One cgroup for each part of a cluster, so that whatever runs in it is found and ended, however it was started."""

from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


def make(name: str) -> None:
    for controller in _controllers():
        (controller / name).mkdir(exist_ok=True)
        for file in ("cpuset.cpus", "cpuset.mems"):  # of a new cpuset they are empty, and nothing may run in it
            if (controller / file).exists():
                (controller / name / file).write_text((controller / file).read_text())


def adopt(name: str, pid: int) -> None:
    """Put a process in; its children are born there."""
    for controller in _controllers():
        (controller / name / "cgroup.procs").write_text(str(pid))


def pids(name: str) -> list[int]:
    """Every process in a cgroup and those below it; none if there is no such cgroup."""
    found: set[int] = set()
    for controller in _controllers():
        for file in (controller / name).rglob("cgroup.procs"):
            try:
                found.update(map(int, file.read_text().split()))
            except OSError:
                continue  # the cgroup went meanwhile
    return sorted(found)


def names(prefix: str) -> list[str]:
    """The cgroups whose name begins so."""
    return sorted({folder.name for controller in _controllers() for folder in controller.glob(f"{prefix}*")})


def remove(name: str) -> None:
    """It and those below it; nothing may run there any more."""
    for controller in _controllers():
        below = [folder for folder in (controller / name).rglob("*") if folder.is_dir()]
        for folder in sorted(below, key=lambda one: -len(one.parts)):
            folder.rmdir()
        if (controller / name).is_dir():
            (controller / name).rmdir()


def _controllers() -> list[Path]:
    return [one for one in ROOT.iterdir() if not one.is_symlink() and (one / "cgroup.procs").exists()]
