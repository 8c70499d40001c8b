"""The judge against the judged: in float64 the trained model and the oracle are the same function."""

import pytest
import torch
from torch.nn import functional as F

import deltaspan as ds
from deltaspan.demo import DemoSettings
from deltaspan.demo.corpus import IGNORED_LABEL, Document, text_packs
from deltaspan.demo.oracle import loss_and_gradients
from deltaspan.demo.training import initial_model


@pytest.mark.parametrize("layout", ["contiguous", "zigzag_per_document"])
def test_model_and_oracle_agree_in_float64(
    rng: torch.Generator, settings: DemoSettings, documents: list[Document], layout: str
) -> None:
    torch.manual_seed(rng.initial_seed())
    pack = text_packs(documents, 1, settings.capacity)[0]
    model = initial_model(settings).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)

    ctx = ds.build_context(ds.partition(pack.cu_seqlens, 1, layout=layout), device="cpu")
    logits = model(ctx.shard(pack.tokens), ctx)
    labels = ctx.shard(pack.labels)
    loss = F.cross_entropy(logits[0], labels[0], ignore_index=IGNORED_LABEL, reduction="sum") / pack.predicted
    loss.backward()

    parameters = dict(model.named_parameters())
    exact_loss, exact = loss_and_gradients(parameters, settings.shape, pack.tokens, pack.labels, pack.cu_seqlens)
    # float64 rounds to 1e-16; two layers and a few hundred tokens leave 1e-13
    assert loss.item() == pytest.approx(exact_loss, rel=1e-11)
    errors = {name: ((p.grad - exact[name]).norm() / exact[name].norm()).item() for name, p in parameters.items()}
    assert {name: error for name, error in errors.items() if not error <= 1e-10} == {}


def test_the_oracle_keeps_documents_apart(settings: DemoSettings, documents: list[Document]) -> None:
    pack = text_packs(documents, 1, settings.capacity)[0]
    parameters = dict(initial_model(settings).named_parameters())
    apart, _ = loss_and_gradients(parameters, settings.shape, pack.tokens, pack.labels, pack.cu_seqlens)
    joined = [0, pack.cu_seqlens[-1]]
    together, _ = loss_and_gradients(parameters, settings.shape, pack.tokens, pack.labels, joined)
    assert abs(apart - together) > 1e-6
