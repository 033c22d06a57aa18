"""A folder that the host process has on its path. Nothing in it is imported here but `kvasir_vllm.wire`."""
