"""The real work of serving: packed forwards of Hugging Face models over paged KV.

`machine` carries launches out; `packing` builds their index tensors, `model`, `gated` and `fused`
run the layers, `attention` and `paged` attend over the pages of `kv`, `graphs` replays decode
batches, `sampling` chooses tokens. May import engine.contract, models, runtime.training.store, of
`runtime.executors` only `machine.py` (the protocol) and `device.py` (what a process has of a GPU),
and, where its kernels were chosen, runtime.kernels.
"""
