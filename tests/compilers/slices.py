"""Prints which slices each index of `data` has, on meshes of TPUs that are not there."""

import json

from benchmarks.absent import prepare_environment

prepare_environment()

from jax.experimental import topologies  # noqa: E402

from jaxrl_llm.train import make_mesh  # noqa: E402


def slices(topology: str, sizes: dict[str, int], **options) -> list[list[int]]:
    devices = topologies.get_topology_desc(topology, "tpu", **options).devices
    mesh = make_mesh(**sizes, devices=devices)
    return [sorted({getattr(x, "slice_index", 0) for x in row.ravel()}) for row in mesh.devices]


sizes = {"fsdp": 4, "tensor": 4}
found = {
    "two": slices("v5e:4x4", {"data": 2, **sizes}, num_slices=2),
    "both": slices("v5e:4x4", {"fsdp": 8, "tensor": 4}, num_slices=2),
    # An axis of the mesh that is half of an axis of the slice.
    "v6e": slices("v6e:8x8", {"fsdp": 16, "tensor": 4}),
}
print(json.dumps(found))
