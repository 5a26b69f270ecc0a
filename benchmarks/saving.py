"""What committing records and saving states costs the loop: the share of the step that waited for either.

States go to node memory every step and to the run directory every third. Prints JSON; goal: at most 3%.
"""

import argparse
import json
import os
import shutil
import tempfile
from pathlib import Path

import realistic


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=realistic.SIZES, default="110M")
    parser.add_argument("--algorithm", choices=("grpo", "ppo"), default="grpo")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--new-tokens", type=int, default=32)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="linckia-saving-") as name:
        folder = Path(name)
        parameters = realistic.make_model(folder / "model", arguments.size)
        config = realistic.write_config(folder, arguments.algorithm, arguments.steps, arguments.new_tokens)
        try:
            rows = realistic.train(folder, config)
        finally:
            shutil.rmtree(f"/dev/shm/linckia-bench-{os.getpid()}", ignore_errors=True)
    stages = realistic.seconds(rows)
    waited = stages["record"] + stages["save"]
    report = {
        "parameters": parameters,
        "algorithm": arguments.algorithm,
        "steps_measured": len(rows),
        "machine": realistic.machine(),
        "new_tokens": arguments.new_tokens,
        "seconds_by_stage": stages,
        "seconds_waited": round(waited, 4),
        "share_of_step": round(waited / stages["step"], 4),
        "goal": 0.03,
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
