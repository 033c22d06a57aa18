"""Runs inside vLLM's environment, with NumPy and msgpack and none of Kvasir's other packages.

`connector` is vLLM's KV connector, `pages` where it finds keys and values, `main` the process that owns the engine,
`wire` what it says to Kvasir.
"""
