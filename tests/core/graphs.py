"""Pipelines of any shape, for tests with hypothesis."""

from hypothesis import strategies as st

from overwinter.core.pipeline import Pipeline, Stage

VERSIONS = st.sampled_from([None, 1])


@st.composite
def graphs(draw: st.DrawFn) -> Pipeline:
    """Draw pipelines in which each stage takes an input or outputs of earlier stages, declared in any order."""
    count = draw(st.integers(1, 12))
    stages = {}
    for number in range(count):
        sources = ["input:x", *(f"s{earlier}:y" for earlier in range(number))]
        taken = draw(st.lists(st.sampled_from(sources), min_size=1, max_size=4))
        inputs = {f"i{at}": source for at, source in enumerate(taken)}
        stages[f"s{number}"] = Stage(function=f"f{number}", version=draw(VERSIONS), inputs=inputs)
    # The first stage can only take the input, and every stage is an output, so that nothing is unused.
    results = draw(st.permutations(list(stages)))
    return Pipeline(
        name="p", inputs=("x",), stages={name: stages[name] for name in results}, outputs={s: f"{s}:y" for s in results}
    )
