"""Convert the linear layers of a model, in place, and drive the random bits of its layers."""

from __future__ import annotations

import dataclasses
import re
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import TypeGuard

import torch

from blockscale._errors import any_int, check_int, did_you_mean, fail, fail_type
from blockscale._names import REPLICATORS, by_first_name, is_part, names_of
from blockscale.nn import Layer, Linear, drop_root, make_root, root_state
from blockscale.recipe import Recipe
from blockscale.recipe import recipe as recipe_named
from blockscale.rng import RngState, Steps
from blockscale.sharded import check_gathered, spec_in_use
from blockscale.tensor import FLOATS, FLOATS_TEXT, is_for_layer

# PyTorch's encoder has a kernel for inference that reads parameters past the forward of its linear
# layers: whose attribute allows it, and the value that does not.
_FAST_PATHS: tuple[tuple[type[torch.nn.Module], str, object], ...] = (
    (torch.nn.TransformerEncoderLayer, "activation_relu_or_gelu", 0),
    (torch.nn.TransformerEncoder, "use_nested_tensor", False),
)


# What counts the steps of models that were reverted: their optimizers still do so.
_REVERTED: weakref.WeakKeyDictionary[torch.nn.Module, RngState] = weakref.WeakKeyDictionary()


@dataclasses.dataclass(frozen=True)
class Report:
    """What `convert` did. Prints as a table.

    Attributes:
        converted: (qualified name, recipe) of every converted layer.
        skipped: (qualified name, reason) of every other module that has parameters of its own.
    """

    converted: list[tuple[str, Recipe]]
    skipped: list[tuple[str, str]]

    def __str__(self) -> str:
        rows = [(name or "(root)", str(recipe)) for name, recipe in self.converted]
        rows += [(name or "(root)", f"left alone: {reason}") for name, reason in self.skipped]
        width = max(len(name) for name, _ in rows)
        head = f"{len(self.converted)} linear layers converted, {len(self.skipped)} modules not"
        return "\n".join([head, *(f"  {name:<{width}}  {what}" for name, what in rows)])


# What torch.load may make: a report is data.
torch.serialization.add_safe_globals([Report])


def convert(
    model: torch.nn.Module,
    recipe: str | Recipe,
    rules: Mapping[str, str | Recipe | None] | None = None,
    skip: Sequence[str] | Set[str] = (),
    seed: int | None = None,
) -> Report:
    """Make every `nn.Linear` of `model` a `blockscale.nn.Linear`, in place.

    A `blockscale.nn.GroupedLinear` gets the recipe; one that is left alone keeps its own. Modules,
    parameters and state_dict keys stay the same objects and names. Converting again changes what is
    different and keeps the count of steps, also after `revert`, which undoes it. Call `attach`
    next.

    Args:
        model: its outermost module: its forward is what counts as a forward (docs/rng.md). Of a
            model in DistributedDataParallel, what it wraps is converted.
        recipe: for layers that no rule matches.
        rules: {regular expression: recipe or None}, searched in the qualified names of linear
            layers that `skip` does not name; the first that matches decides, None leaves the layer
            alone.
        skip: layers left alone, whatever the rules say of them: a name, or a part of one between
            dots; "lm_head" also skips "model.lm_head" and everything inside it. Of a module that
            has several names each counts, here and in rules.
        seed: of the random bits, any int. None keeps that of a model that is converted, or was
            before `revert`, or of parts that are and have the same; of others it is 0.

    Returns:
        A Report, which prints as a table: each module, its recipe, or why it was left alone.

    Raises:
        TypeError, ValueError: an unknown recipe, a rule or skip that matches nothing, or a model
            with nothing to convert. Nothing is changed then.
    """
    _check_types(model, rules, skip, seed)
    model = _unwrapped(model)
    default = recipe_named(recipe)
    plan = list(_plan(model, default, dict(rules or {}), list(skip)))
    report = Report(
        [(step.name, step.what) for step in plan if isinstance(step.what, Recipe)],
        [(step.name, step.what) for step in plan if isinstance(step.what, str)],
    )
    if not report.converted:
        why = "; ".join(f"{name or '(root)'}: {reason}" for name, reason in report.skipped[:4])
        fail(
            "convert",
            "model",
            f"{type(model).__name__} with nothing to convert",
            "at least one nn.Linear or GroupedLinear that no rule or skip leaves alone",
            why or "it has no parameters",
        )
    _check_not_inside_another(model)
    _check_devices(plan)
    for step in plan:
        if isinstance(step.module, Layer) and isinstance(step.what, Recipe):
            check_gathered(step.name, step.module, step.what)
    left = {step.name: step.module for step in plan if not isinstance(step.what, Recipe)}
    _check_restorable("convert", model, left)

    states = _states(model)  # of a converted part, whose count goes on, or of layers built by hand
    state = root_state(model) or _REVERTED.pop(model, None)
    state = state or _joined(states)
    state.seed = state.seed if seed is None else any_int("convert", "seed", seed)
    state.draws = False  # until a layer's recipe does
    for step in plan:
        if isinstance(step.what, Recipe):
            if type(step.module) is torch.nn.Linear:
                step.module.__class__ = Linear
            assert isinstance(step.module, Layer)
            step.module.configure(step.what, state, step.name)
        elif _has_no_plain_form(step.module):
            step.module.configure(step.module.recipe, state, step.name)
        else:
            _restore(step.module)
    make_root(model, state)
    _settle_fast_paths(model)
    return report


def revert(model: torch.nn.Module) -> list[str]:
    """Make every converted layer of `model` a plain `nn.Linear` again, in place.

    A `GroupedLinear` stays as it is, and the model goes on counting for it. An attached optimizer
    goes on counting steps, for a `convert` that may follow.

    Args:
        model: a module; of one in DistributedDataParallel, what it wraps.

    Returns:
        The qualified names of the layers that are plain again.

    Raises:
        TypeError, ValueError: not a model, or a converted layer has another class or forward by
            now, such as fully_shard's.
    """
    _check_model("revert", model)
    model = _unwrapped(model)
    named = by_first_name(names_of(model))
    _check_restorable("revert", model, named)
    state = root_state(model)
    names = [name for name, module in named.items() if _restore(module)]
    for module in model.modules():
        counts = root_state(module) is not None
        if counts and not any(isinstance(inner, Layer) for inner in module.modules()):
            drop_root(module)
    if state is not None and root_state(model) is None:
        _REVERTED[model] = state
    _settle_fast_paths(model)
    return names


@dataclasses.dataclass(frozen=True)
class _Step:
    name: str
    module: torch.nn.Module
    what: Recipe | str  # its recipe, or why it is left alone


def _check_model(operation: str, model: object) -> None:
    if not isinstance(model, torch.nn.Module):
        fail_type(operation, "model", model, "an nn.Module")


def _check_types(model: object, rules: object, skip: object, seed: object) -> None:
    _check_model("convert", model)
    if rules is not None and not isinstance(rules, Mapping):
        need = "a dict {regular expression: recipe or None}"
        fail_type("convert", "rules", rules, need, "to leave layers alone, name them in skip=")
    if isinstance(skip, str):
        fail_type("convert", "skip", skip, "a list of names", f"write skip=[{skip!r}]")
    if not isinstance(skip, Sequence | Set):
        fail_type("convert", "skip", skip, "a list of names", "leave it out to skip nothing")
    for argument, entries, need in (
        ("rules", rules or (), "regular expressions as its keys, in text"),
        ("skip", skip, "names of modules, in text"),
    ):
        for entry in entries:
            if not isinstance(entry, str):
                fail_type("convert", argument, entry, need)
    if seed is not None:
        any_int("convert", "seed", seed)


def _unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The model inside what replicates it."""
    while isinstance(model, REPLICATORS):
        model = model.module
    return model


def _is_sharded(module: torch.nn.Module) -> bool:
    """Whether fully_shard was called for this module, which changes its class."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # nobody has called it if nobody imported it
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def _plan(
    model: torch.nn.Module,
    default: Recipe,
    rules: dict[str, str | Recipe | None],
    skip: list[str],
) -> Iterator[_Step]:
    """What to do with each module that has parameters of its own."""
    names = names_of(model)
    parsed = {
        rule: (_pattern(rule), None if to is None else recipe_named(to))
        for rule, to in rules.items()
    }
    _check_rules({rule: pattern for rule, (pattern, _) in parsed.items()}, names)
    _check_skip(skip, [name for known in names.values() for name in known])
    for name, module in by_first_name(names).items():
        own = any(True for _ in module.parameters(recurse=False))
        if not own and not isinstance(module, Layer):  # which may hold its weight further down
            continue
        reason = _unfit(module)
        known = names[module]
        rule = next((r for r, (at, _) in parsed.items() if any(map(at.search, known))), None)
        skipped = next((s for s in skip if any(is_part(s, name) for name in known)), None)
        stays = f", stays in {module.recipe}" if _has_no_plain_form(module) else ""
        if reason:
            yield _Step(name, module, reason + stays)
        elif skipped is not None:
            yield _Step(name, module, f"skip {skipped!r}{stays}")
        elif rule is not None:
            yield _Step(name, module, parsed[rule][1] or f"rule {rule!r}{stays}")
        else:
            yield _Step(name, module, default)


def _has_no_plain_form(module: torch.nn.Module) -> TypeGuard[Layer]:
    """A layer of ours that PyTorch has none of to go back to: it keeps a recipe."""
    return isinstance(module, Layer) and not isinstance(module, Linear)


def _check_rules(
    patterns: Mapping[str, re.Pattern[str]], names: Mapping[torch.nn.Module, list[str]]
) -> None:
    """A rule that applies to nothing is a mistake in its expression."""
    kinds = (torch.nn.Linear, Layer)
    linears = [n for m, known in names.items() if isinstance(m, kinds) for n in known]
    for rule, pattern in patterns.items():
        if not any(pattern.search(name) for name in linears):
            need = "a regular expression that is found in the name of a linear layer"
            some = ", ".join(linears[:4]) + (", ..." if len(linears) > 4 else "")
            fail("convert", "rules", repr(rule), need, f"the names are {some}")


def _check_skip(skip: list[str], named: list[str]) -> None:
    """A name to skip that is nowhere is a mistake in the name."""
    for entry in skip:
        if not any(is_part(entry, name) for name in named):
            names = {part for name in named for part in (name, name.rpartition(".")[2]) if part}
            remedy = did_you_mean(entry, sorted(names)) or "print(model) shows the names"
            fail("convert", "skip", repr(entry), "the name of a module", remedy)


def _pattern(rule: str) -> re.Pattern[str]:
    try:
        return re.compile(rule)
    except re.error as error:
        fail("convert", "rules", repr(rule), "a regular expression", str(error))


def _unfit(module: torch.nn.Module) -> str:
    """Why a module cannot be converted; "" when it can."""
    if type(module) is not torch.nn.Linear and not isinstance(module, Layer):
        kind = type(module).__name__
        if isinstance(module, torch.nn.LazyLinear):
            return f"{kind} has no shape yet: convert after it has seen a batch"
        if isinstance(module, torch.nn.Linear) and _is_sharded(module):
            return f"{kind} is sharded by itself: convert before fully_shard"
        if isinstance(module, torch.nn.Linear):
            return f"{kind} is a subclass of nn.Linear: its forward may be its own"
        return f"{kind} is not nn.Linear"
    assert isinstance(module, torch.nn.Linear | Layer)
    if type(module) is torch.nn.Linear and "forward" in vars(module):
        return "its forward was replaced by another library: convert before that"
    if not is_for_layer(module.weight):
        return f"its weight is a tensor of type {type(module.weight).__name__}"
    if module.weight.dtype not in FLOATS:
        return f"its weight is {module.weight.dtype}, not {FLOATS_TEXT}"
    return ""


def _settle_fast_paths(model: torch.nn.Module) -> None:
    """No encoder with converted layers goes past them, and every other one may as before."""
    for module in model.modules():
        for kind, name, never in _FAST_PATHS:
            if not isinstance(module, kind):
                continue
            if "_blockscale_fast_path" in vars(module):
                setattr(module, name, vars(module).pop("_blockscale_fast_path"))
            if any(isinstance(inner, Linear) for inner in module.modules()):
                vars(module)["_blockscale_fast_path"] = getattr(module, name)
                setattr(module, name, never)


def _check_not_inside_another(model: torch.nn.Module) -> None:
    """The layers of a model that is part of a converted one belong to that one's root. (Those of a
    copied part belong to none.)"""
    owned = {id(root_state(module)) for module in model.modules()}
    for name, module in model.named_modules():
        if not isinstance(module, Layer) or not module._rng_state.has_root():
            continue
        if id(module._rng_state) not in owned:
            fail(
                "convert",
                "model",
                f"{type(model).__name__}, whose {name or 'layer'!r} belongs to a converted model",
                "the outermost module",
                "convert that with rules=, or bs.revert this part first",
            )


def _check_devices(plan: list[_Step]) -> None:
    """Layers on a GPU get recipes that run there; of one that moves later, `linear` says so."""
    for step in plan:
        what, parameters = step.what, step.module.parameters()
        if isinstance(what, Recipe) and what.cuda_needs and any(p.is_cuda for p in parameters):
            got = f"{what} for {step.name or '(root)'!r} on cuda"
            remedy = "use a recipe without FP32 scales, such as mxfp8, or keep the layer on the CPU"
            fail("convert", "recipe", got, what.cuda_needs, remedy)


def _check_restorable(
    operation: str, model: torch.nn.Module, named: Mapping[str, torch.nn.Module]
) -> None:
    """Converted layers that something has changed further cannot be made plain ones."""
    for name, module in named.items():
        if not isinstance(module, Linear):
            continue
        if spec_in_use(module) is not None:
            got = f"{name or 'layer'!r}, whose codes FSDP2 gathers"
            fail(operation, "model", got, "layers that fully_shard has not cut since then")
        replaced = "forward" in vars(module)
        if replaced or type(module) is not Linear:
            kind = "a layer with another forward" if replaced else type(module).__name__
            got = f"{type(model).__name__} with {name or 'layer'!r} as {kind}"
            need = "what convert made of it, to make it an nn.Linear again"
            fail(operation, "model", got, need, "undo first what a parametrization or a hook did")


def _restore(module: torch.nn.Module) -> bool:
    if type(module) is not Linear:
        return False
    drop_root(module)
    for name in ("recipe", "_rng_state", "_seed"):
        del module.__dict__[name]
    if module.__dict__.pop("_retype", None):  # by quantized_all_gather()
        weight = module.weight
        values = getattr(weight, "local", weight)
        module.weight = torch.nn.Parameter(values, weight.requires_grad)
    module.__class__ = torch.nn.Linear  # type: ignore[assignment]
    return True


# --- the random bits of a converted model ---------------------------------------------------------


def _states(model: torch.nn.Module) -> list[RngState]:
    """Those that the converted layers of `model` draw by, each once."""
    layers = (module for module in model.modules() if isinstance(module, Layer))
    return list({id(layer._rng_state): layer._rng_state for layer in layers}.values())


def _joined(states: list[RngState]) -> RngState:
    """One for parts that were counted apart: that of the furthest, where its optimizer goes on
    counting, with their seed if they have the same."""
    if not states:
        return RngState(0)
    seeds = {state.seed for state in states}
    joined = max(states, key=lambda state: (state.position(), state.stepped))
    joined.seed = seeds.pop() if len(seeds) == 1 else 0
    return joined


def _state(operation: str, model: torch.nn.Module) -> RngState:
    """The one state of all converted layers of `model`."""
    _check_model(operation, model)
    states = _states(model)
    if len(states) != 1:
        got = f"{type(model).__name__} with {len(states)} separately counted parts"
        if not states:
            got = f"{type(model).__name__}, which is not converted"
        fail(operation, "model", got, "a converted model", "call bs.convert(model, recipe) first")
    return states[0]


def _counting_state(operation: str, model: torch.nn.Module) -> RngState:
    """That of a model whose forwards are counted, or of a part of one."""
    state = _state(operation, model)
    if not state.has_root():
        got = f"{type(model).__name__}, a copy or a rest of a part of a converted model"
        need = "a model whose forward counts"
        fail(operation, "model", got, need, "call bs.convert(model, recipe): the count goes on")
    return state


def attach(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Count `optimizer`'s steps as the model's: each advances the offset of its random bits.

    Of several optimizers, attach one. Attaching the same one again changes nothing. A step that a
    gradient scaler skips does not count.

    Args:
        model: a converted one, or one in DistributedDataParallel.
        optimizer: whose `step` is called, once for each update; or a wrapper with that one as its
            attribute `optimizer`, `optim` or `base_optimizer`, with `_` or without. Of optimizers
            that step within the backward, the one of the parameter whose gradient comes last.

    Raises:
        TypeError, ValueError: not an optimizer, or one whose steps call no hooks; the model is not
            converted, or copied from a part of one that is: `convert` it, so that its forwards are
            counted.
    """
    state = _counting_state("attach", model)
    remedy = "call bs.advance(model) after each step instead"
    if not isinstance(optimizer, torch.optim.Optimizer):
        fail_type("attach", "optimizer", optimizer, "a torch.optim.Optimizer", remedy)
    # One that wraps another, as Accelerate's does, may have no hooks; its steps are the other's.
    while inner := _wrapped(optimizer):
        optimizer = inner
    # Whoever does not call Optimizer.__init__ has none, or a step that calls none.
    hooks = getattr(optimizer, "_optimizer_step_post_hooks", None)
    if hooks is None or not getattr(type(optimizer).step, "hooked", False):
        got = f"{type(optimizer).__name__}, whose step calls no hooks"
        fail("attach", "optimizer", got, "one that has called Optimizer.__init__", remedy)
    counters = (getattr(hook, "__self__", None) for hook in hooks.values())
    if not any(isinstance(c, Steps) and c.state is state for c in counters):
        Steps(state, optimizer)


def _wrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer | None:
    for name in ("optimizer", "optim", "base_optimizer"):
        inner = getattr(optimizer, name, None) or getattr(optimizer, f"_{name}", None)
        if isinstance(inner, torch.optim.Optimizer):
            return inner
    return None


def advance(model: torch.nn.Module) -> None:
    """An optimizer step has ended: the next forward is forward 0 of the next step.

    For loops whose optimizer cannot be attached; call it once after each step.

    Args:
        model: a converted one.

    Raises:
        TypeError, ValueError: not a model, or not converted, or copied from a part of one that is.
    """
    _counting_state("advance", model).advance()


def rng_state(model: torch.nn.Module) -> dict[str, int]:
    """Where the random bits of a model stand. Waits for the device.

    Args:
        model: a converted one.

    Returns:
        {"step": optimizer steps ended, "forward": forwards with gradients begun since then (0 where
        the recipe draws no bits; of more than 65535 each 65536 count as a step), "seed": that of
        `convert`}.

    Raises:
        TypeError, ValueError: not a model, or not converted.
    """
    state = _state("rng_state", model)
    step, forward = state.position()
    return {"step": step, "forward": forward, "seed": state.seed}


def set_step(model: torch.nn.Module, step: int, forward: int = 0) -> None:
    """Continue as if `step` optimizer steps had ended, and `forward` forwards had begun since.

    Args:
        model: a converted one.
        step: `rng_state(model)["step"]` of the run to continue, 0 or more, below 2^47.
        forward: and its ["forward"], below 2^16; 0 where a step has just ended.

    Raises:
        TypeError, ValueError: not ints, out of range, or the model is not converted.
    """
    state = _state("set_step", model)
    numbers = []
    for name, value, bits in (("step", step, 47), ("forward", forward, 16)):
        number = check_int("set_step", name, value)
        if not 0 <= number < 1 << bits:
            fail("set_step", name, number, f"0 or more, below 2^{bits}")
        numbers.append(number)
    state.set_position(*numbers)
