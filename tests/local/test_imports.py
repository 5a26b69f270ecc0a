import json
import pkgutil
import subprocess
import sys

import linckia_trainer.log

HEAVY = {"torch", "ray", "vllm", "deepspeed", "transformers"}
LIGHT = [f"linckia_trainer.log.{module.name}" for module in pkgutil.iter_modules(linckia_trainer.log.__path__)] + [
    f"linckia_trainer.state.{name}" for name in ("choose", "fork", "format", "retention", "rewind", "tiers")
]


def test_the_log_and_the_states_need_nothing_heavy() -> None:
    """The command line reads logs and states on machines that have no torch."""
    look = f"import {', '.join(LIGHT)}, json, sys; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True, timeout=60)
    loaded = set(json.loads(done.stdout))
    assert loaded >= set(LIGHT)
    assert loaded & HEAVY == set()


def test_the_controller_gets_advantages_without_torch() -> None:
    code = "import sys, linckia_trainer.algorithms.step; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
