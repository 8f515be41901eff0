"""Small models of the zoo and their programs, whose exports several tests share."""

from functools import lru_cache

from benchmarks import zoo
from overwinter.model.export import export


@lru_cache(maxsize=16)
def exported(name: str):
    """Return a model, its program and its weights."""
    model = zoo.build(name, small=True)
    return model, *export(model.module, model.example_inputs, model.dynamic)
