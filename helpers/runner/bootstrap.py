"""Makes `.venv`, the runner's own environment, with nothing but Python and a registry.

make runs it as `python3 -m helpers.runner.bootstrap`. Old Pythons must be
able to read it, so that they can be told that they are too old.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import threading
import time

OLDEST = (3, 11)
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
VENV = os.path.join(ROOT, ".venv")
PYTHON = os.path.join(VENV, "bin", "python")
LOCK = os.path.join(ROOT, "notebooks", "locks", "runner.txt")
STAMP = os.path.join(VENV, ".gallery-stamp")


def main():
    """Make .venv unless it is complete and fits the lock; says what it does while it does it."""
    problem = unfit_python()
    if problem:
        sys.exit("gallery: " + problem)
    os.makedirs(os.path.join(ROOT, ".envs"), exist_ok=True)
    with open(os.path.join(ROOT, ".envs", "runner.lock"), "w") as lock:
        wait_for(lock)
        if ready():
            return
        build()


def unfit_python(version=None, modules=("venv", "ensurepip")):
    """Why this Python cannot make the environment, in a sentence with the remedy; None if it can."""
    version = version or sys.version_info[:3]
    if version[:2] < OLDEST:
        found, oldest = ".".join(map(str, version)), ".".join(map(str, OLDEST))
        return (
            f"python3 is {found} ({sys.executable}), and {oldest} or newer is needed: install one and name "
            f"it, as in `make run PYTHON=python{oldest}`."
        )
    for module in modules:
        try:
            __import__(module)
        except ImportError:
            return (
                f"{sys.executable} has no module {module!r}, so it cannot make environments: on Debian and "
                f"Ubuntu, `apt-get install python{version[0]}.{version[1]}-venv`."
            )
    return None


def ready():
    """Whether .venv was completed from this lock, in this place, by this version of Python."""
    try:
        with open(STAMP) as stamp:
            return stamp.read() == fingerprint() and os.path.exists(PYTHON)
    except OSError:
        return False


def fingerprint():
    with open(LOCK, "rb") as file:
        digest = hashlib.sha256(file.read()).hexdigest()
    return f"{digest}\n{VENV}\n{sys.version_info[:2]}\n"


def build():
    """Make .venv anew: venv, then uv in it, then all else by uv. The stamp comes last."""
    from helpers.runner.registry import uv_environment

    say(f"making .venv, the runner's environment ({sys.executable})")
    shutil.rmtree(VENV, ignore_errors=True)
    step("venv", [sys.executable, "-m", "venv", VENV])
    with open(LOCK) as file:
        pinned_uv = next(line.split(";")[0].strip() for line in file if line.startswith("uv=="))
    pip = [PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    step(pinned_uv, [*pip, pinned_uv])
    uv = [os.path.join(VENV, "bin", "uv"), "pip", "install", "--compile-bytecode", "--python", PYTHON]
    step("packages of notebooks/locks/runner.txt", [*uv, "-r", LOCK], uv_environment())
    step("this project", [*uv, "--quiet", "--no-deps", "--editable", ROOT], uv_environment())
    with open(STAMP, "w") as stamp:
        stamp.write(fingerprint())
    say(".venv is ready")


def step(label, command, env=None):
    """Run one command, showing its output and every 20 seconds the time."""
    say("  " + label)
    begun, done = time.time(), threading.Event()

    def watch():
        while not done.wait(20):
            say(f"  {label} ... {time.time() - begun:.0f} s")

    threading.Thread(target=watch, daemon=True).start()
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, universal_newlines=True
    ) as process:
        for line in process.stdout or ():
            if not line.startswith(" + "):  # uv's list of what it installed: the lock says it
                print("    " + line, end="", flush=True)
    status = process.returncode
    done.set()
    if status:
        sys.exit(f"gallery: {label} failed (exit code {status}): {' '.join(command)}")


def wait_for(lock):
    """Take the lock; of two makers at once the second waits."""
    import fcntl

    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        say("another process is making .venv; waiting")
        fcntl.flock(lock, fcntl.LOCK_EX)


def say(text):
    print("gallery: " + text, flush=True)


if __name__ == "__main__":
    main()
