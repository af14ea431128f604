"""The parameters of a model that trains: names, shapes and order as Hugging Face has them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from models.spec import GATED, ModelSpec
from traces.training.recipe import Recipe

# The modules that peft adapts where a recipe names none.
LORA_TARGETS = dict.fromkeys((*GATED, "opt"), ("q_proj", "v_proj")) | {"gpt2": ("c_attn",)}


class Parameter(NamedTuple):
    """A tensor of weights.

    Attributes:
        name: As named_parameters() of torch has it.
        shape: Sizes of its dimensions, in numbers.
        trains: Whether an update changes it; a frozen one has no gradient.
    """

    name: str
    shape: tuple[int, ...]
    trains: bool = True

    @property
    def elements(self) -> int:
        """Numbers in the tensor."""
        return math.prod(self.shape)


class Module(NamedTuple):
    """A module that owns parameters: an embedding table, a norm or a matrix product.

    Attributes:
        unit: The unit of the training chain that the module belongs to.
        name: As named_modules() of torch has it.
        sizes: (fan-out, fan-in) of a product, (rows, width) of a table, (width,) of a norm.
        has_bias: Whether a bias of sizes[0] numbers stands beside the weight.
    """

    unit: int
    name: str
    sizes: tuple[int, ...]
    has_bias: bool = False

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of "weight" and "bias". GPT-2's products (Conv1D) lie transposed."""
        is_transposed = self.name.rpartition(".")[2].startswith("c_")
        weight = {"weight": self.sizes[::-1] if is_transposed else self.sizes}
        return weight | {"bias": self.sizes[:1]} if self.has_bias else weight

    def adapters(self, rank: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the LoRA matrices of a product: A [rank, fan-in] and B [fan-out, rank].

        Args:
            rank: The rank of the adapter, from the recipe.

        Returns:
            The shape of each, by the name that peft gives it within the module.
        """
        fan_out, fan_in = self.sizes
        down, up = (rank, fan_in), (fan_out, rank)
        return {"lora_A.default.weight": down, "lora_B.default.weight": up}


def layer_name(spec: ModelSpec, layer: int) -> str:
    """The name of a decoder layer's module within the whole model, as Hugging Face has it.

    Args:
        spec: The model; its family decides the name.
        layer: The layer, counted from 0.

    Returns:
        For example "model.layers.0", the prefix of the names of the layer's parameters.
    """
    within = {"gpt2": "transformer.h", "opt": "model.decoder.layers"}
    return f"{within.get(spec.family, 'model.layers')}.{layer}"


def model_parameters(
    spec: ModelSpec, recipe: Recipe
) -> tuple[tuple[Parameter, ...], tuple[tuple[int, ...], ...]]:
    """All parameters of a model, and which unit of the training chain owns which.

    Unit 0 is the embedding, units 1 to num_layers are the layers, and the last unit has the final
    norm and the output projection. A tied table is one parameter of two units. With LoRA, names and
    order are those behind peft's inject_adapter_in_model; get_peft_model puts "base_model.model."
    before each name.

    Args:
        spec: The model.
        recipe: Says what trains: `frozen_units`, `lora_rank` and `lora_targets`.

    Returns:
        The parameters in the order of named_parameters(); and per unit the indices of its
        parameters among them, a tied table last.

    Raises:
        ValueError: No layer has a product that a LoRA target names.
    """
    parameters = list[Parameter]()
    units = [list[int]() for _ in range(spec.num_layers + 2)]
    targets = lora_targets(spec, recipe)
    for module in _modules(spec):
        trains = module.unit >= recipe.frozen_units
        is_target = any(f".{module.name}".endswith(f".{target}") for target in targets)
        found = _named(module, recipe, trains, is_target)
        units[module.unit] += range(len(parameters), len(parameters) + len(found))
        parameters += found
    if spec.tie_embeddings:
        units[-1].append(0)  # the table is the first parameter of every family
    return tuple(parameters), tuple(tuple(own) for own in units)


def adapter_parameters(spec: ModelSpec, recipe: Recipe) -> tuple[Parameter, ...]:
    """The matrices of a low-rank adapter, in the order in which they lie in memory.

    Args:
        spec: The model.
        recipe: Its `lora_rank` and `lora_targets`.

    Returns:
        A and B of each product that has an adapter, layer by layer.

    Raises:
        ValueError: The recipe has no rank, or no layer has a product that a target names.
    """
    if recipe.lora_rank is None:
        raise ValueError("an adapter needs recipe.lora_rank, such as 8")
    parameters, _ = model_parameters(spec, recipe)
    return tuple([parameter for parameter in parameters if ".lora_" in parameter.name])


def adapter_bytes(spec: ModelSpec, recipe: Recipe) -> int:
    """Bytes of a low-rank adapter, in all layers.

    Args:
        spec: The model.
        recipe: Its `lora_rank` and `lora_targets`.

    Returns:
        Bytes in the model's dtype.

    Raises:
        ValueError: As `adapter_parameters`.
    """
    return sum([p.elements for p in adapter_parameters(spec, recipe)]) * spec.item_bytes


def lora_targets(spec: ModelSpec, recipe: Recipe) -> Sequence[str]:
    """Which modules of a layer get LoRA adapters.

    Args:
        spec: The model.
        recipe: Its `lora_targets`; where they are empty, those that peft takes for the family.

    Returns:
        Endings of module names, such as "q_proj"; none where the recipe has no `lora_rank`.

    Raises:
        ValueError: A target is no product of a layer of this family.
    """
    if recipe.lora_rank is None:
        return ()
    targets = recipe.lora_targets or LORA_TARGETS[spec.family]
    # All layers have equal products; norms and tables have no adapters.
    products = [m.name for m in _layer(spec, 0) if len(m.sizes) == 2]
    for target in targets:
        if not any(name.endswith(f".{target}") for name in products):
            known = ", ".join(name.rpartition(".")[2] for name in products)
            raise ValueError(
                f"recipe.lora_targets: {target!r} is no product of a {spec.family} layer; "
                f"it has {known}"
            )
    return targets


def _named(module: Module, recipe: Recipe, trains: bool, is_target: bool) -> list[Parameter]:
    """The parameters of a module, named as torch or, with LoRA, peft names them."""
    if recipe.lora_rank is None:
        return [Parameter(f"{module.name}.{n}", s, trains) for n, s in module.shapes.items()]
    base = f"{module.name}.base_layer" if is_target else module.name
    found = [Parameter(f"{base}.{n}", shape, False) for n, shape in module.shapes.items()]
    if is_target:
        adapters = module.adapters(recipe.lora_rank)
        found += [Parameter(f"{module.name}.{n}", shape, trains) for n, shape in adapters.items()]
    return found


def _modules(spec: ModelSpec) -> Iterator[Module]:
    """All modules with parameters, in the order in which Hugging Face builds them."""
    hidden, table, head = spec.hidden_size, (spec.vocab_size, spec.hidden_size), spec.num_layers + 1
    family = spec.family
    if family == "gpt2":
        yield Module(0, "transformer.wte", table)
        yield Module(0, "transformer.wpe", (spec.max_positions, hidden))
    elif family == "opt":
        yield Module(0, "model.decoder.embed_tokens", table)
        yield Module(0, "model.decoder.embed_positions", (spec.max_positions + 2, hidden))
        yield Module(head, "model.decoder.final_layer_norm", (hidden,), has_bias=True)
    else:
        yield Module(0, "model.embed_tokens", table)
    for layer in range(spec.num_layers):
        yield from _layer(spec, layer)
    if family == "gpt2":
        yield Module(head, "transformer.ln_f", (hidden,), has_bias=True)
    elif family != "opt":
        yield Module(head, "model.norm", (hidden,))
    if not spec.tie_embeddings:
        yield Module(head, "lm_head", table)


def _layer(spec: ModelSpec, layer: int) -> Iterator[Module]:
    prefix = layer_name(spec, layer)
    of_family = {"gpt2": _gpt2_layer, "opt": _opt_layer}.get(spec.family, _gated_layer)
    for name, sizes, has_bias in of_family(spec):
        yield Module(layer + 1, f"{prefix}.{name}", sizes, has_bias)


Named = Iterator[tuple[str, tuple[int, ...], bool]]


def _gated_layer(spec: ModelSpec) -> Named:
    hidden, inner, bias = spec.hidden_size, spec.intermediate_size, spec.attention_bias
    query, kv = spec.query_size, spec.kv_size
    yield "self_attn.q_proj", (query, hidden), bias
    yield "self_attn.k_proj", (kv, hidden), bias
    yield "self_attn.v_proj", (kv, hidden), bias
    yield "self_attn.o_proj", (hidden, query), bias and spec.family != "qwen2"
    if spec.family == "qwen3":
        yield "self_attn.q_norm", (spec.head_dim,), False
        yield "self_attn.k_norm", (spec.head_dim,), False
    yield "mlp.gate_proj", (inner, hidden), False
    yield "mlp.up_proj", (inner, hidden), False
    yield "mlp.down_proj", (hidden, inner), False
    yield "input_layernorm", (hidden,), False
    yield "post_attention_layernorm", (hidden,), False


def _gpt2_layer(spec: ModelSpec) -> Named:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    yield "ln_1", (hidden,), True
    yield "attn.c_attn", (3 * hidden, hidden), True
    yield "attn.c_proj", (hidden, hidden), True
    yield "ln_2", (hidden,), True
    yield "mlp.c_fc", (inner, hidden), True
    yield "mlp.c_proj", (hidden, inner), True


def _opt_layer(spec: ModelSpec) -> Named:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    for name in ("k_proj", "v_proj", "q_proj", "out_proj"):
        yield f"self_attn.{name}", (hidden, hidden), True
    yield "self_attn_layer_norm", (hidden,), True
    yield "fc1", (inner, hidden), True
    yield "fc2", (hidden, inner), True
    yield "final_layer_norm", (hidden,), True
