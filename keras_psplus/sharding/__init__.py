"""State in shares: each worker keeps and updates a part (ZeRO stages 1 to 3).

The paper: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models", SC 2020. The step of `shard="optimizer"`, with workers w0 and w1 and a gradient of the
halves a and b:

            reduce-scatter      update own part     gather
    w0      a0 b0 -> a0+a1      slots of a, a       a b
    w1      a1 b1 -> b0+b1      slots of b, b       a b

It sends what an all-reduce sends. Keras's own `update_step` runs on the parts.
With `shard="all"`, weights are in shares as well; `units` has their gatherings.
"""
