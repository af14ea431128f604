"""The measured side as a black box: a trace is replayed against an OpenAI-compatible server.

`openai` sends requests on time over the HTTP of `sse`, `answer` reads token times from a stream,
`gauges` reads the server's metrics. May import traces and the standard library; never torch, engine
or another folder of runtime.
"""
