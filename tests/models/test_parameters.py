"""Names, shapes, order and what trains: against named_parameters() of transformers and peft."""

from __future__ import annotations

from dataclasses import replace

import pytest

from models.parameters import model_parameters
from models.spec import ModelSpec
from tests.support.hand_made import FAMILIES
from tests.support.plain_units import PlainUnits, adapter_config, build
from tests.support.published_configs import LLAMA_BIASED, PUBLISHED
from traces.serving.request import TrainingJob
from traces.training.recipe import Recipe

RECIPES = {
    "all": Recipe(),
    "frozen embedding": Recipe(frozen_units=1),
    "frozen layers": Recipe(frozen_units=3),
    "adapters": Recipe(lora_rank=4),
    "frozen adapters": Recipe(lora_rank=2, frozen_units=2),
}
TARGETS = {"gpt2": ("c_attn", "mlp.c_proj", "c_fc"), "opt": ("k_proj", "out_proj", "fc1")}
GATED_TARGETS = ("o_proj", "k_proj", "up_proj", "down_proj")
SPECS = FAMILIES | {
    f"{name} {'untied' if spec.tie_embeddings else 'tied'}": replace(
        spec, tie_embeddings=not spec.tie_embeddings
    )
    for name, spec in FAMILIES.items()
}


def check(spec: ModelSpec, recipe: Recipe) -> None:
    """Compares names, shapes, order and units with a model on the meta device."""
    parameters, units = model_parameters(spec, recipe)
    model = build(spec, recipe, device="meta")
    named = [(n, tuple(p.shape), p.requires_grad) for n, p in model.named_parameters()]
    assert [tuple(p) for p in parameters] == named
    assert len(units) == spec.num_layers + 2
    assert sorted({p for own in units for p in own}) == list(range(len(parameters)))
    twice = sum(map(len, units)) - len(parameters)
    assert twice == spec.tie_embeddings
    assert units[0][0] == 0 and (units[-1][-1] == 0) == spec.tie_embeddings


@pytest.mark.broad(2)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", SPECS)
def test_parameters_are_those_of_hugging_face(name: str, recipe: str) -> None:
    check(SPECS[name], RECIPES[recipe])


@pytest.mark.parametrize("name", FAMILIES)
def test_adapters_are_on_the_targets_of_the_recipe(name: str) -> None:
    spec = FAMILIES[name]
    targets = TARGETS.get(spec.family, GATED_TARGETS)
    check(spec, Recipe(lora_rank=3, lora_targets=targets))


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's own call
def test_names_equal_those_of_a_peft_model_behind_its_prefix() -> None:
    from peft import get_peft_model

    spec, recipe = FAMILIES["llama"], Recipe(lora_rank=4)
    model = get_peft_model(build(spec, Recipe()), adapter_config(spec, recipe))
    named = [(n, p.requires_grad) for n, p in model.named_parameters()]
    parameters, _ = model_parameters(spec, recipe)
    assert named == [(f"base_model.model.{p.name}", p.trains) for p in parameters]


@pytest.mark.parametrize("name", [*PUBLISHED, "llama_biased"])
def test_parameters_of_published_models_are_those_of_hugging_face(name: str) -> None:
    spec = ModelSpec.from_hf((PUBLISHED | {"llama_biased": LLAMA_BIASED})[name])
    spec = replace(spec, num_layers=2)
    check(spec, Recipe())
    assert spec.parameters == sum(p.elements for p in model_parameters(spec, Recipe())[0])


@pytest.mark.parametrize("name", FAMILIES)
def test_units_own_what_their_modules_own(name: str) -> None:
    """The tensors of a unit's parameters are the tensors of its modules."""
    spec = FAMILIES[name]
    job = TrainingJob(0, 0, spec.num_layers + 2, sequence_tokens=4)
    plain = PlainUnits(spec, job)
    order = {id(p): place for place, p in enumerate(plain.model.parameters())}
    for unit, own in enumerate(model_parameters(spec, job.recipe)[1]):
        assert sorted(own) == sorted(order[id(p)] for p in plain.parameters(unit))


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens", "input_layernorm", "proj", "q_prj"])
def test_a_target_that_is_no_product_of_a_layer_is_refused_in_one_line(target: str) -> None:
    recipe = Recipe(lora_rank=2, lora_targets=("v_proj", target))
    with pytest.raises(ValueError, match=f"'{target}' is no product of a llama layer") as caught:
        model_parameters(FAMILIES["llama"], recipe)
    assert "\n" not in str(caught.value)
