"""A spec read from a config.json: its name and dtype, refused files, and the scaling warning."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from models.hf_config import read_model
from tandem.config.compose import composed
from tandem.wiring.run_spec import spec_of
from tests.support.published_configs import LLAMA31_8B, QWEN3_06B, yaml_spec


@pytest.mark.parametrize("named", ["config.json", ""])
def test_a_run_takes_a_model_by_its_config_file(named: str, tmp_path: Path) -> None:
    """The file or its folder names the model; the dtype is the file's unless one is given."""
    folder = tmp_path / "Llama-3.1-8B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA31_8B))
    arguments = ["model=hf", f"model.path={folder / named}"]
    assert spec_of(composed(arguments)) == replace(yaml_spec("llama3_8b"), name="Llama-3.1-8B")
    assert spec_of(composed([*arguments, "model.dtype=float32"])).item_bytes == 4
    assert spec_of(composed([*arguments, "model.name=mine"])).name == "mine"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "not JSON"),
        ("[]", "no JSON object"),
        (json.dumps(LLAMA31_8B | {"model_type": "mamba"}), "model_type 'mamba'"),
        (json.dumps(LLAMA31_8B | {"hidden_size": [1]}), "hidden_size is '\\[1\\]': give a finite"),
        (json.dumps(LLAMA31_8B | {"vocab_size": "32"}), "vocab_size is '32': give a finite number"),
        (json.dumps(LLAMA31_8B | {"hidden_size": 10**400}), "hidden_size is '10+': give a finite"),
        (json.dumps(LLAMA31_8B | {"hidden_size": 0.5}), "hidden_size is 0.5: give a whole number"),
        (json.dumps(LLAMA31_8B | {"hidden_size": -8}), "hidden_size is -8, not above 0"),
        (json.dumps(LLAMA31_8B | {"num_attention_heads": 0}), "num_heads is 0, not above 0"),
        (json.dumps(LLAMA31_8B | {"rope_theta": float("nan")}), "rope_theta is 'nan': give a fin"),
        (json.dumps(LLAMA31_8B | {"rope_theta": -1.0}), "rope_theta is -1.0, not above 0"),
        (json.dumps(LLAMA31_8B | {"rms_norm_eps": "1e-5"}), "rms_norm_eps is '1e-5': give a fini"),
    ],
)
def test_an_unreadable_config_is_refused_with_its_path(
    text: str, complaint: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=complaint) as caught:
        read_model(str(path))
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("rope", "warning"),
    [
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rotary scaling llama3"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rotary scaling linear"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5}}, "rotary scaling yarn"),
        ({"rope_scaling": None}, ""),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, ""),
    ],
)
def test_rotary_scaling_that_is_left_out_is_logged(
    rope: dict[str, Any], warning: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_06B | rope))
    read_model(str(tmp_path))
    assert warning in caplog.text and len(caplog.records) == bool(warning)
