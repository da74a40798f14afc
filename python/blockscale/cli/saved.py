"""The settings of a run to be continued: the file may have been damaged or edited since."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import blockscale as bs
from blockscale.cli.errors import CliError, Whole
from blockscale.cli.model import PRESETS

# The settings that are whole numbers, also for the options that give them. All trainings of a run
# are listed before the first begins, hence a limit on seeds.
WHOLE: Final = {
    "steps": Whole(1),
    "seeds": Whole(1, 1000),
    "seed": Whole(0),
    "batch_size": Whole(1),
    "seq_len": Whole(2),
    "eval_every": Whole(1),
    "checkpoint_every": Whole(1),
}


def whole(name: str) -> tuple[str, Callable[[Any], bool]]:
    """A row of CHECKS."""
    return str(WHOLE[name]), WHOLE[name].holds


def is_rate(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


def are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def are_recipes(value: Any) -> bool:
    if not are_names(value):
        return False
    try:
        return 0 < len(value) == len({bs.recipe(name) for name in value})
    except ValueError:
        return False


# The valid values of each setting, in words and as a test; in the order of the documented options.
CHECKS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "preset": (f"one of {', '.join(PRESETS)}", lambda v: isinstance(v, str) and v in PRESETS),
    "data": ("a list of paths", are_names),
    "recipes": (
        f"different names among {', '.join(bs.recipe_names())}, or changes of them",
        are_recipes,
    ),
    "steps": whole("steps"),
    "seeds": whole("seeds"),
    "seed": whole("seed"),
    "batch_size": whole("batch_size"),
    "seq_len": whole("seq_len"),
    "lr": ("a finite number above 0", is_rate),
    "eval_every": whole("eval_every"),
    "checkpoint_every": whole("checkpoint_every"),
    "device": ("cpu or cuda", lambda v: v in ("cpu", "cuda")),
    # Facts stored with the settings; not options.
    "data_sha256": ("a text", lambda v: isinstance(v, str)),
    "environment": ("an object", lambda v: isinstance(v, dict)),
}
SETTINGS: Final = tuple(CHECKS)[:-2]


def read_settings(path: Path) -> dict[str, Any]:
    """The settings of the run in `path`; CliError unless it is a run with valid settings."""
    file = path / "settings.json"
    try:
        settings = json.loads(file.read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise CliError(
            f"--resume = {path} (holds no run); need the --out folder of an earlier run; leave "
            "--resume out to start one"
        ) from None
    except (ValueError, RecursionError):
        fault = "damaged"
    except OSError as error:
        fault = error.strerror or "unreadable"
    else:
        fault = fault_of(settings)
    if fault:
        raise CliError(
            f"--resume = {file} ({fault}); need the file the run wrote; start again in another "
            "folder"
        )
    return dict(settings)


def fault_of(settings: Any) -> str:
    """What is wrong with a run's settings; empty if nothing is."""
    if not isinstance(settings, dict):
        return f"{type(settings).__name__}, not an object"
    for key, (need, good) in CHECKS.items():
        if key not in settings:
            return f"no {key}"
        if not good(settings[key]):
            got = json.dumps(settings[key])
            return f"{key} {got if len(got) < 60 else got[:60] + '...'}, not {need}"
    return ""
