"""One thread for whatever runs in the test process itself: equal numbers, and no fight for the cores with what it starts."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is first imported, which no plugin does
