"""Recipes of layers with arguments that have Keras compute in another way."""

import keras

from tests.matrix.layers import L, one, program, raw, there_and_back, two
from tests.matrix.training import Bundle, bundle

C, R = keras.constraints, keras.regularizers
ALL = Bundle.columns


def _states(x, h):
    return L.Concatenate()(L.LSTM(4, return_state=True)(h))


RECIPES = {
    "rows": {
        "Dense in low rank": one(lambda: L.Dense(6, lora_rank=2)),
        "Dense (regularizer and constraint)": one(
            lambda: L.Dense(
                *(6, "tanh"),
                kernel_regularizer=R.L2(0.01),
                bias_regularizer=R.L1(0.02),
                activity_regularizer=R.L2(0.05),
                kernel_constraint=C.MaxNorm(0.7),
                bias_constraint=C.NonNeg(),
            )
        ),
        "Dot (normalised)": lambda x, h: L.Dot(axes=1, normalize=True)([h, x]),
        "EinsumDense in low rank": one(
            lambda: L.EinsumDense("ab,bc->ac", 6, bias_axes="c", lora_rank=2)
        ),
        "LayerNormalization (moved alone)": one(lambda: L.LayerNormalization(scale=False)),
    },
    "sequences": {
        "AdditiveAttention without a scale": two(lambda: L.AdditiveAttention(use_scale=False)),
        "Attention (concatenated)": two(lambda: L.Attention(use_scale=True, score_mode="concat")),
        "Bidirectional (summed)": one(
            lambda: L.Bidirectional(L.LSTM(3, return_sequences=True), merge_mode="sum")
        ),
        "Conv1D in groups": one(lambda: L.Conv1D(4, 3, groups=2)),
        "Conv1D (causal and dilated)": one(
            lambda: L.Conv1D(4, 3, padding="causal", dilation_rate=2)
        ),
        "EinsumDense (dots)": one(lambda: L.EinsumDense("...x,xy->...y", 5, bias_axes="y")),
        "GRU (backwards)": one(
            lambda: L.GRU(4, return_sequences=True, go_backwards=True, reset_after=False)
        ),
        "LSTM with its states": _states,
        "LSTM (unrolled)": one(lambda: L.LSTM(4, unroll=True, return_sequences=True)),
        "LayerNormalization over two axes": one(lambda: L.LayerNormalization(axis=[1, 2])),
        "MultiHeadAttention (causal)": lambda x, h: L.MultiHeadAttention(2, 2, use_bias=False)(
            h, h, use_causal_mask=True
        ),
    },
    "images": {
        "Conv2D in groups": one(lambda: L.Conv2D(6, 3, groups=3)),
        "Conv2D in low rank": one(lambda: L.Conv2D(4, 3, lora_rank=2)),
        "Conv2D (dilated)": one(lambda: L.Conv2D(4, 3, dilation_rate=2, use_bias=False)),
        "Conv2D (strided)": one(lambda: L.Conv2D(4, 3, strides=2, padding="same")),
        "Conv2DTranspose (strided)": one(lambda: L.Conv2DTranspose(4, 3, strides=2)),
        "DepthwiseConv2D (strided)": one(
            lambda: L.DepthwiseConv2D(3, strides=2, depth_multiplier=2)
        ),
        "GroupNormalization of instances": one(lambda: L.GroupNormalization(-1)),
        "MaxPooling2D (padded)": one(lambda: L.MaxPooling2D(3, strides=2, padding="same")),
        "PReLU (shared)": one(lambda: L.PReLU(shared_axes=[1, 2])),
        "SeparableConv2D (dilated)": one(
            lambda: L.SeparableConv2D(4, 3, dilation_rate=2, depth_multiplier=2)
        ),
        "UpSampling2D (bilinear)": one(lambda: L.UpSampling2D(2, interpolation="bilinear")),
    },
    "volumes": {
        "Conv3D in groups": one(lambda: L.Conv3D(4, 2, groups=2)),
        "Conv3D (channels first)": one(lambda: L.Conv3D(2, 2, data_format="channels_first")),
        "Conv3DTranspose (strided)": one(lambda: L.Conv3DTranspose(2, 2, strides=2)),
    },
    "tokens": {
        "Embedding (constrained)": raw(
            lambda: L.Embedding(30, 4, embeddings_constraint=C.MaxNorm(0.1, axis=1))
        ),
        "Embedding (masked)": lambda x, h: L.LSTM(4)(L.Embedding(30, 4, mask_zero=True)(x)),
        "ReversibleEmbedding (untied)": lambda x, h: there_and_back(
            L.ReversibleEmbedding(30, 4, tie_weights=False), x
        ),
    },
}


for _kind, _recipes in RECIPES.items():
    _title = f"arguments of layers: of {_kind}"
    # Gradients of volumes are summed in any order: what each worker updates by itself is not the
    # same to the last bit.
    _columns = [name for name in ALL if (_kind, name) != ("volumes", "tensor parallel")]
    bundle("arguments of layers", _title, _recipes, program(_kind, _recipes), columns=_columns)
