"""Runs on one GPU, in at most 8 minutes, what no CPU can: bf16, weight transfer by CUDA IPC, sleep mode, the
hybrid order; with three GPUs NCCL too.

Short runs of the command line on a small random model; each must end, keep the engine's log-probabilities close to the
trainer's after every weight update, and leave nothing behind. Prints JSON. Exit code 2 without a GPU. It has never been run.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import realistic
import yaml

LIMIT_SECONDS = 480
BF16_DIFFERENCE = 0.05  # nats per token between engine and trainer, both in bf16
RUNS: dict[str, dict[str, Any]] = {
    "hybrid, CUDA IPC, sleep mode": {"placement": {"device": "gpu", "colocation": "all"}, "transfer": "cuda_ipc"},
    "a GPU each, NCCL": {"placement": {"device": "gpu", "colocation": "separate"}, "transfer": "nccl"},
    "hybrid, ZeRO-3 with offload": {
        "placement": {"device": "gpu", "colocation": "all"},
        "transfer": "cuda_ipc",
        "policy": {"zero_stage": 3, "offload": True},
    },
}


def run(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="linckia-gpu-") as place:
        folder = Path(place)
        realistic.make_model(folder / "model", "110M")
        path = realistic.write_config(folder, "grpo", steps=4, new_tokens=32, node_memory=False)
        config = yaml.safe_load(path.read_text())
        config["placement"] = settings["placement"]
        config["rollout"] |= {"transfer": settings["transfer"], "gpu_memory_utilization": 0.3}
        config["policy"] |= settings.get("policy", {})
        path.write_text(yaml.safe_dump(config))
        began = time.monotonic()
        rows = realistic.train(folder, path)
        worst = max(row["rollout/log_prob_difference"] for row in rows)
        return {
            "run": name,
            "ok": worst < BF16_DIFFERENCE,
            "worst_log_prob_difference": worst,
            "seconds": round(time.monotonic() - began, 1),
            "seconds_by_stage": realistic.seconds(rows),
        }


def num_gpus() -> int:
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return len(listed.stdout.splitlines())


def main() -> int:
    if shutil.which("nvidia-smi") is None:
        print("no GPU here: nvidia-smi is not installed; run this on a machine with one", file=sys.stderr)
        return 2
    began, reports = time.monotonic(), []
    for name, settings in RUNS.items():
        if settings["transfer"] == "nccl" and num_gpus() < 3:
            reports.append({"run": name, "ok": True, "reason": "left out: NCCL needs a GPU for each of three groups"})
            continue
        if time.monotonic() - began > LIMIT_SECONDS * 0.7:
            reports.append({"run": name, "ok": False, "reason": "no time left"})
            continue
        try:
            reports.append(run(name, settings))
        except RuntimeError as error:
            reports.append({"run": name, "ok": False, "reason": str(error)[-1500:]})
    print(json.dumps(reports, indent=2))
    return 0 if all(report["ok"] for report in reports) else 1


if __name__ == "__main__":
    sys.exit(main())
