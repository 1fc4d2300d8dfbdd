"""What is written for a job is what its container gets."""

import json
import subprocess
import sys

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import gin
from t0repro.cli.spelling import translate_t5x_overrides
from t0repro.cloud.vertex.accelerators import ACCELERATORS
from t0repro.cloud.vertex.command_line import override
from t0repro.cloud.vertex.spec import JobSpec, Machines
from t0repro.errors import UserError

TPU = Machines("cloud-tpu", "TPU_V2", 128)
PRINT_ARGUMENTS = "import json, sys; print(json.dumps(sys.argv[1:]))"

# No surrogates and no NUL, which no process can be given.
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
literals = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(-1e300, 1e300) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)  # fmt: skip


def spec(*arguments: str, **changes) -> JobSpec:
    fields = dict(display_name="a", image_uri="image", machines=TPU, arguments=arguments)
    return JobSpec(**fields | changes)


@settings(max_examples=15)
@given(st.lists(literals, min_size=1, max_size=8))
def test_overrides_arrive_through_a_shell_and_gin_as_they_were_written(values):
    bindings = [f"some/scope.X{at} = {value!r}" for at, value in enumerate(values)]
    job = spec(*(override(binding) for binding in bindings))
    # The image's name is the program that prints what it is given.
    command = job.shell_command().replace("docker run --rm image", 'exec "$0" -c "$1"', 1)
    shell = ["bash", "-c", command, sys.executable, PRINT_ARGUMENTS]
    arrived = json.loads(subprocess.run(shell, stdout=subprocess.PIPE, check=True).stdout)
    assert arrived == list(job.arguments)

    statements = [one.removeprefix("--gin_bindings=") for one in translate_t5x_overrides(arrived)]
    parsed = gin.config.parse_value
    for statement, value in zip(statements, values, strict=True):
        assert parsed(statement.partition("=")[2]) == value


def test_the_yaml_is_the_specification():
    job = spec(
        "--run_mode=train", '--gin.MODEL_DIR="gs://b/d"', "--gin.A='x: y # z'", labels={"a": "b"}
    )
    read = yaml.safe_load(job.to_yaml())
    assert read == {
        "display_name": "a",
        "worker_pool_specs": [
            {
                "machine_spec": {
                    "machine_type": "cloud-tpu",
                    "accelerator_type": "TPU_V2",
                    "accelerator_count": 128,
                },
                "replica_count": 1,
                "container_spec": {"image_uri": "image", "args": list(job.arguments)},
            }
        ],
        "labels": {"a": "b"},
    }


def test_replicas_are_a_primary_pool_of_one_and_the_others():
    pools = spec(machines=Machines("a2-highgpu-1g", "NVIDIA_TESLA_A100", 1, 4)).worker_pool_specs
    assert [pool["replica_count"] for pool in pools] == [1, 3]


def test_vertex_has_the_fields_of_a_slice_of_tpu_hosts():
    types = pytest.importorskip("google.cloud.aiplatform_v1.types")
    slice_ = Machines("ct5lp-hightpu-4t", tpu_topology="4x4")
    (pool,) = spec(machines=slice_).worker_pool_specs
    assert pool["machine_spec"] == {"machine_type": "ct5lp-hightpu-4t", "tpu_topology": "4x4"}
    assert types.MachineSpec(pool["machine_spec"]).tpu_topology == "4x4"
    known = set(types.AcceleratorType.__members__)
    assert set(ACCELERATORS) <= known


@pytest.mark.parametrize("labels", [{"Team": "x"}, {"team": "a b"}, {"": "x"}])
def test_labels_that_vertex_refuses_are_refused_here(labels):
    with pytest.raises(UserError, match="label"):
        spec(labels=labels)


def test_an_accelerator_without_a_number_is_refused():
    with pytest.raises(UserError, match="both a type and a count"):
        Machines("n1-standard-4", "NVIDIA_TESLA_T4")


def test_an_override_without_a_value_is_refused():
    with pytest.raises(UserError, match="binds nothing"):
        override("MODEL_DIR")
