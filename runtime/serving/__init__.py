"""The real work of serving: packed forwards of Hugging Face models over paged KV.

`machine` carries launches out; `packing` builds their index tensors, `model`, `gated` and `fused`
run the layers, `attention` and `paged` attend over the pages of `kv`, `graphs` replays decode
batches, `sampling` chooses tokens. Imports engine.contract, models, runtime.training.store and
runtime.executors (the protocol of machines, and what a process has of a GPU); runtime.kernels only
where its kernels were chosen.
"""
