"""Run a ``model.make`` function in a process of its own, so that the controller stays free of what it loads."""

import sys

from linckia_trainer.experience.rewards import load_function

if __name__ == "__main__":
    spec, folder, seed = sys.argv[1:]
    load_function(spec, "model.make")(folder, int(seed))
