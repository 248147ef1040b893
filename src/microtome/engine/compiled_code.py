"""Find code of a model that torch.compile has compiled, which runs as Python while a session is open."""

from __future__ import annotations

from torch import nn

from microtome.engine.code_references import references_of
from microtome.engine.torch_internals import (
    MODULE_CALL,
    count_compiled_graphs,
    is_compiled_function,
    is_dynamo_imported,
)


def runs_compiled_code(model: nn.Module) -> bool:
    """Whether passes that no session observes run compiled code; call it after such a pass, which compiles it.

    It finds compiled modules, methods and functions that the code of a `forward` refers to in its own package. It does
    not find those of other packages, and assumes that compiled functions of the model are called.
    """
    if not is_dynamo_imported() or not count_compiled_graphs():
        return False
    modules = list(model.modules())
    if any(vars(module).get(MODULE_CALL) is not None or is_compiled_function(module.forward) for module in modules):
        return True
    references = references_of({type(module) for module in modules})
    variables = (variable.namespace.get(variable.name) for variable in references.globals)
    return any(map(is_compiled_function, (*references.functions, *variables)))
