"""From a source's tensors to a plan: every one consumed once, every tensor of the destination filled, or an error."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from dspine_hub.checkpoints.formats import CASTS, RULES, Drop, Split
from dspine_hub.checkpoints.tensors import StoredTensor
from dspine_hub.errors import DSpineHubError


@dataclass
class Plan:
    """What becomes of a source's tensors.

    Args:
        filled (`dict[str, StoredTensor]`): Destination name -> the source tensor or rows of it.
        dropped (`list[tuple[StoredTensor, Drop]]`): What is left out, and why.
    """

    filled: dict[str, StoredTensor] = field(default_factory=dict)
    dropped: list[tuple[StoredTensor, Drop]] = field(default_factory=list)


def storage_dtype(name: str) -> str:
    """Return the dtype a destination tensor is stored in."""
    return next(cast.dtype for cast in CASTS if re.fullmatch(cast.pattern, name))


def describe(tensors) -> str:
    """List names and shapes: `` `a` [2, 3], `b` [4] ``."""
    return ", ".join(f"`{name}` {list(shape)}" for name, shape in tensors)


def make_plan(
    source: Mapping[str, StoredTensor],
    expected: Mapping[str, tuple[int, ...]],
    made: frozenset[str] | set[str] = frozenset(),
) -> Plan:
    """Map a source's tensors to the destination's.

    Args:
        source (`Mapping`): Name -> stored tensor.
        expected (`Mapping`): Name -> shape of everything the destination holds.
        made (`set[str]`): Names in `expected` that come from elsewhere.

    Returns:
        [`Plan`].

    Raises:
        DSpineHubError: When a tensor is unknown, missing, given twice or of another shape; lists names and shapes.
    """
    plan, unknown = Plan(), []
    for tensor in source.values():
        rule, names = match(tensor.name)
        if isinstance(rule, Drop):
            plan.dropped.append((tensor, rule))
            continue
        # a name the destination does not have, or makes itself
        if any(name not in expected or name in made for name in names):
            unknown.append((tensor.name, tensor.shape))
            continue
        for name, part in zip(names, _parts(tensor, names, expected), strict=True):
            if name in plan.filled:
                raise DSpineHubError(
                    f"`{name}` must be given once, got it from `{plan.filled[name].name}` and `{tensor.name}`."
                )
            plan.filled[name] = part
    if unknown:
        raise DSpineHubError(
            f"every tensor must belong to the format, got {len(unknown)} unknown: {describe(unknown)}. If the drafter "
            "needs them it is of another method; `dspine-hub inspect` shows what it looks like."
        )
    missing = [(name, shape) for name, shape in expected.items() if name not in plan.filled and name not in made]
    if missing:
        raise DSpineHubError(f"every tensor must be there, got {len(missing)} missing: {describe(missing)}.")
    for name, tensor in plan.filled.items():
        _check_shape(name, tensor, expected[name])
    return plan


def match(name: str):
    """Return the rule of a source tensor and the destination's names it stands for."""
    for rule in RULES:
        found = re.fullmatch(rule.pattern, name)
        if found:
            templates = () if isinstance(rule, Drop) else rule.names if isinstance(rule, Split) else (rule.name,)
            return rule, [found.expand(template) for template in templates]
    raise AssertionError("the last rule matches everything")


def _parts(tensor: StoredTensor, names: list[str], expected) -> list[StoredTensor]:
    if len(names) == 1:
        return [tensor]
    sizes = [expected[name][0] for name in names]
    if not tensor.shape or tensor.shape[0] != sum(sizes):
        shape = [sum(sizes), *expected[names[0]][1:]]
        raise DSpineHubError(f"`{tensor.name}` must have shape {shape}, got {list(tensor.shape)}.")
    parts, first = [], 0
    for size in sizes:
        parts.append(tensor.rows(first, first + size))
        first += size
    return parts


def check_dtype(name: str, tensor: StoredTensor) -> None:
    """Refuse a source tensor that cannot be cast to its place: `DSpineHubError`."""
    allowed = ("BOOL",) if storage_dtype(name) == "BOOL" else ("F32", "F16", "BF16")
    if tensor.dtype not in allowed:
        raise DSpineHubError(
            f"`{tensor.name}` must be stored as {' or '.join(allowed)}, got {tensor.dtype}: a quantised source is not "
            "converted; start from its unquantised weights."
        )


def _check_shape(name: str, tensor: StoredTensor, shape: tuple[int, ...]) -> None:
    if tensor.shape == tuple(shape):
        return
    if name == "transfer_codes":
        raise DSpineHubError(
            f"`{tensor.name}` must have shape [vocabulary, rank] = {list(shape)}, got {list(tensor.shape)}: codes of "
            "another vocabulary or rank belong to another drafter."
        )
    hint = ": it is transposed" if tensor.shape == tuple(shape)[::-1] else ""
    if name == "fc.weight" and not hint and tensor.shape[:1] == tuple(shape)[:1]:
        read, named = (columns / shape[0] for columns in (tensor.shape[1], shape[1]))
        hint = f": it reads {read:g} tapped layers, and `target_layer_ids` names {named:g}"
    raise DSpineHubError(f"`{tensor.name}` must have shape {list(shape)}, got {list(tensor.shape)}{hint}.")
