"""Is this machine fit for the recipes? Each finding says what was seen and, when it is wrong, what to do."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from helpers.runner import environments, hardware, locks

GOOD, NOTE, BAD = "ok", "note", "wrong"

LEAST_DISK = 20 * 2**30  # an environment with CUDA libraries takes about 7 GB, its download the same again
LEAST_SHM = 2**30  # NCCL and data-loading workers hand tensors over through shared memory
STALE = re.compile(r"^(torch_|psm_|sem\.|nccl-|\d{6}_|__KMP)")  # what torch, NCCL, Streaming and OpenMP leave there

# Asked in the recipe's own environment: this process has no torch.
ASK_TORCH = """
import json, torch
cuda = torch.cuda.is_available()
print(json.dumps({
    "torch": torch.__version__, "cuda": torch.version.cuda, "available": cuda,
    "devices": torch.cuda.device_count() if cuda else 0,
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
    "gloo": torch.distributed.is_gloo_available(),
}))
"""


@dataclass(frozen=True)
class Finding:
    """One line of the report; `remedy` is there when something is wrong or worth a step."""

    topic: str
    state: str
    text: str
    remedy: str = ""


def examine(base: Path) -> Iterator[Finding]:
    """Every finding, as it is made: some take seconds."""
    yield from (_system(), *_gpus(), *_environments(base), _disk(base))
    yield from (_shared_memory(), *_stale_segments(), _ports(), _hub(), *_accelerate(base))


def _system() -> Finding:
    facts = hardware.describe()
    return Finding(
        "machine",
        GOOD,
        f"{facts['cores']} cores ({facts['cpu']}), {facts['memory_gib']} GiB, {facts['system']}",
    )


def _gpus() -> Iterator[Finding]:
    found = hardware.gpus()
    if not found:
        if shutil.which("nvidia-smi"):
            remedy = "run nvidia-smi and read its error: often the driver and its kernel module differ: reboot"
            yield Finding("GPUs", BAD, "nvidia-smi is here but lists no GPU", remedy)
        elif Path("/proc/driver/nvidia").exists():
            yield Finding("GPUs", BAD, "a driver is loaded, but nvidia-smi is not on PATH", "add it to PATH")
        else:
            yield Finding("GPUs", NOTE, "none: recipes run their smoke profile on CPU processes")
        return
    for number, gpu in enumerate(found):
        yield Finding("GPUs", GOOD, f"{number}: {gpu['name']}, {gpu['memory.total']}, driver {gpu['driver_version']}")


def _environments(base: Path) -> Iterator[Finding]:
    """Each recipe environment: its lock, whether it is made, and what its torch sees."""
    for name in locks.environment_names(base):
        if name in {"runner", "tests"}:
            continue
        topic = f"environment {name}"
        fault = locks.fault(base, name)
        if fault:
            yield Finding(topic, BAD, fault.split(". Run ")[0], f"gallery lock {name}")
        elif not environments.is_ready(base, name):
            yield Finding(topic, NOTE, "not made yet; `gallery run` makes it when needed", f"gallery env {name}")
        else:
            yield from _torch(topic, name, environments.python_of(base, name))


def _torch(topic: str, name: str, python: Path) -> Iterator[Finding]:
    try:
        done = subprocess.run([str(python), "-c", ASK_TORCH], text=True, capture_output=True, timeout=120)
    except subprocess.TimeoutExpired:
        yield Finding(topic, BAD, "importing torch took more than 120 s", f"gallery env {name} --rebuild")
        return
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        yield Finding(topic, BAD, f"torch does not import: {last}", f"gallery env {name} --rebuild")
        return
    seen = json.loads(done.stdout.splitlines()[-1])
    build = f"torch {seen['torch']}, " + (f"CUDA {seen['cuda']}" if seen["cuda"] else "CPU build")
    driver_gpus = len(hardware.gpus())
    if driver_gpus and not seen["cuda"]:
        remedy = "unset PIP_FIND_LINKS and UV_FIND_LINKS (or point them at a CUDA wheel), then "
        yield Finding(topic, BAD, f"{build}, but this machine has GPUs", remedy + f"gallery env {name} --rebuild")
    elif driver_gpus and not seen["available"]:
        remedy = f"update the driver to one that supports CUDA {seen['cuda']}, or check CUDA_VISIBLE_DEVICES"
        yield Finding(topic, BAD, f"{build} sees none of the {driver_gpus} GPUs", remedy)
    else:
        backends = f"NCCL {seen['nccl']}" if seen["nccl"] else "no NCCL (needs a GPU)"
        gloo = "gloo" if seen["gloo"] else "no gloo"
        yield Finding(topic, GOOD, f"{build}, {seen['devices']} devices, {backends}, {gloo}")


def _disk(base: Path) -> Finding:
    free = shutil.disk_usage(base).free
    text = f"{free / 2**30:.0f} GiB free at the repository"
    if free < LEAST_DISK:
        return Finding("disk", BAD, text, "free at least 20 GiB; `gallery clean` shows what can go")
    return Finding("disk", GOOD, text)


def _shared_memory(path: Path = Path("/dev/shm")) -> Finding:
    if not path.is_dir():
        return Finding("shared memory", NOTE, f"no {path} on this system")
    usage = shutil.disk_usage(path)
    text = f"{path} has {usage.total / 2**30:.1f} GiB, {usage.free / 2**30:.1f} free"
    if usage.free < LEAST_SHM:
        return Finding(
            "shared memory",
            BAD,
            text,
            "in Docker start with --shm-size=8g or --ipc=host; else remount larger",
        )
    return Finding("shared memory", GOOD, text)


def _stale_segments(path: Path = Path("/dev/shm")) -> Iterator[Finding]:
    """Segments that a killed job left: known by their names, and open in no process."""
    if not path.is_dir():
        return
    stale = [file for file in path.iterdir() if STALE.match(file.name) and not _in_use(file)]
    if stale:
        size = sum(file.stat().st_size for file in stale if file.exists())
        files = " ".join(str(file) for file in stale[:5]) + (" ..." if len(stale) > 5 else "")
        yield Finding("shared memory", BAD, f"{len(stale)} stale segments, {size / 2**20:.1f} MiB", f"rm {files}")
    else:
        yield Finding("shared memory", GOOD, "no stale segments")


def _in_use(file: Path) -> bool:
    for process in psutil.process_iter():
        try:
            if any(part.path == str(file) for part in process.memory_maps(grouped=True)):
                return True
        except (psutil.Error, OSError, AttributeError):  # gone, someone else's, or not offered by this system
            continue
    return False


def _ports() -> Finding:
    """Ranks meet on a port that the system picks, at this host's own name or at the loopback address."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), timeout=2):
                pass
    except OSError as error:
        return Finding(
            "ports", BAD, f"a local connection fails: {error}", "allow connections on the loopback interface"
        )
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        remedy = f"add `127.0.0.1 {socket.gethostname()}` to /etc/hosts"
        return Finding("ports", BAD, f"the host name {socket.gethostname()} does not resolve", remedy)
    return Finding("ports", GOOD, "local connections work, the host name resolves")


def _hub(connect: Callable[..., socket.socket] = socket.create_connection) -> Finding:
    address = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    host = urlsplit(address).hostname or address
    try:
        connect((host, 443), timeout=3).close()
    except OSError:
        return Finding("hub", NOTE, f"{host} does not answer: smoke profiles need no hub, full profiles do")
    return Finding("hub", GOOD, f"{host} answers")


def _accelerate(base: Path) -> Iterator[Finding]:
    """The parts of `accelerate env` that explain surprises, from the environments that have accelerate."""
    for name in locks.environment_names(base):
        program = environments.folder(base, name) / "bin" / "accelerate"
        said = hardware.ask([str(program), "env"], timeout=120) if program.exists() else None
        if said:
            lines = [line.strip(" -\t") for line in said.splitlines() if re.search(r"[Vv]ersion|config", line)]
            yield Finding(f"accelerate ({name})", GOOD, "; ".join(lines[:6]))
