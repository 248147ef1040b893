"""Why a model cannot be cut at a call: side effects, state and randomness that do not survive the cut."""

from __future__ import annotations

from microtome.addresses import strip_first_index
from microtome.results.trace import Op, Trace, TracedCall
from microtome.split.analysis.analysis import Analysis
from microtome.split.cuts.crossing import Crossing


def find_refusal(analysis: Analysis, crossing: Crossing) -> str | None:
    """The reason why a cut is not exact, other than values that cannot be sent; None: there is none."""
    if analysis.draws and len(analysis.scalars) != len(analysis.trace.ops):  # in a backward that the forward runs
        return "the model draws random numbers, and it is not known in which of its operators"
    if (unsupported := analysis.input_spec.unsupported) is not None:
        return f"the model is given a {unsupported}, which cannot be sent: give tensors, numbers and strings"
    return (
        _refuse_fused(analysis, crossing)
        or _refuse_side_effects(analysis, crossing)
        or analysis.state.refusal(crossing, analysis.trace.calls)
        or _refuse_mutated_weights(analysis, crossing)
        or _refuse_randomness(analysis, crossing)
    )


def find_gradient_refusal(analysis: Analysis, crossing: Crossing) -> str | None:
    """The reason why gradients cannot cross a cut of a model without state; None: none is known."""
    for location in crossing.values:
        if location.draw is not None and (draw := analysis.draws[location.draw]).has_gradient:
            return (
                f"{draw.name} draws random numbers in code that both sides of the cut at {crossing.cut.address!r} run, "
                "and their gradient cannot cross: cut before they are drawn, or outside the call that draws them"
            )
    return None


def _refuse_fused(analysis: Analysis, crossing: Crossing) -> str | None:
    for level in reversed(crossing.levels):
        if level.call.index in analysis.fused_calls:
            name = repr(level.call.address) if level.call.address else "the model itself"
            return (
                f"it lies inside {name}, a {level.call.type}, which torch runs as one fused operator when no gradient "
                "is wanted: separately they round differently"
            )
    return None


def _refuse_side_effects(analysis: Analysis, crossing: Crossing) -> str | None:
    """The reason why the tail cannot replay what a skipped call does beside returning tensors."""
    if not (analysis.has_side_effects or analysis.has_hook_mutations or analysis.mutates_attributes):
        return None
    trace = analysis.trace
    later_paths: set[str] | None = None
    for call in (call for level in crossing.levels for call in level.skipped):
        if (side_effect := analysis.call_structures[call.index].side_effect) is not None:
            return f"{call.address!r} runs in the head, and {side_effect}"
        if analysis.has_hook_mutations and (refusal := _refuse_hooks(analysis, crossing, call)) is not None:
            return refusal
        for inner in trace.below(call) if analysis.mutates_attributes else ():
            if not (names := analysis.call_structures[inner.index].mutated_attributes):
                continue
            if later_paths is None:
                later_paths = {later.path for later in trace.calls if later.ends > crossing.cut.ends}
            if inner.path in later_paths:
                return (
                    f"{inner.address!r} runs in the head and sets {', '.join(names)} of its module, which runs again "
                    "in the tail"
                )
    return None


def _refuse_hooks(analysis: Analysis, crossing: Crossing, call: TracedCall) -> str | None:
    """The reason why the tail would miss a forward hook: it runs those of skipped calls, not of calls inside these."""
    enclosing = {level.call.path for level in crossing.levels}
    for inner in analysis.trace.below(call):
        for path, names in analysis.call_structures[inner.index].hook_mutations if inner is not call else ():
            if names and path in enclosing:
                where = f"the enclosing {path!r}" if path else "the model"
                return (
                    f"a forward hook of {inner.address!r} sets {', '.join(names)} on {where}, and would not run in "
                    f"the tail, which skips {call.address!r}: put the hook on {call.address!r}"
                )
    return None


def _refuse_mutated_weights(analysis: Analysis, crossing: Crossing) -> str | None:
    """The reason why a tensor that the model holds and mutates would differ between the sides."""
    trace, enclosing = analysis.trace, {level.call.index for level in crossing.levels}

    def side_of(op: Op) -> str:
        return "tail" if op.index >= crossing.cut.ends else "both" if op.call in enclosing else "head"

    for memory, writers in analysis.state_writes.items():
        values = [value for value in trace.values if value.memory == memory]
        readers = {op for value in values for op in value.consumers if not _only_writes(trace, op, memory)}
        sides = {side_of(trace.ops[op]) for op in (*writers, *readers)}
        if any(value.index in trace.calls[0].outputs for value in values):
            sides.add("tail")
        if len(sides) == 1 and "both" not in sides:
            continue
        op, weight = trace.ops[writers[0]], values[0]
        where = "" if op.call is None else f" in {trace.calls[op.call].address!r}"
        what = f"the {weight.origin} {weight.name!r}" if weight.name else "a tensor that the model keeps"
        hint = "put the model in eval mode, or " if analysis.is_training else ""
        return (
            f"{op.name}{where} changes {what} as it runs, and the other side of the cut reads or changes it too: {hint}"
            "cut where one side does both"
        )
    return None


def _only_writes(trace: Trace, op: int, memory: int) -> bool:
    """Whether an operator reads a memory only to write to the same one."""
    traced = trace.ops[op]
    results = {trace.values[value].memory for value in (*traced.outputs, *traced.mutates)}
    return bool(traced.mutates) and results == {memory}


def _refuse_randomness(analysis: Analysis, crossing: Crossing) -> str | None:
    """The reason why the two sides may draw different random numbers, or make different calls than this run."""
    if not analysis.varying_calls and not analysis.python_draws:
        return None
    trace, position = analysis.trace, analysis.exit_order.index(crossing.cut)
    hint = "put the model in eval mode, or cut" if analysis.is_training else "cut"
    python_draws = [draw for draw in analysis.python_draws if draw.ended <= position]
    drawing = {trace.ops[op].call for op in analysis.draws if op < crossing.cut.ends}
    drawing |= {draw.call for draw in python_draws}
    for call in (level.call for level in crossing.levels):
        name = repr(call.address) if call.address else "the model"
        varies = strip_first_index(call.address) in analysis.varying_calls
        if varies and any(inner.index in drawing for inner in trace.below(call)):
            return (
                f"by the random numbers that {name} draws, it makes other calls in other runs: {hint} before it draws"
            )
        for draw in python_draws:
            if draw.call == call.index:
                return (
                    f"the forward of {name} draws from {draw.package} before the cut, and both sides would draw for "
                    f"themselves: {hint} before that"
                )
    return None
