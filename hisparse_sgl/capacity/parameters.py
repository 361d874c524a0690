"""The number of parameters of a DSA model, counted from its config."""

from __future__ import annotations

from hisparse_sgl.capacity.fields import Fields

NEEDED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "n_routed_experts",
    "q_lora_rank",
    "qk_nope_head_dim",
    "v_head_dim",
    "index_n_heads",
)


def count_parameters(fields: Fields, layers: int, index_layers: int) -> int | None:
    """Parameters of layers, embeddings and output head, without the MTP layer. None where a size is missing.

    Norms and biases are left out: they are less than a millionth.
    """
    if not all(fields.has(name) for name in NEEDED):
        return None
    hidden = fields.number("hidden_size")
    dense = min(fields.number("first_k_dense_replace", 0, least=0), layers)
    embeddings = (1 if fields.values.get("tie_word_embeddings") is True else 2) * fields.number("vocab_size")
    return (
        embeddings * hidden
        + layers * _attention(fields, hidden)
        + index_layers * _indexer(fields, hidden)
        + dense * 3 * hidden * fields.number("intermediate_size")
        + (layers - dense) * _experts(fields, hidden)
    )


def _attention(fields: Fields, hidden: int) -> int:
    heads, latent = fields.number("num_attention_heads"), fields.number("kv_lora_rank")
    nope, rope = fields.number("qk_nope_head_dim"), fields.number("qk_rope_head_dim")
    query, value = fields.number("q_lora_rank"), fields.number("v_head_dim")
    return (
        hidden * (query + latent + rope)
        + query * heads * (nope + rope)
        + latent * heads * (nope + value)
        + heads * value * hidden
    )


def _indexer(fields: Fields, hidden: int) -> int:
    heads, width = fields.number("index_n_heads"), fields.number("index_head_dim")
    return fields.number("q_lora_rank") * heads * width + hidden * (width + heads)


def _experts(fields: Fields, hidden: int) -> int:
    experts = fields.number("n_routed_experts") + fields.number("n_shared_experts", 0, least=0)
    return 3 * hidden * fields.number("moe_intermediate_size") * experts + hidden * fields.number(
        "n_routed_experts"
    )
