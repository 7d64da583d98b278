"""`tessera plan`: the screen, the JSON, the page, the list of clusters, and mistakes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tessera.cli.main import main

CONFIG = {
    "model_type": "llama",
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "intermediate_size": 4096,
    "vocab_size": 32000,
}
SIZES = ["--cluster", "pcie-l40s", "--seq", "1024", "--global-batch", "16"]


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return f"hf:{path}"


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["plan", *args])
    return int(stop.value.code or 0)


def test_the_screen_has_the_layout_the_reasons_and_the_next_command(config: str, capsys) -> None:
    assert run(config, *SIZES, "--goal", "energy, time<=1.05") == 0
    out = capsys.readouterr().out
    for word in ("8 of 8 GPUs", "16 x 1024 tokens", "layout", "energy", "least sure", "next  tessera plan"):
        assert word in out
    assert len(out.splitlines()) < 45


def test_json_is_the_plan(config: str, capsys) -> None:
    assert run(config, *SIZES, "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["goal"] == "time"
    assert data["best"]["time_s"] == data["candidates"][0]["time_s"] > 0
    assert data["timeline"]["spans"]


def test_the_page_is_one_file_with_the_step_as_a_picture(config: str, tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    assert run(config, *SIZES, "--html", str(page), "--json") == 0
    text = page.read_text()
    assert "<svg class='steps'" in text
    assert "stage 0" in text
    assert "src=" not in text
    assert "given" in text or "assumed" in text  # the sources of the cluster


def test_the_clusters_are_listed_without_a_model(capsys) -> None:
    assert run("--cluster", "list") == 0
    assert "gb200-nvl72" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "the model is missing"),
        (["hf:nowhere.json"], "cannot read"),
        (["hf:{}", "--cluster", "dgx-h20"], "did you mean"),
        (["hf:{}", "--cluster", "dgx-h200"], "does not say hidden"),
    ],
)
def test_mistakes_are_named(args: list[str], words: str, capsys) -> None:
    assert run(*args) != 0
    assert words in capsys.readouterr().err


def test_a_configuration_needs_no_torch(config: str) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from tessera.cli.main import main\n"
        f"main(['plan', {config!r}, '--cluster', 'pcie-l40s', '--seq', '1024', '--global-batch', '8', '--json'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["best"]["layout"]["dp"] >= 1


def test_a_module_of_ones_own_is_planned_with_its_inputs(tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / "own_decoder.py").write_text(
        "import torch\nfrom decoders import GPT\n"
        "def make():\n    return GPT(), torch.zeros((16, 512), dtype=torch.int64)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert run("own_decoder:make", "--cluster", "pcie-l40s", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["global_batch"], data["seq"], data["model"]["layers"]) == (16, 512, 4)


FUSED = """
import torch
from torch import nn
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.h, self.q, self.o = 4, nn.Linear(64, 192), nn.Linear(64, 64)
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.q(x).view(b, t, 3, self.h, d // self.h).permute(2, 0, 3, 1, 4)
        x = x + self.o(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d))
        return x + self.down(self.up(x))
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(100, 64), nn.Linear(64, 100)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
    def forward(self, ids):
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)
def make():
    return Model(), torch.zeros((4, 32), dtype=torch.int64)
"""


def test_a_decoder_that_does_not_say_its_heads_is_divided_by_data_parallelism(tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "fused_decoder.py").write_text(FUSED)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert run("fused_decoder:make", "--cluster", "dgx-h100", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["global_batch"], data["best"]["layout"]["dp"]) == (4, 4)
    assert run("fused_decoder:make", "--cluster", "dgx-h100", "--json", "--seq", "64", "--global-batch", "16") == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["global_batch"], data["best"]["layout"]["dp"]) == (16, 8)
    assert any("data parallelism" in note for note in data["notes"])


def test_the_name_of_a_public_model_is_planned(capsys) -> None:
    assert run("meta-llama/Llama-3.1-8B", *SIZES, "--json") == 0
    assert json.loads(capsys.readouterr().out)["model"]["parameters"] == 8030257152.0
    assert run("llama-3.1-8", *SIZES) != 0
    assert "did you mean 'llama-3.1-8b'" in capsys.readouterr().err


def test_energies_of_plans_have_one_unit_whatever_the_batch(capsys) -> None:
    for batch in ("1024", "2048"):  # 2.9 and 5.7 MJ: on both sides of a kilowatt-hour
        assert run("llama-3.1-70b", "--cluster", "dgx-h200:4", "--global-batch", batch) == 0
        out = capsys.readouterr().out
        assert " MJ " in out and "Wh" not in out
