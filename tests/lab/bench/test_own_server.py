"""Servers of measurements end with the process that has started them."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil

PROGRAM = """
import sys, time
from octavo.config.engine_config import EngineConfig
from octavo.lab.bench.own_server import own_server

with own_server(EngineConfig(model=sys.argv[1], num_gpu_blocks_override=50)) as server:
    print(server.process.pid, flush=True)
    time.sleep(600)
"""


def test_a_terminated_measurement_leaves_no_server(tiny_model: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tiny_model)], stdout=subprocess.PIPE, text=True
    ) as measurement:
        assert measurement.stdout is not None
        server = psutil.Process(int(measurement.stdout.readline()))
        family = [server, *server.children(recursive=True)]
        measurement.send_signal(signal.SIGTERM)
        assert measurement.wait(60) == 128 + signal.SIGTERM
        assert psutil.wait_procs(family, timeout=10)[1] == []
