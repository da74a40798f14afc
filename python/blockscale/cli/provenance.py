"""The origin of a result: date, commit, machine, versions."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from pathlib import Path
from typing import Any, Final

import torch

import blockscale as bs

ORIGIN: Final = ("date", "commit")  # does not affect the bits of a result


def provenance(device: str) -> dict[str, Any]:
    """The origin of measured numbers."""
    facts = bs.describe()
    where = origin() | {
        "device": device,
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "instruction_set": facts["instruction_set"],
        "blockscale": facts["version"],
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if device == "cuda":
        query = "--query-gpu=clocks.sm,clocks.mem,driver_version"
        where |= {
            "gpu": torch.cuda.get_device_name(),
            "clocks_after_and_driver": output("nvidia-smi", query, "--format=csv,noheader"),
            "cuda": torch.version.cuda,
        }
    return where


def origin() -> dict[str, str]:
    """Date and commit: ORIGIN."""
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return dict(zip(ORIGIN, (now, commit()), strict=True))


def output(*words: str, cwd: Path | None = None) -> str:
    """What a command prints; empty if it is missing or fails."""
    try:
        done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def commit() -> str:
    """The commit of this file, with `+changes`; empty if it is installed outside its repository."""
    here = Path(__file__).resolve()
    if not output("git", "ls-files", here.name, cwd=here.parent):
        return ""
    changed = output("git", "status", "--porcelain", "--untracked-files=no", cwd=here.parent)
    return output("git", "rev-parse", "HEAD", cwd=here.parent) + ("+changes" if changed else "")


def cpu_name() -> str:
    """The processor, as the kernel names it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
