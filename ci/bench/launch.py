"""What a launch costs: a no-op on N processes, started from a notebook-like parent, against torchrun.

Both import torch, join the process group, make one all_reduce and leave. They take turns, so that a machine whose
speed drifts drifts for both; the ratio of the medians is what to quote. The bound is 1.15.

    python ci/bench/launch.py --processes 2 --rounds 7
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))
BOUND = 1.15
SCRIPT = f"""
import sys; sys.path.insert(0, {str(REPOSITORY)!r})
from helpers import ranks
ranks.init()
ranks.all_mean(1.0)
ranks.shut_down()
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()

    from helpers import distributed, ranks

    @distributed(gpus=options.processes)
    def noop() -> None:
        ranks.init()
        ranks.all_mean(1.0)

    threads = str(max(1, (os.cpu_count() or 1) // options.processes))
    with tempfile.TemporaryDirectory() as folder:
        os.environ["GALLERY_RUN_DIR"] = folder
        script = Path(folder) / "noop.py"
        script.write_text(SCRIPT)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        torchrun += ["--nproc-per-node", str(options.processes), str(script)]
        environment = {**os.environ, "OMP_NUM_THREADS": threads, "GLOO_SOCKET_IFNAME": "lo"}

        ours, theirs = [], []
        for number in range(options.rounds + 1):
            begin = time.perf_counter()
            noop.distributed()
            middle = time.perf_counter()
            subprocess.run(torchrun, check=True, env=environment)
            end = time.perf_counter()
            if number:  # the first round fills the file cache
                ours.append(middle - begin)
                theirs.append(end - middle)

    ratio = statistics.median(ours) / statistics.median(theirs)
    for name, seconds in (("@distributed", ours), ("torchrun", theirs)):
        print(f"{name:13s} median {statistics.median(seconds):.2f} s, {min(seconds):.2f} to {max(seconds):.2f} s")
    print(f"ratio {ratio:.2f} (bound {BOUND}), {options.rounds} rounds of {options.processes} processes")
    return int(ratio > BOUND)


if __name__ == "__main__":
    sys.exit(main())
