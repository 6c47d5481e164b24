"""Modules of a model by name: those that stay as they are, and others in the place of some."""


def kept_names(op, model, keep):
    """The dotted names in `keep` as a tuple. TypeError for a lone str, ValueError for a name that the model does not have."""
    if isinstance(keep, str):
        raise TypeError(f"{op}: keep must be a list of names, got {keep!r}; write [{keep!r}]")
    keep, there = tuple(keep), dict(model.named_modules(remove_duplicate=False))
    for name in keep:
        if name not in there:
            raise ValueError(f"{op}: keep names {name!r}, and {type(model).__name__} has no module of that name")
    return keep


def is_kept(path, keep):
    """Whether a module is one of those, or lies below one."""
    return any(path == name or path.startswith(name + ".") for name in keep)


def replaced(model, new):
    """The model with {id of a module: another} in the places of these, wherever they stand; the model itself may be one."""
    for module in list(model.modules()):
        for name, child in module.__dict__["_modules"].items():
            if id(child) in new:
                setattr(module, name, new[id(child)])
    return new.get(id(model), model)
