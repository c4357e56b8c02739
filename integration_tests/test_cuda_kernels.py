"""Mamba on the real kernels of causal-conv1d and mamba-ssm beside plain torch; without a CUDA device there is no test.

`MOE_TEST_DEVICE=cuda` asks for them, and `pip install --no-build-isolation 'nemotron-nano[cuda]'` brings the packages.
"""

import os

import attrs
import pytest
import torch

from nemotron_nano import NemotronNano, presets

SMALL = attrs.evolve(presets["tiny"], pattern="MM*", vocab_size=61, ssm_state_size=64, chunk_size=64)


def difference(packed, dtype):
    """Relative, of the logits and of all gradients at once."""
    torch.manual_seed(0)
    models = [NemotronNano(SMALL, mamba_kernels=kernels, device="cuda", dtype=dtype) for kernels in ("torch", "cuda")]
    models[1].load_state_dict(models[0].state_dict())
    tokens = torch.randint(61, (2, 150), device="cuda")
    documents = torch.tensor([[7] * 64 + [2] * 3 + [7] * 83, [0] * 150], device="cuda") if packed else None
    results = []
    for model in models:
        logits = model(tokens, document_ids=documents)
        logits.square().mean().backward()
        grads = [parameter.grad.double().flatten() for parameter in model.parameters()]
        results.append((logits.detach().double(), torch.cat(grads)))
    return [((ours - theirs).norm() / theirs.norm()).item() for theirs, ours in zip(*results, strict=True)]


# defined there only: a session on the CPU has nothing to skip
if os.environ.get("MOE_TEST_DEVICE") == "cuda":

    @pytest.mark.parametrize("packed", [False, True])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_logits_and_gradients_are_those_of_plain_torch(packed, dtype):
        for package in ("mamba_ssm", "causal_conv1d"):
            pytest.importorskip(package, reason="an extra, compiled for each torch: not every machine has it")
        # Triton multiplies fp32 in TF32
        assert max(difference(packed, dtype)) < (1e-2 if dtype == torch.float32 else 3e-2)
