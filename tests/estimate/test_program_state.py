"""What a program keeps, counts and decides by: caches, tokens, values that nobody knows, CPU-only operators."""

import pytest
import torch
from torch import nn

import tessera
from tessera.errors import CaptureError
from tessera.graph.capture import capture

MIB = 1 << 20


class GrowingCache:
    """Keys that are concatenated and replaced, as in Hugging Face's DynamicCache."""

    def __init__(self, layers: int, past: int) -> None:
        self.keys = [torch.empty(past, 1024, device="meta") for _ in range(layers)]

    def update(self, new: torch.Tensor, layer: int) -> torch.Tensor:
        self.keys[layer] = torch.cat([self.keys[layer], new])
        return self.keys[layer]


class Decoder(nn.Module):
    def __init__(self, cache: GrowingCache | None = None) -> None:
        super().__init__()
        self.cache = cache

    def forward(self, x: torch.Tensor, cache: GrowingCache | None = None) -> torch.Tensor:
        cache = cache or self.cache
        assert cache is not None
        for i in range(len(cache.keys)):
            x = x + cache.update(x, i).sum(0)
        return x


@pytest.mark.parametrize("how", ["input", "closure", "attribute"])
def test_a_cache_that_grows_is_counted_once(how: str) -> None:
    cache, x = GrowingCache(layers=8, past=2560), torch.empty(1, 1024, device="meta")  # 10 MiB a layer
    if how == "input":
        report = tessera.predict(Decoder(), (x, cache))
    elif how == "closure":
        report = tessera.predict(lambda: Decoder()(x, cache), ())
    else:
        report = tessera.predict(Decoder(cache), x)
    # All layers, and one of them twice while it is copied.
    assert 90 * MIB <= report.prediction.peak_memory_bytes < 105 * MIB
    assert [tuple(k.shape) for k in cache.keys] == [(2560, 1024)] * 8, "the program finds its cache as it left it"


class GraphNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x).index_add(0, edges[1], self.linear(x)[edges[0]])


def test_edges_are_not_tokens() -> None:
    edges = torch.zeros(2, 500, dtype=torch.int64)
    assert capture(GraphNetwork(), (torch.empty(100, 16), edges)).tokens is None
    ids = torch.zeros(4, 32, dtype=torch.int64)
    assert capture(nn.Embedding(10, 8), ids).tokens == 128


class EarlyExit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        if y.softmax(-1).max().item() > 0.9:
            return y
        return self.second(y)


def test_a_branch_on_an_unknown_value_is_said() -> None:
    report = tessera.predict(EarlyExit(), torch.empty(4, 16))
    assert any("item() > 0.9 is taken to be True, and only that way is predicted" in note for note in report.notes)


def test_known_values_are_compared_silently() -> None:
    def run(scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if scale.item() > 3 else x

    graph = capture(run, (torch.tensor(4), torch.empty(8)))
    assert not graph.assumptions
    assert len(graph.kernels) == 1


@pytest.mark.filterwarnings("ignore")  # deprecated, and still used
def test_eager_quantisation_runs_on_cpus_only() -> None:
    model = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(16, 16)), {nn.Linear}, dtype=torch.qint8)
    with pytest.raises(CaptureError, match="no kernel for a GPU") as caught:
        tessera.predict(model, torch.randn(4, 16))
    assert "precision='int8'" in (caught.value.fix or "")
