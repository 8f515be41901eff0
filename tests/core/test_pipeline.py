import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overwinter.core.errors import CallerError, NotFoundError
from overwinter.core.pipeline import (
    OUTPUTS_MAX,
    SIZES_MAX,
    SOURCES_MAX,
    Pipeline,
    Signature,
    Stage,
    check_pipeline,
    decode_pipeline,
    needs,
    parse_pipeline,
    signature,
)
from overwinter.core.tensor import TensorSpec
from tests.core.graphs import graphs

TOML = """
name = "street"
inputs = ["image"]
slo_ms = 200

[stages.detect]
function = "detector"
inputs = { image = "input:image" }

[stages.cars]
function = "cars"
version = 3
inputs = { image = "input:image", boxes = "detect:boxes" }

[stages.faces]
function = "faces"
inputs = { image = "input:image", boxes = "detect:boxes" }

[outputs]
makes = "cars:labels"
people = "faces:labels"
"""
IMAGE = TensorSpec("image", "UINT8", ("height", "width", 3))
CLASSIFIER = Signature(
    (IMAGE, TensorSpec("boxes", "FP32", ("n", 4))), (TensorSpec("labels", "BYTES", ("n",)), TensorSpec("s", "FP32", ()))
)
FUNCTIONS = {
    "detector": Signature((IMAGE,), (TensorSpec("boxes", "FP32", ("found", 4)),)),
    "cars": CLASSIFIER,
    "faces": CLASSIFIER,
}


def find(name: str, version: int | None) -> Signature:
    if name not in FUNCTIONS:
        raise NotFoundError(f"no function {name!r} here")
    return FUNCTIONS[name]


def changed(pipeline: Pipeline, **changes: object) -> Pipeline:
    return msgspec.structs.replace(pipeline, **changes)


@given(graphs(), st.data())
def test_a_stage_that_waits_for_itself_is_named(pipeline: Pipeline, data: st.DataObject) -> None:
    def behind(name: str) -> set[str]:
        users = {other for other, stage in pipeline.stages.items() if name in needs(stage)}
        return {name}.union(*(behind(user) for user in users))

    first = data.draw(st.sampled_from(list(pipeline.stages)))
    last = data.draw(st.sampled_from(sorted(behind(first))))
    inputs = pipeline.stages[first].inputs | {"again": f"{last}:y"}
    stage = msgspec.structs.replace(pipeline.stages[first], inputs=inputs)
    with pytest.raises(CallerError, match=rf"stages of pipeline 'p' wait for each other: .*\b{first}\b"):
        check_pipeline(changed(pipeline, stages=pipeline.stages | {first: stage}))


def test_toml_and_json_say_the_same() -> None:
    pipeline = parse_pipeline(TOML)
    assert pipeline.stages["cars"] == Stage(
        function="cars", version=3, inputs={"image": "input:image", "boxes": "detect:boxes"}
    )
    assert decode_pipeline(msgspec.json.encode(pipeline)) == pipeline


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("[stages.detect]", "[stages.detect", "not valid"),
        ("inputs = [", "input = [", "unknown field `input`"),
        ("slo_ms = 200", "slo_ms = 0", "slo_ms"),
        ("version = 3", "version = 0", "version"),
        ('name = "street"', 'name = "Street"', "name"),
        ('["image"]', '["image", "image"]', "names an input twice"),
        ('["image"]', '["image", "sound"]', "nothing in pipeline 'street' uses 'input:sound'"),
        ('makes = "cars:labels"\n', "", "nothing in pipeline 'street' uses 'cars'"),
        ('"cars:labels"', '"cars"', '\'cars\', which is not a source: write "input:NAME" or "STAGE:OUTPUT"'),
        ('"cars:labels"', '"lorries:labels"', "'lorries:labels'; the stages are detect, cars, faces"),
        ('"cars:labels"', '"input:image"', "output 'makes' of pipeline 'street' is its own input 'input:image'"),
        ('image = "input:image" }\n\n[stages.cars]', 'image = "input:photo" }\n\n[stages.cars]', "'input:photo'; the"),
        ("[stages.detect]", "[stages.input]", "no stage of pipeline 'street' may be called 'input'"),
    ],
)
def test_the_error_for_an_invalid_pipeline_names_what_is_wrong(before: str, after: str, words: str) -> None:
    assert before in TOML
    with pytest.raises(CallerError) as result:
        parse_pipeline(TOML.replace(before, after))
    assert words in str(result.value)


def test_the_tensors_of_a_pipeline_are_those_of_its_functions() -> None:
    assert signature(parse_pipeline(TOML), find) == Signature(
        (TensorSpec("image", "UINT8", ("detect.height", "detect.width", 3)),),
        (TensorSpec("makes", "BYTES", ("cars.n",)), TensorSpec("people", "BYTES", ("faces.n",))),
    )


def test_a_size_that_one_function_fixes_is_fixed_for_the_input_of_the_pipeline(monkeypatch) -> None:
    monkeypatch.setitem(FUNCTIONS, "cars", Signature((TensorSpec("image", "UINT8", (96, "w", 3)), *CLASSIFIER[0][1:]),
                                                     CLASSIFIER.outputs))  # fmt: skip
    assert signature(parse_pipeline(TOML), find).inputs[0].shape == (96, "detect.width", 3)
    monkeypatch.setitem(FUNCTIONS, "faces", Signature((TensorSpec("image", "UINT8", (64, "w", 3)), *CLASSIFIER[0][1:]),
                                                      CLASSIFIER.outputs))  # fmt: skip
    with pytest.raises(CallerError, match=r"'faces' of .* 'input:image' is UINT8 \[96, .*takes UINT8 \[64, "):
        signature(parse_pipeline(TOML), find)


@pytest.mark.parametrize(
    "boxes", [("FP64", ("found", 4)), ("FP32", ("found", 5)), ("FP32", (4,)), ("FP32", (1, "found", 4))]
)
def test_stages_that_do_not_fit_each_other_are_named(monkeypatch, boxes) -> None:
    monkeypatch.setitem(FUNCTIONS, "detector", Signature((IMAGE,), (TensorSpec("boxes", *boxes),)))
    with pytest.raises(CallerError, match=r"stage 'cars' of .*: 'detect:boxes' is FP.*input 'boxes' takes"):
        signature(parse_pipeline(TOML), find)


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ('function = "faces"', 'function = "absent"', "stage 'faces' of pipeline 'street': no function 'absent' here"),
        (', boxes = "detect:boxes" }\n\n[outputs]', "}\n\n[outputs]", "has no source for input 'boxes' of"),
        ('boxes = "detect:boxes"', 'squares = "detect:boxes"', "'cars' has no input 'squares'; its inputs are"),
        ('"detect:boxes"', '"detect:squares"', "stage 'detect' has no output 'squares'; it has 'boxes'"),
        ('"faces:labels"', '"faces:names"', "stage 'faces' has no output 'names'; it has 'labels', 's'"),
    ],
)
def test_functions_inputs_and_outputs_that_do_not_exist_are_named(before: str, after: str, words: str) -> None:
    assert before in TOML
    with pytest.raises(CallerError) as result:
        signature(parse_pipeline(TOML.replace(before, after)), find)
    assert words in str(result.value)


@pytest.mark.parametrize("names", [SOURCES_MAX // 64, SOURCES_MAX + 1])
def test_the_sources_of_all_stages_are_counted_together(names):
    with pytest.raises(CallerError, match=r"are allowed|length <="):
        decode_pipeline(with_sources(names))


def test_as_many_sources_as_are_allowed_are_accepted() -> None:
    assert len(decode_pipeline(with_sources(SOURCES_MAX // 64 - 1)).stages) == 64


def with_sources(names: int) -> bytes:
    """Return a pipeline of 64 stages, each with this many inputs. Its 64 outputs have sources too."""
    inputs = [f"x{number}" for number in range(names)]
    stage = {"function": "f", "inputs": {name: f"input:{name}" for name in inputs}}
    stages = {f"s{number}": stage for number in range(64)}
    outputs = {f"y{number}": f"s{number}:y" for number in range(64)}
    return msgspec.json.encode({"name": "p", "inputs": inputs, "stages": stages, "outputs": outputs})


def test_the_outputs_of_all_functions_are_counted_together() -> None:
    many = Signature((TensorSpec("x", "FP32", ()),), tuple(TensorSpec(f"y{n}", "FP32", ()) for n in range(1024)))
    stages = {f"s{n}": Stage(function="f", inputs={"x": "input:x"}) for n in range(3)}
    outputs = {name: f"{name}:y0" for name in stages}
    large = Pipeline(name="large", inputs=("x",), stages=stages, outputs=outputs)
    with pytest.raises(CallerError, match=f"return 3072 tensors; {OUTPUTS_MAX} are allowed"):
        signature(large, lambda name, version: many)
    del stages["s2"], outputs["s2"]
    assert len(signature(large, lambda name, version: many).outputs) == 2


@pytest.mark.parametrize("more", ["", "input", "output"])
def test_the_sizes_of_all_shapes_are_counted_together(more: str) -> None:
    count = SIZES_MAX // 64 - 1
    taken = tuple(TensorSpec(f"x{n}", "FP32", ("n",) * 64) for n in range(count))
    function = Signature(
        (*taken, TensorSpec("z", "FP32", ("n",) * (more == "input"))),
        (TensorSpec("y", "FP32", ("n",) * (64 + (more == "output"))),),
    )
    inputs = tuple(spec.name for spec in function.inputs)
    stage = Stage(function="f", inputs={name: f"input:{name}" for name in inputs})
    pipeline = Pipeline(name="large", inputs=inputs, stages={"s": stage}, outputs={"y": "s:y"})
    if more:
        with pytest.raises(CallerError, match=f"pipeline 'large' .* more than {SIZES_MAX} sizes: give it fewer"):
            signature(pipeline, lambda name, version: function)
    else:
        assert signature(pipeline, lambda name, version: function).inputs[0].shape == ("s.n",) * 64


def test_a_source_has_a_limited_length():
    stage = {"function": "f", "inputs": {"x": "input:" + "x" * 1000}}
    with pytest.raises(CallerError, match="length"):
        decode_pipeline(
            msgspec.json.encode({"name": "p", "inputs": [], "stages": {"s": stage}, "outputs": {"y": "s:y"}})
        )
