"""The examples' workloads as models that know nothing of jaxmem."""

import dataclasses

from examples import gpt, llama, resnet_batchnorm, vit_nnx
from jaxmem import Memory, Workload

EXAMPLES = {"gpt": gpt, "llama": llama, "resnet": resnet_batchnorm, "vit": vit_nnx}


def unmarked(workload: Workload) -> Workload:
    """The same workload, with the marks that its loss makes by `memory.block` ignored."""

    def loss(params, batch, *, rng, state):
        return workload.loss_fn(params, batch, rng=rng, state=state, memory=Memory())

    return dataclasses.replace(workload, loss_fn=loss)
