"""Convert the linear layers and the experts of a model, in place."""

from __future__ import annotations

import dataclasses
import re
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import NoReturn, TypeGuard

import torch

from blockscale._errors import any_int, counted, did_you_mean, fail, fail_type, kind_of
from blockscale._names import REPLICATORS, by_first_name, is_part, names_of, shown
from blockscale._plain import values_of
from blockscale._unfit import NO_LINEAR, has_own_parameters, read_past, unfit
from blockscale.classes import class_of
from blockscale.counting import states_of
from blockscale.experts import Experts, is_experts
from blockscale.forwards import RngState, drop_root, make_root, root_state
from blockscale.nn import Layer, Linear, WeightLayer, check_model
from blockscale.recipe import Recipe
from blockscale.recipe import recipe as recipe_named
from blockscale.sharded import check_gathered, gathered_spec, gathers_codes, inherit

# PyTorch's encoder has an inference kernel that reads the parameters of its linear layers without
# calling their forward: the class and attribute that allow it, and the value that does not.
_FAST_PATHS: tuple[tuple[type[torch.nn.Module], str, object], ...] = (
    (torch.nn.TransformerEncoderLayer, "activation_relu_or_gelu", 0),
    (torch.nn.TransformerEncoder, "use_nested_tensor", False),
)


# The states of reverted models, in which their optimizers still count steps.
_REVERTED: weakref.WeakKeyDictionary[torch.nn.Module, RngState] = weakref.WeakKeyDictionary()


@dataclasses.dataclass(frozen=True, repr=False)
class Report:
    """What `convert` did. Prints as a table, in a notebook too.

    Attributes:
        converted: (qualified name, recipe) of every converted layer.
        skipped: (qualified name, reason) of every other module that has parameters of its own.
        unused: rules that decided nothing, as earlier rules or `skip` take precedence.
    """

    converted: list[tuple[str, Recipe]]
    skipped: list[tuple[str, str]]
    unused: Sequence[str]

    def __str__(self) -> str:
        rows = [(shown(name), str(recipe)) for name, recipe in self.converted]
        rows += [(shown(name), f"left alone: {reason}") for name, reason in self.skipped]
        width = max((len(name) for name, _ in rows), default=0)
        layers, modules = len(self.converted), len(self.skipped)
        head = f"{counted(layers, 'layer')} converted, {counted(modules, 'module')} not"
        lines = [head, *(f"  {name:<{width}}  {what}" for name, what in rows)]
        if self.unused:
            lines.append(f"Rules that decided nothing: {', '.join(map(repr, self.unused))}")
        return "\n".join(lines)

    __repr__ = __str__


# What torch.load may construct: a report is data.
torch.serialization.add_safe_globals([Report])


def convert(
    model: torch.nn.Module,
    recipe: str | Recipe,
    rules: Mapping[str, str | Recipe | None] | None = None,
    skip: Sequence[str] | Set[str] | None = (),
    seed: int | None = None,
    experts: Sequence[str] | Set[str] | None = (),
) -> Report:
    """Make every `nn.Linear` of `model` a `blockscale.nn.Linear`, in place, including instances of
    subclasses that inherit its forward.

    A `blockscale.nn.GroupedLinear` gets the recipe, or keeps its own if it is left alone. Modules
    and parameters stay the same objects, and state_dict keys the same names. Converting again
    changes only what is different and keeps the count of steps, also after `revert`, which undoes
    the conversion (but a copy of a reverted model knows neither its count nor its seed). A layer
    that becomes plain again may get a new weight, as `revert` says. Call `attach` next.

    Experts of other libraries, such as Transformers, are modules that hold matrices [E, N, K] or
    [E, K, N] and multiply by `torch.nn.functional.grouped_mm`. In those named in `experts`,
    `grouped_linear` computes these products; the rest of their forward stays as it is.

    Args:
        model: the outermost module, whose forward is what counts as a forward (docs/rng.md). If it
            is a DistributedDataParallel, the module that it wraps is converted.
        recipe: for layers that no rule matches.
        rules: {regular expression: recipe or None}, searched in the qualified names of linear
            layers that `skip` does not name. The first match decides; None leaves the layer alone.
        skip: layers to leave alone, whatever the rules say: a name, or a part of one between dots;
            "lm_head" also skips "model.lm_head" and everything inside it. An nn.Linear that was
            converted before, or a blockscale.nn.Linear, becomes plain. If a module has several
            names, each one counts, here and in rules.
        experts: modules of experts to convert too, named as in `skip`. Only products in a module's
            own forward are replaced, not what other code computes from its parameters. Products
            that it computes in other ways than by grouped_mm stay in high precision; a forward with
            gradients that never calls it warns.
        seed: of the random bits, any int. None keeps the seed of a model that is converted, or was
            before `revert`, or of converted parts that share one; otherwise it is 0.

    Returns:
        A Report, which prints as a table: each module with its recipe, or why it was left alone.

    Raises:
        TypeError, ValueError: an unknown recipe; a rule, skip or experts that match nothing, or a
            rule with a recipe or experts that match only modules that cannot be converted; a model
            with nothing to convert, or a part of a converted one; a recipe that does not run on a
            layer's device; a layer that would change while FSDP2 gathers its codes, or that
            something else has changed since it was converted. Nothing is changed if it raises.
    """
    skip, experts = () if skip is None else skip, () if experts is None else experts
    _check_types(model, rules, skip, seed, experts)
    model = _unwrapped(model)
    if isinstance(model, torch.jit.ScriptModule):
        need = "a model that torch.jit has not compiled"
        fail("convert", "model", kind_of(model), need, "convert before scripting or tracing")
    default = recipe_named(recipe)
    plan = list(_plan(model, default, dict(rules or {}), list(skip), list(experts)))
    report = Report(
        [(step.name, step.what) for step in plan if isinstance(step.what, Recipe)],
        [(step.name, step.what) for step in plan if isinstance(step.what, str)],
        [rule for rule in rules or () if all(step.rule != rule for step in plan)],
    )
    if not report.converted:
        _fail_with_nothing(model, report)
    _check_plan(model, plan)
    _apply_plan(model, plan, None if seed is None else any_int("convert", "seed", seed))
    return report


def revert(model: torch.nn.Module) -> list[str]:
    """Make every converted layer of `model` a plain `nn.Linear` again, in place, and restore
    experts.

    A `GroupedLinear` stays as it is, and the model continues to count forwards for it. An attached
    optimizer continues to count steps, for a later `convert`. The seed and the count are remembered
    for this one object: a deep copy or a pickle of the reverted model is a new model. Weights that
    `quantized_all_gather` has replaced are replaced again, by parameters with the same values and
    gradients: make their optimizer anew.

    Args:
        model: a module; if it is a DistributedDataParallel, the module that it wraps is reverted.

    Returns:
        The qualified names of the layers that are plain again.

    Raises:
        TypeError, ValueError: not a model; or a converted layer has got another class or forward,
            such as fully_shard's; or FSDP2 gathers its codes.
    """
    check_model("revert", model)
    model = _unwrapped(model)
    named = by_first_name("revert", names_of(model))
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
    rule: str | None = None  # the rule that decided


def _converted(plain: type[torch.nn.Module]) -> type[Layer]:
    """The class that a module of class `plain` gets."""
    if plain is torch.nn.Linear:
        return Linear
    return class_of(Linear if issubclass(plain, torch.nn.Linear) else Experts, plain)


def _check_types(model: object, rules: object, skip: object, seed: object, experts: object) -> None:
    check_model("convert", model)
    if rules is not None and not isinstance(rules, Mapping):
        need = "a dict {regular expression: recipe or None}"
        fail_type("convert", "rules", rules, need, "to leave layers alone, name them in skip=")
    for argument, names in (("skip", skip), ("experts", experts)):
        if isinstance(names, str):
            remedy = f"write {argument}=[{names!r}]"
            fail_type("convert", argument, names, "a list of names", remedy)
        if not isinstance(names, Sequence | Set):
            fail_type("convert", argument, names, "a list of names", "leave it out to name none")
    for argument, entries, need in (
        ("rules", rules or (), "regular expressions as its keys, in text"),
        ("skip", skip, "names of modules, in text"),
        ("experts", experts, "names of modules, in text"),
    ):
        for entry in entries:  # type: ignore[attr-defined]
            if not isinstance(entry, str):
                fail_type("convert", argument, entry, need)
    if seed is not None:
        any_int("convert", "seed", seed)


def _unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The model inside a wrapper that replicates it."""
    while isinstance(model, REPLICATORS):
        model = model.module
    return model


def _plan(
    model: torch.nn.Module,
    default: Recipe,
    rules: dict[str, str | Recipe | None],
    skip: list[str],
    experts: list[str],
) -> Iterator[_Step]:
    """What to do with each module that has parameters of its own."""
    names = names_of(model)
    parsed = {
        rule: (_pattern(rule), None if to is None else recipe_named(to))
        for rule, to in rules.items()
    }
    _check_named("skip", skip, names)
    chosen = _experts(experts, names)
    past = read_past(names)
    reasons = {
        module: past.get(module) or unfit(module, module in chosen)
        for module in names
        # A layer's weight may be in a submodule, or held by FSDP.
        if isinstance(module, Layer | torch.nn.Linear) or has_own_parameters(module)
    }
    _check_fit(
        "experts", {entry: _named(entry, chosen, names) for entry in experts}, names, reasons
    )
    _check_rules(parsed, names, reasons, chosen)
    for name, module in by_first_name("convert", names).items():
        if module not in reasons:
            continue
        known, reason = names[module], reasons[module]
        rule = next((r for r, (at, _) in parsed.items() if any(map(at.search, known))), None)
        skipped = next((s for s in skip if any(is_part(s, name) for name in known)), None)
        stays = f", stays in {module.recipe}" if _has_no_plain_form(module) else ""
        if reason:
            yield _Step(name, module, reason + stays)
        elif skipped is not None:
            yield _Step(name, module, f"skip {skipped!r}{stays}{_ends_in(module)}")
        elif rule is not None:
            alone = f"rule {rule!r}{stays}{_ends_in(module)}"
            yield _Step(name, module, parsed[rule][1] or alone, rule)
        else:
            yield _Step(name, module, default)


def _fail_with_nothing(model: torch.nn.Module, report: Report) -> NoReturn:
    # Layers before modules that never are layers.
    skipped = sorted(report.skipped, key=lambda of: of[1].endswith(NO_LINEAR))
    why = "; ".join(f"{shown(name)}: {reason}" for name, reason in skipped[:4])
    fail(
        "convert",
        "model",
        f"{type(model).__name__} with nothing to convert",
        "at least one nn.Linear, GroupedLinear or experts= that no rule or skip leaves alone",
        why or "it has no parameters",
    )


def _check_plan(model: torch.nn.Module, plan: list[_Step]) -> None:
    """Refuse a plan that cannot be carried out whole: nothing has been changed yet."""
    _check_not_inside_another(model)
    _check_devices(plan)
    for step in plan:
        if isinstance(step.module, Layer) and isinstance(step.what, Recipe):
            check_gathered(step.name, step.module, step.what)
    left = {step.name: step.module for step in plan if not isinstance(step.what, Recipe)}
    _check_restorable("convert", model, left)


def _apply_plan(model: torch.nn.Module, plan: list[_Step], seed: int | None) -> None:
    """Change the model; refuses nothing."""
    state = root_state(model) or _REVERTED.pop(model, None)
    # Otherwise the state of a converted part, whose count continues, or of layers built by hand.
    state = state or _joined(states_of(model))
    state.seed = state.seed if seed is None else seed
    state.draws = False  # until a layer's recipe draws bits
    for step in plan:
        if isinstance(step.what, Recipe):
            if not isinstance(step.module, Layer):
                # Bypasses the module's own __setattr__, as Layer.configure does.
                object.__setattr__(step.module, "__class__", _converted(type(step.module)))
            assert isinstance(step.module, Layer)
            step.module.configure(step.what, state, step.name)
        elif _has_no_plain_form(step.module):
            step.module.configure(step.module.recipe, state, step.name)
        else:
            _restore(step.module)
    make_root(model, state)
    _settle_fast_paths(model)


def _ends_in(module: torch.nn.Module) -> str:
    """What a layer loses by being left alone: it becomes plain."""
    if not isinstance(module, Layer) or _has_no_plain_form(module):
        return ""
    return f", no longer in {module.recipe}"


def _has_no_plain_form(module: torch.nn.Module) -> TypeGuard[Layer]:
    """Whether it is a layer of ours without a PyTorch counterpart to revert to: it keeps a
    recipe."""
    return isinstance(module, Layer) and module.plain is None


def _check_rules(
    rules: Mapping[str, tuple[re.Pattern[str], Recipe | None]],
    names: Mapping[torch.nn.Module, list[str]],
    reasons: Mapping[torch.nn.Module, str],
    experts: set[torch.nn.Module],
) -> None:
    """Refuse rules that apply to nothing: the expression is a mistake."""
    kinds = (torch.nn.Linear, Layer)
    layers = [m for m in names if isinstance(m, kinds) or m in experts]
    linears = [name for layer in layers for name in names[layer]]
    found = {
        rule: [layer for layer in layers if any(map(pattern.search, names[layer]))]
        for rule, (pattern, _) in rules.items()
    }
    for rule, matches in found.items():
        if not matches:
            need = "a regular expression that is found in the name of a layer to convert"
            some = ", ".join(linears[:4]) + (", ..." if len(linears) > 4 else "")
            fail("convert", "rules", repr(rule), need, f"the names are {some}")
    recipes = {rule: found[rule] for rule, (_, to) in rules.items() if to is not None}
    _check_fit("rules", recipes, names, reasons)


def _check_fit(
    argument: str,
    found: Mapping[str, Sequence[torch.nn.Module]],
    names: Mapping[torch.nn.Module, list[str]],
    reasons: Mapping[torch.nn.Module, str],
) -> None:
    """Refuse an entry if none of the modules that it asks for can be converted."""
    for entry, modules in found.items():
        unfit = [(names[m][0], reasons.get(m, "it has no weight")) for m in modules]
        if unfit and all(reason for _, reason in unfit):
            got = f"{entry!r}, which finds {', '.join(shown(name) for name, _ in unfit[:4])}"
            remedy = "; ".join(f"{shown(name)}: {reason}" for name, reason in unfit[:4])
            fail("convert", argument, got, "at least one layer that can be converted", remedy)


def _check_named(
    argument: str, entries: list[str], names: Mapping[torch.nn.Module, list[str]]
) -> None:
    """Refuse names that do not occur: they are mistakes."""
    named = [name for known in names.values() for name in known]
    for entry in entries:
        if not any(is_part(entry, name) for name in named):
            parts = {part for name in named for part in (name, name.rpartition(".")[2]) if part}
            remedy = did_you_mean(entry, sorted(parts)) or "print(model) shows the names"
            fail("convert", argument, repr(entry), "the name of a module", remedy)


def _named(
    entry: str, modules: Iterable[torch.nn.Module], names: Mapping[torch.nn.Module, list[str]]
) -> list[torch.nn.Module]:
    return [m for m in modules if any(is_part(entry, name) for name in names[m])]


def _experts(
    entries: list[str], names: Mapping[torch.nn.Module, list[str]]
) -> set[torch.nn.Module]:
    """The modules that the entries name and that could be experts, at least one per entry."""
    _check_named("experts", entries, names)
    found: set[torch.nn.Module] = set()
    for entry in entries:
        could = [module for module in _named(entry, names, names) if is_experts(module)]
        if not could:
            need = "a module that holds matrices, [E, N, K]"
            remedy = "experts of nn.Linear need none; a model that is experts goes into a module"
            fail("convert", "experts", repr(entry), need, remedy)
        found.update(could)
    return found


def _pattern(rule: str) -> re.Pattern[str]:
    try:
        return re.compile(rule)
    except re.error as error:
        fail("convert", "rules", repr(rule), "a regular expression", str(error))


def _settle_fast_paths(model: torch.nn.Module) -> None:
    """Turn fast paths off in encoders with converted layers, and restore them in all others."""
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
    """Refuse a part of a converted model: its layers belong to that model's root. (Layers of a
    copied part belong to none.)"""
    owned = {id(root_state(module)) for module in model.modules()}
    for name, module in model.named_modules():
        if not isinstance(module, Layer) or module._rng_state.counted_by() is None:
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
    """Refuse recipes that do not run on the GPU where a layer is; if it moves later, `linear`
    refuses."""
    for step in plan:
        what, parameters = step.what, step.module.parameters()
        if isinstance(what, Recipe) and what.cuda_needs and any(p.is_cuda for p in parameters):
            got = f"{what} for {shown(step.name)!r} on cuda"
            remedy = "use a recipe without FP32 scales, such as mxfp8, or keep the layer on the CPU"
            fail("convert", "recipe", got, what.cuda_needs, remedy)


def _check_restorable(
    operation: str, model: torch.nn.Module, named: Mapping[str, torch.nn.Module]
) -> None:
    """Refuse to revert converted layers that something else has changed since."""
    for name, module in named.items():
        if not isinstance(module, Layer) or module.plain is None:
            continue
        if gathers_codes(module) and gathered_spec(module.recipe) is not None:
            got = f"{name or 'layer'!r}, whose codes FSDP2 gathers"
            fail(operation, "model", got, "layers that fully_shard has not cut since then")
        replaced = "forward" in vars(module)
        if replaced or type(module) is not _converted(module.plain):
            kind = "a layer with another forward" if replaced else type(module).__name__
            got = f"{type(model).__name__} with {name or 'layer'!r} as {kind}"
            plain = "nn.Linear" if isinstance(module, Linear) else module.plain.__name__
            need = f"what convert made of it, to make it an {plain} again"
            fail(operation, "model", got, need, "undo first what a parametrization or a hook did")


def _restore(module: torch.nn.Module) -> bool:
    if not isinstance(module, Layer) or module.plain is None:
        return False
    drop_root(module)
    named = ("_name",) if isinstance(module, Experts) else ()  # of a linear layer it is theirs
    for name in ("recipe", "_rng_state", "_seed", "_kept", *named):
        module.__dict__.pop(name, None)
    if isinstance(module, WeightLayer) and module.__dict__.pop("_retype", None):
        weight = module.weight  # replaced by quantized_all_gather()
        made = torch.nn.Parameter(values_of(weight), weight.requires_grad)
        inherit(made, weight)
        torch.nn.Module.__setattr__(module, "weight", made)  # past its own, too
    object.__setattr__(module, "__class__", module.plain)
    return True


def _joined(states: list[RngState]) -> RngState:
    """One state for parts that were counted separately: the one furthest ahead, preferably one that
    an optimizer counts in, with the parts' seed if they share one."""
    if not states:
        return RngState(0)
    seeds = {state.seed for state in states}
    joined = max(states, key=lambda state: (state.position(), state.steps is not None))
    joined.seed = seeds.pop() if len(seeds) == 1 else 0
    return joined
